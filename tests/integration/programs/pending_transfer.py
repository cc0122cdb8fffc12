"""While a file exists, a stream stands still that a transfer to the GPU is queued in.

Usage: pending_transfer.py MIB GO

Fills so much GPU memory, then says READY and waits for the file GO. Then it queues work that does not end before GO is
gone, and behind it a transfer of a megabyte into memory that is new; says QUEUED, waits for both, and says GOOD, or BAD
and why.
"""

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

SIZE = 1 << 20


def check(result: Any) -> Any:
    if int(result[0]):
        print(f"BAD {result[0]!r}", flush=True)
        raise SystemExit(1)
    return result[1] if len(result) == 2 else None


def main() -> None:
    mebibytes, go = int(sys.argv[1]), Path(sys.argv[2])
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(0))))
    check(cuda.cuMemsetD8(check(cuda.cuMemAlloc(mebibytes << 20)), 1, mebibytes << 20))
    stream, host = check(cuda.cuStreamCreate(1)), check(cuda.cuMemHostAlloc(SIZE, 0))
    ctypes.memset(int(host), 7, SIZE)

    def stand_still(_: Any) -> None:
        while go.exists():
            time.sleep(0.005)

    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(stand_still)
    print("READY", flush=True)
    while not go.exists():
        time.sleep(0.005)
    new = check(cuda.cuMemAlloc(SIZE))
    check(cuda.cuLaunchHostFunc(stream, ctypes.cast(work, ctypes.c_void_p).value, 0))
    check(cuda.cuMemcpyHtoDAsync(new, int(host), SIZE, stream))
    print("QUEUED", flush=True)
    check(cuda.cuStreamSynchronize(stream))
    found = (ctypes.c_ubyte * SIZE)()
    check(cuda.cuMemcpyDtoH(ctypes.addressof(found), new, SIZE))
    print("GOOD" if bytes(found) == b"\7" * SIZE else "BAD content", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
