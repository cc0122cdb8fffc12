"""What a peer may do, decided by the kernel's word on who it is."""

from __future__ import annotations

import os


def uid_of(pid: int) -> int:
    """The user that a process runs as; -1 if there is no such process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def may_write(directory: int, uid: int, gid: int) -> bool:
    """Whether a user may make files in a directory, by owner, group and mode; ACLs and further groups do not count."""
    status = os.fstat(directory)
    if uid == 0:
        return True
    wanted = 0o3  # write and search
    if status.st_uid == uid:
        return status.st_mode >> 6 & wanted == wanted
    if status.st_gid == gid:
        return status.st_mode >> 3 & wanted == wanted
    return status.st_mode & wanted == wanted
