"""Takes all of a GPU's memory but for so many MiB, says FULL, and keeps it until it is killed."""

import ctypes
import sys
import time

cuda = ctypes.CDLL("libcuda.so.1")


def check(result: int) -> None:
    if result:
        raise SystemExit(f"error {result}")


left = int(sys.argv[1]) << 20
context, address = ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
while True:
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    wanted = (free.value - left) // (2 << 20) * (2 << 20)
    if wanted <= 0:
        break
    check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(wanted)))
print("FULL", flush=True)
while True:
    time.sleep(1)
