"""Launches a kernel of argv[1] blocks of 1,024 threads again and again, one ITERATION each, until it is killed."""

import ctypes
import sys
import time

from cuda.bindings import driver as cuda

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 to) {
    .reg .b64 %a<3>;
    .reg .b32 %r<5>;
    ld.param.u64 %a0, [to];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %tid.x;
    mad.lo.u32 %r2, %r0, 1024, %r1;
    mul.wide.u32 %a1, %r2, 4;
    add.u64 %a2, %a0, %a1;
    ld.global.u32 %r3, [%a2];
    add.u32 %r4, %r3, 1;
    st.global.u32 [%a2], %r4;
    ret;
}
\0"""


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def main():
    blocks = int(sys.argv[1])
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    kernel = check(cuda.cuModuleGetFunction(check(cuda.cuModuleLoadData(PTX)), b"fill"))
    memory = check(cuda.cuMemAlloc(256 << 20))
    check(cuda.cuMemsetD32(memory, 1, 64 << 20))
    number = 0
    while True:
        arguments = ((int(memory),), (ctypes.c_uint64,))
        check(cuda.cuLaunchKernel(kernel, blocks, 1, 1, 1024, 1, 1, 0, 0, arguments, 0))
        check(cuda.cuCtxSynchronize())
        number += 1
        print(f"ITERATION {number}", flush=True)
        time.sleep(0.02)


main()
