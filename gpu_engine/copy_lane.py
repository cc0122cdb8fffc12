"""A worker's stream on one GPU as native code has it (copy_lane.h), and what native copies fail with."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Protocol

from phos.gpu_engine import driver
from phos.gpu_engine.copy_work import SLOTS

READING, APPENDING, CHANGED = 1, 2, 3
CALLS = (
    ("cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"),
    ("cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"),
    ("cuMemsetD8Async", "cuMemsetD8Async"),
    ("cuLaunchKernel", "cuLaunchKernel"),
    ("cuEventRecord", "cuEventRecord"),
    ("cuEventSynchronize", "cuEventSynchronize"),
    ("cuEventQuery", "cuEventQuery"),
    ("cuStreamWaitEvent", "cuStreamWaitEvent"),
)
"""struct phos_copy_driver; as something that fails they are counted from CHANGED + 1 on."""


class Addressed(Protocol):
    """What native code knows by its address."""

    @property
    def address(self) -> int:
        """Of its structure."""


class LaneRecord(ctypes.Structure):
    """struct phos_copy_lane."""

    _fields_ = (
        ("driver", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
        ("events", ctypes.c_uint64 * SLOTS),
        ("slots", ctypes.c_uint64 * SLOTS),
    )


class Failure(ctypes.Structure):
    """struct phos_copy_failure."""

    _fields_ = (("call", ctypes.c_uint32), ("code", ctypes.c_int32), ("number", ctypes.c_uint32))


class CopyFailed(Exception):
    """Something other than the driver failed.

    ``call``: READING or APPENDING, then ``code`` is an errno, or 0 at a file's end; or CHANGED, then it is that of
    a chunk in the piece. ``number``: of the piece, in what was given; in a plan, of the place.
    """

    def __init__(self, call: int, code: int, number: int) -> None:
        super().__init__(call, code, number)
        self.call = call
        self.code = code
        self.number = number


@functools.cache
def driver_table() -> Any:
    """A struct phos_copy_driver."""
    addresses = driver.entry_points([symbol for _, symbol in CALLS])
    return (ctypes.c_uint64 * len(addresses))(*addresses)


def fail(failure: Failure) -> None:
    """Raise what native code has failed with: CopyFailed or DriverError."""
    if failure.call <= CHANGED:
        raise CopyFailed(int(failure.call), int(failure.code), int(failure.number))
    driver.fail(CALLS[failure.call - CHANGED - 1][0], int(failure.code))


class NativeLane:
    """A worker's part of a stream: two events, and the two slots of the ring that are its own."""

    def __init__(self, lane: driver.Lane, events: Sequence[Any], slots: Sequence[int]) -> None:
        """``slots``: addresses of page-locked memory, used in turns for what comes from files or goes there."""
        self._table = driver_table()  # kept: threads that come first at the same time make one each
        self.record = LaneRecord(ctypes.addressof(self._table), lane.handle)
        self.record.events[:] = [int(event) for event in events]
        self.record.slots[:] = list(slots)
