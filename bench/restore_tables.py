"""What the benchmark `restore` works out of its rows, and the tables that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import harness
from harness import GB, Results

LAZY = "lazy"
WITHOUT = ("allocation order", "random order")


def size_text(size: float) -> str:
    """Return a size in words."""
    return f"{size / GB:g} GB" if size >= GB else f"{size / 1e6:g} MB"


def label(row: Mapping[str, Any]) -> str:
    """Return what was restored, in words."""
    models = f", {row['models']} models" if row["models"] > 1 else ""
    return size_text(row["bytes"]) + models


def by_label(results: Results, system: str) -> dict[str, dict[str, Any]]:
    """Return a system's rows by what was restored."""
    return {label(row): row for row in results.rows.values() if row["system"] == system}


def goals(results: Results) -> list[tuple[str, float, str, bool]]:
    """Return each goal of which something was measured: what, the figure, what it should be, and whether it is."""
    found: list[tuple[str, float, str, bool]] = []
    lazy, pool, peer = by_label(results, LAZY), by_label(results, "pool"), by_label(results, "peer")
    for size, row in lazy.items():
        first = row["first_kernel_s"]
        found.append((f"{size}: lazy, first kernel, s", first, "at most 1.0", first <= 1.0))
    times = [row["first_kernel_s"] for row in lazy.values() if row["models"] == 1]
    if len(times) > 1:
        spread = 100 * (max(times) / min(times) - 1)
        found.append(("lazy, first kernel: slowest size over fastest, %", spread, "at most 20", spread <= 20))
    for size, row in pool.items():
        first = row["first_kernel_s"]
        found.append((f"{size}: pool, first kernel, s", first, "at most 0.1", first <= 0.1))
    for size, row in peer.items():
        for name, own in (("lazy", lazy.get(size)), ("pool", pool.get(size))):
            if own is None:
                continue
            times_as_soon = row["first_token_s"] / own["first_token_s"]
            what = f"{size}: first token, {name}, times sooner than the peer"
            if row["driver_only"]:
                what += "'s driver part"
            found.append((what, times_as_soon, "at least 10 at 32 GB", times_as_soon >= 10))
    for name, rows in (("lazy", lazy), ("pool", pool)):
        for size, row in rows.items():
            if "percent_of_copy" in row:
                share = row["percent_of_copy"]
                found.append((f"{size}: {name}, GPU data, % of copying", share, "at least 85", share >= 85))
    for system, ours in ((LAZY, lazy), ("pool", pool)):
        for other in WITHOUT:
            for size, without in by_label(results, f"{system}, {other}").items():
                row = ours.get(size, {})
                if without.get("waited_s") and "waited_s" in row:
                    share = row["waited_s"] / without["waited_s"]
                    what = f"{size}: {system}, waiting, recorded order over {other}"
                    found.append((what, share, "at most 0.33", share <= 1 / 3))
    return found


def summarise(results: Results) -> None:
    """Put the goals into the summary."""
    for what, value, wanted, reached in goals(results):
        results.summary[what] = f"{harness.show(float(value))} ({wanted}: {'reached' if reached else 'not reached'})"


def tables(results: Results) -> list[str]:
    """Return the readable tables."""
    rows = list(results.rows.values())
    timed = [row for row in rows if row["system"] != "running"]
    text = [
        "Seconds from the restore command, a request already waiting; medians. `running`: a process that was not",
        "interrupted, from the moment it sees the request.",
        "",
    ]
    columns = {
        "first kernel": "first_kernel_s",
        "first token": "first_token_s",
        "last token": "last_token_s",
        "last byte": "last_byte_s",
        "command returned": "returned_s",
        "GB/s": "data_gb_s",
        "% of copying": "percent_of_copy",
        "tokens equal": "tokens_equal",
        "runs": "runs",
    }
    text += [_table(rows, columns), ""]
    waiting = [row for row in timed if "waits" in row]
    if waiting:
        columns = {
            "on demand, GB": "on_demand_gb",
            "waits": "waits",
            "waited, s": "waited_s",
            "calls traced": "traced_calls",
            "mappings opened": "opened",
            "opening, s": "open_s",
        }
        text += ["While data came:", "", _table(waiting, columns), ""]
    sizes = [row for row in rows if row["system"] == "running"]
    if sizes:
        columns = {
            "weights, GB": "weights_gb",
            "GPU memory, GB": "gpu_gb",
            "of it not zero": "data_gb",
            "image, GB": "image_gb",
            "cold start, s": "start_s",
            "checkpoint, s": "checkpoint_s",
            "kernels not analysed": "kernels_pending",
        }
        text += ["The program:", "", _table(sizes, columns), ""]
    pools = [row for row in rows if row["system"].startswith("pool")]
    if pools:
        columns = {"parked in, s": "park_s", "GPU memory, GB": "parked_gpu_gb", "host memory, GB": "parked_gb"}
        text += ["A parked process:", "", _table(pools, columns), ""]
    reached = goals(results)
    if reached:
        cells = [[what, float(value), wanted, yes] for what, value, wanted, yes in reached]
        text += ["Goals:", "", harness.table(["", "measured", "goal", "reached"], cells), ""]
    text += phases(timed)
    return text


def phases(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return where the time went: the begin of each phase since the command, and its length."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("phases", {})))
    if not names:
        return []
    cells = []
    for row in rows:
        line = [row["key"]]
        for name in names:
            seconds, begin = row.get("phases", {}).get(name), row.get("at", {}).get(name)
            if seconds is None:
                line.append("")
            elif begin is None:
                line.append(harness.show(float(seconds)))
            else:
                line.append(f"{harness.show(float(seconds))} from {harness.show(float(begin))}")
        cells.append(line)
    return ["Where the time went, seconds:", "", harness.table(["", *names], cells), ""]


def _table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    return harness.table(
        ["", *columns], [[row["key"], *(row.get(name, "") for name in columns.values())] for row in rows]
    )
