"""Memory that processes share, of a size that none of them can change (memfd seals, fcntl(2)).

Who touches a mapping of a file that another process has made shorter dies of SIGBUS. phosd maps what it shares with the
processes of all users.
"""

from __future__ import annotations

import fcntl
import os
import stat

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make(name: str, size: int) -> int:
    """A descriptor of so many zeros, for the caller to close.

    Raises:
        OSError: there is none, or no room.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def can_be_mapped(descriptor: int, size: int) -> bool:
    """Whether what a descriptor of another process stands for will always have so many bytes.

    Of a driver's own descriptors, which are devices, the driver knows.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return True
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # a file of a file system that has no seals
        return False
    return seals & SEALS == SEALS and status.st_size >= size
