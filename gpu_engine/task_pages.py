"""The private memory of the tasks of a dump, copied beside CRIU while they are frozen.

CRIU takes a task's pages through a pipe, with one thread; while it does, everything stands still. Here several threads
copy them straight into a file of the image (page_copy.c), and CRIU's plugin keeps CRIU from dumping them a second time
(criu_plugin/hidden_pages.c). When the tasks run again, CRIU's own two images of each task's memory are completed from
that file (images/criu_pages.py): what is left is an image like any other that CRIU makes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from phos.gpu_engine import procfs
from phos.gpu_engine.errors import CheckpointFailed
from phos.images import criu_pages
from phos.images.files import allocate, describe_path, free_bytes, run_in_threads
from phos.images.formats import task_pages_file
from phos.images.mapping import MADV_POPULATE_WRITE, advise, map_memory, unmap_memory
from phos.images.native import chunks_library

log = logging.getLogger(__name__)

THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))
"""That copy one task's pages. The others copy GPU memory meanwhile."""

SMALL_BYTES = 16 << 20
"""A task with less is copied by one thread."""

FOUND = 32768
"""How many runs of pages, and how many mappings, a task is expected to have at most: more take a second look."""

POPULATE_BYTES = 32 << 20
"""What a thread populates at once."""

GROWTH_BYTES = 4 << 30
"""How much a task's memory may grow, by what the driver saves into it for example, before the file is mapped anew:
what was populated would have to be found again. Addresses only."""

_HIDDEN = struct.Struct("=QQQ")
"""struct phos_hidden of include/task_pages.h."""


class _Pages(ctypes.Structure):
    """struct phos_pages of include/task_pages.h."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("copied", ctypes.c_uint64),
    )


class _Mapping(ctypes.Structure):
    """struct phos_mapping of include/task_pages.h."""

    _fields_ = (("address", ctypes.c_uint64), ("size", ctypes.c_uint64), ("kind", ctypes.c_uint64))


_TABLE = struct.Struct("=QQ")
"""struct phos_task_table of include/task_pages.h."""


class _PageCopy(ctypes.Structure):
    """struct phos_page_copy of page_copy.h."""

    _fields_ = (
        ("file", ctypes.c_void_p),
        ("pages", ctypes.POINTER(_Pages)),
        ("count", ctypes.c_uint64),
        ("pid", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("next", ctypes.c_uint64),
        ("failed_at", ctypes.c_uint64),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    library.phos_read_mappings.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_long]
    library.phos_read_mappings.restype = ctypes.c_long
    library.phos_find_pages.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_long]
    library.phos_find_pages.restype = ctypes.c_long
    library.phos_copy_pages.argtypes = [ctypes.POINTER(_PageCopy)]
    library.phos_copy_pages.restype = None
    return library


class _Task:
    """One task: its file, and the copy of its pages into it."""

    def __init__(self, directory: int, pid: int) -> None:
        """
        Raises:
            OSError: the file cannot be made.
        """
        self.pid = pid
        self.tracer = 0
        self.image_pid = procfs.inner_pid(pid)
        self.name = task_pages_file(self.image_pid)
        self.found: ctypes.Array[_Pages] = (_Pages * FOUND)()
        self.count = 0
        self._mappings: ctypes.Array[_Mapping] = (_Mapping * FOUND)()
        self._mapping_count = 0
        self._finder: threading.Thread | None = None
        self._error: Exception | None = None  # why what there is was not found, or is not copied
        self._directory = directory
        self._address = self._mapped = 0
        self._threads: list[threading.Thread] = []
        self._copy = _PageCopy()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self.file = os.open(self.name, flags, 0o600, dir_fd=directory)

    def make_room(self) -> None:
        """As much as it has now, and populated: memory-backed file systems find pages more slowly than they fill them.

        Raises:
            OSError: there is no room, or no mapping of it.
        """
        size = procfs.anonymous(self.pid)
        size += size // 16
        size -= size % POPULATE_BYTES
        if not size or free_bytes(self.file) < size or not allocate(self.file, 0, size):
            return
        self._map(size + GROWTH_BYTES)
        pieces = range(0, size, POPULATE_BYTES)
        run_in_threads(
            [partial(advise, self._address + at, POPULATE_BYTES, MADV_POPULATE_WRITE) for at in pieces], THREADS
        )

    def freeze(self) -> None:
        """It is frozen, and CRIU has not changed its mappings yet. Its pages are looked for, and copied, from now on.

        Raises:
            OSError: the kernel does not say which mappings there are.
            RuntimeError: there can be no thread.
        """
        count = _library().phos_read_mappings(self.pid, self._mappings, len(self._mappings))
        while count > len(self._mappings):
            self._mappings = (_Mapping * (2 * count))()
            count = _library().phos_read_mappings(self.pid, self._mappings, len(self._mappings))
        self._mapping_count = _checked(count)
        finder = threading.Thread(target=self._find_and_copy, name="find-pages")
        finder.start()
        self._finder = finder

    def table(self) -> bytes:
        """What is copied, as the plugin reads it (include/task_pages.h), when it has been found.

        Raises:
            Exception: the kernel does not say which pages there are, there is no room for so many, or no thread.
        """
        self._join_finder()
        if self._error is not None:
            raise self._error
        pages = memoryview(self.found).cast("B")[: self.count * ctypes.sizeof(_Pages)]
        mappings = memoryview(self._mappings).cast("B")[: self._mapping_count * ctypes.sizeof(_Mapping)]
        return b"".join((_TABLE.pack(self.count, self._mapping_count), pages, mappings))

    def _find_and_copy(self) -> None:
        try:
            self._find()
            self._start()
        except Exception as error:
            self._error = error

    def _find(self) -> None:
        """
        Raises:
            OSError: the kernel does not say which pages there are, or there is no room for so many.
        """
        find = partial(_library().phos_find_pages, self.pid, self._mappings, self._mapping_count)
        while (count := find(self.found, len(self.found))) > len(self.found):
            self.found = (_Pages * (2 * count))()
        self.count = _checked(count)
        size = self._size()
        if size > os.fstat(self.file).st_size:
            os.ftruncate(self.file, size)
        if size > self._mapped:
            self._map(size)

    def _start(self) -> None:
        """Copy what was found, in threads of their own.

        Raises:
            RuntimeError: there can be no thread.
        """
        self._copy = _PageCopy(self._address, self.found, self.count, self.pid)
        for number in range(THREADS if self._size() > SMALL_BYTES else 1):
            thread = threading.Thread(target=_library().phos_copy_pages, args=(self._copy,), name="copy-pages")
            try:
                thread.start()
            except RuntimeError:
                if not number:
                    raise
                break
            self._threads.append(thread)

    def wait(self) -> None:
        """
        Raises:
            CheckpointFailed: not everything could be copied.
        """
        self._join_finder()
        if self._threads:
            self._join()
            if procfs.tracer(self.pid) != self.tracer:  # it may have become another program, of another user
                self._copy.error = errno.ESRCH
        if self._copy.error == errno.EFAULT and free_bytes(self.file) < POPULATE_BYTES:
            self._copy.error = errno.ENOSPC
        if self._copy.error:
            raise CheckpointFailed(
                f"Copying the pages of process {self.pid} into {describe_path(self._directory)}/{self.name} failed at "
                f"address {self._copy.failed_at:#x}: {os.strerror(self._copy.error)}.{pages_advice(self._copy.error)}"
            )

    def runs(self) -> list[criu_pages.Run]:
        """What was copied, and where to."""
        found = (self.found[number] for number in range(self.count))
        return [criu_pages.Run(pages.address, pages.size, pages.offset) for pages in found if pages.copied]

    def remove(self) -> None:
        """As if there had been no file; it may be gone already, or CRIU's own by now."""
        self._join()
        with suppress(OSError):
            self._map(0)
        descriptor, self.file = self.file, -1  # the number may soon be another file's
        with suppress(OSError):
            os.close(descriptor)
        with suppress(OSError):
            os.unlink(self.name, dir_fd=self._directory)

    def _size(self) -> int:
        """Of the file, with room for what is left to CRIU."""
        return self.found[self.count - 1].offset + self.found[self.count - 1].size if self.count else 0

    def _join_finder(self) -> None:
        if self._finder is not None:
            self._finder.join()

    def _join(self) -> None:
        self._join_finder()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _map(self, size: int) -> None:
        if self._mapped:
            unmap_memory(self._address, self._mapped)
        self._address = self._mapped = 0
        if size:
            self._address, self._mapped = map_memory(size, self.file), size


def _checked(count: int) -> int:
    """A count that native code has returned.

    Raises:
        OSError: it is an error's number, negative.
    """
    if count < 0:
        raise OSError(-count, os.strerror(-count))
    return count


def pages_advice(error: int | None) -> str:
    """What to do about an error in copying memory, if CRIU would not fail as well."""
    if error in (errno.ENOSPC, errno.EDQUOT):
        return " Make room, or choose another directory."
    return "" if error == errno.ESRCH else " With PHOS_CPU_PAGES=off in phosd's environment CRIU copies them."


class TaskPages:
    """The tasks of one dump. One thread at a time, but for :meth:`wait`."""

    def __init__(self, directory: int) -> None:
        """``directory``: an open descriptor of the image directory, which stays the caller's, and open."""
        self._directory = directory
        self._tasks: dict[int, _Task] = {}  # by pid
        self._frozen: dict[int, _Task] = {}  # by the pid that CRIU knows it by
        self._merges = True  # what is copied can be put into CRIU's images

    def prepare(self, pids: Iterable[int]) -> None:
        """Make room for the memory of tasks that still run; what cannot be done is left to CRIU, or done later."""
        if not procfs.says_pages():
            self._merges = False
            return
        try:
            criu_pages.prepare()
        except ImportError as error:
            log.warning("The pages of frozen processes are left to CRIU: %s. Run install.sh again.", error)
            self._merges = False
            return
        for pid in pids:
            with suppress(OSError):
                self._task(pid).make_room()

    @property
    def merges(self) -> bool:
        """What is copied can be put into CRIU's images; after :meth:`prepare`."""
        return self._merges

    @property
    def unmerged(self) -> bool:
        """CRIU has been kept from dumping pages, and its images have not been completed."""
        return bool(self._frozen)

    def freeze(self, pid: int, criu_pid: int, tracer: int) -> None:
        """A task is frozen, and CRIU has not changed its mappings yet: begin to find its pages, and to copy them.

        CRIU dumps all, if it is not ``tracer`` who keeps the task from changing into another program.
        """
        if not self._merges or procfs.tracer(pid) != tracer or criu_pid in self._frozen:
            return
        try:
            task = self._task(pid)
            task.tracer = tracer
            task.freeze()
        except (OSError, RuntimeError) as error:
            self._leave(pid, error)
        else:
            self._frozen[criu_pid] = task

    def tell(self, criu_pid: int, table: int) -> None:
        """Write into ``table`` (a memfd) which pages of a frozen task CRIU need not dump.

        Nothing is written, and CRIU dumps all, if the kernel does not say which pages there are or may not be asked.

        Raises:
            OSError: the table cannot be written.
        """
        task = self._frozen.get(criu_pid)
        if task is None:
            return
        try:
            told = task.table()
        except Exception as error:
            del self._frozen[criu_pid]
            self._leave(task.pid, error)
        else:
            while told:
                told = told[os.write(table, told) :]

    def _leave(self, pid: int, error: Exception) -> None:
        log.info("The pages of process %d are left to CRIU: %s", pid, error)
        if pid in self._tasks:
            self._tasks.pop(pid).remove()  # CRIU may need the room

    def wait(self) -> None:
        """Return when nothing more is read from the tasks.

        Raises:
            CheckpointFailed: not everything could be copied.
        """
        for task in self._frozen.values():
            task.wait()

    def merge(self, hidden: bytes) -> None:
        """Complete CRIU's images by what CRIU was not shown: struct phos_hidden, one after another.

        Raises:
            CheckpointFailed: not everything could be copied, or what was hidden is not known of any task here.
            ImageError: see :func:`phos.images.criu_pages.merge`.
        """
        self.wait()
        if len(hidden) % _HIDDEN.size:
            raise CheckpointFailed("CRIU's plugin said in no known form which pages it hid from CRIU.")
        wanted: dict[int, list[tuple[int, int]]] = {pid: [] for pid in self._frozen}
        for pid, start, end in _HIDDEN.iter_unpack(hidden):
            if pid not in wanted:
                raise CheckpointFailed(f"CRIU's plugin hid pages of process {pid}, which phosd has not copied.")
            wanted[pid].append((start, end))
        for pid, task in self._frozen.items():
            size = sum(end - start for start, end in wanted[pid])
            in_place = criu_pages.merge(self._directory, task.image_pid, task.name, task.file, task.runs(), wanted[pid])
            log.info(
                "Process %d: %d bytes of its pages were copied beside CRIU%s",
                task.pid,
                size,
                "" if in_place else "; their file had to be written anew",
            )
        self.discard()

    def discard(self) -> None:
        """Remove what is left of files that CRIU's images do not need."""
        for task in self._tasks.values():
            task.remove()
        self._tasks, self._frozen = {}, {}

    def _task(self, pid: int) -> _Task:
        if pid not in self._tasks:
            self._tasks[pid] = _Task(self._directory, pid)
        return self._tasks[pid]
