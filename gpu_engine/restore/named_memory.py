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
import stat
import threading
import time
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

SPARE_BYTES = 16 << 20
"""Of /dev/shm, for others."""

LOOK_SECONDS = 0.005


@dataclass
class _Former:
    """What had a name before, under a hidden one; the descriptor's lock keeps it."""

    path: Path
    descriptor: int

    def forget(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        if self.descriptor >= 0:
            os.close(self.descriptor)


@dataclass
class _Piece:
    message: pb.NamedMemory
    paths: list[Path]
    file: HeldFile
    former: dict[Path, _Former | None] = field(default_factory=dict)  # by the names that are its own now


class RestoredNamedMemory:
    """That of one restore. The steps are called one after the other; filling runs beside them."""

    def __init__(self, image: ImageSource, patience: float = 0.0, *, pool: bool = False) -> None:
        """Make it, and give it its names. For so many seconds another restore is waited for.

        Raises:
            RestoreFailed: it cannot be made; all is as before.
        """
        self._image = image
        self._patience = patience
        self._pieces: list[_Piece] = []
        self._locks: list[HeldFile] = []  # one for each name
        self._filled = threading.Event()
        self.error = ""
        self.warnings: list[str] = []
        try:
            for memory in image.inventory.named_memory:
                paths = _paths(memory)
                if not pool and (user := self._partner(memory, paths)):
                    self.warnings.append(
                        f"{paths[0]} is used by process {user} ({procfs.executable(user)}), which is not in the image: "
                        "the restored processes share it as it is now."
                    )
                    continue
                self._pieces.append(self._make(memory, paths))
            self.take_names()
        except BaseException:
            self.discard()
            raise
        for warning in self.warnings:
            log.warning("%s: %s", image.path, warning)

    def _is_there(self, memory: pb.NamedMemory, paths: list[Path]) -> bool:
        """Whether the very file that the image's processes had is still to be found."""
        if self._image.inventory.host.boot_id != BOOT_ID.read_text().strip():
            return False
        for path in paths:
            with suppress(OSError):
                status = path.lstat()
                if (status.st_dev, status.st_ino) == (memory.device, memory.inode):
                    return True
        return False

    def _partner(self, memory: pb.NamedMemory, paths: list[Path]) -> int:
        """Who shares it still, of those outside of the tree with whom it was shared; 0: nobody."""
        if not memory.shared or not self._is_there(memory, paths):
            return 0
        file = (memory.device, memory.inode)
        return procfs.users_of({file}).get(file, 0)

    def _make(self, memory: pb.NamedMemory, paths: list[Path]) -> _Piece:
        if shared_memory.room() < memory.size + SPARE_BYTES and self._is_there(memory, paths):
            self._make_room(memory, paths)
        try:
            made = HeldFile.make(
                shared_memory.hidden(), memory.size, memory.uid, memory.gid, mode=memory.mode & PERMISSIONS
            )
        except OSError as error:
            raise _cannot(paths[0], error) from error
        return _Piece(memory, paths, made)

    def _make_room(self, memory: pb.NamedMemory, paths: list[Path]) -> None:
        """There is none for what the dead processes have left as well."""
        if procfs.users_of({(memory.device, memory.inode)}):
            return
        for path in paths:
            with suppress(OSError):
                if path.lstat().st_ino == memory.inode:
                    path.unlink()

    # Names.

    def take_names(self) -> None:
        """From here on they are this restore's, until :meth:`release` nobody else's restore takes them.

        Raises:
            RestoreFailed: they cannot be had.
        """
        if not self._pieces:
            return
        self._acquire()
        for piece in self._pieces:
            for path in piece.paths:
                try:
                    piece.former[path] = _hide(path)
                    link = shared_memory.hidden()
                    os.link(piece.file.path, link)
                    os.rename(link, path)
                except OSError as error:
                    raise _cannot(path, error) from error

    def _acquire(self) -> None:
        deadline = time.monotonic() + self._patience
        for path in sorted({path for piece in self._pieces for path in piece.paths}):
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
        for held in self._locks:
            held.discard()
        self._locks = []

    def give_back(self) -> None:
        """What had the names before has them again; nothing, if nothing had."""
        for piece in self._pieces:
            inode = os.fstat(piece.file.descriptor).st_ino
            for path, former in piece.former.items():
                with suppress(OSError):
                    if path.lstat().st_ino == inode:  # not another's by now
                        if former is not None:
                            os.rename(former.path, path)
                        else:
                            path.unlink()
                if former is not None:
                    former.forget()
            piece.former = {}
        self.release()

    def keep(self) -> None:
        """The processes compute: the names are theirs."""
        for piece in self._pieces:
            for former in piece.former.values():
                if former is not None:
                    former.forget()
            piece.file.discard()  # which has names of its own
        self._pieces = []
        self.release()

    def discard(self) -> None:
        """There are no processes that need it."""
        self.give_back()
        for piece in self._pieces:
            piece.file.discard()
        self._pieces = []

    # What is in it.

    def fill(self) -> None:
        """Copy the content out of the image, every hash checked; afterwards :attr:`error` says what went wrong."""
        try:
            for piece in list(self._pieces):
                self._image.copy_file(piece.message.file, piece.file.descriptor)
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


def _lock_of(path: Path) -> Path:
    """The file that whoever changes what has this name has locked."""
    return shared_memory.folder() / f"{hashlib.sha256(path.name.encode()).hexdigest()[:32]}-00000000.memory"


def _hide(path: Path) -> _Former | None:
    """Whatever has this name, by another one; None: nothing has."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise FileExistsError(f"it is there, and no file: {path}")
    former = _Former(shared_memory.hidden(), -1)
    os.link(path, former.path, follow_symlinks=False)
    with suppress(OSError):
        former.descriptor = os.open(former.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        shared_memory.lock(former.descriptor)  # if its users lock it, nobody takes it for one that is left, either
    return former


def _cannot(path: Path, error: OSError) -> RestoreFailed:
    return RestoreFailed(f"{path}, which the image's processes share, cannot be made: {error.strerror or error}.")


def _paths(memory: pb.NamedMemory) -> list[Path]:
    """Where it is. An image is input: it must not make phosd write anywhere else, nor make just any file there."""
    for name in memory.names:
        if not name or "/" in name or name in (".", "..") or "\0" in name:
            raise RestoreFailed(f"The image names {name!r} as memory in {SHARED_MEMORY}; PhOS puts none there.")
    if not memory.names or memory.mode & ~PERMISSIONS:
        raise RestoreFailed(
            f"The image has shared memory with no name, or mode {memory.mode:o}; PhOS makes no such file."
        )
    return [SHARED_MEMORY / name for name in memory.names]
