#!/usr/bin/env python3
"""Sets CU_POINTER_ATTRIBUTE_SYNC_MEMOPS on its memory, as who lets a network card read it, and sees that it stays."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda.bindings import driver
from cuda_program import Buffer, Device, check
from report import Report, parser

SYNC_MEMOPS = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
SIZE = 32 << 20


def main() -> None:
    """Run the program."""
    report = Report(parser("Memory that synchronous calls are done with.", iterations=60).parse_args())
    with Device():
        report.device("")
        buffers = [Buffer(SIZE) for _ in range(3)]
        for buffer in buffers[:2]:
            check(driver.cuPointerSetAttribute(1, SYNC_MEMOPS, buffer.address), "set the attribute")
        for iteration in range(report.options.iterations):
            digest = 0
            for number, buffer in enumerate(buffers):
                check(driver.cuMemsetD8(buffer.address, iteration + number, SIZE), "write")
                value = int(check(driver.cuPointerGetAttribute(SYNC_MEMOPS, buffer.address), "ask for the attribute"))
                digest = digest * 1000 + 10 * buffer.download(1, iteration * 1000)[0] + value
            # However the attribute is brought about, a context that is brought back must still have it.
            flags = int(check(driver.cuCtxGetFlags(), "ask for the context's flags"))
            if iteration == 0:
                first = flags
            report.step(digest ^ (flags != first))
        report.result()


if __name__ == "__main__":
    main()
