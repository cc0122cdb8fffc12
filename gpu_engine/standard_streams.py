"""Descriptors 0, 1 and 2 of a program that was started without some of them, or whose reader has gone."""

from __future__ import annotations

import os
import select
import sys


def occupy() -> None:
    """Let nothing else get their numbers: a child would take a file or a socket of ours for its standard output.

    What is opened in their place is not inherited: a program that replaces us finds them closed, as we did. Nor need
    anybody ask whether there are streams: Python has None where there was no descriptor.
    """
    for _ in range(3):
        descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        if descriptor > 2:
            os.close(descriptor)
            break
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115


def flush() -> None:
    """Write what is buffered, if there is anywhere to write it to.

    Raises:
        OSError: it cannot be written.
    """
    if sys.stdout is not None:  # it is where descriptor 1 was closed
        sys.stdout.flush()


def nobody_reads() -> bool:
    """Whether standard output or the messages go to a pipe or a socket whose other end is closed."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def silence(*, messages: bool = False) -> None:
    """What standard output has not taken it never will: let the interpreter not try again at its end, and change the
    exit status to 120. Or what standard error has not.
    """
    stream, original, number = (sys.stderr, sys.__stderr__, 2) if messages else (sys.stdout, sys.__stdout__, 1)
    if stream is not None and stream is original:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, number)
        os.close(null)
