"""Copies out without the interpreter lock: libphos_chunks.so is given several pieces at once (copy_loop.c)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

from phos.gpu_engine.copy_lane import Failure, NativeLane, fail
from phos.images.append import StripeState
from phos.images.native import chunks_library

_SAVE = struct.Struct("=QQQQQQII")
"""struct phos_save."""


class SaveJob(ctypes.Structure):
    """struct phos_save_job."""

    _fields_ = (
        ("stripe", ctypes.POINTER(StripeState)),
        ("table", ctypes.c_void_p),
        ("changing", ctypes.c_void_p),
        ("zero", ctypes.c_char_p),
        ("permits", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("landed_ns", ctypes.c_uint64),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.phos_copy_save.argtypes = [pointer, pointer, pointer, u32, pointer]
    library.phos_copy_landed.argtypes = [pointer, pointer, ctypes.c_int]
    library.phos_copy_compare.argtypes = [pointer, ctypes.c_uint64, ctypes.c_uint64, pointer]
    library.phos_copy_compare.restype = ctypes.c_int64
    library.phos_permits_size.restype = ctypes.c_size_t
    library.phos_permits_begin.argtypes = [pointer, u32]
    library.phos_permits_take.argtypes = [pointer]
    return library


@functools.cache
def _brief() -> ctypes.PyDLL:
    """The same, for what takes less time than getting the interpreter lock back."""
    library = ctypes.PyDLL(str(chunks_library()))
    library.phos_permits_try.argtypes = library.phos_permits_give.argtypes = [ctypes.c_void_p]
    return library


class Permits:
    """So many batches of pieces may be taken and on their way to host memory at once; any thread.

    Native code gives a permit back when the last piece has landed (struct phos_save_job).
    """

    def __init__(self, count: int) -> None:
        self._semaphore = (ctypes.c_uint64 * -(-_library().phos_permits_size() // 8))()
        self.address = ctypes.addressof(self._semaphore)
        _library().phos_permits_begin(self.address, count)


class Turns:
    """Copies to the host that leave a GPU's copy engine to others again and again (copy_turns.h); any thread."""

    def __init__(self) -> None:
        self._words = (ctypes.c_uint32 * 3)()
        """struct phos_turns."""
        self.address = ctypes.addressof(self._words)

    def begin(self, part: int) -> None:
        """From now on ``part`` bytes are under way at a time. What is queued is still copied as it is."""
        self._words[0] = part

    def end(self) -> None:
        """Copies are queued again as they come."""
        self._words[0] = 0

    @property
    def taken(self) -> int:
        """How many pieces were copied so."""
        return int(self._words[2])


def take_permit(permits: int) -> None:
    """Wait for one of the :class:`Permits` at an address; 0: none is needed."""
    if permits:
        _library().phos_permits_take(permits)


def try_permit(permits: int) -> bool:
    """Have one if there is one now, or none is needed; whether."""
    return not permits or bool(_brief().phos_permits_try(permits))


def give_permit(permits: int) -> None:
    """Give it back: no piece was taken, or it was not copied."""
    if permits:
        _brief().phos_permits_give(permits)


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


def landed(job: SaveJob, save: bytes) -> None:
    """What is done for a piece whose bytes are in host memory, the only one; :func:`save` does it for each."""
    _library().phos_copy_landed(ctypes.byref(job), save, True)


def first_changed(address: int, size: int, chunk: int, hashes: bytes) -> int:
    """The number of the first chunk of ``size`` bytes at an address that has not its hash; -1: all have."""
    return int(_library().phos_copy_compare(address, size, chunk, hashes))


def packed_save(
    address: int, size: int, *, place: int, hashes: int, places: int, zero_tail: int, known: bool, chunk: int
) -> bytes:
    """A piece to be copied out as the library wants it; addresses, see struct phos_save."""
    return _SAVE.pack(address, size, place, hashes, places, zero_tail, known, chunk)
