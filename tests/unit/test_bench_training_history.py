"""The table of what the frontend costs training: what is in it, and that the documentation has what the records say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import training_history
from process import ROOT


def test_the_documentation_has_the_table_that_the_records_make() -> None:
    """A figure that was mended by hand, and a record that was not added, are found."""
    assert training_history.table() in (ROOT / "docs" / "measurements.md").read_text()


def record(folder: Path, name: str, date: str, *each: list[float], models: int = 3) -> None:
    """Write the record of a run whose models all took these times, past the frontend and through it."""
    keys = [f"training step, {model}, in one process" for model in training_history.MODELS[:models]]
    environment = {"date": date, "commit": "a" * 40, "gpu": "NVIDIA H100 80GB HBM3"}
    rows = [{"key": key, "each": each} for key in keys] + [{"key": "training step, conv net", "each": each}]
    (folder / f"{name}.json").write_text(json.dumps({"environment": environment, "rows": rows}))


def test_runs_of_this_frontend_are_one(tmp_path: Path) -> None:
    """Their pairs are put together; runs before stand apart, and those that did not measure all models do not count."""
    record(tmp_path, "1-h100-training-1234567", "2026-11-27T01", [1.0, 1.0, 1.0], [1.01, 1.01, 1.01])
    record(tmp_path, "2-h100-training", "2026-11-28T01", [2.0, 2.0], [2.06, 2.06])
    record(tmp_path, "3-h100-training", "2026-11-20T01", [1.0], [1.1])
    record(tmp_path, "4-h100-training", "2026-11-28T02", [1.0], [9.0], models=2)
    lines = training_history.table(tmp_path, "2026-11-26T18:00").splitlines()[2:]
    one, two, both, before = (
        " | ".join([cell] * 3)
        for cell in ("+1.00 (1.00 to 1.00)", "+3.00 (3.00 to 3.00)", "+1.00 (1.00 to 3.00)", "+10.00 (10.00 to 10.00)")
    )
    assert lines == [
        f"| [11-27 1234567](../bench/results/1-h100-training-1234567.md), H100 | 3 | {one} |",
        f"| [11-28 aaaaaaa](../bench/results/2-h100-training.md), H100 | 2 | {two} |",
        f"| **all of these** | 5 | {both} |",
        f"| before: [11-20 aaaaaaa](../bench/results/3-h100-training.md), H100 | 1 | {before} |",
    ]
