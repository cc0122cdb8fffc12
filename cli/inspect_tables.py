"""What ``phos-gpu inspect`` shows to people, made with rich: who asks for JSON does not wait until that is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from phos.cli.text import printable, seconds_text, size_text


def render(s: dict[str, Any], all_buffers: bool) -> Iterable[Any]:
    """The summary in parts that rich can print."""
    yield _facts(s)
    if not s["processes"] and s["problems"]:
        return  # the inventory could not be read: there is nothing else to show
    yield _processes(s["processes"])
    if s["gpus"]:
        yield _gpus(s["gpus"])
    yield from _data(s, all_buffers)
    if s["sharing"]:
        table = _table("\nShared between processes", "block", "size>", "processes")
        for share in s["sharing"]:
            pids = ", ".join(map(str, share["pids"]))
            table.add_row(f"{share['session'][:8]}…/{share['block']}", size_text(share["size"]), pids)
        yield table
    yield _saved_by(s["saved_by"])
    if s["timings"]["phases"] or s["timings"]["commit"]:
        yield _timings(s["timings"])


def _table(title: str, *columns: str) -> Table:
    """A plain table; a column whose name ends with '>' is aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    return table


def _facts(s: dict[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    complete = f"yes, committed {s['committed']}" if s["complete"] else "NO: see the problems below"
    host, versions = s["host"], s["versions"]
    about_host = [host["name"], host["distribution"], f"Linux {host['kernel']}" if host["kernel"] else ""]
    about_versions = [
        f"{label} {versions[key]}"
        for key, label in (("phos", "PhOS"), ("criu", "CRIU"), ("cuda", "CUDA"), ("driver", "driver"))
        if versions[key]
    ]
    for name, value in (
        ("Image", s["path"]),
        ("Complete", complete),
        ("Made", s["created"] or ""),
        ("Protocol", s["protocol"] + (f" (reducers: {', '.join(s['reducers'])})" if s["reducers"] else "")),
        ("Host", ", ".join(filter(None, about_host))),
        ("Versions", ", ".join(about_versions)),
    ):
        if value:
            grid.add_row(Text(name, style="bold"), Text(printable(value)))
    return grid


def _processes(processes: list[dict[str, Any]]) -> Table:
    table = _table("\nProcesses", "pid>", "GPU memory>", "buffers>", "pinned>", "modules>", "command")
    for p in processes:
        words = p["command_line"] or [p["executable"]]
        note = "" if p["under_frontend"] else "  (not under the frontend: the driver saved its GPU memory)"
        table.add_row(
            str(p["pid"]),
            size_text(p["block_bytes"]) if p["under_frontend"] else "unknown",
            str(p["buffers"]),
            size_text(p["pinned_bytes"]),
            str(p["modules"]),
            Text(printable(" ".join(words)) + note),
        )
    return table


def _gpus(gpus: list[dict[str, Any]]) -> Table:
    table = _table("\nGPUs", "GPU>", "name", "chip", "memory>", "in the image>", "uuid")
    for g in gpus:
        table.add_row(
            str(g["ordinal"]),
            Text(printable(g["name"])),
            g["compute_capability"],
            size_text(g["memory"]),
            size_text(g["block_bytes"]),
            g["uuid"],
        )
    return table


def _data(s: dict[str, Any], all_buffers: bool) -> Iterable[Any]:
    data = s["gpu_data"]
    total = data["total_bytes"]
    share = f" ({100 * data['written_bytes'] / total:.0f} %)" if total else ""
    stored = f"{size_text(data['written_bytes'])} stored{share} in {data['stripes']} data files"
    zero = f"{size_text(data['zero_bytes'])} are zeros and take no space"
    yield Text("\nGPU data", style="bold")
    yield Text(f"{size_text(total)} in {data['blocks']} blocks: {stored}, {zero}")
    if not data["buffers"]:
        return
    table = _table("\nBuffers by size", "up to>", "buffers>", "together>")
    for row in data["by_size"]:
        if row["buffers"]:
            bound = "larger" if row["up_to"] is None else size_text(row["up_to"])
            table.add_row(bound, str(row["buffers"]), size_text(row["bytes"]))
    table.add_row("all", str(data["buffers"]), size_text(data["buffer_bytes"]))
    yield table
    title = "\nBuffers" if all_buffers else "\nLargest buffers"
    table = _table(title, "size>", "address>", "pid>", "GPU>", "block>", "offset>", "made by")
    for b in s["buffers"]:
        table.add_row(
            size_text(b["size"]),
            f"{b['address']:#x}",
            str(b["pid"]),
            "" if b["device"] is None else str(b["device"]),
            str(b["block"]),
            str(b["offset"]),
            Text(printable(b["entry_point"])),
        )
    yield table


def _saved_by(saved: dict[str, Any]) -> Table:
    table = _table("\nSaved by", "whom", "size>", "what")
    phos, criu = saved["phos"], saved["criu"]
    table.add_row("PhOS", size_text(phos["stored_bytes"]), f"{size_text(phos['bytes'])} of GPU data")
    for d in saved["driver"]:
        if d["bytes"] is None:
            table.add_row("driver", "unknown", f"all GPU memory of process {d['pid']}, inside CRIU's pages")
        else:
            what = f"{d['count']} × {printable(d['kind'])} of process {d['pid']}, inside CRIU's pages"
            table.add_row("driver", size_text(d["bytes"]), Text(what))
    for r in saved["residue"]:
        what = f"room for what it holds itself for process {r['pid']}, in {printable(r['file'])}"
        table.add_row("driver", size_text(r["size"]), Text(what))
    for m in saved["named_memory"]:
        names = ", ".join(f"/dev/shm/{name}" for name in m["names"])
        table.add_row("PhOS", size_text(m["size"]), Text(printable(f"shared memory {names}, in {m['file']}")))
    table.add_row("CRIU", size_text(criu["pages_bytes"]), "memory pages")
    table.add_row("CRIU", size_text(criu["bytes"] - criu["pages_bytes"]), "everything else")
    if criu["frozen_seconds"] is not None:
        frozen = f"{seconds_text(criu['frozen_seconds'])}, freezing took {seconds_text(criu['freezing_seconds'])}"
        table.add_row("", "", f"CRIU kept the processes frozen for {frozen}")
    return table


def _timings(timings: dict[str, Any]) -> Table:
    table = _table("\nTimes", "phase", "time>", "")
    for t in timings["phases"]:
        note = "beside the others" if t["concurrent"] else ""
        table.add_row(Text(printable(t["phase"])), seconds_text(t["seconds"]), note)
    if timings["total_seconds"] is not None:
        table.add_row("unaccounted", seconds_text(timings["unaccounted_seconds"]), "")
        table.add_row("all", seconds_text(timings["total_seconds"]), "until the image was handed over to be committed")
    for t in timings["commit"]:
        table.add_row(Text(printable(t["phase"])), seconds_text(t["seconds"]), "commit")
    return table
