"""Names that the tests on a real GPU import; conftest.py puts this folder and bench/ on the path."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import process

DEVICE = os.environ.get("PHOS_TEST_DEVICE", "nvidia")
PROGRAMS = Path(__file__).resolve().parent / "programs"
CONNECTED = ("--tcp-established", "--network-lock", "skip")  # both ends are dumped, and nobody else's
TIME_WAIT = "06"  # Linux, include/net/tcp_states.h, as /proc/net/tcp has it
Starter = Callable[..., process.Program]


def example(name: str, *options: str) -> list[str]:
    """Return the command that runs an example."""
    return process.python_program(process.EXAMPLES / f"{name}.py", *options)


def reference(name: str) -> list[str]:
    """Return the stored output of an example with its default sizes."""
    return (process.EXAMPLES / "reference" / f"{name}.txt").read_text().splitlines()


def connections_are_forgotten() -> bool:
    """Whether the kernel keeps no address of a closed connection any more, as it does for a minute.

    NCCL closes many while it starts, without giving up the listeners they came to; CRIU could not bind those as long.
    """
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    return all(line.split()[3] != TIME_WAIT for path in tables for line in path.read_text().splitlines()[1:])


def without_repeats(lines: Sequence[str]) -> list[str]:
    """Drop lines that were printed again.

    An iteration that was cut between its computing and its printing, or that ran on after a dump that left the program
    running, is printed once more after the restore. It must be the same line, or it is not dropped here.
    """
    return list(dict.fromkeys(lines))
