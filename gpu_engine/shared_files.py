"""What tasks share without a name that lasts, copied beside CRIU while they are frozen.

That is anonymous shared memory and memfds, of which the driver has some in every process, and files whose name is gone
(ghost files), as those in /dev/shm are by which PyTorch's loaders hand batches over. CRIU copies them with one thread,
while everything stands still, and takes half a second for a gigabyte. Its plugin hands phosd the files instead
(criu_plugin/shared_files.c), and phosd copies them with several threads:

  - a range of a file to a place in one of CRIU's image files, as sendfile(2) would have;
  - shared memory into a file of its own, which becomes CRIU's pages file when CRIU is done (images/criu_pages.py).

What is large is copied into a file with pages that was made before (shared_rooms.py). In the first case that file takes
the place of CRIU's when CRIU is done, with what CRIU has written.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.shared_rooms import Replacement, Room, SharedRooms, name_in
from phos.gpu_engine.task_pages import pages_advice
from phos.images import criu_pages
from phos.images.files import describe_path, new_file_in
from phos.images.formats import shared_pages_file
from phos.images.mapping import MADV_POPULATE_WRITE, advise, map_memory, unmap_memory

log = logging.getLogger(__name__)

THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))

SHARE_BYTES = 4 << 20
"""What a thread copies at once."""

CHECK_SECONDS = 0.1

OPEN_MOST = 64
"""Copies under way, each of which has two files open: who begins another waits."""

_BUFFER_BYTES = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Piece(NamedTuple):
    """Bytes of one file, and where in another they go."""

    source: int
    target: int
    size: int


def _shares(pieces: Iterable[_Piece]) -> list[list[_Piece]]:
    """What the threads take one after another: pieces cut up, or several small ones, which lie side by side."""
    shares: list[list[_Piece]] = []
    room = 0
    for source, target, size in pieces:
        for at in range(0, size, SHARE_BYTES):
            piece = _Piece(source + at, target + at, min(SHARE_BYTES, size - at))
            if piece.size > room:
                shares.append([])
                room = SHARE_BYTES
            shares[-1].append(piece)
            room -= piece.size
    return shares


class _FileCopy:
    """Ranges of one file that are on their way into another."""

    def __init__(self, source: int, target: int, end: int, address: int = 0) -> None:
        """``source``, ``target``: descriptors, which this object closes; ``end``: of what is written.

        ``address``: where the target is mapped already, and populated.
        """
        self._source, self._target, self._end = source, target, end
        self.left = 0  # shares
        self._address, self._mapped = address, not address
        if address:
            return
        # Several threads write into a mapping at once; write(2) lets one at a time. Not every file system maps files.
        try:
            self._address = map_memory(end, target)
        except OSError:
            self._mapped = False

    def run(self, share: Sequence[_Piece], *, may_end: bool) -> None:
        """Copy one share. ``may_end``: what is behind the source's end is zeros.

        Raises:
            OSError: it cannot be read, or there is no room for it.
        """
        if self._mapped:
            first = share[0].target - share[0].target % _PAGE
            with suppress(OSError):  # copying says why
                advise(self._address + first, share[-1].target + share[-1].size - first, MADV_POPULATE_WRITE)
        for piece in share:
            self._copy_piece(*piece, may_end)

    def _copy_piece(self, source_offset: int, target_offset: int, size: int, may_end: bool) -> None:
        while size:
            try:
                count = self._copy(source_offset, target_offset, size)
            except OSError as error:
                if error.errno == errno.EFAULT:  # a page of the target cannot be had, and this says why
                    os.posix_fallocate(self._target, target_offset, size)
                raise
            if not count and may_end:
                return
            if not count:
                raise OSError(errno.EIO, "the file was cut off while it was read")
            source_offset, target_offset, size = source_offset + count, target_offset + count, size - count

    def _copy(self, source_offset: int, target_offset: int, size: int) -> int:
        """How much of it was copied."""
        if self._address:
            place = (ctypes.c_char * size).from_address(self._address + target_offset)
            return os.preadv(self._source, [place], source_offset)
        return os.pwrite(self._target, os.pread(self._source, min(size, _BUFFER_BYTES), source_offset), target_offset)

    def close(self) -> None:
        if self._mapped:
            unmap_memory(self._address, self._end)
        _close(self._source, self._target)


def _find(source: int) -> tuple[list[criu_pages.Run], int]:
    """What there is of some memory, one run behind the other: the address of each is its offset in it; the size of all.

    Raises:
        OSError: the kernel does not say.
    """
    runs: list[criu_pages.Run] = []
    at = size = 0
    while True:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no data behind
                return runs, size
            raise
        end = -(-os.lseek(source, at, os.SEEK_HOLE) // _PAGE) * _PAGE
        runs.append(criu_pages.Run(at, end - at, size))
        at, size = end, size + end - at


class _SharedMemory:
    """One file of memory without a name."""

    def __init__(self, directory: int, inode: int, runs: list[criu_pages.Run], room: Room | None) -> None:
        """
        Raises:
            OSError: there is no ``room``, and no file can be made.
        """
        self.inode, self.runs, self.room = inode, runs, room
        if room is not None:
            self.name, self.file = room.name, room.file
            return
        self.name = shared_pages_file(inode)
        self.file = new_file_in(directory, self.name)

    def close(self) -> None:
        if self.room is not None:
            self.room.close()
        else:
            _close(self.file)


def _close(*descriptors: int) -> None:
    """What is amiss with a file that was written to is said when the image is synced."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _readable(target: int) -> int:
    """The same file, so that it can be mapped to be written: that needs the right to read it as well.

    Raises:
        OSError: there can be no more descriptors, or it was not opened to be written.
    """
    flags = fcntl.fcntl(target, fcntl.F_GETFL)
    if flags & (os.O_ACCMODE | os.O_PATH) not in (os.O_WRONLY, os.O_RDWR) or not stat.S_ISREG(os.fstat(target).st_mode):
        raise OSError(errno.EBADF, "CRIU's file was not opened to be written")
    try:
        return os.open(f"/proc/self/fd/{target}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return os.dup(target)  # then it is written to by calls


class SharedFiles:
    """Those of one dump. One thread at a time."""

    def __init__(self, directory: int) -> None:
        """``directory``: an open descriptor of the image directory, which stays the caller's, and open."""
        self._directory = directory
        self._rooms = SharedRooms(directory)
        self._memory: list[_SharedMemory] = []
        self._replacements: dict[int, Replacement] = {}  # by the inode of CRIU's file
        self._merged: list[Callable[[], None]] = []  # what is to be let go
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._open = threading.BoundedSemaphore(OPEN_MOST)
        self._changed = threading.Condition()
        self._left = 0  # jobs; with the lock of the one above
        self._failure: Exception | None = None  # likewise: the first
        self._ranges = 0  # bytes
        self.unmerged = False
        """CRIU has been kept from copying something, and its images have not been completed."""

    def prepare(self, pids: Iterable[int], needed: int = 0) -> None:
        """Make room for what tasks share that still run; what cannot be done is done later.

        ``needed``: bytes that the image needs for other things, of which none have been reserved.
        """
        self._rooms.prepare(pids, needed, THREADS)

    def take_memory(self, inode: int, source: int) -> None:
        """Begin to copy shared memory, which the plugin hides from CRIU. ``source``: a descriptor of the caller's."""
        self.unmerged = True
        self._begin(source, partial(self._copy_memory, inode))

    def take_range(self, source: int, target: int, source_offset: int, target_offset: int, size: int) -> None:
        """Begin to copy a range of a file into an image file of CRIU's, which is that large already.

        ``source`` and ``target``: descriptors of the caller's. Whatever opened the target may write to it.
        """
        self.unmerged = True
        self._ranges += size
        pieces = [_Piece(source_offset, target_offset, size)]
        try:
            opened, address = _readable(target), 0
            # CRIU gives a file with holes piece by piece, and a large one as well.
            whole = max(size, os.fstat(source).st_blocks * 512 - source_offset)
            if room := self._replace(opened, target_offset, target_offset + size, target_offset + whole):
                _close(opened)
                opened, address = os.dup(room.file), room.address
        except OSError as error:
            self._fail(error)
            return
        copy = partial(self._copy, target=opened, pieces=pieces, may_end=False, address=address)
        if not self._begin(source, copy):
            _close(opened)

    def lacks(self, error: Exception) -> None:
        """Something that CRIU was kept from copying has not come here."""
        self.unmerged = True
        self._fail(error)

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Return when nothing more is read. ``check``: called now and then meanwhile.

        Raises:
            CheckpointFailed: not everything could be copied.
            Exception: what ``check`` raises.
        """
        while not self._is_done(CHECK_SECONDS):
            check()
        self._finish()
        if self._failure is not None:
            code = self._failure.errno if isinstance(self._failure, OSError) else None
            raise CheckpointFailed(
                f"Copying what the processes share without a name into {describe_path(self._directory)} failed: "
                f"{getattr(self._failure, 'strerror', None) or repr(self._failure)}.{pages_advice(code)}"
            )

    def merge(self) -> None:
        """Complete CRIU's images, which CRIU has finished.

        Raises:
            CheckpointFailed: not everything could be copied.
            ImageError, OSError: see :func:`phos.images.criu_pages.merge_shared`.
        """
        self.wait()
        sizes = criu_pages.shared_sizes(self._directory) if self._memory else {}
        while self._memory:
            memory = self._memory[-1]
            criu_pages.merge_shared(self._directory, memory.inode, memory.name, memory.file, memory.runs, sizes)
            log.info(
                "%d bytes of shared memory %d were copied beside CRIU%s",
                sum(run.size for run in memory.runs),
                memory.inode,
                "" if memory.room is None else ", into room that had been made",
            )
            self._merged.append(self._memory.pop().close)
        while self._replacements:
            inode, replacement = next(iter(self._replacements.items()))
            replacement.put(self._directory)
            log.info("%s was copied into room that had been made", replacement.name)
            self._merged.append(self._replacements.pop(inode).room.close)
        if self._ranges:
            log.info("%d bytes of files without a name were copied beside CRIU", self._ranges)
        self.unmerged = False
        self._rooms.remove()

    def discard(self) -> None:
        """Remove what is left of files that CRIU's images do not need. What is not copied yet is not.

        When all has been merged, the directory may be closed, and nobody need wait for this: to unmap gigabytes takes
        a while.
        """
        self.give_up()
        self._finish()
        while self._memory:
            memory = self._memory.pop()
            memory.close()
            with suppress(OSError):
                os.unlink(memory.name, dir_fd=self._directory)
        while self._replacements:
            _, replacement = self._replacements.popitem()
            replacement.room.close()
            with suppress(OSError):
                os.unlink(replacement.room.name, dir_fd=self._directory)
        while self._merged:
            self._merged.pop()()
        self._rooms.discard()

    def give_up(self) -> None:
        """Copy no more of what CRIU's images lack: they will not be whole. Waits for nothing."""
        if self.unmerged:
            self._fail(CheckpointFailed("The image was given up."))

    def _replace(self, file: int, begin: int, end: int, expected: int) -> Room | None:
        """The room that this part of a file of CRIU's is to be written into instead; None: into that file.

        ``expected``: how large the file may become.

        Raises:
            OSError: the file cannot be looked at.
        """
        status = os.fstat(file)
        replacement = self._replacements.get(status.st_ino)
        if replacement is None:
            name = name_in(self._directory, file)
            room = self._rooms.take(expected) if name is not None else None
            if name is None or room is None:
                return None
            replacement = Replacement(name, status.st_dev, status.st_ino, room)
            self._replacements[status.st_ino] = replacement
        return replacement.room if replacement.cover(begin, end) else None

    def _begin(self, source: int, copy: Callable[[int], None]) -> bool:
        """Have it called with a descriptor of its own; False if there can be none."""
        self._open.acquire()
        try:
            held = os.dup(source)
        except OSError as error:
            self._open.release()
            self._fail(error)
            return False
        while len(self._workers) < THREADS:
            worker = threading.Thread(target=self._work, name="shared-files")
            try:
                worker.start()
            except RuntimeError:  # there can be no more threads; without any, it is done here
                break
            self._workers.append(worker)
        self._put([partial(copy, held)])
        return True

    def _put(self, jobs: Sequence[Callable[[], None]]) -> None:
        with self._changed:
            self._left += len(jobs)
        for job in jobs:
            if self._workers:
                self._jobs.put(job)
            else:
                self._run(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self._fail(error)
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error

    def _copy_memory(self, inode: int, source: int) -> None:
        """The first job of some memory: find what there is of it."""
        target = -1
        try:
            runs, size = _find(source)
            room = self._rooms.take(size)
            memory = _SharedMemory(self._directory, inode, runs, room)
            with self._changed:
                self._memory.append(memory)
            if room is None:
                os.ftruncate(memory.file, size)
            target = os.dup(memory.file)
            pieces = [_Piece(run.address, run.offset, run.size) for run in runs]
        except BaseException:
            self._end(source, target)
            raise
        self._copy(source, target, pieces, may_end=True, address=0 if room is None else room.address)

    def _copy(self, source: int, target: int, pieces: Sequence[_Piece], *, may_end: bool, address: int = 0) -> None:
        """Have them copied, by all threads; in order of both. Closes both files, then or at once."""
        try:
            shares = _shares(pieces)
            end = pieces[-1].target + pieces[-1].size if shares else 0
            copy = _FileCopy(source, target, end, address) if shares else None
            jobs = [partial(self._copy_share, copy, share, may_end) for share in shares] if copy else []
        except BaseException:
            self._end(source, target)
            raise
        if copy is None:
            self._end(source, target)
            return
        copy.left = len(jobs)
        self._put(jobs)

    def _copy_share(self, copy: _FileCopy, share: Sequence[_Piece], may_end: bool) -> None:
        try:
            if self._failure is None:
                copy.run(share, may_end=may_end)
        finally:
            with self._changed:
                copy.left -= 1
                last = not copy.left
            if last:
                copy.close()
                self._open.release()

    def _end(self, *descriptors: int) -> None:
        """Of a copy that does not come about."""
        _close(*descriptors)
        self._open.release()

    def _is_done(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._left, seconds)

    def _finish(self) -> None:
        self._is_done(None)
        for _ in self._workers:
            self._jobs.put(None)
        for worker in self._workers:
            worker.join()
        self._workers = []
