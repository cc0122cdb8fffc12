"""Filling GPU memory without the interpreter lock: libphos_chunks.so is given several loads at once (copy_loop.c)."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic

from phos.gpu_engine import driver
from phos.gpu_engine.copy_work import (
    IDLE_SECONDS,
    SLOTS,
    UNDER_WAY,
    HashRoom,
    Item,
    Load,
    NothingYet,
    Reading,
)
from phos.images.native import chunks_library

LOADS_AT_ONCE = UNDER_WAY - SLOTS
"""How many loads are given to the library by one call. With more, a process would wait longer for one that another
worker has been given already."""

_ZEROS, _HOST, _IN_FILE = 0, 1, 2
_LOAD = struct.Struct("=QQQQiIQQQIIIIQ")
"""enum and struct phos_load."""

_READING = 1
_CALLS = (
    ("cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"),
    ("cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"),
    ("cuMemsetD8Async", "cuMemsetD8Async"),
    ("cuLaunchKernel", "cuLaunchKernel"),
    ("cuEventRecord", "cuEventRecord"),
    ("cuEventSynchronize", "cuEventSynchronize"),
    ("cuStreamSynchronize", "cuStreamSynchronize"),
)
"""struct phos_copy_driver; what failed is counted from _READING + 1 on."""


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


class _Failure(ctypes.Structure):
    """struct phos_copy_failure."""

    _fields_ = (("call", ctypes.c_uint32), ("code", ctypes.c_int32), ("number", ctypes.c_uint32))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    library.phos_copy_load.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p]
    library.phos_copy_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


@functools.cache
def _driver_table() -> Any:
    addresses = driver.entry_points([symbol for _, symbol in _CALLS])
    return (ctypes.c_uint64 * len(addresses))(*addresses)


class ReadFailed(Exception):
    """A file did not give what was asked for; ``number``: of the load, ``code``: an errno, or 0 at the file's end."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__(number, code)
        self.number = number
        self.code = code


class LoadLane:
    """A stream of one worker on one GPU, whose context is current; of one thread."""

    def __init__(self, lane: driver.Lane, events: Sequence[Any], slots: Sequence[int]) -> None:
        """``slots``: addresses of page-locked memory, used in turns for what comes from files."""
        self._lane = _Lane(ctypes.addressof(_driver_table()), lane.handle)
        self._lane.events[:] = [int(event) for event in events]
        self._lane.slots[:] = list(slots)
        self._failure = _Failure()

    @property
    def landed(self) -> int:
        """How many loads have landed, as far as is known, since the lane was made; they do in their order."""
        return int(self._lane.landed)

    def queue(self, loads: Sequence[bytes]) -> None:
        """Queue what :func:`packed` has made; some may have landed then, all but SLOTS of those from memory have.

        Raises:
            ReadFailed: then those before it are queued.
            DriverError: likewise.
        """
        raw = b"".join(loads)
        if _library().phos_copy_load(ctypes.byref(self._lane), raw, len(loads), ctypes.byref(self._failure)):
            self._fail()

    def wait(self) -> None:
        """Return when all has landed.

        Raises:
            DriverError: it cannot.
        """
        if _library().phos_copy_wait(ctypes.byref(self._lane), ctypes.byref(self._failure)):
            self._fail()

    def _fail(self) -> None:
        failure = self._failure
        if failure.call == _READING:
            raise ReadFailed(int(failure.number), int(failure.code))
        driver.fail(_CALLS[failure.call - _READING - 1][0], int(failure.code))


def packed(
    address: int, size: int, *, host: int = 0, file: tuple[int, int] | None = None, room: HashRoom | None = None
) -> bytes:
    """A load as the library wants it: from ``host`` memory, or a ``file`` (descriptor, offset), else zeros."""
    kind = _HOST if host else _ZEROS if file is None else _IN_FILE
    descriptor, offset = file or (-1, 0)
    hashing = (0, 0, 0, 0, 0, 0, 0, 0)
    if room is not None:
        hashing = (room.kernel, room.sums, room.host, room.size, room.grid, room.block, 0, room.chunk_bytes)
    return _LOAD.pack(address, size, host, offset, descriptor, kind, *hashing)


class Filler(Generic[Item]):
    """One worker's part of a job that fills GPU memory."""

    def __init__(
        self,
        number: int,
        slots: Sequence[tuple[int, memoryview]],
        lane: Callable[[int], LoadLane],
        reading: Reading[Item],
        arrived: Callable[[Load[Item]], None],
    ) -> None:
        """``number``: the worker's; ``lane``: its lane on a GPU, which makes that GPU's context current."""
        self._number = number
        self._slots = slots
        self._lane_on = lane
        self._reading = reading
        self._arrived = arrived
        self._lane: LoadLane | None = None
        self._device = -1
        self._confirmed = 0  # of the lane's loads
        self._turn = 0
        self._going: deque[tuple[int, Load[Item]]] = deque()  # the number of the room for its hashes
        self._held: list[Load[Item]] = []
        self._over = False

    def run(self, take: Callable[[], Load[Item] | None]) -> None:
        """Fill what ``take`` gives, until it gives None; all has landed then.

        Raises: what ``take``, reading, the driver and the check raise; loads may be under way then.
        """
        while not self._over or self._held:
            loads = self._gather(take)
            if loads:
                self._queue(loads)
            if not loads or loads[-1].urgent:
                going = bool(self._going)
                self._land()
                if not going and not loads and not self._over:
                    time.sleep(IDLE_SECONDS)
        self._land()

    def _gather(self, take: Callable[[], Load[Item] | None]) -> list[Load[Item]]:
        """Some for one GPU. One that somebody waits for comes alone, before those that were taken already."""
        loads, self._held = self._held, []
        while len(loads) < LOADS_AT_ONCE and not self._over:
            try:
                load = take()
            except NothingYet:
                break
            if load is None:
                self._over = True
            elif load.urgent:
                self._held = loads
                return [load]
            elif loads and load.device != loads[0].device:
                self._held = [load]
                break
            else:
                loads.append(load)
        return loads

    def _queue(self, loads: Sequence[Load[Item]]) -> None:
        if self._lane is None or loads[0].device != self._device:
            self._land()  # its slots are the other lane's as well
            self._device = loads[0].device
            self._lane = self._lane_on(self._device)
            self._lane.wait()  # a job that failed may have left something, which counts for nobody
            self._confirmed = self._lane.landed
        ready: list[bytes] = []
        first = 0
        for number, load in enumerate(loads):
            content, reading = load.content, self._reading
            if content is None:
                ready.append(packed(load.address, load.size))
                self._going.append((-1, load))
                continue
            room_number = self._number * UNDER_WAY + self._turn
            self._turn = (self._turn + 1) % UNDER_WAY
            room = None if reading.check is None else reading.check.room(room_number, load)
            if host := reading.lies_at(content):
                ready.append(packed(load.address, load.size, host=host, room=room))
            elif reading.check is not None and (file := reading.file_of(content)) is not None:
                ready.append(packed(load.address, load.size, file=file, room=room))
            else:
                self._hand_over(loads[first:number], ready)
                ready, first = [], number
                self._land()  # the slot is free now
                address, view = self._slots[0]
                reading.read(content, view[: load.size])
                ready.append(packed(load.address, load.size, host=address, room=room))
            self._going.append((room_number, load))
        self._hand_over(loads[first:], ready)
        self._confirm()

    def _hand_over(self, loads: Sequence[Load[Item]], ready: Sequence[bytes]) -> None:
        assert self._lane is not None
        if not ready:
            return
        try:
            self._lane.queue(ready)
        except ReadFailed as failed:
            load = loads[failed.number]
            if load.content is not None:  # whoever owns the file can say what it is and whose
                self._reading.read(load.content, memoryview(bytearray(load.size)))
            raise OSError(failed.code, os.strerror(failed.code) if failed.code else "a file has ended early") from None

    def _land(self) -> None:
        if self._going and self._lane is not None:
            self._lane.wait()
            self._confirm()

    def _confirm(self) -> None:
        assert self._lane is not None
        for _ in range(self._lane.landed - self._confirmed):
            room_number, load = self._going.popleft()
            if room_number >= 0 and self._reading.check is not None:
                self._reading.check.end(room_number, load)
            self._arrived(load)
        self._confirmed = self._lane.landed
