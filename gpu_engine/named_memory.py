"""Memory that processes share by a name: files in /dev/shm that tasks have mapped, to be read and written.

shm_open(3) and sem_open(3) make them. CRIU takes them for files like any other, which are the user's: it stores their
path, and finds them as they are when it restores, if they are still there. But they are memory: what the tasks have in
them goes on with the tasks. So it is part of the image, as it is while the tasks are frozen, and a restore has its own.

A semaphore's mapping has a name that is gone (sem_open(3) makes the file by another name first). CRIU would make a link
in the same directory, by a number that the next dump uses too, and have it restored once; what such a mapping is
restored from is the file by one of the names that it still has (images/criu_remaps.py).
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import procfs
from phos.gpu_engine.errors import CheckpointFailed, RestoreFailed
from phos.images import criu_remaps
from phos.images.errors import ImageError
from phos.images.formats import named_memory_file
from phos.images.source import ImageSource
from phos.images.writer import ImageWriter

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_GONE = " (deleted)"
"""How a mapping's name ends that its file does not have any more."""

_LINK = re.compile(r"link_remap\.\d+")
"""What CRIU calls the links that it makes (create_link_remap() in criu/files-reg.c)."""


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


def _mapped(pid: int) -> dict[int, set[str]]:
    """The inodes of the files in /dev/shm itself that a process shares for writing, and their names in its mappings.

    And of those that it has by names that are gone, however it uses them.
    """
    found: dict[int, set[str]] = {}
    for mapping in procfs.mappings(pid, f"{SHARED_MEMORY}/"):
        path = Path(mapping.name.removesuffix(_GONE))
        shares = mapping.permissions[1] == "w" and mapping.permissions[3] == "s"
        if path.parent == SHARED_MEMORY and (shares or mapping.name.endswith(_GONE)):
            found.setdefault(mapping.inode, set()).add(str(path))
    return found


def _names(inodes: Iterable[int]) -> dict[int, list[str]]:
    """The names in /dev/shm that these files have."""
    found: dict[int, list[str]] = {inode: [] for inode in inodes}
    with os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            known = entry.inode() in found and entry.is_file(follow_symlinks=False)
            if known and not _LINK.fullmatch(entry.name) and procfs.readable(entry.name) == entry.name:
                found[entry.inode()].append(entry.name)
    return found


@dataclass
class _Saved:
    """One file, and by which names it is mapped."""

    names: list[str]
    status: os.stat_result
    mapped_as: set[str] = field(default_factory=set)


class DumpedNamedMemory:
    """That of the tasks of one dump. One thread at a time."""

    def __init__(self, writer: ImageWriter, ours: bool) -> None:
        """``ours``: :func:`is_ours` of the tree; if not, CRIU sees to all of it."""
        self._writer = writer
        self._ours = ours
        self._files: dict[int, _Saved] = {}  # by inode; None of those that were looked at and are not ours to save
        self._worker: ThreadPoolExecutor | None = None
        self._looking: list[Future[None]] = []
        self._links: list[str] = []

    def look(self, pid: int) -> None:
        """A task is frozen: begin to save what it has, beside whatever else is done."""
        if not self._ours:
            return
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="named-memory")
        try:
            self._looking.append(self._worker.submit(self._save, pid))
        except RuntimeError:  # there can be no thread
            done: Future[None] = Future()
            try:
                self._save(pid)
                done.set_result(None)
            except (ImageError, OSError) as error:
                done.set_exception(error)
            self._looking.append(done)

    def _save(self, pid: int) -> None:
        try:
            mapped = _mapped(pid)
        except OSError as error:
            if procfs.has_ended(pid):
                return
            raise OSError(error.errno, f"what process {pid} has mapped cannot be told: {error.strerror}") from error
        names = _names(mapped.keys() - self._files.keys())
        for inode, paths in mapped.items():
            if names.get(inode) and (saved := self._save_file(inode, sorted(names[inode]))) is not None:
                self._files[inode] = saved
            if inode in self._files:
                self._files[inode].mapped_as |= paths

    def _save_file(self, inode: int, names: list[str]) -> _Saved | None:
        descriptor = os.open(SHARED_MEMORY / names[0], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_ino != inode or not stat.S_ISREG(status.st_mode):
                return None
            self._writer.add_file(named_memory_file(len(self._files)), descriptor, status.st_size)
        finally:
            os.close(descriptor)
        return _Saved(names, status)

    def wait(self) -> None:
        """Return when nothing more is read.

        Raises:
            CheckpointFailed: not everything could be saved.
        """
        failures = [failure for future in self._looking if (failure := future.exception()) is not None]
        self.discard()
        if failures:
            raise CheckpointFailed(f"Saving what the processes share in {SHARED_MEMORY} failed: {failures[0]}")

    def describe(self, message: pb.Inventory, directory: int) -> None:
        """Say in the inventory what was saved, and have CRIU's images name it as it is called.

        Raises:
            CheckpointFailed: CRIU would need a link to restore a file that is not there (any more).
            ImageError, OSError: CRIU's images cannot be read, or changed.
        """
        if not self._ours:
            return
        names = {path: str(SHARED_MEMORY / f.names[0]) for f in self._files.values() for path in f.mapped_as}
        replaced = criu_remaps.name_again(directory, names)
        self._links = replaced.links
        for name, link in replaced.left.items():
            if not os.path.lexists(link):
                raise CheckpointFailed(
                    f"A process uses {name}, which has lost that name and has another one. CRIU restores such a file "
                    f"by a link (--link-remap), {link}, and removes that where the processes run on: such an image "
                    "could not be restored. Dump without --leave-running."
                )
        for number, file in enumerate(self._files.values()):
            message.named_memory.add(
                file=named_memory_file(number),
                names=file.names,
                size=file.status.st_size,
                mode=file.status.st_mode & 0o777,
                uid=file.status.st_uid,
                gid=file.status.st_gid,
                inode=file.status.st_ino,
            )

    def remove_links(self) -> None:
        """The image is whole, and does not need the links that CRIU has left."""
        inodes = {file.status.st_ino for file in self._files.values()}
        for link in self._links:
            path = Path(link)
            with suppress(OSError):
                if path.parent == SHARED_MEMORY and _LINK.fullmatch(path.name) and path.lstat().st_ino in inodes:
                    path.unlink()

    def discard(self) -> None:
        """Nothing is looked at any more."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
        self._worker, self._looking = None, []


class RestoredNamedMemory:
    """That of one restore, made before CRIU opens it."""

    def __init__(self, image: ImageSource) -> None:
        """
        Raises:
            RestoreFailed: it cannot be made; nothing of it is left.
            ImageError: its content cannot be had.
        """
        self._made: list[tuple[Path, int]] = []  # what has a name now, and its inode
        this_boot = image.inventory.host.boot_id == BOOT_ID.read_text().strip()
        try:
            for memory in image.inventory.named_memory:
                paths = _paths(memory)
                if this_boot and (user := _partner(paths, memory.inode)):
                    log.warning(
                        "%s: %s is still used by process %d (%s): the restored processes share it as it is now.",
                        image.path,
                        paths[0],
                        user,
                        procfs.executable(user),
                    )
                    continue
                self._make(image, memory, paths)
        except BaseException:
            self.discard()
            raise

    def _make(self, image: ImageSource, memory: pb.NamedMemory, paths: Sequence[Path]) -> None:
        try:
            with ExitStack() as stack:
                folder = os.open(SHARED_MEMORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, folder)
                descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
                stack.callback(os.close, descriptor)
                if (memory.uid, memory.gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, memory.uid, memory.gid)
                os.fchmod(descriptor, memory.mode)
                os.ftruncate(descriptor, memory.size)
                image.copy_file(memory.file, descriptor)
                inode = os.fstat(descriptor).st_ino
                for path in paths:
                    with suppress(FileNotFoundError):
                        path.unlink()  # whoever else has it keeps it; these processes do not share with him
                    # With a descriptor of the folder: without one Python does not follow the link, whatever it is told.
                    os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder, follow_symlinks=True)
                    self._made.append((path, inode))
        except OSError as error:
            raise RestoreFailed(
                f"{paths[0]}, which the image's processes share, cannot be made: {error.strerror or error}."
            ) from error

    def discard(self) -> None:
        """There are no processes that need it. What has been replaced meanwhile stays."""
        for path, inode in self._made:
            with suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()
        self._made = []


def _paths(memory: pb.NamedMemory) -> list[Path]:
    """Where it is. An image is input: it must not make phosd write anywhere else, nor make just any file there."""
    for name in memory.names:
        if not name or "/" in name or name in (".", "..") or "\0" in name:
            raise RestoreFailed(f"The image names {name!r} as memory in {SHARED_MEMORY}; PhOS puts none there.")
    if not memory.names or memory.mode & ~0o777:
        raise RestoreFailed(
            f"The image has memory without a name, or with mode {memory.mode:o}; PhOS makes no such file."
        )
    return [SHARED_MEMORY / name for name in memory.names]


def _partner(paths: Iterable[Path], inode: int) -> int:
    """A process that still uses the very file that the image's processes used; 0: nobody does."""
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            if status.st_ino == inode:
                return procfs.user_of(status)
    return 0
