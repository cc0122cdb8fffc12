"""Room for what tasks share without a name, made while they still run (shared_files.py copies it once they are frozen).

To find a page of a memory-backed file system takes longer than to fill it. So a file with pages is made, and mapped,
for each large piece of shared memory before anything stands still, and of what is copied later each gets one that holds
it. By then it may be other pieces, as with the batches that PyTorch's loaders hand over, but those are often as large.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress

import psutil

from phos.images import criu_files
from phos.images.files import allocate, free_bytes, lives_in_memory, new_file_in, populate
from phos.images.formats import shared_room_file
from phos.images.mapping import HUGE_PAGE, map_memory, unmap_memory

LEAST_BYTES = 4 << 20
"""What is smaller gets its pages while it is copied."""

ROOMS_MOST = 64
"""Each is a file that is open and mapped until the image is whole."""

LARGER_BYTES = 1 << 20
"""So much larger than a file its room may be, or by a sixteenth: CRIU puts its own words before it."""

_BUFFER_BYTES = 1 << 20

_GONE = " (deleted)"
_OTHERS = ("/SYSV", "/memfd:phos-")
"""System V's, which CRIU dumps; and ours, which are not mapped any more when it does."""


class Room:
    """A file of the image directory, populated and mapped."""

    def __init__(self, directory: int, name: str, size: int) -> None:
        """
        Raises:
            OSError: the file cannot be made, or not be mapped, or there is no room for it.
        """
        self.name, self.size = name, size
        self.file = new_file_in(directory, name)
        try:
            if not allocate(self.file, 0, size):
                raise OSError("there is no room for it")
            self.address = map_memory(size, self.file)
        except BaseException:
            os.close(self.file)
            os.unlink(name, dir_fd=directory)
            raise

    def close(self) -> None:
        """The file stays. What is amiss with it is said when the image is synced."""
        unmap_memory(self.address, self.size)
        with suppress(OSError):
            os.close(self.file)


class SharedRooms:
    """Those of one dump. Any thread."""

    def __init__(self, directory: int) -> None:
        """``directory``: an open descriptor of the image directory, which stays the caller's, and open."""
        self._directory = directory
        self._lock = threading.Lock()
        self._free: list[Room] = []  # with the lock
        self._removed: list[Room] = []

    def prepare(self, pids: Iterable[int], needed: int, threads: int) -> None:
        """Make room for what these share now, the largest first; what cannot be made is not there later.

        Half of what is left stays so: what is copied may be other files by then, which no room fits. ``needed``: bytes
        of it that are needed for other things. On a disk nothing is made: all would be written twice.
        """
        if not lives_in_memory(self._directory):
            return
        left = min(free_bytes(self._directory), psutil.virtual_memory().available) - needed
        made: list[Room] = []
        for number, least in enumerate(sorted(_sizes(pids), reverse=True)[:ROOMS_MOST]):
            size = least + max(LARGER_BYTES, least // 16)
            if left < 2 * size:
                continue
            try:
                made.append(Room(self._directory, shared_room_file(number), size))
            except OSError:
                break
            left -= 2 * size
        with self._lock:
            self._free += made
        with suppress(RuntimeError):  # there can be no more threads: then they have pages only where they need them
            populate([(room.address, room.size) for room in made], threads)

    def take(self, size: int) -> Room | None:
        """The smallest one that holds so much, and is not meant for something far larger. It is the caller's then.

        If there is none, and little room for another, the largest ones are let go.
        """
        if size < LEAST_BYTES:
            return None
        most = 2 * size
        with self._lock:
            fitting = [room for room in self._free if size <= room.size <= most]
            if fitting:
                room = min(fitting, key=lambda room: room.size)
                self._free.remove(room)
                return room
            while self._free and free_bytes(self._directory) < most:
                room = max(self._free, key=lambda room: room.size)
                self._free.remove(room)
                self._let_go(room)
        return None

    def _let_go(self, room: Room) -> None:
        with suppress(OSError):
            os.unlink(room.name, dir_fd=self._directory)
        room.close()

    def remove(self) -> None:
        """Those that nobody has taken have no name any more. That they are gone as well is for :meth:`discard`."""
        with self._lock:
            rooms, self._free = self._free, []
        for room in rooms:
            with suppress(OSError):
                os.unlink(room.name, dir_fd=self._directory)
        self._removed += rooms

    def discard(self) -> None:
        """Let those go that nobody has taken. The directory may be closed after :meth:`remove`."""
        self.remove()
        while self._removed:
            self._removed.pop().close()


class Replacement:
    """A room that one of CRIU's files is written into instead, and takes the place of that file."""

    def __init__(self, name: str, device: int, inode: int, room: Room) -> None:
        """``name``, ``device``, ``inode``: CRIU's file."""
        self.name, self.room = name, room
        self._file = device, inode
        self._covered: list[tuple[int, int]] = []

    def cover(self, begin: int, end: int) -> bool:
        """This part of CRIU's file is written here; False: it does not fit."""
        if end > self.room.size:
            return False
        self._covered.append((begin, end))
        return True

    def put(self, directory: int) -> None:
        """CRIU has written the rest.

        Raises:
            OSError: it is not as CRIU has left it, or cannot be replaced.
        """
        with criu_files.open_file(directory, self.name, "r") as theirs:
            status = os.fstat(theirs.fileno())
            if (status.st_dev, status.st_ino) != self._file or not stat.S_ISREG(status.st_mode):
                raise OSError(errno.ESTALE, "it is not the file any more that CRIU has written", self.name)
            if max(end for _, end in self._covered) > status.st_size:
                raise OSError(errno.EIO, "it has been cut off", self.name)
            os.ftruncate(self.room.file, status.st_size)
            at = 0
            for begin, end in (*sorted(self._covered), (status.st_size, status.st_size)):
                while at < begin:
                    read = os.pread(theirs.fileno(), min(begin - at, _BUFFER_BYTES), at)
                    if not read:
                        raise OSError(errno.EIO, "it has been cut off", self.name)
                    at += os.pwrite(self.room.file, read, at)
                at = end
            os.fchmod(self.room.file, stat.S_IMODE(status.st_mode))
            os.rename(self.room.name, self.name, src_dir_fd=directory, dst_dir_fd=directory)


def name_in(directory: int, file: int) -> str | None:
    """What a file is called in a directory; None: it is in another, or not known."""
    with suppress(OSError):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        if os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(file)):
            return name
    return None


def _sizes(pids: Iterable[int]) -> list[int]:
    """How much there is of each file without a name that some of these processes map and share; of the large ones."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as lines:
            for line in lines:
                words = line.rstrip("\n").split(maxsplit=5)
                if len(words) < 6 or words[1][3] != "s" or not words[5].endswith(_GONE) or words[5].startswith(_OTHERS):
                    continue
                start, end = (int(word, 16) for word in words[0].split("-"))
                with suppress(OSError):  # unmapped since, or we have no right to look
                    path = f"/proc/{pid}/map_files/{start:x}-{end:x}"
                    status = os.stat(path)
                    # One that has another name is no copy in the image, and CRIU copies huge pages itself.
                    if not status.st_nlink and os.statvfs(path).f_bsize < HUGE_PAGE:
                        found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return [size for size in found.values() if size >= LEAST_BYTES]
