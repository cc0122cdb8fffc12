"""One table of all recorded runs of the benchmark `cow` at 64 GB, as docs/measurements.md has it.

Two stalls are told, because they are two things: phosd's goes from the detach until the processes run again, the felt
one is the longest gap between two iterations less an iteration, so that what calls wait in the window is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

COLUMNS = (
    "recorded",
    "stall, 8 GB",
    "64 GB",
    "more at 64 GB, %",
    "felt, 8 GB",
    "64 GB",
    "more, %",
    "iteration in the window, %, worst",
    "copied at, GB/s",
    "tracing, µs",
)


def records(results: Path = harness.RESULTS) -> Iterator[tuple[Path, dict[str, Any], dict[str, dict[str, Any]]]]:
    """Yield file, environment and rows by key of each run of `cow` that has one of 64 GB, the newest first.

    Not of those with another allocator than PyTorch's usual one.
    """
    found = []
    for path in results.glob("*-cow*.json"):
        record = json.loads(path.read_text())
        rows = {row["key"]: row for row in record["rows"] if row.get("protocol") == "cow" and "section" not in row}
        if "64 GB cow" in rows and "allocator" not in record["environment"]:
            found.append((path, record["environment"], rows))
    return iter(sorted(found, key=lambda each: each[1]["date"], reverse=True))


def _with_first(rows: dict[str, dict[str, Any]], size: str, name: str) -> str:
    later, first = (rows.get(key, {}).get(name) for key in (f"{size} GB cow", f"{size} GB cow, first"))
    return "" if later is None else f"{later:.2f}" + ("" if first is None else f" ({first:.2f})")


def _more(rows: dict[str, dict[str, Any]], name: str) -> str:
    if "8 GB cow" not in rows:
        return ""
    return f"{100 * (rows['64 GB cow'][name] / rows['8 GB cow'][name] - 1):.0f}"


def _slower(row: dict[str, Any]) -> str:
    normal = row["iteration_s"]
    median, worst = (100 * (row[name] / normal - 1) for name in ("window_iteration_s", "window_worst_iteration_s"))
    return f"{median:.0f}, {worst:.0f}"


def table(results: Path = harness.RESULTS) -> str:
    """Return the table, its links as from docs/."""
    cells = []
    for path, environment, rows in records(results):
        row = rows["64 GB cow"]
        cells.append(
            [
                harness.recorded(path, environment),
                *(
                    text
                    for name in ("phosd_stall_s", "felt_stall_s")
                    for text in (_with_first(rows, "8", name), _with_first(rows, "64", name), _more(rows, name))
                ),
                _slower(row),
                f"{row['data_gb_s']:.1f}",
                f"{row['tracing_us']:.1f}",
            ]
        )
    return harness.table(COLUMNS, cells)


if __name__ == "__main__":
    print(table())
