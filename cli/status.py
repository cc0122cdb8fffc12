"""``phos-gpu status``: what phosd holds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import click
from google.protobuf.message import Message

from phos.cli.parameters import json_option
from phos.cli.text import printable, printable_lines, size_text
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client


@click.command()
@json_option()
def status(as_json: bool) -> None:
    """Show phosd's GPUs, processes under PhOS (memory, state, what is not carried) and its checkpoints and restores."""
    answer = client.status()
    if as_json:
        click.echo(json.dumps(plain(answer), indent=2))
        return
    _show(answer)


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON's types: unlike protobuf's own JSON, 64-bit numbers stay numbers, and bytes become hex."""

    def value(of: Any) -> Any:
        if isinstance(of, Message):
            return plain(of)
        return of.hex() if isinstance(of, bytes) else of

    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        content = getattr(message, field.name)
        if isinstance(content, Mapping):
            fields[field.name] = dict(content)
            continue
        repeated = not isinstance(content, (str, bytes, int, float, Message))
        fields[field.name] = [value(item) for item in content] if repeated else value(content)
    return fields


def _show(answer: wire_pb2.Status) -> None:
    from rich.table import Table

    from phos.cli.console import Console

    console = Console()
    up = time.time() - answer.since
    console.print(
        f"phosd {answer.version}, pid {answer.pid}, {answer.mode} device, CUDA {answer.driver_version // 1000}."
        f"{answer.driver_version % 1000 // 10}, up {up:.0f} s, pinned ring {size_text(answer.ring_bytes)}"
    )
    gpus = Table("GPU", "Name", "Total", "Free", "Held for processes", title="GPUs", title_justify="left")
    for gpu in answer.gpus:
        free = size_text(gpu.free) if gpu.free else "-"
        gpus.add_row(str(gpu.ordinal), gpu.name, size_text(gpu.total), free, size_text(gpu.held))
    console.print(gpus)
    if answer.listen:
        console.print(f"Images are shared at {answer.listen}.")
    if answer.processes:
        table = Table(
            "Pid", "Program", "State", "Blocks", "Memory", "Not carried (the driver saves it)", title="Processes"
        )
        for process in answer.processes:
            rest = ", ".join(f"{u.kind}: {u.count} ({size_text(u.bytes)})" for u in process.uncarried) or "nothing"
            table.add_row(
                str(process.pid),
                printable(process.executable),
                process.state,
                str(process.blocks),
                size_text(process.bytes),
                rest,
            )
        console.print(table)
    else:
        console.print("No process runs under PhOS. Start one with 'phos-gpu run -- COMMAND'.")
    if answer.pools:
        from phos.cli.pool import pools_table

        console.print(pools_table(answer.pools))
    if answer.jobs:
        table = Table("Image", "Job", "State", "Copied", "Processes", "Error", title="Checkpoints and restores")
        for job in answer.jobs:
            table.add_row(
                printable(job.image),
                job.kind,
                job.state,
                f"{size_text(job.bytes_done)} of {size_text(job.bytes_total)}",
                " ".join(map(str, job.pids)),
                printable_lines(job.error),
            )
        console.print(table)
    if answer.pinned:
        from phos.cli.image import show_pinned

        show_pinned(console, answer)
