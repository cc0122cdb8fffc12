"""The pids of an image's processes and threads: CRIU restores under the same ones (clone3's set_tid), or not at all."""

from __future__ import annotations

import os
import re
import time

from phos.gpu_engine import procfs

PATIENCE_SECONDS = 2.0
"""How long a pid may still be that of a process that has just ended, or of a short one that was given it meanwhile."""

_CORE = re.compile(r"core-([1-9][0-9]*)\.img")


def of_image(directory: int) -> list[int]:
    """Those that CRIU needs in the pid namespace it runs in: none if the image brings a namespace of its own."""
    found = sorted(int(match[1]) for name in os.listdir(directory) if (match := _CORE.fullmatch(name)))
    return [] if found[:1] == [1] else found


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
