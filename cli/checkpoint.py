"""``phos-gpu checkpoint``: criu dump with the plugin, progress, and one message when it fails."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import psutil

from phos.cli.criu import DUMP_LOG, image_directory, named_log, needs_shell_job, run_dump, tree_of
from phos.cli.launched import ENDING, Interrupted, handle_as_before, heed
from phos.cli.outcome import tell
from phos.cli.parameters import PID, Place, json_option
from phos.cli.progress import ImageProgress
from phos.cli.text import printable, printable_lines
from phos.gpu_engine import configuration, procfs
from phos.gpu_engine.cow.settings import CowSettings, size_of
from phos.gpu_engine.daemon import client, reach
from phos.gpu_engine.daemon.permissions import uid_of
from phos.gpu_engine.errors import CheckpointFailed, DaemonUnavailable, NoSuchProcess, NotPermitted, UsageError
from phos.gpu_engine.installation import device_kind, load_driver
from phos.gpu_engine.timeline import stall_seconds

TOO_LATE = "The interruption came too late: process {pid} is in {directory}."


@click.command()
@click.argument("pid", type=PID)
@click.argument("image", type=Place(path_type=Path))
@click.option("--leave-running", is_flag=True, help="Let the processes run on; otherwise they are ended.")
@click.option(
    "--protocol",
    type=click.Choice(configuration.PROTOCOLS),
    default=None,
    help="stop: the processes stand still until their GPU memory is copied; cow: only until the copy has begun. "
    "Default: PHOS_PROTOCOL, the configuration file, else cow with --leave-running and stop without.",
)
@click.option("--pool", metavar="SIZE", help="GPU memory for shadows (cow), for example 256M. Default: PHOS_COW_POOL.")
@click.option("--no-validate", is_flag=True, help="Do not look for wrong guesses (cow): a shorter stall.")
@click.option("--no-prioritise", is_flag=True, help="Do not let copies of the application go first (cow).")
@json_option()
def checkpoint(
    pid: int,
    image: Path,
    leave_running: bool,
    protocol: str | None,
    pool: str | None,
    no_validate: bool,
    no_prioritise: bool,
    as_json: bool,
) -> None:
    """Dump process PID, its children and their GPU memory into the directory IMAGE (made if missing).

    On any failure the processes run on as before and IMAGE is left without a part of ours.
    """
    began = time.perf_counter()
    chosen = choose_protocol(protocol, leave_running=leave_running)
    settings = {"PHOS_PROTOCOL": chosen}
    if pool is not None:
        size_of("--pool", pool)  # an empty one would be the default, and an error name a variable that nobody has set
        settings["PHOS_COW_POOL"] = pool
    settings |= {"PHOS_VALIDATE": "off"} if no_validate else {}
    settings |= {"PHOS_PRIORITISE": "off"} if no_prioritise else {}
    os.environ.update(settings)  # CRIU hands them to its plugin, and that to phosd
    CowSettings.from_environment()  # says what has no meaning before anything is done
    given = {"--pool": pool, "--no-validate": no_validate, "--no-prioritise": no_prioritise}
    if chosen != "cow" and (useless := [option for option, value in given.items() if value]):
        raise UsageError(
            f"{' and '.join(useless)}: only for the protocol cow, and this is a checkpoint by {chosen}. Give "
            "--protocol cow, or leave that out."
        )
    refuse_own(pid)
    beside = pid if procfs.apart(pid) else None
    arguments = ["-t", str(procfs.inner_pid(pid) if beside else pid), "--file-locks"]
    if needs_shell_job(pid):
        arguments.append("--shell-job")
    if leave_running:
        arguments.append("--leave-running")
    reach.ensure(without=reach.FOR_ONE_COMMAND)
    _require_cuda(pid)
    directory = image_directory(image, create=True)
    with ImageProgress(directory, restore=False, quiet=as_json):
        status, errors, interrupted = run_dump(arguments, directory.absolute(), beside)
    if beside is not None:
        reach.ensure(without=reach.FOR_ONE_COMMAND)  # had phosd died, nobody in there could have started one
    if interrupted and status == 0:
        raise Interrupted(interrupted, TOO_LATE.format(pid=pid, directory=directory))
    if interrupted:
        became = "runs on as before" if procfs.is_alive(pid) else "has ended"
        raise Interrupted(interrupted, f"Interrupted: process {pid} {became}; {directory} holds no image.")
    if status != 0:
        became = "it runs on as before" if procfs.is_alive(pid) else "it has ended"
        raise CheckpointFailed(
            f"Process {pid} could not be checkpointed; {became}.\n{errors}{named_log(directory / DUMP_LOG)}"
        )
    seconds = time.perf_counter() - began
    with _too_late(TOO_LATE.format(pid=pid, directory=directory)):
        _tell(pid, directory, chosen, seconds, as_json)


@contextmanager
def _too_late(said: str) -> Iterator[None]:
    """What a signal that ends the command says from now on.

    Raises:
        Interrupted: one has come.
    """

    def received(number: int, _frame: object) -> None:
        raise Interrupted(number, said)

    former: list[tuple[int, Any]] = []
    heed(ENDING, received, former)
    try:
        yield
    finally:
        handle_as_before(former)


def _tell(pid: int, directory: Path, protocol: str, seconds: float, as_json: bool) -> None:
    warnings: list[str] = []
    with suppress(DaemonUnavailable):  # it has ended since
        warnings += client.wait_image(directory).warnings
    if as_json:
        result: dict[str, object] = {"pid": pid, "image": str(directory), "protocol": protocol}
        result |= {"seconds": round(seconds, 4), "stall": _stall(directory), "warnings": warnings}
        tell(json.dumps(result))
    else:
        for line in warnings:
            click.echo(f"Warning: {printable_lines(line)}", err=True)
        shown = printable(str(directory))
        tell(f"Process {pid} is in {shown} ({seconds:.2f} s). What else is: phos-gpu inspect {shlex.quote(shown)}")


def choose_protocol(asked: str | None, *, leave_running: bool) -> str:
    """The protocol: what was asked for, else what the environment or the configuration file says, else what fits.

    Raises:
        UsageError: there is no such protocol, or the configuration file has no meaning.
    """
    configuration.fill_environment()
    chosen = asked or os.environ.get("PHOS_PROTOCOL") or ("cow" if leave_running else "stop")
    if chosen not in configuration.PROTOCOLS:
        raise UsageError(f"PHOS_PROTOCOL={chosen}: the protocols are {' and '.join(configuration.PROTOCOLS)}.")
    return chosen


def refuse_own(pid: int) -> None:
    """
    Raises:
        UsageError: the process is this one, or one above it.
        NoSuchProcess: it is a thread, which the kernel shows as a process to whoever asks for it by its number.
    """
    if (process := procfs.process_of(pid)) not in (0, pid):
        raise NoSuchProcess(f"There is no process {pid}: that is a thread of process {process}. Name the process.")
    own = psutil.Process()
    if pid in (own.pid, *(parent.pid for parent in own.parents())):
        raise UsageError(f"Process {pid} has started this command, which would have to dump itself.")


def _stall(directory: Path) -> float | None:
    """For how many seconds the processes stood still; None if phosd does not know (any more)."""
    where = client.image_name(directory)
    with suppress(DaemonUnavailable):
        for job in reversed(client.status().jobs):
            if job.kind == "dump" and job.image == where:
                return round(stall_seconds(job.phases), 4)
    return None


def _require_cuda(pid: int) -> None:
    """A process without CUDA is a mistake here (plain 'criu dump' takes it)."""
    tree = tree_of(pid)
    if os.geteuid() not in (0, owner := uid_of(pid)):  # phosd would refuse it too, but behind CRIU's failure
        raise NotPermitted(f"Process {pid} belongs to user {owner}: only that user and root may checkpoint it.")
    if {process.pid for process in client.status().processes} & tree:
        return  # phosd knows; asking the driver costs half a second
    load_driver(device_kind())
    from phos.gpu_engine import driver, toggle

    driver.initialise()
    if not any(toggle.holds_cuda(member) for member in tree):
        if procfs.has_ended(pid):
            raise NoSuchProcess(f"Process {pid} has ended.")
        raise NoSuchProcess(
            f"Process {pid} and its children hold no CUDA context: there is no GPU state to save. "
            "Use 'criu dump' for processes without a GPU."
        )
