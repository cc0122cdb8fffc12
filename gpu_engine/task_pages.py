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
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from phos.gpu_engine import procfs
from phos.gpu_engine.errors import CheckpointFailed
from phos.images import criu_pages
from phos.images.files import POPULATE_BYTES, allocate, describe_path, free_bytes, new_file_in, populate
from phos.images.formats import task_pages_file
from phos.images.mapping import map_memory, unmap_memory
from phos.images.native import chunks_library

log = logging.getLogger(__name__)

THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))
"""That find and copy the pages of a dump's tasks. The others copy GPU memory meanwhile."""

FOUND = 32768
"""How many runs of pages, and how many mappings, a task is expected to have at most: more take a second look."""

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


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    pointer = ctypes.c_void_p
    for name, result, *arguments in (
        ("phos_page_pool_open", ctypes.c_int, ctypes.c_long, ctypes.POINTER(pointer)),
        ("phos_page_pool_close", None, pointer),
        (
            "phos_page_copy_begin",
            ctypes.c_int,
            pointer,
            ctypes.c_int,
            ctypes.c_int,
            pointer,
            ctypes.c_uint64,
            ctypes.POINTER(pointer),
        ),
        ("phos_page_copy_mappings", ctypes.c_long, pointer, pointer, ctypes.c_long),
        ("phos_page_copy_found", ctypes.c_long, pointer, pointer, ctypes.c_long),
        ("phos_page_copy_wait", ctypes.c_int, pointer, ctypes.POINTER(ctypes.c_uint64)),
        ("phos_page_copy_drop", None, pointer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_Structure = TypeVar("_Structure", _Pages, _Mapping)


def _list(kind: type[_Structure], write: Callable[[ctypes.Array[_Structure], int], int]) -> memoryview:
    """The bytes of what native code writes into an array, of which it returns how many there are."""
    entries = (kind * FOUND)()
    while (count := _checked(write(entries, len(entries)))) > len(entries):
        entries = (kind * count)()
    return memoryview(entries).cast("B")[: count * ctypes.sizeof(kind)]


class _Pool:
    """Threads of native code (page_copy.c) that find and copy pages."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: there can be no thread.
        """
        self.address = ctypes.c_void_p()
        _checked(_library().phos_page_pool_open(THREADS, ctypes.byref(self.address)))

    def close(self) -> None:
        """No task uses it any more."""
        _library().phos_page_pool_close(self.address)


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
        self._directory = directory
        self._address = self._mapped = 0
        self._copy: ctypes.c_void_p | None = None  # a struct phos_page_copy
        self._waited = False
        self._failure: CheckpointFailed | None = None
        self.file = new_file_in(directory, self.name)

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
        populate([(self._address, size)], THREADS)

    def freeze(self, pool: _Pool) -> None:
        """It is frozen, and CRIU has not changed its mappings yet. Its pages are looked for, and copied, from now on.

        Raises:
            OSError: the kernel does not say which mappings there are.
        """
        copy = ctypes.c_void_p()
        begin = _library().phos_page_copy_begin
        _checked(begin(pool.address, self.pid, self.file, self._address, self._mapped, ctypes.byref(copy)))
        self._copy = copy

    def table(self) -> bytes:
        """What is copied, as the plugin reads it (include/task_pages.h), when it has been found.

        Raises:
            OSError: the kernel does not say which pages there are, or there is no room for so many.
        """
        pages = self._found()
        mappings = _list(_Mapping, partial(_library().phos_page_copy_mappings, self._copy))
        counts = _TABLE.pack(len(pages) // ctypes.sizeof(_Pages), len(mappings) // ctypes.sizeof(_Mapping))
        return b"".join((counts, pages, mappings))

    def wait(self) -> None:
        """
        Raises:
            CheckpointFailed: not everything could be copied.
        """
        if self._copy is not None and not self._waited:
            failed_at = ctypes.c_uint64()
            error = _library().phos_page_copy_wait(self._copy, ctypes.byref(failed_at))
            if procfs.tracer(self.pid) != self.tracer:  # it may have become another program, of another user
                error = errno.ESRCH
            if error == errno.EFAULT and free_bytes(self.file) < POPULATE_BYTES:
                error = errno.ENOSPC
            if error:
                self._failure = CheckpointFailed(
                    f"Copying the pages of process {self.pid} into {describe_path(self._directory)}/{self.name} failed "
                    f"at address {failed_at.value:#x}: {os.strerror(error)}.{pages_advice(error)}"
                )
            self._waited = True  # from now on the task may run
        if self._failure is not None:
            raise self._failure

    def runs(self) -> list[criu_pages.Run]:
        """What was copied, and where to.

        Raises:
            OSError: as for :meth:`table`.
        """
        found = struct.iter_unpack("=QQQQ", self._found())
        return [criu_pages.Run(address, size, offset) for address, size, offset, copied in found if copied]

    def _found(self) -> memoryview:
        return _list(_Pages, partial(_library().phos_page_copy_found, self._copy))

    def remove(self) -> None:
        """As if there had been no file; it may be gone already, or CRIU's own by now."""
        self._drop()
        with suppress(OSError):
            self._map(0)
        descriptor, self.file = self.file, -1  # the number may soon be another file's
        with suppress(OSError):
            os.close(descriptor)
        with suppress(OSError):
            os.unlink(self.name, dir_fd=self._directory)

    def _drop(self) -> None:
        if self._copy is not None:
            _library().phos_page_copy_drop(self._copy)
            self._copy = None

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
    """The tasks of one dump. One thread at a time."""

    def __init__(self, directory: int) -> None:
        """``directory``: an open descriptor of the image directory, which stays the caller's, and open."""
        self._directory = directory
        self._tasks: dict[int, _Task] = {}  # by pid
        self._frozen: dict[int, _Task] = {}  # by the pid that CRIU knows it by
        self._merges = True  # what is copied can be put into CRIU's images
        self._pool: _Pool | None = None

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
        with suppress(OSError):
            self._threads()
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
            task.freeze(self._threads())
        except OSError as error:
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
        except OSError as error:
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
            runs = task.runs() if size else []  # else nobody has asked what was found, if anything
            in_place = criu_pages.merge(self._directory, task.image_pid, task.name, task.file, runs, wanted[pid])
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
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _threads(self) -> _Pool:
        """
        Raises:
            OSError: there can be no thread.
        """
        if self._pool is None:
            self._pool = _Pool()
        return self._pool

    def _task(self, pid: int) -> _Task:
        if pid not in self._tasks:
            self._tasks[pid] = _Task(self._directory, pid)
        return self._tasks[pid]
