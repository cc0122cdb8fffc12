"""What a frontend tells of modules and kernels, on its way to the speculator; and the table that comes back."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext, suppress
from functools import lru_cache

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.permissions import sees_all
from phos.gpu_engine.errors import ProtocolError
from phos.gpu_engine.spec import table as tables
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.identity import BUILD_ID_MOST, FileIdentity
from phos.gpu_engine.spec.module_store import ModuleStore
from phos.gpu_engine.spec.sources import FileSource
from phos.gpu_engine.spec.speculator import Speculator

log = logging.getLogger(__name__)

COPY_LIMIT = 256 << 20
"""Bytes of a module that is in no file: the frontend keeps no more of them either."""

NAME_LIMIT = 4096

IMAGES_KEPT = 16
"""Images whose tables are kept as they were looked through; some hundred kilobytes each."""

_store = ModuleStore()
_one_at_a_time = threading.Lock()
"""Held while a module of an ordinary user is read: each takes memory meanwhile."""


def module_loaded(
    speculator: Speculator, session: bytes, pid: int, uid: int, loaded: wire_pb2.ModuleLoaded, descriptors: list[int]
) -> None:
    """A module: in a file, as the process sees it, or in a memfd beside. The descriptors stay the caller's.

    One that was in a memfd before, for this phosd or for another one, comes without: it is looked up in the store.
    """
    if not loaded.module:
        return
    if loaded.path:
        # By way of the process's own root: it may live in a container. Held, as that root goes with the process.
        where = f"/proc/{pid}/root{loaded.path}"
        source = FileSource.of(where, loaded.offset, loaded.size, name=loaded.path, file=_file(loaded))
        speculator.add_module(session, loaded.module, source, user=uid)
    elif len(descriptors) == 1 and loaded.size <= COPY_LIMIT:
        with suppress(OSError, ProtocolError), nullcontext() if sees_all(uid) else _one_at_a_time:
            image = wire.content(descriptors[0], COPY_LIMIT)[: loaded.size]
            # In memory, there could be more of them than there is memory: for root alone.
            stored = _store.keep(uid, loaded.digest, image)
            if stored is not None or sees_all(uid):
                speculator.add_module(session, loaded.module, stored or image, user=uid)
    elif kept := _store.find(uid, loaded.digest, loaded.size):
        speculator.add_module(session, loaded.module, kept, user=uid)


def _file(loaded: wire_pb2.ModuleLoaded) -> FileIdentity | None:
    """Which file it was; None: the frontend does not know, or is of an image that an earlier version has made."""
    if not loaded.file_size:
        return None
    build_id = loaded.build_id[:BUILD_ID_MOST]
    return FileIdentity(loaded.device, loaded.inode, loaded.mtime_ns, loaded.file_size, build_id)


def kernels_seen(speculator: Speculator, session: bytes, seen: wire_pb2.KernelsSeen) -> None:
    """Kernels that the process may launch."""
    speculator.add_kernels(session, seen.module, [name[:NAME_LIMIT] for name in seen.kernel])


def known_table(
    speculator: Speculator, session: bytes, timeout: float, of_image: bytes = b"", *, quiet: bool = False
) -> bytes:
    """The packed table of the session's kernels; of a restored process, with what its image says of them."""
    known = speculator.table(session, timeout, quiet=quiet)
    if not of_image:
        return known
    try:
        # Thousands of kernels take tens of milliseconds. Of a process that has told nothing yet that is done already
        # when somebody waits for it, if it was done when the process was parked.
        return _of_image(of_image) if tables.is_empty(known) else tables.merge(of_image, known)
    except SpecError as error:
        log.warning("What the image says of kernels is of no use: %s", error)
        return known


@lru_cache(maxsize=IMAGES_KEPT)
def _of_image(table: bytes) -> bytes:
    """What an image says, looked through.

    Raises:
        SpecError: it is no table.
    """
    return tables.merge(table)


def table_file(speculator: Speculator, session: bytes, timeout: float, of_image: bytes = b"") -> int:
    """A memfd with that table, for the caller to close."""
    return packed_file(known_table(speculator, session, timeout, of_image))


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
