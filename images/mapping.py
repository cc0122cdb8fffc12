"""Files and memory at an address, by calls that let go of the interpreter lock (those of Python's mmap do not)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

HUGE_PAGE = 2 << 20

COLLAPSE_ATTEMPTS = 3
"""How often pages that somebody holds for a moment, the kernel for its lists for example, are tried again."""

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1
_PROT_NONE = 0
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 1, 2, 0x10, 0x20, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_memory(size: int, descriptor: int) -> int:
    """Map memory, of a file or (-1) of nobody, to be read and written; its address, a multiple of a huge page.

    Raises:
        OSError: the kernel refuses.
    """
    # Room for it and for its alignment, of which only what it needs is kept.
    room = _mmap(0, size + HUGE_PAGE, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-room // HUGE_PAGE) * HUGE_PAGE
    flags = _MAP_SHARED if descriptor >= 0 else _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, descriptor)
    except OSError:
        unmap_memory(room, size + HUGE_PAGE)
        raise
    end = -(-(address + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, stop in ((room, address), (end, room + size + HUGE_PAGE)):
        if start < stop:
            unmap_memory(start, stop - start)
    return address


def _mmap(address: int, size: int, protection: int, flags: int, descriptor: int) -> int:
    mapped = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(mapped or 0)


def unmap_memory(address: int, size: int) -> None:
    """Undo :func:`map_memory`."""
    _libc.munmap(address, size)


def advise(address: int, size: int, advice: int) -> int:
    """madvise(2): 0, or an errno."""
    return 0 if _libc.madvise(address, size, advice) == 0 else ctypes.get_errno()


def collapse(address: int, size: int) -> int:
    """Make huge pages of the small ones that a mapped file in memory has (madvise(2), Linux 6.1): 0, or an errno.

    Both are multiples of a huge page. Not all of the small pages need to be there: one in each huge page is enough.
    """
    code = 0
    for _ in range(COLLAPSE_ATTEMPTS):
        code = advise(address, size, MADV_COLLAPSE)
        if code != errno.EAGAIN:
            break
    return code


def view_of(address: int, size: int) -> memoryview:
    """Memory at an address."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def can_collapse() -> bool:
    """Whether the kernel makes a huge page of small ones of a file in memory when it is asked to: tried on one."""
    try:
        descriptor = os.memfd_create("collapse", os.MFD_CLOEXEC)
    except OSError:
        return False
    try:
        os.ftruncate(descriptor, HUGE_PAGE)
        os.pwrite(descriptor, b"1", 0)
        address = map_memory(HUGE_PAGE, descriptor)
        try:
            return advise(address, HUGE_PAGE, MADV_COLLAPSE) == 0
        finally:
            unmap_memory(address, HUGE_PAGE)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def has_huge_pages(descriptor: int) -> bool:
    """Whether a file's file system gives it huge pages: one in memory says so by its block size (mm/shmem.c)."""
    return os.fstat(descriptor).st_blksize >= HUGE_PAGE
