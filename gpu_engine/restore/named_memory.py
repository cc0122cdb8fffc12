"""Memory that restored processes share by a name (named_memory.py): made before CRIU opens it, under its names.

A file is made in PhOS's folder in /dev/shm and filled beside CRIU's work; CRIU looks at its size and mode only. It gets
its names while nobody else's restore uses theirs, which takes until CRIU has opened all it needs. What had these names
before comes back if the restore fails. In a pool it comes back in any case: who is parked gets the names when he is
taken, so that those who are there before keep theirs until then.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import procfs, shared_memory
from phos.gpu_engine.errors import RestoreFailed
from phos.gpu_engine.named_memory import PERMISSIONS
from phos.gpu_engine.shared_memory import SHARED_MEMORY, HeldFile
from phos.images.errors import ImageError
from phos.images.source import ImageSource

log = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

SPARE_BYTES = 1 << 20
"""Of /dev/shm, for others."""

LOOK_SECONDS = 0.005


@dataclass
class _Piece:
    """One file: its hidden name, and what had its names before, by the names that are its own now (None: nothing)."""

    message: pb.NamedMemory
    paths: list[Path]
    hidden: Path
    inode: int
    former: dict[Path, Path | None] = field(default_factory=dict)


class RestoredNamedMemory:
    """That of one restore. Its steps may be called by several threads; none of them runs while another does."""

    def __init__(self, image: ImageSource, patience: float = 0.0, *, pool: bool = False) -> None:
        """Make it, and give it its names. For so many seconds another restore is waited for.

        Raises:
            RestoreFailed: it cannot be made; all is as before, unless there was no room for both.
        """
        self._image = image
        self._patience = patience
        self._token = secrets.token_hex(16)
        self._held: HeldFile | None = None  # stands for all files with the token
        self._pieces: list[_Piece] = []
        self._locks: list[HeldFile] = []  # one for each name
        self._step = threading.RLock()
        self._filling = threading.Lock()  # held while there is written to descriptors
        self._filled = threading.Event()
        self.error = ""
        self.warnings: list[str] = []
        try:
            wanted = []
            found = [(memory, _paths(memory)) for memory in image.inventory.named_memory]
            partners = {} if pool else self._partners(found)
            for memory, paths in found:
                if user := partners.get((memory.device, memory.inode), 0):
                    self.warnings.append(
                        f"{paths[0]} is used by process {user} ({procfs.executable(user)}), which is not in the image: "
                        "the restored processes share it as it is now."
                    )
                else:
                    wanted.append((memory, paths))
            self._make(wanted)
        except BaseException:
            self.discard()
            raise
        for warning in self.warnings:
            log.warning("%s: %s", image.path, warning)

    def _partners(self, found: Iterable[tuple[pb.NamedMemory, list[Path]]]) -> dict[procfs.FileId, int]:
        """Who shares which still, of those outside of the tree with whom it was shared."""
        if self._image.inventory.host.boot_id != BOOT_ID.read_text().strip():
            return {}
        shared = {(memory.device, memory.inode): paths for memory, paths in found if memory.shared}
        return procfs.users_of({file for file, paths in shared.items() if file in _files_at(paths).values()})

    def _make(self, wanted: list[tuple[pb.NamedMemory, list[Path]]]) -> None:
        if not wanted:
            return
        names = [path for _, paths in wanted for path in paths]
        self._acquire(names)
        if shared_memory.room() < sum(memory.allocated for memory, _ in wanted) + SPARE_BYTES:
            _make_room(names)
        try:
            self._held = shared_memory.hold(shared_memory.stands_for(self._token))
            assert self._held is not None  # nobody else knows the token
            for memory, paths in wanted:
                hidden = shared_memory.hidden(self._token)
                # Not kept open: there may be thousands.
                descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    self._pieces.append(_Piece(memory, paths, hidden, os.fstat(descriptor).st_ino))
                    os.fchmod(descriptor, memory.mode)
                    if (memory.uid, memory.gid) != (os.geteuid(), os.getegid()):
                        os.fchown(descriptor, memory.uid, memory.gid)
                    os.ftruncate(descriptor, memory.size)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise _cannot(names[0], error) from error
        self._take_names()

    # Names.

    def take_names(self, patience: float) -> None:
        """As they were taken first. For so many seconds another restore is waited for.

        Raises:
            RestoreFailed: they cannot be had.
        """
        with self._step:
            self._patience = patience
            self._acquire([path for piece in self._pieces for path in piece.paths])
            self._take_names()

    def _take_names(self) -> None:
        for piece in self._pieces:
            for path in piece.paths:
                try:
                    former = self._hide(path)
                    self._note(former, piece.inode, path)
                    piece.former[path] = former
                    link = shared_memory.hidden(self._token)
                    os.link(piece.hidden, link)
                    os.rename(link, path)
                except OSError as error:
                    raise _cannot(path, error) from error

    def _hide(self, path: Path) -> Path | None:
        """Whatever has this name, by another one; None: nothing has."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise FileExistsError(f"it is there, and no file: {path}")
        hidden = shared_memory.hidden(self._token)
        os.link(path, hidden, follow_symlinks=False)
        return hidden

    def _note(self, former: Path | None, inode: int, path: Path) -> None:
        """For whoever sweeps, should this phosd be killed."""
        assert self._held is not None
        if former is not None:
            end = os.lseek(self._held.descriptor, 0, os.SEEK_END)
            os.pwrite(self._held.descriptor, f"{former.name} {inode} {path.name}\n".encode(), end)

    def _acquire(self, names: Iterable[Path]) -> None:
        deadline = time.monotonic() + self._patience
        for path in sorted(set(names)):
            try:
                while (held := shared_memory.hold(_lock_of(path))) is None:
                    if time.monotonic() >= deadline:
                        raise RestoreFailed(
                            f"{path} is just being made for another restore, which has not been done with it for "
                            f"{self._patience:.0f} s. Try again."
                        )
                    time.sleep(LOOK_SECONDS)
            except OSError as error:
                raise _cannot(path, error) from error
            self._locks.append(held)

    def release(self) -> None:
        """CRIU has opened all of it."""
        with self._step:
            for held in self._locks:
                held.discard()
            self._locks = []

    def give_back(self) -> None:
        """What had the names before has them again; nothing, if nothing had."""
        with self._step:
            names = [path for piece in self._pieces for path in piece.former]
            if not self._locks:
                with suppress(RestoreFailed):  # then it is done without
                    self._acquire(names)
            for piece in self._pieces:
                for path, former in piece.former.items():
                    if former is not None:
                        shared_memory.put_back(former, path, piece.inode)
                        former.unlink(missing_ok=True)
                    elif _files_at([path]).get(path, (0, 0))[1] == piece.inode:  # not another's by now
                        path.unlink(missing_ok=True)
                piece.former = {}
            self.release()

    def keep(self) -> None:
        """The processes compute: the names are theirs."""
        with self._step:
            for piece in self._pieces:
                for former in filter(None, piece.former.values()):
                    former.unlink(missing_ok=True)
                piece.former = {}
            self._forget()

    def discard(self) -> None:
        """There are no processes that need it. Returns when nothing is written to it any more."""
        with self._step:
            self.give_back()
            self._forget()

    def _forget(self) -> None:
        with self._filling:
            pieces, self._pieces = self._pieces, []
        for piece in pieces:
            piece.hidden.unlink(missing_ok=True)
        if self._held is not None:
            self._held.discard()
            self._held = None
        self.release()

    # What is in it.

    def fill(self) -> None:
        """Copy the content out of the image, every hash checked; afterwards :attr:`error` says what went wrong."""
        try:
            with self._filling:
                for piece in self._pieces:
                    descriptor = os.open(piece.hidden, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        self._image.copy_file(piece.message.file, descriptor)
                    finally:
                        os.close(descriptor)
        except (ImageError, OSError) as error:
            self.error = str(error)
        except Exception as error:
            log.exception("What processes share by a name could not be put back")
            self.error = repr(error)
        finally:
            self._filled.set()

    def wait(self) -> None:
        """Return when :meth:`fill` has ended: before that no process may run.

        Raises:
            RestoreFailed: it is not what it was.
        """
        self._filled.wait()
        if self.error:
            raise RestoreFailed(f"What the processes share in {SHARED_MEMORY} cannot be put back: {self.error}")


def _files_at(paths: Iterable[Path]) -> dict[Path, procfs.FileId]:
    """The files that there are under these names."""
    found = {}
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found[path] = (status.st_dev, status.st_ino)
    return found


def _make_room(names: Iterable[Path]) -> None:
    """Without room for both, what the dead processes have left goes first."""
    there = _files_at(names)
    used = procfs.users_of(set(there.values()))
    for path, file in there.items():
        if file not in used:
            log.warning("%s is removed: there is no room in %s beside it.", path, SHARED_MEMORY)
            with suppress(OSError):
                path.unlink()


def _lock_of(path: Path) -> Path:
    """The file that whoever changes what has this name has locked."""
    return shared_memory.stands_for(hashlib.sha256(path.name.encode()).hexdigest()[:32])


def _cannot(path: Path, error: OSError) -> RestoreFailed:
    return RestoreFailed(f"{path}, which the image's processes share, cannot be made: {error.strerror or error}.")


def _paths(memory: pb.NamedMemory) -> list[Path]:
    """Where it is. An image is input: it must not make phosd write anywhere else, nor make just any file there."""
    for name in memory.names:
        if not name or "/" in name or "\n" in name or name in (".", "..") or "\0" in name:
            raise RestoreFailed(f"The image names {name!r} as memory in {SHARED_MEMORY}; PhOS puts none there.")
    if not memory.names or memory.mode & ~PERMISSIONS:
        raise RestoreFailed(
            f"The image has shared memory with no name, or mode {memory.mode:o}; PhOS makes no such file."
        )
    return [SHARED_MEMORY / name for name in memory.names]
