"""What the kernel says of a process: /proc/PID/stat, read in one place (proc_pid_stat(5)), and its program."""

from __future__ import annotations

import os
from pathlib import Path

# Positions after the program's name, which may itself hold blanks and parentheses: field 3 of the manual is number 0.
_STATE = 0
_THREADS = 17
_START_TIME = 19


def _fields(pid: int) -> list[str]:
    """The fields after the program's name; none when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # also ESRCH: it ended between opening and reading
        return []
    return stat.rpartition(")")[2].split()


def state(pid: int) -> str:
    """One letter (R, S, D, T, t, Z, X, ...); empty when there is no such process."""
    fields = _fields(pid)
    return fields[_STATE] if fields else ""


def is_alive(pid: int) -> bool:
    """Whether a process exists; a zombie does not count, unless it is only the main thread that has ended."""
    fields = _fields(pid)
    if not fields or fields[_STATE] == "X":
        return False
    return fields[_STATE] != "Z" or int(fields[_THREADS]) > 1


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal (T) or by whoever traces it (t)."""
    return state(pid) in ("T", "t")


def start_time(pid: int) -> int | None:
    """When it started, in clock ticks since boot: with the pid it names one process for ever. None if there is none."""
    fields = _fields(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else None


def readable(text: str) -> str:
    """A file name or an argument as protobuf takes it: what was not UTF-8 (lone surrogates here) becomes '?'."""
    return text.encode(errors="replace").decode()


def executable(pid: int) -> str:
    """The path of a process's program, for people; '?' when the link cannot be read."""
    try:
        return readable(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return "?"
