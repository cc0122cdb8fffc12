"""Copies without the interpreter lock: libphos_chunks.so is given several pieces at once (copy_loop.c)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from phos.gpu_engine import driver
from phos.gpu_engine.copy_work import SLOTS, HashRoom
from phos.images.append import StripeState
from phos.images.native import chunks_library

_ZEROS, _HOST, _IN_FILE = 0, 1, 2
_LOAD = struct.Struct("=QQQQiIQQQIIQ")
"""enum and struct phos_load."""

_SAVE = struct.Struct("=QQQQQQII")
"""struct phos_save."""

READING, APPENDING, CHANGED = 1, 2, 3
_CALLS = (
    ("cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"),
    ("cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"),
    ("cuMemsetD8Async", "cuMemsetD8Async"),
    ("cuLaunchKernel", "cuLaunchKernel"),
    ("cuEventRecord", "cuEventRecord"),
    ("cuEventSynchronize", "cuEventSynchronize"),
    ("cuStreamSynchronize", "cuStreamSynchronize"),
    ("cuEventQuery", "cuEventQuery"),
)
"""struct phos_copy_driver; as something that fails they are counted from CHANGED + 1 on."""


class _Lane(ctypes.Structure):
    """struct phos_copy_lane."""

    _fields_ = (
        ("driver", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
        ("events", ctypes.c_uint64 * SLOTS),
        ("slots", ctypes.c_uint64 * SLOTS),
        ("marks", ctypes.c_uint64 * SLOTS),
        ("queued", ctypes.c_uint64),
        ("landed", ctypes.c_uint64),
    )


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


class _Failure(ctypes.Structure):
    """struct phos_copy_failure."""

    _fields_ = (("call", ctypes.c_uint32), ("code", ctypes.c_int32), ("number", ctypes.c_uint32))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.phos_copy_load.argtypes = [pointer, pointer, u32, pointer]
    library.phos_copy_save.argtypes = [pointer, pointer, pointer, u32, pointer]
    library.phos_copy_landed.argtypes = [pointer, pointer, ctypes.c_int]
    library.phos_copy_compare.argtypes = [pointer, ctypes.c_uint64, ctypes.c_uint64, pointer]
    library.phos_copy_compare.restype = ctypes.c_int64
    library.phos_copy_wait.argtypes = [pointer, pointer]
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


@functools.cache
def _driver_table() -> Any:
    addresses = driver.entry_points([symbol for _, symbol in _CALLS])
    return (ctypes.c_uint64 * len(addresses))(*addresses)


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


class CopyFailed(Exception):
    """Something other than the driver failed.

    ``call``: READING or APPENDING, then ``code`` is an errno, or 0 at a file's end; or CHANGED, then it is that of
    a chunk in the piece. ``number``: of the piece, in what was given.
    """

    def __init__(self, call: int, code: int, number: int) -> None:
        super().__init__(call, code, number)
        self.call = call
        self.code = code
        self.number = number


def _fail(failure: _Failure) -> None:
    if failure.call <= CHANGED:
        raise CopyFailed(int(failure.call), int(failure.code), int(failure.number))
    driver.fail(_CALLS[failure.call - CHANGED - 1][0], int(failure.code))


class CopyLane:
    """One worker's use of a stream on one GPU, whose context is current. Of one thread; the stream need not be."""

    def __init__(self, lane: driver.Lane, events: Sequence[Any], slots: Sequence[int]) -> None:
        """``slots``: addresses of page-locked memory, used in turns for what comes from files or goes there."""
        self._table = _driver_table()  # kept: threads that come first at the same time make one each
        self._lane = _Lane(ctypes.addressof(self._table), lane.handle)
        self._lane.events[:] = [int(event) for event in events]
        self._lane.slots[:] = list(slots)
        self._failure = _Failure()

    @property
    def landed(self) -> int:
        """How many loads have landed, as far as is known, since the lane was made; they do in their order."""
        return int(self._lane.landed)

    @property
    def queued(self) -> int:
        """How many loads have been queued since the lane was made; the next one's slot goes by it, modulo SLOTS."""
        return int(self._lane.queued)

    def load(self, loads: Sequence[bytes]) -> None:
        """Queue what :func:`packed_load` has made; all but the last SLOTS have landed then.

        Raises:
            CopyFailed: it could not be read; those before it are queued.
            DriverError: likewise.
        """
        raw = b"".join(loads)
        if _library().phos_copy_load(ctypes.byref(self._lane), raw, len(loads), ctypes.byref(self._failure)):
            _fail(self._failure)

    def save(self, job: SaveJob, saves: Sequence[bytes]) -> None:
        """Copy out what :func:`packed_save` has made.

        Raises:
            CopyFailed: it could not be appended, or memory had changed.
            DriverError: likewise; one piece may still be under way, and nothing counts as appended.
        """
        raw = b"".join(saves)
        lane, failure = ctypes.byref(self._lane), ctypes.byref(self._failure)
        if _library().phos_copy_save(lane, ctypes.byref(job), raw, len(saves), failure):
            _fail(self._failure)

    def wait(self) -> None:
        """Return when all has landed.

        Raises:
            DriverError: it cannot.
        """
        if _library().phos_copy_wait(ctypes.byref(self._lane), ctypes.byref(self._failure)):
            _fail(self._failure)


def landed(job: SaveJob, save: bytes) -> None:
    """What is done for a piece whose bytes are in host memory, the only one; :meth:`CopyLane.save` does it for each."""
    _library().phos_copy_landed(ctypes.byref(job), save, True)


def first_changed(address: int, size: int, chunk: int, hashes: bytes) -> int:
    """The number of the first chunk of ``size`` bytes at an address that has not its hash; -1: all have."""
    return int(_library().phos_copy_compare(address, size, chunk, hashes))


def packed_load(
    address: int, size: int, *, host: int = 0, file: tuple[int, int] | None = None, room: HashRoom | None = None
) -> bytes:
    """A load as the library wants it: from ``host`` memory, or a ``file`` (descriptor, offset), else zeros."""
    kind = _HOST if host else _ZEROS if file is None else _IN_FILE
    descriptor, offset = file or (-1, 0)
    hashing = (0, 0, 0, 0, 0, 0)
    if room is not None:
        hashing = (room.kernel, room.room, room.host, room.grid, room.block, room.chunk_bytes)
    return _LOAD.pack(address, size, host, offset, descriptor, kind, *hashing)


def packed_save(
    address: int, size: int, *, place: int, hashes: int, places: int, zero_tail: int, known: bool, chunk: int
) -> bytes:
    """A piece to be copied out as the library wants it; addresses, see struct phos_save."""
    return _SAVE.pack(address, size, place, hashes, places, zero_tail, known, chunk)
