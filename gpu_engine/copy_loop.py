"""Copies out without the interpreter lock: libphos_chunks.so is given several pieces at once (copy_loop.c)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

from phos.gpu_engine.copy_lane import Failure, NativeLane, fail
from phos.images.append import StripeState
from phos.images.native import chunks_library

_SAVE = struct.Struct("=QQQQQII")
"""struct phos_save."""


class SaveJob(ctypes.Structure):
    """struct phos_save_job."""

    _fields_ = (
        ("stripe", ctypes.POINTER(StripeState)),
        ("table", ctypes.c_void_p),
        ("changing", ctypes.c_void_p),
        ("zero", ctypes.c_char_p),
        ("landed_ns", ctypes.c_uint64),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.phos_copy_save.argtypes = [pointer, pointer, pointer, u32, pointer]
    library.phos_copy_compare.argtypes = [pointer, ctypes.c_uint64, ctypes.c_uint64, pointer]
    library.phos_copy_compare.restype = ctypes.c_int64
    return library


def save(lane: NativeLane, job: SaveJob, saves: Sequence[bytes]) -> None:
    """Copy out what :func:`packed_save` has made, on a worker's lane; its GPU's context is current.

    Raises:
        CopyFailed: it could not be appended, or memory had changed.
        DriverError: likewise; one piece may still be under way, and nothing counts as appended.
    """
    raw, failure = b"".join(saves), Failure()
    record = ctypes.byref(lane.record)
    if _library().phos_copy_save(record, ctypes.byref(job), raw, len(saves), ctypes.byref(failure)):
        fail(failure)


def first_changed(address: int, size: int, chunk: int, hashes: bytes) -> int:
    """The number of the first chunk of ``size`` bytes at an address that has not its hash; -1: all have."""
    return int(_library().phos_copy_compare(address, size, chunk, hashes))


def packed_save(address: int, size: int, *, hashes: int, places: int, zero_tail: int, known: bool, chunk: int) -> bytes:
    """A piece to be copied out as the library wants it; addresses, see struct phos_save."""
    return _SAVE.pack(address, size, hashes, places, zero_tail, known, chunk)
