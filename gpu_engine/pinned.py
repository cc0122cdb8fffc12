"""An image's GPU data in page-locked memory of phosd's, from which it is copied to GPUs without bounce or hashing.

Every chunk is checked against its hash once, when it is pinned. Data files that lie in memory already (tmpfs) are
mapped and pinned where they are, if nobody but root or phosd's user may write to them and nobody has them open to do
so; others are copied. A file that is mapped and changes afterwards is noticed: writing to it and cutting it off by its
time of modification and size, stores through a mapping, which need not change the time in tmpfs, when whoever made
them closes the file (inotify's IN_CLOSE_WRITE comes with the last of descriptors and mappings).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver
from phos.gpu_engine.errors import PhosError
from phos.images import formats
from phos.images.errors import ImageError
from phos.images.extents import BlockTable, Extent
from phos.images.files import lives_in_memory, run_in_threads, thread_count
from phos.images.formats import BlockKey, align_up
from phos.images.mapping import (
    MADV_HUGEPAGE,
    MADV_POPULATE_WRITE,
    advise,
    map_memory,
    unmap_memory,
    view_of,
)
from phos.images.reader import Image
from phos.images.remote import RemoteImage

POPULATE_BYTES = 256 << 20
"""What a thread populates at once."""

CHECK_BYTES = 8 << 20
"""What a thread reads and checks at once: it stays in the cache."""

CLOCK_SECONDS = 0.02
"""Longer than the kernel's coarse clock stands still: two changes so far apart have different times."""

_IN_CLOSE_WRITE = 8
_OVERFLOW = -1  # instead of a number: more has happened than the kernel keeps

_libc = ctypes.CDLL(None, use_errno=True)


class _Watcher:
    """Tells which files somebody else has closed after they were open to be written to."""

    def __init__(self) -> None:
        """Raises OSError: this user has no more watchers left (fs.inotify.max_user_instances)."""
        self._descriptor = int(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._descriptor < 0:
            raise _failure()
        self._lock = threading.Lock()  # guards _closed, and one reader at a time
        self._closed: set[int] = set()

    def add(self, descriptor: int) -> int:
        """Watch an open file; its number here."""
        number = int(_libc.inotify_add_watch(self._descriptor, f"/proc/self/fd/{descriptor}".encode(), _IN_CLOSE_WRITE))
        if number < 0:
            raise _failure()
        return number

    def closed(self, number: int) -> bool:
        """Whether that has happened to a file."""
        with self._lock:
            with suppress(BlockingIOError):
                while events := os.read(self._descriptor, 4096):  # struct inotify_event: 16 bytes, without a name
                    self._closed.update(found for found, *_ in struct.iter_unpack("iIII", events))
            return number in self._closed or _OVERFLOW in self._closed

    def close(self) -> None:
        """Watch nothing any more."""
        os.close(self._descriptor)


def _failure() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def _has_writers(descriptor: int) -> bool:
    """Whether anybody has a file open to write to it, or mapped so; ``descriptor`` is open for reading.

    The kernel grants a lease for reading only if nobody has (fcntl(2)). True also where it grants none at all.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # who opens it in between: a signal that does nothing
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


class Region:
    """One data file's bytes at an address, to be page-locked."""

    def __init__(self, name: str, size: int, descriptor: int = -1, watcher: _Watcher | None = None) -> None:
        """``descriptor``: of the file to be mapped, which becomes this object's; -1: the bytes are copied.

        Raises:
            OSError: it cannot be mapped or watched.
        """
        self.name = name
        self.size = size
        self.descriptor = descriptor
        self.length = align_up(size)
        self._locked = False
        self._identity: tuple[int, int] | None = None
        self._watcher = watcher
        self._watch = watcher.add(descriptor) if watcher else 0
        self.address = map_memory(self.length, descriptor)
        if descriptor < 0:
            advise(self.address, self.length, MADV_HUGEPAGE)

    def populate(self, offset: int, length: int) -> None:
        """Have the kernel find pages for a part of it."""
        advise(self.address + offset, length, MADV_POPULATE_WRITE)

    def lock(self) -> None:
        """Page-lock it.

        Raises:
            DriverError: so much cannot be locked.
        """
        driver.context(0).use()
        driver.register_host(self.address, self.length)
        self._locked = True

    def note(self) -> None:
        """From now on a change of the file is noticed."""
        self._identity = self._now()

    def _now(self) -> tuple[int, int] | None:
        if self.descriptor < 0:
            return None
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    @property
    def changed(self) -> bool:
        """Whether the file that it is has been written to, or cut off."""
        return self._now() != self._identity or (self._watcher is not None and self._watcher.closed(self._watch))

    def view(self, offset: int, length: int) -> memoryview:
        """A part of it. Of a file that is mapped it may be given to the kernel only, which survives a truncation."""
        if not 0 <= offset <= offset + length <= self.size:
            raise ValueError(f"bytes {offset} to {offset + length} of {self.size}")
        return view_of(self.address + offset, length)

    def free(self) -> None:
        """Unlock and unmap it. No copy from it may be under way."""
        if self._locked:
            driver.context(0).use()
            driver.unregister_host(self.address)
        unmap_memory(self.address, self.length)
        if self.descriptor >= 0:
            os.close(self.descriptor)


def data_bytes(image: Image) -> int:
    """What pinning an image takes."""
    return sum(align_up(file.size) for file in image.record.files if file.origin == pb.File.PHOS_DATA)


class PinnedMemory:
    """The data files of an image in memory. Freed when its owner and all that use it have let go."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._watcher: _Watcher | None = None
        self._lock = threading.Lock()  # guards _users
        self._users = 1  # its owner
        self.done = 0
        """Bytes checked so far; of no more use than to be shown."""
        self._given_up = threading.Event()

    @property
    def bytes(self) -> int:
        """Memory that is locked, or about to be."""
        return sum(region.length for region in self._regions.values())

    @property
    def copied(self) -> int:
        """How much of it is a copy, beside the file. May be asked while others are being mapped."""
        return sum(region.length for region in list(self._regions.values()) if region.descriptor < 0)

    @property
    def users(self) -> int:
        """Restores and connections that have it in use."""
        with self._lock:
            return max(0, self._users - 1)

    def give_up(self) -> None:
        """Have :meth:`load` end with an error before its next piece of work."""
        self._given_up.set()

    def go_on(self) -> None:
        """Raise PhosError if it is given up."""
        if self._given_up.is_set():
            raise PhosError("It is not pinned: somebody has given it up meanwhile.")

    def load(self, image: Image | RemoteImage, *, copy: bool, room: Callable[[int], None]) -> None:
        """Bring an image's data into memory, page-lock it, check every chunk.

        ``copy``: also what could stay where it is, which nothing of another host can. ``room`` is told how many bytes
        will be copied before they are, and refuses by an exception.

        Raises:
            ImageError: the data is damaged, or changes meanwhile. DriverError: it cannot be locked. OSError.
            PhosError: it is given up.
        """
        sizes = {file.name: file.size for file in image.record.files if file.origin == pb.File.PHOS_DATA}
        if not copy and not isinstance(image, RemoteImage):
            with suppress(OSError):
                self._watcher = _Watcher()
        for name, size in sizes.items():
            stripe = formats.stripe_of(name)
            if size and stripe is not None:
                self._regions[stripe] = _region(image, name, size, self._watcher)
        room(self.copied)
        regions = list(self._regions.values())

        def populate(region: Region, at: int) -> None:
            self.go_on()
            region.populate(at, min(POPULATE_BYTES, region.length - at))

        pieces = [partial(populate, region, at) for region in regions for at in range(0, region.length, POPULATE_BYTES)]
        run_in_threads(pieces)
        run_in_threads([region.lock for region in regions])
        time.sleep(CLOCK_SECONDS)  # populating has changed the files' times
        for region in regions:
            region.note()
        self._check(image)
        self.confirm(image.path)

    def _check(self, image: Image | RemoteImage) -> None:
        scratch = threading.local()
        lock = threading.Lock()  # guards done

        def check(extent: Extent) -> None:
            self.go_on()
            assert extent.stripe is not None
            region = self._regions[extent.stripe]
            if region.descriptor < 0:
                view = region.view(extent.file_offset, extent.length)
            else:  # never touched by us: of a file that is cut off meanwhile it would be the end of phosd
                known: memoryview | None = getattr(scratch, "view", None)
                if known is None or len(known) < extent.length:
                    known = scratch.view = memoryview(mmap.mmap(-1, align_up(extent.length)))
                view = known
            image.read_into(extent, view[: extent.length])
            with lock:
                self.done += extent.length

        extents = [e for t in image.blocks.values() for e in t.extents(CHECK_BYTES, zeros=False)]
        run_in_threads([partial(check, extent) for extent in extents], thread_count())

    def address_of(self, extent: Extent) -> int:
        """Where an extent's data lies."""
        assert extent.stripe is not None
        region = self._regions[extent.stripe]
        if extent.file_offset + extent.length > region.size:
            raise ImageError(f"{region.name} has no bytes {extent.file_offset} to {extent.file_offset + extent.length}")
        return region.address + extent.file_offset

    def view(self, stripe: int, offset: int, length: int) -> memoryview:
        """A part of a data file, for a system call; see :meth:`Region.view`."""
        return self._regions[stripe].view(offset, length)

    def changed(self) -> list[str]:
        """The names of files that are mapped and have changed since."""
        return [region.name for region in self._regions.values() if region.changed]

    def confirm(self, path: Path) -> None:
        """Raise ImageError if a file that is mapped has changed."""
        if names := self.changed():
            raise ImageError(f"{path / names[0]} was changed while phosd had it pinned: unpin the image, and verify it")

    def use(self) -> bool:
        """Keep it until :meth:`release`; False: it is gone already."""
        with self._lock:
            if self._users == 0:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Its owner, or one that has it in use, needs it no more."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        regions, self._regions = self._regions, {}
        for region in regions.values():
            region.free()
        if self._watcher is not None:
            self._watcher.close()


def _region(image: Image | RemoteImage, name: str, size: int, watcher: _Watcher | None) -> Region:
    """Of one data file; it is copied without a ``watcher``."""
    where = image.path / name
    directory = image.directory()
    try:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            return Region(name, size)  # what it leads to may be another file by and by
        descriptor = os.open(name, os.O_RDONLY | flags, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            private = status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
            if watcher is None or not private or not lives_in_memory(descriptor) or _has_writers(descriptor):
                return Region(name, size)
        finally:
            os.close(descriptor)
        try:  # the driver locks memory only if it may be written to; nobody here writes to it
            descriptor = os.open(name, os.O_RDWR | flags, dir_fd=directory)
        except OSError:  # a file system that is mounted read-only
            return Region(name, size)
        try:
            if os.fstat(descriptor).st_ino != status.st_ino or os.fstat(descriptor).st_size != size:
                raise ImageError(f"{where} changes while it is being pinned")
            return Region(name, size, descriptor, watcher)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise ImageError(f"{where} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(directory)


class PinnedImage:
    """An image whose data is pinned. An :class:`~phos.images.source.ImageSource`."""

    def __init__(self, image: Image | RemoteImage, memory: PinnedMemory) -> None:
        """Both become this object's: ``image``, which may lack its data files, and a use of ``memory``."""
        self._image = image
        self._memory = memory
        self._open = True

    @property
    def inventory(self) -> pb.Inventory:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._image.inventory

    @property
    def blocks(self) -> Mapping[BlockKey, BlockTable]:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._image.blocks

    @property
    def path(self) -> Path:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._image.path

    @property
    def record(self) -> pb.CommitRecord:
        """The commit record."""
        return self._image.record

    def view(self, stripe: int, offset: int, length: int) -> memoryview:
        """A part of a data file, for a system call; see :meth:`Region.view`."""
        return self._memory.view(stripe, offset, length)

    def lies_at(self, extent: Extent) -> int:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._memory.address_of(extent)

    def file_of(self, extent: Extent) -> None:
        """There is no need for one: see :class:`~phos.images.source.ImageSource`."""

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """See :class:`~phos.images.source.ImageSource`; nobody need ask for what lies in memory."""
        self._image.read_into(extent, buffer)

    def read_unchecked(self, extent: Extent, buffer: memoryview) -> None:
        """See :class:`~phos.images.source.ImageSource`."""
        self._image.read_unchecked(extent, buffer)

    def copy_file(self, name: str, target: int) -> None:
        """See :class:`~phos.images.source.ImageSource`; from where the image is, such files are not pinned."""
        self._image.copy_file(name, target)

    def confirm(self) -> None:
        """Raise ImageError unless what :meth:`read_into` has named is still what was pinned."""
        self._memory.confirm(self.path)

    def close(self) -> None:
        """See :class:`~phos.images.source.ImageSource`."""
        if self._open:
            self._open = False
            self._image.close()
            self._memory.release()
