"""Custody: a user's image directory is root's while root writes to it.

phosd and the CRIU that it starts write with root's rights. Whoever owns a directory can put links there under the
names that will be written, or let its path lead elsewhere. So for as long as root writes, the directory is root's,
nobody else may enter it, it is empty at first, and it is reached by its descriptor alone. Then it is the user's again;
if phosd was killed meanwhile, when the next one has started.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phos.gpu_engine.errors import CheckpointFailed, NotPermitted
from phos.images.files import describe_path

log = logging.getLogger(__name__)

MODE = 0o700

OWNER = "trusted.phos.custody"
"""Extended attribute of a directory that is not its user's at present: that user, and the mode that it had. Only root
can read or write attributes of this kind (xattr(7))."""

USED_SECONDS = 1.0
"""How often to look whether the last process of an earlier phosd has left a directory."""


@contextmanager
def custody(directory: int, uid: int, records: Path) -> Iterator[int]:
    """Take a directory of user ``uid`` over for the time of the block.

    Yields a descriptor of it that was opened here; ``directory`` stays the caller's. Root's requests need no custody:
    root may as well write by itself. ``records`` is the folder that says where to look if phosd is killed.

    Raises:
        NotPermitted: it is no directory, not the user's own, or on a file system that is.
        CheckpointFailed: it is not empty, is in use, or cannot change hands.
    """
    path = describe_path(directory)
    try:
        opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        raise NotPermitted(f"{path} is no directory that an image can be written to: {error.strerror}.") from error
    try:
        if uid == 0:
            yield opened
            return
        if server := _served_by(_mount_of(opened), Path("/proc/self/mountinfo").read_text(errors="replace")):
            raise NotPermitted(
                f"{path} is on a file system that user {server} provides (FUSE), and who can put links into it at any "
                "time: choose a directory on another file system."
            )
        try:
            # Who ends first must not give back what another still writes to.
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointFailed(f"{path} is in use: somebody has a lock on it. Name another directory.") from error
        before = os.fstat(opened)
        if before.st_uid != uid:
            raise NotPermitted(
                f"{path} belongs to user {before.st_uid}. phosd writes images for user {uid} only into directories of "
                "that user's own: name another, which is then made."
            )
        record = records / f"{before.st_dev}-{before.st_ino}"
        try:
            _note(opened, before, record)
            _take(opened, path)
            yield opened
        finally:
            _give_back(opened, path, before.st_uid, stat.S_IMODE(before.st_mode))
            _forget(opened, record)
    finally:
        os.close(opened)


def give_back_left(records: Path) -> None:
    """Give back, in a thread, what an earlier phosd was killed over. To be called before this one takes anything."""
    left = list(records.iterdir()) if records.is_dir() else []

    def run() -> None:
        while left:
            left[:] = [record for record in left if not _settle(record)]
            time.sleep(USED_SECONDS if left else 0)

    if left:
        threading.Thread(target=run, daemon=True, name="custody").start()


def _note(directory: int, before: os.stat_result, record: Path) -> None:
    try:
        record.parent.mkdir(mode=0o700, exist_ok=True)
        record.write_bytes(os.readlink(os.fsencode(f"/proc/self/fd/{directory}")))
        os.setxattr(directory, OWNER, f"{before.st_uid} {stat.S_IMODE(before.st_mode):o}".encode())
    except OSError as error:
        log.warning("%s would stay root's if phosd were killed now: %s", describe_path(directory), error.strerror)


def _forget(directory: int, record: Path) -> None:
    with suppress(OSError):  # there may be none
        os.removexattr(directory, OWNER)
    with suppress(OSError):
        record.unlink()


def _settle(record: Path) -> bool:
    """Whether nothing is left to be done about a directory that was taken over; its path may lead elsewhere by now."""
    path = os.fsdecode(record.read_bytes())
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        log.warning("%s was root's when phosd was killed, and cannot be given back: %s", path, error.strerror)
        record.unlink()
        return True
    try:
        try:
            uid, mode = os.getxattr(opened, OWNER).split()
        except OSError:
            pass  # another directory, or it had not been taken yet
        else:
            if _used(os.fstat(opened)):
                return False
            _give_back(opened, path, int(uid), int(mode, 8))
            log.warning("phosd was killed while it wrote to %s, which is user %d's again.", path, int(uid))
        _forget(opened, record)
        return True
    finally:
        os.close(opened)


def _used(directory: os.stat_result) -> bool:
    """Whether another of root's processes is in a directory or has it open: it may write there by name."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid != 0 or int(process.name) == os.getpid():
                continue
            for link in (process / "cwd", *process.glob("fd/*")):
                with suppress(OSError):
                    if os.path.samestat(link.stat(), directory):
                        return True
    return False


def _mount_of(directory: int) -> str:
    """The number of the mount that a descriptor's file is on."""
    for line in Path(f"/proc/self/fdinfo/{directory}").read_text().splitlines():
        if line.startswith("mnt_id:"):
            return line.split()[1]
    return ""


def _served_by(mount: str, mountinfo: str) -> int:
    """The user who answers for a mount's content, as far as it is not the kernel: proc_pid_mountinfo(5), fuse(4)."""
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        kind, _, options = (*tail.split(" "), "", "")[:3]
        if head.split(" ")[0] == mount and kind.startswith("fuse"):
            return next((int(word[8:]) for word in options.split(",") if word.startswith("user_id=")), 0)
    return 0


def _take(directory: int, path: str) -> None:
    try:
        os.fchown(directory, os.geteuid(), -1)
        os.fchmod(directory, MODE)
        now = os.fstat(directory)
    except OSError as error:
        raise CheckpointFailed(
            f"{path} cannot be made root's while the image is written ({error.strerror}): choose a directory on "
            "another file system."
        ) from error
    if now.st_uid != os.geteuid() or stat.S_IMODE(now.st_mode) != MODE:
        raise CheckpointFailed(
            f"{path} is on a file system that keeps no owners and modes: choose a directory on another file system."
        )
    if os.listdir(directory):  # not before: its owner could put something there until now
        raise CheckpointFailed(f"{path} is not empty. Name a new directory, or remove what is in it.")


def _give_back(directory: int, path: str, uid: int, mode: int) -> None:
    try:
        os.fchown(directory, uid, -1)
        os.fchmod(directory, mode)
    except OSError as error:
        log.error("%s stays root's: it cannot be given back to user %d: %s", path, uid, error.strerror)
