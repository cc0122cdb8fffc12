"""A stream waits for this program, which makes another call before it lets the stream go on.

Usage: waits_for_itself.py

Says WAITING, then makes calls until one of them took long: a checkpoint had closed the gate, and opened it again. Only
then it lets the stream go on, and says THROUGH and how many seconds that call took. Then it computes on.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from cuda.bindings import driver as cuda

SIZE = 1 << 20
LONG = 0.1


def check(result: Any) -> Any:
    if int(result[0]):
        raise SystemExit(f"ERROR {result[0]!r}")
    return result[1] if len(result) == 2 else None


def main() -> None:
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(0))))
    waiting, other = check(cuda.cuStreamCreate(1)), check(cuda.cuStreamCreate(1))
    memory, flag = check(cuda.cuMemAlloc(SIZE)), int(check(cuda.cuMemHostAlloc(4, 0)))
    ctypes.memset(flag, 0, 4)
    check(cuda.cuStreamWaitValue32(waiting, flag, 1, 0))
    took = 0.0
    print("WAITING", flush=True)
    while took < LONG:
        began = time.monotonic()
        check(cuda.cuMemsetD8Async(memory, 7, SIZE, other))
        check(cuda.cuStreamSynchronize(other))
        took = time.monotonic() - began
        time.sleep(0.001)
    ctypes.memset(flag, 1, 1)
    check(cuda.cuStreamSynchronize(waiting))
    print(f"THROUGH {took:.3f}", flush=True)
    number = 0
    while True:
        number += 1
        check(cuda.cuMemsetD8(memory, number % 256, SIZE))
        print(f"ITERATION {number}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
