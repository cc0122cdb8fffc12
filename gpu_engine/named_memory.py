"""Memory that processes share by a name: files in /dev/shm that tasks have mapped, to be read and written.

shm_open(3) and sem_open(3) make them. CRIU takes them for files like any other, which are the user's: it stores their
path, and finds them as they are when it restores, if they are still there. But they are memory: what the tasks have in
them goes on with the tasks. So it is part of the image, as it is while the tasks are frozen, and a restore has its own
(restore/named_memory.py).

A semaphore's mapping has a name that is gone (sem_open(3) makes the file by another name first). CRIU would make a link
in the same directory, by a number that the next dump uses too, and have it restored once; what such a mapping is
restored from is the file by one of the names that it still has (images/criu_remaps.py, criu_plugin/file_links.c).
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import procfs, shared_memory
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.shared_memory import SHARED_MEMORY
from phos.images import criu_remaps
from phos.images.formats import named_memory_file
from phos.images.writer import ImageWriter

log = logging.getLogger(__name__)

_GONE = " (deleted)"
"""How a mapping's name ends that its file does not have any more."""

_LINK = re.compile(r"link_remap\.\d+")
"""What CRIU calls the links that it makes (create_link_remap() in criu/files-reg.c)."""

PERMISSIONS = 0o777


def _mapped(pid: int) -> set[int]:
    """The inodes of the files in /dev/shm itself that a process shares for writing.

    And of those that it has by names that are gone, however it uses them.
    """
    device = os.stat(SHARED_MEMORY).st_dev
    found = set()
    for mapping in procfs.mappings(pid, f"{SHARED_MEMORY}/"):
        inside = Path(mapping.name.removesuffix(_GONE)).parent == SHARED_MEMORY
        if mapping.device == device and inside and (mapping.shared_for_writing or mapping.name.endswith(_GONE)):
            found.add(mapping.inode)
    return found


def _on_the_way(pid: int) -> set[int]:
    """The inodes of files that a process has made for another to open by name, and that neither may have mapped now.

    With PyTorch's sharing strategy file_system each tensor that a DataLoader's worker hands over is one for a while,
    called torch_PID_RANDOM_NUMBER (ATen/MapAllocator.cpp).
    """
    beginning = f"torch_{procfs.inner_pid(pid)}_"
    found, owner = set(), _owner(pid)
    with os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            if entry.name.startswith(beginning):
                with suppress(FileNotFoundError):  # another process, outside of the tree, has just removed it
                    if entry.stat(follow_symlinks=False).st_uid == owner:
                        found.add(entry.inode())
    return found


def _owner(pid: int) -> int:
    return os.stat(f"/proc/{pid}").st_uid


def _names(inodes: Iterable[int]) -> dict[int, list[str]]:
    """The names in /dev/shm that these files have."""
    found: dict[int, list[str]] = {inode: [] for inode in inodes}
    if not found:
        return found
    with os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            if entry.inode() not in found or not entry.is_file(follow_symlinks=False) or _LINK.fullmatch(entry.name):
                continue
            if procfs.readable(entry.name) == entry.name and "\n" not in entry.name:
                found[entry.inode()].append(entry.name)
            else:
                log.warning("What is in %r is not part of the image: its name is no text of one line.", entry.path)
    return {inode: sorted(names) for inode, names in found.items()}


def _same_mounts(pid: int) -> bool:
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/mnt"), os.stat("/proc/self/ns/mnt"))
    except OSError:
        return False


@dataclass
class _Saved:
    """One file in the image."""

    file: str
    names: list[str]
    status: os.stat_result


class DumpedNamedMemory:
    """That of the tasks of one dump. One thread at a time."""

    def __init__(self, writer: ImageWriter, ours: bool) -> None:
        """``ours``: :func:`~phos.gpu_engine.shared_memory.is_ours` of the tree; if not, CRIU sees to all of it."""
        self._writer = writer
        self._ours = ours
        self._tasks: set[int] = set()
        self._looked: set[int] = set()  # at these inodes
        self._files: dict[int, _Saved] = {}  # by inode
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()  # of pids; 0 ends it
        self._worker: threading.Thread | None = None
        self._failure: Exception | None = None
        self._links: dict[str, int] = {}  # that CRIU has made, and are not needed → inode
        self._sees_files = True  # elsewhere as well as in /dev/shm, those that CRIU sees

    def look(self, pid: int, criu: int) -> None:
        """A task is frozen, by CRIU (process ``criu``): begin to save what it has, beside whatever else is done."""
        self._tasks.add(pid)
        self._sees_files = self._sees_files and _same_mounts(criu)
        if not self._ours or not shared_memory.is_ours(pid, criu):
            return
        if self._worker is None:
            worker = threading.Thread(target=self._work, name="named-memory")
            try:
                worker.start()
            except RuntimeError:  # there can be no thread
                self._save(pid)
                return
            self._worker = worker
        self._queue.put(pid)

    def _work(self) -> None:
        while pid := self._queue.get():
            self._save(pid)

    def _save(self, pid: int) -> None:
        if self._failure is not None:
            return
        try:
            mapped = _mapped(pid) | _on_the_way(pid)
        except OSError as error:
            if not procfs.has_ended(pid):
                self._failure = error
            return
        try:
            for inode, names in _names(mapped - self._looked).items():
                self._looked.add(inode)
                if names:  # else CRIU sees to it
                    self._save_file(inode, names)
        except Exception as error:
            self._failure = error

    def _save_file(self, inode: int, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):  # somebody outside of the tree removes names
                descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    status = os.fstat(descriptor)
                    if status.st_ino == inode:
                        saved = _Saved(named_memory_file(len(self._files)), names, status)
                        self._writer.add_file(saved.file, descriptor, status.st_size)
                        self._files[inode] = saved
                        return
                finally:
                    os.close(descriptor)
        if _names([inode])[inode]:  # else CRIU sees to it, too, if it is mapped
            raise FileNotFoundError(f"{SHARED_MEMORY / names[0]} is not there any more, or another file")

    def wait(self) -> None:
        """Return when nothing more is read.

        Raises:
            CheckpointFailed: not everything could be saved.
        """
        self.discard()
        if self._failure is not None:
            raise CheckpointFailed(f"Saving what the processes share in {SHARED_MEMORY} failed: {self._failure}")

    def discard(self) -> None:
        """Nothing is looked at any more, once what was begun is done."""
        if self._worker is not None:
            self._queue.put(0)
            self._worker.join()
            self._worker = None

    def describe(self, message: pb.Inventory, directory: int, links: Mapping[str, int]) -> None:
        """Say in the inventory what was saved, and have CRIU's images name it as it is called.

        ``links``: of those that CRIU was kept from making, the inode that each stands for.

        Raises:
            CheckpointFailed: CRIU would need a link to restore a file that is not there (any more).
            ImageError, OSError: CRIU's images cannot be read, or changed.
        """
        if not self._ours:
            return
        replaced = criu_remaps.name_again(directory, lambda link: self._name_for(link, links))
        self._links = {link: inode for link, inode in self._links.items() if link in replaced.links}
        for name, link in replaced.left.items():
            seen = self._sees_files or Path(link).parent == SHARED_MEMORY
            if link in links or (seen and not os.path.lexists(link)):
                raise CheckpointFailed(
                    f"A process uses {name}, which has lost that name and has another one. CRIU restores such a file "
                    f"by a link (--link-remap), {link}, and removes that where the processes run on: such an image "
                    "could not be restored. Dump without --leave-running."
                )
        device = os.stat(SHARED_MEMORY).st_dev
        users = procfs.users_of({(device, inode) for inode in self._files}, but=self._tasks)
        for inode, saved in self._files.items():
            message.named_memory.add(
                file=saved.file,
                names=saved.names,
                size=saved.status.st_size,
                mode=saved.status.st_mode & PERMISSIONS,
                uid=saved.status.st_uid,
                gid=saved.status.st_gid,
                device=device,
                inode=inode,
                shared=(device, inode) in users,
                allocated=512 * saved.status.st_blocks,
            )

    def _name_for(self, link: str, links: Mapping[str, int]) -> str:
        """By what name the file can be restored that CRIU has this link for; empty: by none."""
        inode = links.get(link, 0)
        if not inode and Path(link).parent == SHARED_MEMORY:
            with suppress(OSError):
                self._links[link] = inode = os.lstat(link).st_ino
        if not inode:
            return ""
        names = self._files[inode].names if inode in self._files else _names([inode])[inode]
        return str(SHARED_MEMORY / names[0]) if names else ""

    def remove_links(self) -> None:
        """The image is whole, and does not need the links that CRIU has left."""
        for link, inode in self._links.items():
            path = Path(link)
            with suppress(OSError):
                if _LINK.fullmatch(path.name) and path.lstat().st_ino == inode and inode in self._looked:
                    path.unlink()
