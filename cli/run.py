"""``phos-gpu run``: start a program under the frontend."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from phos.gpu_engine import standard_streams
from phos.gpu_engine.daemon import reach
from phos.gpu_engine.daemon.paths import socket_path
from phos.gpu_engine.errors import UsageError
from phos.gpu_engine.installation import application_environment, device_kind

device_option = click.option(
    "--device",
    type=click.Choice(["auto", "nvidia", "software"]),
    default=None,
    help="Which GPU. Default: PHOS_DEVICE, else auto: NVIDIA's where there is one.",
)


def program_of(name: str) -> str:
    """Where the program lies that a command names.

    Raises:
        UsageError: there is none, or what is there can be none.
    """
    program = shutil.which(name)
    if program is not None:
        return program
    if "/" not in name:
        raise UsageError(f"There is no program '{name}' on the PATH.")
    if os.path.isdir(name):
        raise UsageError(f"'{name}' is a directory, and no program.")
    if os.path.exists(name):
        raise UsageError(
            f"'{name}' is not executable: chmod +x makes it so, or name the program that reads it before it."
        )
    raise UsageError(f"There is no program '{name}'.")


@contextmanager
def starting(program: str) -> Iterator[None]:
    """Start the program in the block.

    Raises:
        UsageError: it cannot be: a script without its first line, another machine's program, too long arguments.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{program} cannot be started: {error.strerror}.") from error


def become(program: str, words: Sequence[str]) -> None:
    """Let a program take the place of this process; ``words``: its name, and its arguments.

    Raises:
        UsageError: as :func:`starting`.
    """
    standard_streams.flush()
    # Python ignores them, and ignoring is inherited.
    ignored = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    try:
        with starting(program):
            os.execv(program, list(words))
    finally:  # it could not be started
        for number, handler in ignored.items():
            signal.signal(number, handler)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@device_option
@click.option(
    "--connections",
    type=click.IntRange(1, 32),
    help="Hardware queues a context (CUDA_DEVICE_MAX_CONNECTIONS; the driver's default is 8). With 1 checkpoints are "
    "shorter, but streams of COMMAND share one queue.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(device: str | None, connections: int | None, command: tuple[str, ...]) -> None:
    """Run COMMAND so that it can be checkpointed: phos-gpu run -- python train.py

    COMMAND replaces this process: its pid, exit status and signals are its own. phosd is started if it does not run.
    """
    kind = device_kind(device)
    socket = socket_path()
    os.environ["PHOS_DEVICE"] = kind
    try:
        reach.ensure(socket)
    except reach.Hanging as error:  # a checkpoint wants it, and not the program
        click.echo(f"phos-gpu run: {error} '{command[0]}' is started all the same.", err=True)
    program = program_of(command[0])
    os.environ.update(application_environment(kind, socket))
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    become(program, command)
