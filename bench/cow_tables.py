"""What the benchmark `cow` works out of its rows, and the tables that people read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import harness
import training
from harness import Results


def by_system(results: Results, system: str) -> dict[float, dict[str, Any]]:
    """Return a system's rows of the section `sizes`, by the size asked for."""
    rows = [row for row in results.rows.values() if row.get("system") == system and "section" not in row]
    return {row["asked_gb"]: row for row in rows}


def summarise(results: Results, gpus: int, failure_rate: float) -> None:
    """Work out the figures that the goals are about."""
    summary = results.summary
    cow = by_system(results, "cow")
    for system in ("cow", "stop", "peer"):
        for size, row in by_system(results, system).items():
            overhead = row["felt_total_s"]
            if overhead <= 0:
                continue
            frequency = training.optimal_frequency(gpus, failure_rate, overhead)
            row["checkpoints_an_hour"] = frequency
            row["wasted_percent"] = 100 * training.wasted_share(gpus, failure_rate, overhead, frequency)
            if system != "cow" and size in cow and cow[size]["felt_stall_s"] > 0:
                summary[f"{size:g} GB: stall of {system} / stall of cow"] = (
                    row["felt_stall_s"] / cow[size]["felt_stall_s"]
                )
    if len(cow) > 1:
        least, most = cow[min(cow)], cow[max(cow)]
        for name in ("felt_stall_s", "phosd_stall_s"):
            if least[name] > 0:
                summary[f"{name}: {max(cow):g} GB over {min(cow):g} GB, %"] = 100 * (most[name] / least[name] - 1)


def tables(results: Results, gpus: int, failure_rate: float) -> list[str]:
    """Return the readable tables."""
    rows = list(results.rows.values())
    ours = [row for row in rows if "felt_stall_s" in row]
    text = [
        "Medians, in seconds. `felt`: the longest time between the ends of two iterations, less the median before",
        "the checkpoint; `felt, all`: the same, added up over all iterations that the checkpoint touched.",
        "",
    ]
    columns = {
        "felt": "felt_stall_s",
        "felt, all": "felt_total_s",
        "phosd's stall": "phosd_stall_s",
        "committed after": "committed_s",
        "GPU GB": "gpu_gb",
        "GB/s": "data_gb_s",
        "protocol": "protocol",
        "validated": "validated",
        "stopped at": "stopped_at",
    }
    text += [_table(ours, columns), "", "In the window:", ""]
    columns = {
        "window": "window_s",
        "iteration, normal": "iteration_s",
        "in window": "window_iteration_s",
        "worst": "window_worst_iteration_s",
        "lost in window": "lost_in_window_s",
        "calls": "calls",
        "tracing, µs a call": "tracing_us",
        "shadowed": "shadowed",
        "waits": "waits",
        "waited": "wait_s",
        "waited for all": "anything",
    }
    text += [_table([row for row in ours if row.get("calls") or row.get("window_s")], columns), ""]
    phases = list(dict.fromkeys(name for row in ours for name in row["phases"]))
    cells = [[row["key"], *(row["phases"].get(name, "") for name in phases)] for row in ours]
    text += ["Where the time went:", "", harness.table(["", *phases], cells), ""]
    rated = [row for row in rows if "wasted_percent" in row]
    if rated:
        text += [
            f"At the optimal frequency for {gpus} GPU(s) that fail {failure_rate:g} times an hour:",
            "",
            _table(rated, {"checkpoints an hour": "checkpoints_an_hour", "GPU time wasted, %": "wasted_percent"}),
            "",
        ]
    back = [row for row in rows if "losses_identical" in row]
    if back:
        columns = {
            "restored in": "restore_s",
            "iterations repeated": "iterations_repeated",
            "identical": "losses_identical",
        }
        text += ["Killed, restored and run on:", "", _table(back, columns), ""]
    return text


def _table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    return harness.table(
        ["", *columns], [[row["key"], *(row.get(name, "") for name in columns.values())] for row in rows]
    )
