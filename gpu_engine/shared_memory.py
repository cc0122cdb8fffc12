"""/dev/shm, and PhOS's own folder in it.

What lies in the folder is there for as long as somebody of ours has it locked: a file without a lock was left behind by
a phosd that was killed, and anybody may remove it. Memory of other programs is never locked itself, as they may do so:
the files of one restore are named alike, and one of them, which says what had which name before, is locked for all.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from phos.gpu_engine import procfs
from phos.images.files import new_file_in

log = logging.getLogger(__name__)

H = TypeVar("H", bound="HeldFile")

SHARED_MEMORY = Path("/dev/shm")

FOLDER_MODE = 0o711

FOLDER = re.compile(r"phos(-\d+)?")
_OURS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}\.residue")
_MEMORY = re.compile(r"([0-9a-f]{32})-[0-9a-f]{8}\.memory")


def folder() -> Path:
    """Where this phosd's files are: root's in one place, those of other users each in one of their own."""
    user = os.geteuid()
    return SHARED_MEMORY / (f"phos-{user}" if user else "phos")


def stands_for(token: str) -> Path:
    """The file that is locked for all memory with this token, of 32 digits."""
    return folder() / f"{token}-00000000.memory"


def hidden(token: str) -> Path:
    """A name in the folder that nothing has."""
    return folder() / f"{token}-{secrets.token_hex(4)}.memory"


def claim() -> None:
    """Make our folder before anybody else does: everybody may make files in /dev/shm, and nobody remove another's."""
    try:
        os.close(enter(folder(), os.geteuid()))
    except OSError as error:
        log.error("No image can be restored that has part of a process's memory in %s: %s", folder(), error)


def enter(path: Path, owner: int) -> int:
    """A descriptor of the folder, made if it is missing: everybody may pass through, nobody may look.

    Raises:
        OSError: it cannot be made, or is somebody else's.
    """
    user = os.geteuid()
    if user in (0, owner):  # else it would be there, in the wrong hands
        with suppress(FileExistsError):
            path.mkdir(mode=FOLDER_MODE)
            if owner != user:
                os.chown(path, owner, -1)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(directory)
        if status.st_uid not in (user, owner):
            raise PermissionError(
                f"{path} belongs to user {status.st_uid}. It is for PhOS, made when phosd starts: remove it as root"
            )
        if status.st_uid == user and stat.S_IMODE(status.st_mode) != FOLDER_MODE:  # the umask, or a careless hand
            os.fchmod(directory, FOLDER_MODE)
    except OSError:
        os.close(directory)
        raise
    return directory


def lock(descriptor: int) -> bool:
    """Whether this descriptor has the file's lock from now on, until it is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep() -> None:
    """Remove what phosds that were killed have left behind."""
    try:
        directory = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        tokens = set()
        for name in os.listdir(directory):
            if _OURS.fullmatch(name):
                remove_if_left(directory, name)
            elif memory := _MEMORY.fullmatch(name):
                tokens.add(memory[1])
        for token in tokens:
            _sweep_memory(directory, token)
    finally:
        os.close(directory)


def _sweep_memory(directory: int, token: str) -> None:
    """What one restore has left, if it has; what had names before has them again, if nobody uses what has them now."""
    held = hold(stands_for(token), keep=True)
    if held is None:
        return
    try:
        with open(held.descriptor, "rb", closefd=False) as notes:
            lines = notes.read().decode(errors="replace").split("\n")  # there may be thousands
        noted = []
        for line in lines:
            former, _, rest = line.partition(" ")
            inode, _, name = rest.partition(" ")
            if _MEMORY.fullmatch(former) and inode.isdigit() and name and "/" not in name:
                noted.append((folder() / former, SHARED_MEMORY / name, int(inode)))
        device = os.stat(SHARED_MEMORY).st_dev
        used = procfs.users_of({(device, number) for _, _, number in noted})
        for was, path, number in noted:
            if (device, number) not in used:
                put_back(was, path, number)
        for name in os.listdir(directory):
            if name.startswith(f"{token}-") and _MEMORY.fullmatch(name) and name != held.path.name:
                with suppress(OSError):
                    os.unlink(name, dir_fd=directory)
    finally:
        held.discard()


def put_back(former: Path, path: Path, inode: int) -> None:
    """Give a file its name again, if that is still a certain other file's."""
    with suppress(OSError):
        if path.lstat().st_ino == inode and former.lstat():
            os.rename(former, path)


def remove_if_left(directory: int, name: str) -> None:
    """Remove a file that nobody has locked."""
    with suppress(OSError):
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if lock(descriptor) and _has(directory, name, descriptor):
                os.unlink(name, dir_fd=directory)
        finally:
            os.close(descriptor)


def _has(directory: int | None, name: str | Path, descriptor: int) -> bool:
    """Whether an open file has this name."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


@dataclass
class HeldFile:
    """A file with its path; the lock on ``descriptor`` keeps it."""

    path: Path
    descriptor: int
    size: int
    uid: int
    gid: int

    @classmethod
    def make(cls: type[H], path: Path, size: int, uid: int, gid: int, *, mode: int = 0o600) -> H:
        """A file of so many zeros, not allocated yet.

        Raises:
            OSError: it cannot be made; FileExistsError if it is there, and in use.
        """
        shape = FOLDER.fullmatch(path.parent.name)
        directory = enter(path.parent, int(shape[1][1:]) if shape and shape[1] else 0)
        descriptor = -1
        try:
            remove_if_left(directory, path.name)
            descriptor = new_file_in(directory, path.name)
            # Between making and locking it, it may have been taken for one that was left: then it is removed.
            if not lock(descriptor) or not _has(directory, path.name, descriptor):
                raise BlockingIOError(f"{path} is locked by somebody else")
            try:
                os.fchmod(descriptor, mode)
                if (uid, gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, uid, gid)
                os.ftruncate(descriptor, size)
            except OSError:
                os.unlink(path.name, dir_fd=directory)
                raise
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        finally:
            os.close(directory)
        return cls(path, descriptor, size, uid, gid)

    def discard(self) -> None:
        """Let it go: who has it mapped keeps the memory, nobody else can find it."""
        if self.descriptor < 0:
            return
        with suppress(OSError):
            if _has(None, self.path, self.descriptor):
                os.unlink(self.path)
        os.close(self.descriptor)
        self.descriptor = -1


def hold(path: Path, *, keep: bool = False) -> HeldFile | None:
    """A file in our folder that only one has at a time, empty; None: another has it.

    ``keep``: if it is one that was left, as it was.

    Raises:
        OSError: it cannot be made.
    """
    if keep:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            if lock(descriptor) and _has(None, path, descriptor):
                return HeldFile(path, descriptor, 0, os.geteuid(), os.getegid())
            os.close(descriptor)
    try:
        return HeldFile.make(path, 0, os.geteuid(), os.getegid())
    except (FileExistsError, BlockingIOError):
        return None


def room() -> int:
    """Bytes that it still takes."""
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def is_ours(pid: int, criu: int) -> bool:
    """Whether a process finds in /dev/shm what phosd finds there, and CRIU (process ``criu``) leaves it there.

    CRIU packs the whole of /dev/shm if the process's mounts are others than its own. Those of a process that was taken
    from a pool are not phosd's, but the file systems are the same, and CRIU is run among them.
    """
    try:
        if not os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), os.stat(f"/proc/{criu}/ns/mnt")):
            return False
        return os.path.samestat(os.stat(f"/proc/{pid}/root{SHARED_MEMORY}"), os.stat(SHARED_MEMORY))
    except OSError:
        return False
