"""``phos-gpu audit``: run a program, and compare what each kernel was predicted to write with what it wrote."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.table import Table

from phos.cli.console import Console
from phos.cli.parameters import COUNT, Place, json_option
from phos.cli.run import device_option, program_of, starting
from phos.cli.text import printable, size_text
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import reach, wire
from phos.gpu_engine.daemon.paths import socket_path
from phos.gpu_engine.errors import DaemonUnavailable, ExitStatus, PhosError, UsageError
from phos.gpu_engine.installation import application_environment, device_kind

KERNELS_SHOWN = 30
NAME_SHOWN = 60
STDERR = 2


class Opened:
    """An audit that phosd keeps for as long as this connection lasts."""

    def __init__(self, path: Path, first: int, every: int, patience: int) -> None:
        """
        Raises:
            DaemonUnavailable: phosd is not there.
        """
        self.name = secrets.token_hex(16)
        self._connection = reach.connect(path)
        asked = wire_pb2.AuditOpen(audit=self.name, first=first, every=every, patience=patience)
        answer, descriptors = self._ask(wire_pb2.Envelope(id=1, audit_open=asked))
        wire.close_all(descriptors)
        if answer.done.error:
            raise PhosError(answer.done.error)

    def _ask(self, envelope: wire_pb2.Envelope) -> tuple[wire_pb2.Envelope, list[int]]:
        try:
            wire.send(self._connection, envelope)
            answer = wire.receive(self._connection)
        except OSError:
            answer = None
        if answer is None:
            raise DaemonUnavailable("phosd ended during the audit, and with it what was found.")
        return answer

    def report(self) -> dict[str, Any]:
        """What was found up to now (:meth:`phos.gpu_engine.spec.audit.Audit.report`)."""
        _, descriptors = self._ask(wire_pb2.Envelope(id=2, audit_report=wire_pb2.AuditReport()))
        try:
            found: dict[str, Any] = json.loads(wire.content_of(wire_only(descriptors)))
            return found
        finally:
            wire.close_all(descriptors)

    def close(self) -> None:
        """phosd forgets the audit."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def wire_only(descriptors: list[int]) -> int:
    """The one descriptor that has to come with a report."""
    if len(descriptors) != 1:
        raise DaemonUnavailable("phosd sent no report of the audit.")
    return descriptors[0]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@device_option
@json_option("Print one JSON object instead of tables; COMMAND prints to stderr.")
@click.option(
    "--output", type=Place(path_type=Path, dir_okay=False), help="Write the JSON object to this file as well."
)
@click.option(
    "--limit-launches",
    type=COUNT,
    default=20,
    show_default=True,
    metavar="N",
    help="Look at the first N launches of each kernel.",
)
@click.option(
    "--every",
    type=COUNT,
    default=50,
    show_default=True,
    metavar="M",
    help="After them look at each M-th; 0: at none.",
)
@click.option(
    "--patience",
    type=COUNT,
    default=0,
    metavar="S",
    help="Let COMMAND wait S seconds in all for the analysis of its kernels; then they are judged as they are known. "
    "0 (the default): until it is done.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def audit(
    device: str | None,
    as_json: bool,
    output: Path | None,
    limit_launches: int,
    every: int,
    patience: int,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and say, for each of its kernels, what it was predicted to write and what it wrote.

    Slow: COMMAND's GPU work is done one call at a time, and all of its GPU memory is hashed before and after a call.
    COMMAND cannot be checkpointed meanwhile.
    """
    program = program_of(command[0])
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {output.absolute().parent} for --output.")
    kind = device_kind(device)
    path = socket_path()
    os.environ["PHOS_DEVICE"] = kind
    reach.ensure(path)
    opened = Opened(path, limit_launches, every, patience)
    try:
        status = _run(program, command, {**application_environment(kind, path), "PHOS_AUDIT": opened.name}, as_json)
        found = {"command": list(command), "device": kind, "status": status, **opened.report()}
    finally:
        opened.close()
    text = json.dumps(found, indent=1)
    not_written = ""
    if output is not None:
        try:
            output.write_text(text + "\n")
        except OSError as error:  # what was found, perhaps in hours, is said all the same
            not_written = f"{output} could not be written: {error.strerror}."
    if as_json:
        click.echo(text)
    else:
        show(found)
    if not_written:
        click.echo(f"phos-gpu audit: {printable(not_written)}", err=True)
    if status != 0:
        click.echo(f"phos-gpu audit: the program ended with status {status}.", err=True)
        raise SystemExit(status)
    if not_written or any(row["wrong_launches"] for row in found["sources"]):
        raise SystemExit(ExitStatus.FAILED)


def _run(program: str, command: tuple[str, ...], changes: dict[str, str], as_json: bool) -> int:
    """Run the program; its exit status, or 128 and the signal's number. Signals to us are passed on."""
    # What reads our standard output as JSON cannot tell the program's words from ours.
    output = STDERR if as_json else None
    with starting(program):
        process = subprocess.Popen([program, *command[1:]], env={**os.environ, **changes}, stdout=output)

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the program as well
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def show(found: dict[str, Any]) -> None:
    """Tables of an audit's report."""
    console = Console(highlight=False)
    sources = Table("Descriptors from", title="Success by source", title_justify="left")
    for title in ("Kernels", "Wrong", "Launches", "Audited", "Wrong", "Success", "Over-traced"):
        sources.add_column(title, justify="right")
    for row in found["sources"]:
        wrong, launches = row["kernels_wrong"], row["wrong_launches"]
        counts = (row["kernels"], wrong, row["launches"], row["audited"], launches)
        rates = (_percent(row["success"]), _percent(row["over_traced"]))
        sources.add_row(row["source"], *map(str, counts), *rates)
    console.print(sources)
    kernels = Table("Kernel", "From", title="Kernels", title_justify="left")
    for title in ("Launches", "Audited", "Written", "Predicted", "Wrong", "Over-traced"):
        kernels.add_column(title, justify="right")
    for kernel in found["kernels"][:KERNELS_SHOWN]:
        name = printable(kernel["kernel"])
        traced = kernel["over_traced_bytes"] / kernel["predicted_bytes"] if kernel["predicted_bytes"] else None
        names = ("launches", "audited", "written_chunks", "predicted_chunks", "wrong_chunks")
        numbers = [str(kernel[name]) for name in names]
        shown = name if len(name) <= NAME_SHOWN else name[: NAME_SHOWN - 1] + "…"
        source = printable(kernel["library"]) if kernel["library"] else kernel["source"]
        kernels.add_row(shown, source, *numbers, _percent(traced))
    console.print(kernels)
    if len(found["kernels"]) > KERNELS_SHOWN:
        console.print(f"... and {len(found['kernels']) - KERNELS_SHOWN} more; --json has all.")
    console.print(f"Written, Predicted, Wrong: in chunks of {size_text(found['chunk_bytes'])}, all audited launches.")
    for kernel in found["kernels"]:
        for wrong in kernel["wrong"]:
            _say_wrong(console, kernel, wrong)
    for kernel in found["kernels"]:
        for why, count in kernel["skipped"].items():
            console.print(f"{printable(kernel['kernel'])}: {count} launches not compared: {printable(why)}.")
    if not found["kernels"]:
        console.print("The program made no call that writes to GPU memory.")


def _say_wrong(console: Console, kernel: dict[str, Any], wrong: dict[str, Any]) -> None:
    console.print(
        f"Wrong guess ({kernel['source']}): {printable(kernel['kernel'])}, launch {wrong['launch']} of process "
        f"{wrong['pid']}, parameters {' '.join(wrong['parameters']) or 'unknown'}, wrote to",
        soft_wrap=True,
    )
    for place in wrong["written"]:
        text = f"  {place['size']} bytes"
        text += f" at {place['address']}" if "address" in place else f" of block {place['block']}"
        if "allocation" in place:
            text += f", in {place['allocation_size']} bytes from {place['entry_point']} at {place['allocation']}"
        console.print(text, soft_wrap=True)
    if wrong["more"]:
        console.print(f"  ... and {wrong['more']} more places")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
