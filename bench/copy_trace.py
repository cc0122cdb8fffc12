#!/usr/bin/env python3
"""Show what phosd's workers did in a checkpoint or a restore: files that it leaves where PHOS_TRACE_COPIES says.

For each tenth of a second: the rate, how many pieces came and how large they were, for how many of them somebody
waited, how many came from shadows, and how long it took to take pieces, until the last was in host memory, and until
what follows from that had been seen to (medians); how fast pieces that had come were compared with their hashes, and
how long one took.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
from harness import GB

COLUMNS = ["s", "GB/s", "pieces", "MB each", "waited for", "shadows", "zeros"]
COLUMNS += ["take ms", "land ms", "after ms", "compared GB/s", "compare ms"]


def rows(trace: dict[str, Any], bin_seconds: float) -> list[list[Any]]:
    """Return the table's rows; a step counts when its pieces had landed, a comparison when it ended."""
    bins: dict[int, list[list[Any]]] = defaultdict(list)
    for step in trace["steps"]:
        bins[int(step[3] / bin_seconds)].append(step)
    compared: dict[int, list[list[Any]]] = defaultdict(list)
    for check in trace["checks"]:
        compared[int(check[2] / bin_seconds)].append(check)
    found: list[list[Any]] = []
    for number in sorted(bins.keys() | compared.keys()):
        inside, checks = bins[number], compared[number]
        pieces = [piece for step in inside for piece in step[5]]
        copied = [size for size, kind, _ in pieces if kind != "zeros"]
        times = [harness.median(1e3 * (step[at + 1] - step[at]) for step in inside) for at in (1, 2, 3)]
        found.append(
            [
                f"{number * bin_seconds:.1f}",
                sum(copied) / bin_seconds / GB,
                len(copied),
                sum(copied) / len(copied) / 1e6 if copied else 0.0,
                sum(bool(urgent) for _, _, urgent in pieces),
                sum(kind == "shadow" for _, kind, _ in pieces),
                len(pieces) - len(copied),
                *times,
                sum(check[3] for check in checks) / bin_seconds / GB,
                harness.median(1e3 * (check[2] - check[1]) for check in checks),
            ]
        )
    return found


def main() -> None:
    """Print a table for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--bin", type=float, default=0.1, metavar="S", help="seconds of a row (%(default)s)")
    chosen = parser.parse_args()
    for file in chosen.files:
        trace = json.loads(file.read_text())
        print(f"{file.name}: {trace['image']}\n")
        print(harness.table(COLUMNS, rows(trace, chosen.bin)) + "\n")


if __name__ == "__main__":
    main()
