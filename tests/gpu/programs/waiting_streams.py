#!/usr/bin/env python3
"""Two streams write to the same chunks of memory, one of them only once the host has seen the other done.

What is queued in the first waits in the GPU for a word in host memory (cuStreamWaitValue32) that is set after the
second has been synchronised: who let the second wait for anything in the first would stop this program for ever.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda.bindings import driver
from cuda_program import Buffer, Device, Stream, check
from report import Report, parser

CHUNK = 4 << 20
PART = 1 << 20
ROUNDS = 40


def main() -> None:
    """Run the program."""
    size_help = "chunks of 4 MiB, of which every iteration changes 40"
    options = parser("Streams that wait for the host.", iterations=120, size=64, size_help=size_help).parse_args()
    report = Report(options)
    with Device() as device:
        report.device(device.describe())
        waiting, other = Stream(), Stream()
        memory = Buffer(options.size * CHUNK)
        check(driver.cuMemsetD8(memory.address, 1, options.size * CHUNK), "fill the memory")
        word = int(check(driver.cuMemHostAlloc(4, 0), "allocate pinned host memory"))
        seen = ctypes.c_uint32.from_address(word)
        seen.value = 0
        content = (ctypes.c_ubyte * (2 * PART))()
        number = 0
        for _ in range(options.iterations):
            digest = 0
            for _ in range(ROUNDS):
                number += 1
                at = memory.address + number * 7 % options.size * CHUNK
                check(driver.cuStreamWaitValue32(waiting.handle, word, number, 0), "wait for the host")
                check(driver.cuMemsetD8Async(at, number % 251, PART, waiting.handle), "write behind that")
                check(driver.cuMemsetD8Async(at + PART, number % 241, PART, other.handle), "write beside it")
                check(driver.cuStreamSynchronize(other.handle), "synchronise the stream that waits for nothing")
                seen.value = number
                check(driver.cuStreamSynchronize(waiting.handle), "synchronise the stream that waited")
                check(driver.cuMemcpyDtoH(ctypes.addressof(content), at, 2 * PART), "read what was written")
                digest = zlib.crc32(content, digest)
            report.step(digest)
    report.result()


if __name__ == "__main__":
    main()
