"""The table of recorded concurrent checkpoints: what is in it, and that the documentation has what the records say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import cow_history
from process import ROOT


def test_the_documentation_has_the_table_that_the_records_make() -> None:
    """A figure that was mended by hand, and a record that was not added, are found."""
    assert cow_history.table() in (ROOT / "docs" / "measurements.md").read_text()


def test_a_record_becomes_a_row(tmp_path: Path) -> None:
    """Later checkpoints count, with the first in parentheses; runs of 8 GB alone and of variants are left out."""
    row = {"protocol": "cow", "phosd_stall_s": 0.4, "felt_stall_s": 0.5, "data_gb_s": 49.26, "tracing_us": 1.04}
    row |= {"iteration_s": 2.0, "window_iteration_s": 2.1, "window_worst_iteration_s": 2.5}
    rows = [
        {"key": "8 GB cow", **row},
        {"key": "64 GB cow, first", **row, "phosd_stall_s": 0.61},
        {"key": "64 GB cow", **row, "phosd_stall_s": 0.5, "felt_stall_s": 0.55},
        {"key": "64 GB stop", **row, "protocol": "stop"},
        {"key": "8 GB cow, first", **row, "section": "pools"},
    ]
    environment = {"date": "2026-11-25T07:14:36+00:00", "commit": "a" * 40, "gpu": "NVIDIA H100 80GB HBM3"}
    (tmp_path / "2026-11-25-h100-cow.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    older = environment | {"date": "2026-11-24T07:14:36+00:00"}
    (tmp_path / "2026-11-24-h100-cow-1234567.json").write_text(json.dumps({"environment": older, "rows": rows[1:]}))
    (tmp_path / "2026-11-24-h100-cow-8gb.json").write_text(json.dumps({"environment": environment, "rows": rows[:1]}))
    lines = cow_history.table(tmp_path).splitlines()[2:]
    assert lines == [
        "| [11-25 aaaaaaa](../bench/results/2026-11-25-h100-cow.md), H100 | 0.40 | 0.50 (0.61) | 25 "
        "| 0.50 | 0.55 (0.50) | 10 | 5, 25 | 49.3 | 1.0 |",
        "| [11-24 1234567](../bench/results/2026-11-24-h100-cow-1234567.md), H100 |  | 0.50 (0.61) |  "
        "|  | 0.55 (0.50) |  | 5, 25 | 49.3 | 1.0 |",
    ]
