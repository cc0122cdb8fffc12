"""Launches a kernel again and again, one ITERATION each, until it is killed; its first context ends meanwhile.

It does so some launches after the process has been sent twins. They write to memory that is younger than the window,
which twins know by their tables.
"""

import ctypes
import sys
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


def first_context(kind):
    if kind == "own":
        return check(cuda.cuCtxCreate(None, 0, 0))
    return check(cuda.cuDevicePrimaryCtxRetain(0))


def end(kind, context):
    if kind == "own":
        check(cuda.cuCtxDestroy(context))
    else:
        check(cuda.cuDevicePrimaryCtxRelease(0))


def main():
    kind = sys.argv[1]
    check(cuda.cuInit(0))
    first = first_context(kind)
    check(cuda.cuCtxSetCurrent(check(cuda.cuCtxCreate(None, 0, 0))))
    memory = check(cuda.cuMemAlloc(256 << 20))
    check(cuda.cuMemsetD32(memory, 1, 64 << 20))
    kernel = check(cuda.cuModuleGetFunction(check(cuda.cuModuleLoadData(PTX)), b"fill"))
    number = with_twins = 0
    while True:
        if with_twins == 1:
            memory = check(cuda.cuMemAlloc(256 << 20))
        check(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(memory),), (ctypes.c_uint64,)), 0))
        with open("/proc/self/maps") as maps:
            with_twins += "phos-twins" in maps.read()
        if with_twins == 40:  # a capture of the other context's survives it
            stream = check(cuda.cuStreamCreate(1))
            check(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
            end(kind, first)
            check(cuda.cuStreamEndCapture(stream))
        check(cuda.cuCtxSynchronize())
        number += 1
        print(f"ITERATION {number}", flush=True)
        time.sleep(0.02)


main()
