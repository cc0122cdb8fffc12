"""A program whose allocator has taken much more GPU memory than it uses: 128 MiB in one block, of which it fills 8.

unused_memory.py OPTIONS (those of the examples). UNUSED_MEMORY=all: it fills nothing, of 64 MiB.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda.bindings import driver
from cuda_program import Buffer, Device, check
from report import Report, parser

MIB = 1 << 20


def main() -> None:
    report = Report(parser("Unused memory.", iterations=60).parse_args())
    fills = os.environ.get("UNUSED_MEMORY") != "all"
    with Device():
        block = Buffer((128 if fills else 64) * MIB)
        report.device("")
        for iteration in range(report.options.iterations):
            if fills:
                check(driver.cuMemsetD32(block.address + 40 * MIB, iteration + 1, 2 * MIB), "fill 8 MiB")
            sample = block.download(MIB, (39 + iteration % 10) * MIB)  # before, in and behind what is written to
            report.step(int.from_bytes(sample[:4] + sample[-4:], "little") ^ iteration)
        report.result()


if __name__ == "__main__":
    main()
