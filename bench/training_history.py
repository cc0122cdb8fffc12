"""One table of what the frontend was found to cost training, in one process, as docs/measurements.md has it.

Each run is a machine of its own, and tells its steps apart to about half a percent; all together tell more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import harness

MODELS = ("conv net", "transformer", "transformer as a CUDA graph")
SINCE = "2026-11-29T00:00"
"""Since 66d5eac what notes PyTorch's allocations is what it is; at 8321be7 it cost more, before, there was nothing."""

Pairs = list[tuple[float, float]]


class Run(NamedTuple):
    """One recorded run, on a machine of its own."""

    date: str
    called: str
    pairs: dict[str, Pairs]
    """By model: past the frontend, through it."""


def records(results: Path = harness.RESULTS) -> list[Run]:
    """Return the runs that measured training steps in one process, the oldest first."""
    found = []
    for path in results.glob("*-training*.json"):
        record = json.loads(path.read_text())
        rows = {row["key"]: row for row in record["rows"]}
        pairs: dict[str, Pairs] = {}
        for model in MODELS:
            if row := rows.get(f"training step, {model}, in one process"):
                past, through = row["each"]
                pairs[model] = list(zip(past, through, strict=True))
        if len(pairs) == len(MODELS):
            environment = record["environment"]
            found.append(Run(environment["date"], harness.recorded(path, environment), pairs))
    return sorted(found)


def _cells(called: str, pairs: dict[str, Pairs]) -> list[str]:
    compared = [harness.paired_percent(*zip(*pairs[model], strict=True)) for model in MODELS]
    return [called, str(len(pairs[MODELS[0]])), *(f"{c.percent:+.2f} ({c.low:.2f} to {c.high:.2f})" for c in compared)]


def table(results: Path = harness.RESULTS, since: str = SINCE) -> str:
    """Return the table, its links as from docs/: the runs of this frontend, all of them as one, and earlier ones."""
    runs = records(results)
    now = [run for run in runs if run.date >= since]
    together = {model: [pair for run in now for pair in run.pairs[model]] for model in MODELS}
    cells = [_cells("**all of these**", together)] if len(now) > 1 else []
    cells = [_cells(run.called, run.pairs) for run in now] + cells
    cells += [_cells(f"before: {run.called}", run.pairs) for run in runs if run.date < since]
    return harness.table(("recorded", "pairs", *(f"{model}, %" for model in MODELS)), cells)


if __name__ == "__main__":
    print(table())
