"""Launches a kernel in a context that it makes for it and destroys again, one ITERATION each, until it is killed."""

import ctypes
import time

from cuda.bindings import driver as cuda

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 to) {
    .reg .b64 %a<1>;
    ld.param.u64 %a0, [to];
    st.global.u32 [%a0], 7;
    ret;
}
\0"""


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def main():
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    memory = check(cuda.cuMemAlloc(256 << 20))
    check(cuda.cuMemsetD32(memory, 1, 64 << 20))
    number = 0
    while True:
        context = check(cuda.cuCtxCreate(None, 0, 0))
        kernel = check(cuda.cuModuleGetFunction(check(cuda.cuModuleLoadData(PTX)), b"fill"))
        check(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(memory),), (ctypes.c_uint64,)), 0))
        check(cuda.cuCtxSynchronize())
        check(cuda.cuCtxDestroy(context))
        number += 1
        print(f"ITERATION {number}", flush=True)
        time.sleep(0.02)


main()
