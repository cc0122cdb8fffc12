"""What a frontend tells of modules and kernels, on its way to the speculator; and the table that comes back."""

from __future__ import annotations

import os
from contextlib import suppress

from phos.gen import wire_pb2
from phos.gpu_engine.spec.speculator import FileSource, Speculator

COPY_LIMIT = 256 << 20
"""Bytes of a module that is in no file: the frontend keeps no more of them either."""

NAME_LIMIT = 4096


def module_loaded(
    speculator: Speculator, session: bytes, pid: int, loaded: wire_pb2.ModuleLoaded, descriptors: list[int]
) -> None:
    """A module: in a file, as the process sees it, or in a memfd beside. The descriptors stay the caller's."""
    if not loaded.module:
        return
    if loaded.path:
        # By way of the process's own root: it may live in a container.
        source = FileSource(f"/proc/{pid}/root{loaded.path}", loaded.offset, loaded.size)
        speculator.add_module(session, loaded.module, source)
    elif len(descriptors) == 1 and loaded.size <= COPY_LIMIT:
        with suppress(OSError):
            speculator.add_module(session, loaded.module, os.pread(descriptors[0], loaded.size, 0))


def kernels_seen(speculator: Speculator, session: bytes, seen: wire_pb2.KernelsSeen) -> None:
    """Kernels that the process may launch."""
    speculator.add_kernels(session, seen.module, [name[:NAME_LIMIT] for name in seen.kernel])


def table_file(speculator: Speculator, session: bytes, timeout: float) -> int:
    """A memfd with the packed table of the session's kernels, for the caller to close."""
    return packed_file(speculator.table(session, timeout))


def packed_file(packed: bytes) -> int:
    """A memfd with a packed table, for the caller to close."""
    descriptor = os.memfd_create("phos-access", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(packed)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
