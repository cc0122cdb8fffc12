"""One of the programs of answers, again and again: what it says must not change, whatever happens to the process."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import zlib
from difflib import unified_diff
from pathlib import Path

from cuda.bindings import driver as cu
from driver_calls import ok

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from report import Report, parser

# Rounds after which all is as in those that follow: contexts were there before, limits are set.
SETTLED = 2


def main() -> None:
    """Run the program."""
    options = parser("Driver calls and their answers.", iterations=20)
    options.add_argument("program", help="its file, in this folder")
    options.add_argument("words", nargs="*", help="its arguments")
    report = Report(options.parse_args())
    report.device(report.options.program)
    program = str(Path(__file__).with_name(report.options.program))
    sys.argv = [program, *report.options.words]
    expected: list[str] = []
    for number in range(report.options.iterations):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(program, run_name="__main__")
        ok(cu.cuDevicePrimaryCtxReset(ok(cu.cuDeviceGet(0))))
        ok(cu.cuCtxSetCurrent(0))
        lines = said.getvalue().splitlines()
        if number == SETTLED:
            expected = lines
        elif number > SETTLED:
            for line in unified_diff(expected, lines, "before", "now", lineterm="", n=0):
                print(line, file=sys.stderr)
        report.step(zlib.crc32(said.getvalue().encode()))
    report.result()


if __name__ == "__main__":
    main()
