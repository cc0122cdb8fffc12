"""userfaultfd(2), as far as tests need it."""

from __future__ import annotations

import ctypes
import os
import struct

SYS_USERFAULTFD = 323  # x86_64
UFFD_API = 0xAA
API, REGISTER, COPY, WAKE, ZEROPAGE = 0xC018AA3F, 0xC020AA00, 0xC028AA03, 0x8010AA02, 0xC020AA04
UNREGISTER = 0x8010AA01
FORK, REMAP, REMOVE, UNMAP = 1 << 1, 1 << 2, 1 << 3, 1 << 6
MESSAGE_BYTES = 32
MISSING = 1

_libc = ctypes.CDLL(None, use_errno=True)


def open_uffd(features: int = 0) -> int:
    """A descriptor for this process. OSError: it may not have one."""
    descriptor = int(_libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    answer = ctypes.create_string_buffer(struct.pack("=QQQ", UFFD_API, features, 0), 24)
    if _libc.ioctl(descriptor, ctypes.c_ulong(API), answer):
        os.close(descriptor)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def register(descriptor: int, address: int, size: int) -> None:
    """Faults on missing pages there are the descriptor's from now on."""
    wanted = ctypes.create_string_buffer(struct.pack("=QQQQ", address, size, MISSING, 0), 32)
    if _libc.ioctl(descriptor, ctypes.c_ulong(REGISTER), wanted):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class CopyRequest(ctypes.Structure):
    """struct uffdio_copy."""

    _fields_ = (
        ("to", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("copied", ctypes.c_int64),
    )
