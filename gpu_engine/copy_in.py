"""Filling GPU memory: one worker's part of a job."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

from phos.gpu_engine.batches import Batches
from phos.gpu_engine.copy_loop import CopyFailed, CopyLane, packed_load
from phos.gpu_engine.copy_trace import FILE, HOST, ZEROS, CopyTrace
from phos.gpu_engine.copy_work import SLOTS, UNDER_WAY, Item, Load, NothingYet, Reading

LOADS_AT_ONCE = UNDER_WAY - SLOTS
"""How many loads are given to the library by one call. With more, a process would wait longer for one that another
worker has been given already."""


class Filler(Generic[Item]):
    """One worker's part of a job that fills GPU memory."""

    def __init__(
        self,
        number: int,
        slots: Sequence[tuple[int, memoryview]],
        lane: Callable[[int], CopyLane],
        reading: Reading[Item],
        arrived: Callable[[Load[Item]], None],
        urgent_at_once: Callable[[], int],
        trace: CopyTrace | None = None,
    ) -> None:
        """``number``: the worker's; ``lane``: its lane on a GPU, which makes that GPU's context current.

        ``urgent_at_once``: see :class:`~phos.gpu_engine.copy_work.LoadSource`. ``trace`` is told of what has been
        queued.
        """
        self._number = number
        self._slots = slots
        self._lane_on = lane
        self._reading = reading
        self._arrived = arrived
        self._urgent_at_once = urgent_at_once
        self._trace = trace
        self._lane: CopyLane | None = None
        self._device = -1
        self._confirmed = 0  # of the lane's loads
        self._turn = 0
        self._going: deque[tuple[int, Load[Item]]] = deque()  # the number of the room for its hashes

    def run(self, take: Callable[[], Load[Item] | None]) -> None:
        """Fill what ``take`` gives, until it gives None; all has landed then.

        Raises: what ``take``, reading, the driver and the check raise; loads may be under way then.
        """
        batches = Batches(take, LOADS_AT_ONCE, urgent_at_once=self._urgent_at_once)
        while not batches.over:
            asked = time.perf_counter()
            try:
                loads = batches.following()
            except NothingYet as later:
                if self._going:
                    self._land()
                else:
                    time.sleep(later.seconds)
                continue
            if loads:
                taken = time.perf_counter()
                self._queue(loads)
                if any(load.urgent for load in loads):
                    self._land()
                if self._trace is not None:
                    self._trace.add(
                        self._number,
                        asked,
                        asked,
                        taken,
                        time.perf_counter(),
                        [(load.size, self._kind(load), load.urgent) for load in loads],
                    )
        self._land()

    def _kind(self, load: Load[Item]) -> str:
        if load.content is None:
            return ZEROS
        return HOST if self._reading.lies_at(load.content) else FILE

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
                ready.append(packed_load(load.address, load.size))
                self._going.append((-1, load))
                continue
            room_number = self._number * UNDER_WAY + self._turn
            self._turn = (self._turn + 1) % UNDER_WAY
            room = None if reading.check is None else reading.check.room(room_number, load)
            if host := reading.lies_at(content):
                ready.append(packed_load(load.address, load.size, host=host, room=room))
            elif reading.check is not None and (file := reading.file_of(content)) is not None:
                ready.append(packed_load(load.address, load.size, file=file, room=room))
            else:
                self._hand_over(loads[first:number], ready)
                ready, first = [], number
                self._land()
                # The one that the library would use for it, which fills the other one next, from a file.
                address, view = self._slots[self._lane.queued % SLOTS]
                reading.read(content, view[: load.size])
                ready.append(packed_load(load.address, load.size, host=address, room=room))
            self._going.append((room_number, load))
        self._hand_over(loads[first:], ready)
        self._confirm()

    def _hand_over(self, loads: Sequence[Load[Item]], ready: Sequence[bytes]) -> None:
        assert self._lane is not None
        if not ready:
            return
        try:
            self._lane.load(ready)
        except CopyFailed as failed:
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
