"""What a peer may do, decided by the kernel's word on who it is."""

from __future__ import annotations

import os

import psutil

from phos.gpu_engine.errors import NotPermitted


def uid_of(pid: int) -> int:
    """The user that a process runs as; -1 if there is no such process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def sees_all(uid: int) -> bool:
    """Whether a user may do what phosd may: root, and phosd's own user."""
    return uid in (0, os.geteuid())


def tree_of(pid: int) -> list[int]:
    """A process and all below it.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    return [pid] + [child.pid for child in psutil.Process(pid).children(recursive=True)]


def refuse_others(root: int, uid: int) -> None:
    """Whoever dumps a process dumps all below it, so all of it has to be that user's, unless the user is root.

    Raises:
        NotPermitted: it is not. psutil.Error: a process has ended.
    """
    if uid == 0:
        return
    for pid in tree_of(root):
        if set(psutil.Process(pid).uids()) != {uid}:
            raise NotPermitted(f"Process {pid} below process {root} belongs to another user.")


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


def refuse_unwritable(directory: int, uid: int, gid: int) -> None:
    """phosd writes with its own rights, and a descriptor that is open for reading is no proof of the caller's.

    Raises:
        NotPermitted: the user may not write there, or phosd may not.
    """
    path = os.readlink(f"/proc/self/fd/{directory}")
    if not may_write(directory, uid, gid):
        raise NotPermitted(f"User {uid} may not write to {path}.")
    if not may_write(directory, own := os.geteuid(), os.getegid()):
        raise NotPermitted(
            f"This phosd runs as user {own}, who may not write to {path}. What root is to checkpoint has to be started "
            "while a phosd of root's runs: start that ('phosd --ensure', or the service), and then the program anew."
        )
