"""``phos-gpu demo --restore``: how soon a program computes again, restored eagerly, lazily or from a pool.

The program is dumped half-way and ended. From the same image it is restored in each way that was asked for, and
computes to its end; it must end with the same result each time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from phos.cli.demo_protocols import Watch
from phos.cli.text import size_text
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import CheckpointFailed

if TYPE_CHECKING:
    from phos.cli.demo import Demo

MODES = ("eager", "lazy", "pool")
ITERATIONS = 40

SOFTWARE_BANDWIDTH = 4 << 20
"""Bytes per second that the software GPU copies: memory should still be coming when the program computes."""

POOL = "demo"


@dataclass
class Measured:
    """One restore; seconds since its command began, bytes, and how often and how long calls waited for memory."""

    mode: str
    first_kernel: float
    first_iteration: float
    last_byte: float
    size: int
    on_demand: int | None = None
    waits: int | None = None
    waited: float | None = None


def compare(demo: Demo, modes: Sequence[str]) -> None:
    """All steps.

    Raises:
        PhosError: one failed.
    """
    expected = demo.begin(SOFTWARE_BANDWIDTH)
    output = demo.folder / "restored.log"
    demo.dump_half_way(output)
    said = output.read_bytes()
    measured = []
    for mode in modes:
        with open(output, "r+b") as file:  # CRIU wants it as long as it was
            file.truncate(len(said))
        measured.append(_pool(demo, output) if mode == "pool" else _restore(demo, mode, output))
        if (found := demo.result(output)) != expected:
            raise CheckpointFailed(f"The results differ: {expected} without interruption, {found} restored ({mode}).")
    _show(demo, measured)
    demo.console.print(f"Restored in each of these ways, the program ends with the same result, {expected}.")


def _restore(demo: Demo, mode: str, output: Path) -> Measured:
    options = ["--lazy"] if mode == "lazy" else []
    with Watch(output) as watch:
        with demo.timed(" ".join([f"{mode}: phos-gpu restore", *options, "image/"])):
            began, clock = time.time(), time.perf_counter()
            said = json.loads(demo.command("phos-gpu", "restore", *options, "--json", str(demo.image)))
            job = _job(demo)
        with demo.timed(f"{mode}: let it compute to its end"):
            demo.wait_end(said["pids"][0])
            time.sleep(0.01)  # the watch's last look
    ends = {phase.name: job.since + phase.start + phase.seconds - began for phase in job.phases}
    first = _first(watch, clock)
    found = Measured(
        mode,
        first_kernel=_let_through(ends.get("attach", 0.0), first),
        first_iteration=first,
        last_byte=ends.get("GPU data", 0.0),
        size=job.bytes_total,
    )
    return _on_demand(found, said) if mode == "lazy" else found


def _pool(demo: Demo, output: Path) -> Measured:
    with demo.timed(f"pool: phos-gpu pool create image/ --size 1 --name {POOL}"):
        demo.command("phos-gpu", "pool", "create", str(demo.image), "--size", "1", "--name", POOL)
    with Watch(output) as watch:
        with demo.timed(f"pool: phos-gpu pool take {POOL}"):
            began, clock = time.time(), time.perf_counter()
            said = json.loads(demo.command("phos-gpu", "pool", "take", POOL, "--json"))
        with demo.timed("pool: drop it, and let the process that was taken compute to its end"):
            demo.command("phos-gpu", "pool", "drop", POOL)
            demo.wait_end(said["pids"][0])
            time.sleep(0.01)
    offset = float(said["began"]) - began  # its own times begin where phosd was asked
    for name in ("attached", "first_kernel", "last_byte"):
        if said.get(name) is not None:
            said[name] += offset
    first = _first(watch, clock)
    found = Measured(
        "pool",
        first_kernel=_let_through(said["attached"], first),
        first_iteration=first,
        last_byte=said["last_byte"],
        size=said["bytes"],
    )
    return _on_demand(found, said)


def _on_demand(found: Measured, said: dict[str, Any]) -> Measured:
    """With what the command printed of a restore whose calls were watched while memory came."""
    if said.get("first_kernel") is not None:  # else there was none before all memory was there
        found.first_kernel = said["first_kernel"]
    found.on_demand, found.waits, found.waited = said["on_demand_bytes"], said["waits"], said["waited"]
    return found


def _let_through(attached: float, first_iteration: float) -> float:
    """The moment from which on calls are let through, where nobody watches them.

    phosd notes it when the process has answered that it is, and may have computed by then.
    """
    return min(attached, first_iteration)


def _first(watch: Watch, clock: float) -> float:
    if not watch.times:
        raise CheckpointFailed("The restored program computed nothing.")
    return watch.times[0] - clock


def _job(demo: Demo) -> wire_pb2.Status.Job:
    """phosd's latest restore."""
    where = client.image_name(demo.image)
    jobs = [
        job
        for job in client.status(Path(demo.environment["PHOS_SOCKET"])).jobs
        if job.kind == "restore" and job.image == where
    ]
    if not jobs:
        raise CheckpointFailed(f"phosd knows of no restore from {where}.")
    return jobs[-1]


def _show(demo: Demo, measured: Sequence[Measured]) -> None:
    title = "Seconds from the command to the first kernel, the next iteration, the last byte; what calls waited for"
    table = Table("Restore", title=title, title_justify="left")
    for title in ("kernel", "iteration", "last byte", "memory", "on demand", "waits", "waited"):
        table.add_column(title, justify="right")
    for m in measured:
        times = [f"{seconds:.3f}" for seconds in (m.first_kernel, m.first_iteration, m.last_byte)]
        demanded = ["-", "-", "-"]
        if m.on_demand is not None:
            demanded = [size_text(m.on_demand), str(m.waits), f"{m.waited:.3f}"]
        table.add_row(m.mode, *times, size_text(m.size), *demanded)
    demo.console.print(table)
