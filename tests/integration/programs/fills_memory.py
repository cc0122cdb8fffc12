"""Takes all of a GPU's memory but for so many MiB, says FULL, and keeps it until it is killed.

What others are still giving back when it begins is taken too: it says FULL only once nothing has become free for a
while, which is also when nobody believes an older figure any more.
"""

import ctypes
import sys
import time

cuda = ctypes.CDLL("libcuda.so.1")


def check(result: int) -> None:
    if result:
        raise SystemExit(f"error {result}")


SETTLED = 0.5  # seconds in which nothing becomes free

left = int(sys.argv[1]) << 20
context, address = ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
last = time.monotonic()
while time.monotonic() - last < SETTLED:
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    wanted = (free.value - left) // (2 << 20) * (2 << 20)
    if wanted > 0:
        check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(wanted)))
        last = time.monotonic()
    else:
        time.sleep(0.01)
print("FULL", flush=True)
while True:
    time.sleep(1)
