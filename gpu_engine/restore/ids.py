"""The pids of an image's processes and threads: CRIU restores under the same ones (clone3's set_tid), or not at all."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from phos.gpu_engine import procfs
from phos.images import criu_files
from phos.images.errors import ImageError

PATIENCE_SECONDS = 2.0
"""How long a pid may still be that of a process that has just ended, or of a short one that was given it meanwhile."""

AHEAD = 4096
"""So many new processes and threads get other numbers than an image's: more than are made while CRIU restores it."""

FIRST = 300
"""Where the kernel begins again after the highest number (RESERVED_PIDS in kernel/pid.c)."""

LAST_PID, PID_MAX = Path("/proc/sys/kernel/ns_last_pid"), Path("/proc/sys/kernel/pid_max")

_CORE = re.compile(r"core-([1-9][0-9]*)\.img")


def of_image(directory: int) -> list[int]:
    """Those that CRIU needs in the pid namespace it runs in: none if the image brings a namespace of its own."""
    found = sorted(int(match[1]) for name in os.listdir(directory) if (match := _CORE.fullmatch(name)))
    with suppress(OSError, ImageError):  # CRIU will say what is wrong with it
        tree = _tree(directory)  # others' files may be left from a dump into the same folder that failed
        found = [pid for pid in found if pid in tree]
    return [] if found[:1] == [1] else found


def _tree(directory: int) -> set[int]:
    """The pids of the processes and threads that CRIU has dumped."""
    from pycriu.images.pstree_pb2 import pstree_entry

    found: set[int] = set()
    for body in criu_files.messages(directory, "pstree.img", "PSTREE", linked=True):
        task = criu_files.parse(pstree_entry, body, "pstree.img")
        found |= {task.pid, *task.threads}
    return found


def in_the_way(pids: list[int], criu: int) -> str:
    """Wait until nobody has these pids; else say who has one of them, in a sentence. Empty if nobody has.

    Another pid namespace than ours is not looked at: there most are free.
    """
    if procfs.pid_namespace(criu) != procfs.pid_namespace(os.getpid()):
        return ""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while held := next(((pid, holder) for pid in pids if (holder := procfs.process_of(pid))), None):
        if time.monotonic() > deadline:
            return _told(*held)
        time.sleep(0.02)
    return ""


def keep_away(pids: Collection[int], criu: int) -> None:
    """See to it that while CRIU restores these pids nobody new is given one of them.

    The kernel numbers upwards, and begins anew at the end: where that is 32,768 a host under load comes by every few
    seconds. So it is told to go on behind them (proc_sys_kernel(5), ns_last_pid), if it would meet with one soon.
    """
    if not pids or procfs.pid_namespace(criu) != procfs.pid_namespace(os.getpid()):
        return
    with suppress(OSError, ValueError):  # not to be written, in a container for example
        last = int(LAST_PID.read_text())
        if (better := after(last, pids, int(PID_MAX.read_text()))) != last:
            LAST_PID.write_text(str(better))


def after(last: int, pids: Collection[int], end: int) -> int:
    """The number after which the kernel is to go on: ``last``, or the first behind it that leaves room for AHEAD.

    If none does, that with the most. ``end``: the kernel's numbers are below it.
    """

    def room(number: int) -> int:
        return min((pid - number - 1) % (end - FIRST) for pid in pids)

    candidates = [last, *sorted(pids, key=lambda pid: (pid - last) % (end - FIRST))]
    return next((number for number in candidates if room(number) >= AHEAD), max(candidates, key=room))


def _told(pid: int, holder: int) -> str:
    if procfs.is_remains(holder):
        who = f"process {holder}, which has ended and which its parent has not waited for,"
    else:
        who = f"process {holder} ({procfs.executable(holder)})"
    part = "" if pid == holder else "a thread of "
    return (
        f"The image needs the pid {pid}, and {part}{who} has it. End that, or restore in a pid namespace of its "
        "own: unshare --pid --fork --mount-proc."
    )
