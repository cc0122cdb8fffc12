"""A process with a context and memory on the first GPU that it sees, which it reads at each ITERATION.

It says on which GPU it believes to be (by UUID, a BELIEVES line when that changes), and in the end how often it read
what it had not written.
"""

import argparse
import ctypes
import signal
import time
from pathlib import Path

from cuda.bindings import driver as cuda

VALUE = 7


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def hold(size, report):
    check(cuda.cuInit(0))
    device = check(cuda.cuDeviceGet(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(device))))
    address = int(check(cuda.cuMemAlloc(size)))
    check(cuda.cuMemsetD32(address, VALUE, size // 4))
    word, number, wrong, place = ctypes.c_uint32(), 0, 0, ""
    ends = []
    signal.signal(signal.SIGUSR1, lambda *_: ends.append(True))
    while not ends:
        check(cuda.cuMemcpyDtoH(ctypes.addressof(word), address + size - 4, 4))
        wrong += word.value != VALUE
        if (now := bytes(check(cuda.cuDeviceGetUuid(device)).bytes).hex()) != place:
            place = now
            print(f"BELIEVES {place}", file=report)
        number += 1
        print(f"ITERATION {number}", file=report)
        time.sleep(0.01)
    print(f"RESULT {wrong}", file=report)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 29, metavar="N", help="of memory (%(default)s)")
    parser.add_argument("--report", type=Path, default=Path("/dev/stdout"), help="where lines go (%(default)s)")
    chosen = parser.parse_args()
    with chosen.report.open("a", buffering=1) as report:
        hold(chosen.bytes, report)


main()
