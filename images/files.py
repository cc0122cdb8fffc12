"""File-system helpers shared by writer and reader."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, TypeVar

import xxhash

from phos.images.formats import SEGMENT_SIZE, digest, zero_digest
from phos.images.mapping import HUGE_PAGE, MADV_POPULATE_WRITE, advise, collapse

T = TypeVar("T")

# f_type values of statfs(2): file systems that keep their data in memory, where O_DIRECT has nothing to bypass.
_MEMORY_FILE_SYSTEMS = frozenset({0x01021994, 0x858458F6, 0x958458F6})  # tmpfs, ramfs, hugetlbfs

_READ_SIZE = 1 << 20  # small enough to stay in a core's cache between reading and hashing
_SAMPLE = 4093  # no multiple of what a program aligns to

_libc = ctypes.CDLL(None, use_errno=True)
_AT_EMPTY_PATH, _HANDLE_MOST = 0x1000, 128  # <fcntl.h>: MAX_HANDLE_SZ
_thread = threading.local()


def describe_path(fd: int) -> str:
    """The path of an open directory, for messages."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "the image directory"


def free_bytes(fd: int) -> int:
    """What an unprivileged writer may still use of the file system; 0 if it cannot be told."""
    try:
        status = os.fstatvfs(fd)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def lives_in_memory(fd: int) -> bool:
    """True if the file or directory lies in tmpfs or another file system without a disk."""
    buffer = (ctypes.c_long * 32)()  # struct statfs is 120 bytes on the 64-bit machines we run on; f_type comes first
    if _libc.fstatfs(fd, buffer) != 0:
        return False
    return (buffer[0] & 0xFFFFFFFF) in _MEMORY_FILE_SYSTEMS


def allocate(fd: int, offset: int, length: int) -> bool:
    """fallocate(2): room for a part of a file, which grows to hold it. False if there is none, or it cannot be done.

    Not os.posix_fallocate, which fills the file with writes where the file system has no such call.
    """
    return bool(_libc.fallocate(fd, 0, ctypes.c_long(offset), ctypes.c_long(length)) == 0)


def allocate_huge(descriptor: int, offset: int, address: int, size: int) -> int:
    """Allocate a part of a file in memory, mapped at ``address``, in huge pages: 0, or why they are not huge, an errno.

    ``offset`` and ``address`` are multiples of a huge page.

    Raises:
        OSError: there is no room.
    """
    for at in range(offset, offset + size, HUGE_PAGE):  # a small page of each, which the others join
        if not allocate(descriptor, at, min(mmap.PAGESIZE, offset + size - at)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return collapse(address, size)


def new_file_in(directory: int, name: str) -> int:
    """A descriptor of a new file, to be read and written, in an open directory.

    Raises:
        OSError: there is something of that name, or no file can be made.
    """
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory)


def address_of(view: memoryview) -> int:
    """The address of a writable buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def thread_count(wanted: int | None = None) -> int:
    """`wanted`, or as many threads as this process has cores, at most 16."""
    return wanted or max(1, min(16, len(os.sched_getaffinity(0))))


def run_in_threads(actions: Sequence[Callable[[], T]], threads: int | None = None) -> list[T]:
    """Run all actions to their end; then return the results, or raise the first error, in the actions' order.

    Who is interrupted meanwhile, by a signal, waits for those that have begun.
    """
    if len(actions) <= 1:
        return [action() for action in actions]
    pool = ThreadPoolExecutor(thread_count(threads), thread_name_prefix="phos-image")
    try:
        futures = [pool.submit(action) for action in actions]
        pool.shutdown()
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    results = []
    try:
        for future in futures:
            results.append(future.result())
    finally:  # an error refers to this frame; this frame must not refer to who has the error
        futures = []
        del future
    return results


POPULATE_BYTES = 32 << 20
"""What a thread populates at once."""


def populate(places: Iterable[tuple[int, int]], threads: int) -> None:
    """Find the pages of mapped files, (address, size) each, ahead of their use; what there is no room for is left out.

    Raises:
        RuntimeError: there can be no thread.
    """
    actions = [
        partial(advise, address + offset, length, MADV_POPULATE_WRITE)
        for address, size in places
        for offset, length in segments(size, POPULATE_BYTES)
    ]
    run_in_threads(actions, threads)


def segments(size: int, step: int = SEGMENT_SIZE) -> list[tuple[int, int]]:
    """(offset, length) of the pieces in which a file of that size is hashed."""
    return [(offset, min(step, size - offset)) for offset in range(0, size, step)]


def is_hole(fd: int, offset: int, length: int) -> bool:
    """Whether a part of a file is nothing but a hole, and lies in the file; the file's position is nobody's then.

    For files in memory, and on stable storage: some file systems do not know where what they still have to write is.
    """
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        return error.errno == errno.ENXIO and os.fstat(fd).st_size >= offset + length


def _buffer() -> memoryview:
    """This thread's, for what is read. Kept as long as the thread: fresh pages cost more than the hashing."""
    view: memoryview | None = getattr(_thread, "view", None)
    if view is None:
        memory = mmap.mmap(-1, _READ_SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = _thread.view = memoryview(memory)
    return view


def hash_segment(fd: int, offset: int, length: int) -> bytes:
    """XXH3-128 of a part of a file; EOFError if the file ends before it does."""
    state = xxhash.xxh3_128()
    view = _buffer()
    while length:
        n = os.preadv(fd, [view[: min(length, _READ_SIZE)]], offset)
        if n == 0:
            raise EOFError(f"the file ends at byte {offset}")
        state.update(view[:n])
        offset += n
        length -= n
    return state.digest()


def is_zero(piece: memoryview) -> bool:
    """Whether a buffer of bytes holds nothing but zeros. A few of them tell of most that do not; else a hash tells."""
    return not any(piece[::_SAMPLE]) and digest(piece) == zero_digest(len(piece))


def put(target: int, piece: memoryview, offset: int) -> None:
    """Write to a file that has zeros there. Zeros are not written."""
    if is_zero(piece):
        return
    done = 0
    while done < len(piece):
        done += os.pwrite(target, piece[done:], offset + done)


def copy_segment(source: int, target: int, offset: int, length: int) -> bytes:
    """Copy a part of a file to the same place in another, which has zeros there; return its XXH3-128.

    Zeros are not written. EOFError if the source ends before it does.
    """
    if is_hole(source, offset, length):
        return zero_digest(length)
    state = xxhash.xxh3_128()
    view = _buffer()
    while length:
        n = os.preadv(source, [view[: min(length, _READ_SIZE)]], offset)
        if n == 0:
            raise EOFError(f"the file ends at byte {offset}")
        piece = view[:n]
        state.update(piece)
        put(target, piece, offset)
        offset += n
        length -= n
    return state.digest()


class _FileHandle(ctypes.Structure):
    _fields_: ClassVar = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("handle", ctypes.c_ubyte * _HANDLE_MOST)]


def identity(descriptor: int) -> tuple[int, int, bytes]:
    """Return what no other file or directory has, also when this one is gone: its device, its inode, and its handle.

    A number of an inode is used again at once. The handle (open_by_handle_at(2)) says which of its files it is; it is
    empty on a file system that has none.
    """
    status = os.fstat(descriptor)
    handle, mount = _FileHandle(bytes=_HANDLE_MOST), ctypes.c_int()
    failed = _libc.name_to_handle_at(descriptor, b"", ctypes.byref(handle), ctypes.byref(mount), _AT_EMPTY_PATH)
    return status.st_dev, status.st_ino, b"" if failed else bytes(handle.handle[: handle.bytes])


def open_regular(directory: int, name: str) -> int:
    """A descriptor of a file of an image, to be read; it may be a link to one.

    An image's directory may be a user's, and its reader root: a pipe is not waited for, and opening some devices is
    doing something.

    Raises:
        OSError: with the file's name: it cannot be opened, or is no regular file.
    """
    try:
        found = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(found)
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from error


def hash_files(directory: int, names: Sequence[str], segment_size: int) -> list[tuple[int, list[bytes]]]:
    """(size, hash of each segment) of each file. OSError names the file; a file that shrinks meanwhile is one too.

    No more of them are open at once than there are threads: each thread of each task that CRIU dumps has one.
    """

    def size_of(name: str) -> int:
        fd = open_regular(directory, name)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def job(name: str, offset: int, length: int) -> bytes:
        fd = open_regular(directory, name)
        try:
            return hash_segment(fd, offset, length)
        except EOFError as error:
            raise OSError(errno.EIO, f"it shrank while it was read: {error}", name) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, name) from error
        finally:
            os.close(fd)

    sizes = [size_of(name) for name in names]
    places = [(name, *place) for name, size in zip(names, sizes, strict=True) for place in segments(size, segment_size)]
    jobs = [partial(job, *place) for place in places]
    hashes = iter(run_in_threads(jobs))
    return [(size, [next(hashes) for _ in segments(size, segment_size)]) for size in sizes]
