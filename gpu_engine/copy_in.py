"""Filling GPU memory: one worker's part of a job. What comes next, and all that follows, is native (fill_plan.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Generic

from phos.gpu_engine.copy_lane import CHANGED, CopyFailed
from phos.gpu_engine.copy_trace import CopyTrace
from phos.gpu_engine.copy_work import MAPPING_SECONDS, Item, Reading
from phos.gpu_engine.fill_plan import BROKEN, GET, NOTHING_LEFT, NOTHING_YET, FillLanes, FillPlan, FillWorker

TURN_SECONDS = 0.01
"""For so long a worker fills before it looks whether it is wanted elsewhere."""


class Filler(Generic[Item]):
    """One worker's part of a job that fills GPU memory."""

    def __init__(
        self,
        number: int,
        slots: Sequence[memoryview],
        lanes: Callable[[int], FillLanes],
        plan: FillPlan[Item],
        reading: Reading[Item],
        arrived: Callable[[int], None],
        trace: CopyTrace | None = None,
        *,
        roams: bool = False,
    ) -> None:
        """``number``: the worker's; ``lanes``: its lanes on a GPU, which makes that GPU's context current.

        ``arrived`` is told how many bytes have, ``trace`` of what has been queued. ``roams``: there are fewer workers
        than GPUs, and whoever waits for one is not to wait for all of another.
        """
        self._roams = roams
        self._number = number
        self._slots = slots
        self._lanes_on = lanes
        self._plan = plan
        self._reading = reading
        self._arrived = arrived
        self._trace = trace
        self._workers: dict[int, FillWorker] = {}
        self._current: FillWorker | None = None

    def run(self, leave: Callable[[], bool]) -> bool:
        """Fill until nothing is left, or ``leave`` says so; all has landed then. Answers whether nothing is left.

        Raises: what ``leave``, reading, the driver and the check raise; loads may be under way then.
        """
        count = len(self._plan.devices)
        queue = self._plan.enlist() % max(1, count)
        left = set(range(count))
        idle = 0
        began = time.monotonic()
        while left and not leave():
            if queue in left:
                status = self._fill(queue)
                idle = idle + 1 if status == NOTHING_YET else 0
                if status == NOTHING_LEFT:
                    left.discard(queue)
                elif not idle and (not self._roams or time.monotonic() - began < TURN_SECONDS):
                    continue
            queue, began = (queue + 1) % count, time.monotonic()
            if left and idle >= len(left):
                time.sleep(MAPPING_SECONDS)
                idle = 0
        if self._current is not None:
            self._report(self._current, self._current.land)
        return not left

    def _fill(self, queue: int) -> int:
        worker = self._on(queue)
        status = NOTHING_YET

        def fill() -> None:
            nonlocal status
            status = worker.fill(TURN_SECONDS)

        self._report(worker, fill)
        if status == BROKEN:
            raise self._plan.error
        if status == GET:
            content, size = self._plan.places.content(worker.wanted), self._plan.places.size(worker.wanted)
            self._reading.read(content, self._slots[worker.slot][:size])
            self._report(worker, worker.got)
        return status

    def _on(self, queue: int) -> FillWorker:
        """The worker on a queue's GPU, whose context is current then."""
        if queue not in self._workers:
            device, check = self._plan.devices[queue], self._reading.check
            rooms = None if check is None else check.rooms(self._number, device)
            lanes = self._lanes_on(device)
            self._workers[queue] = FillWorker(self._plan, queue, lanes, rooms, steps=self._trace is not None)
        worker = self._workers[queue]
        if worker is not self._current:
            if self._current is not None:
                self._report(self._current, self._current.land)  # its slots are the other's as well
            self._lanes_on(self._plan.devices[queue])
            self._current = worker
        return worker

    def _report(self, worker: FillWorker, action: Callable[[], None]) -> None:
        """Do something, and tell what has become of it."""
        try:
            action()
        except CopyFailed as failed:
            raise self._explained(failed) from None
        finally:
            if worker.arrived:
                self._arrived(worker.arrived)
        if self._trace is not None:
            for step in worker.steps():
                piece = (step.size, step.kind, step.urgent)
                self._trace.add(self._number, step.asked, step.taken, step.queued, [piece], step.queued)

    def _explained(self, failed: CopyFailed) -> Exception:
        content, size = self._plan.places.content(failed.number), self._plan.places.size(failed.number)
        if failed.call == CHANGED and self._reading.check is not None:
            return self._reading.check.wrong(content, self._plan.device_of(failed.number))
        try:  # whoever owns the file can say what it is and whose
            self._reading.read(content, memoryview(bytearray(size)))
        except Exception as error:
            return error
        return OSError(failed.code, os.strerror(failed.code) if failed.code else "a file has ended early")
