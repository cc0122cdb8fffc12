"""Buffers of 4 MiB, each full of its own number, and a kernel, from PTX, that adds up a word of each: launched once
for each buffer, the last buffer first, when the file GO exists. The sum is printed.

Usage: reader.py BUFFERS GO
"""

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

SIZE = 4 << 20
PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 from, .param .u64 sum)
{
	.reg .b32 %r<2>; .reg .b64 %rd<3>;
	ld.param.u64 %rd1, [from]; ld.param.u64 %rd2, [sum];
	ld.global.u32 %r1, [%rd1+64];
	red.global.add.u32 [%rd2], %r1;
	ret;
}
\0"""


def check(result: Any) -> Any:
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def fresh(value: int) -> int:
    address = int(check(cuda.cuMemAlloc(SIZE)))
    check(cuda.cuMemsetD32(address, value, SIZE // 4))
    return address


def main() -> None:
    count, go = int(sys.argv[1]), Path(sys.argv[2])
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    kernel = check(cuda.cuModuleGetFunction(check(cuda.cuModuleLoadData(PTX)), b"add"))
    buffers = [fresh(i + 1) for i in range(count)]
    total = fresh(1000)
    check(cuda.cuCtxSynchronize())
    print("ITERATION 1", flush=True)
    while not go.exists():
        time.sleep(0.005)
    for buffer in reversed(buffers):
        arguments = ((buffer, total), (ctypes.c_uint64, ctypes.c_uint64))
        check(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
    word = ctypes.c_uint32()
    check(cuda.cuMemcpyDtoH(ctypes.addressof(word), total, 4))
    print(f"RESULT {word.value}", flush=True)


main()
