"""Whether the driver needs GPUs' copy engines itself: while it saves a process's own part, or brings it back.

Copies to a GPU leave them to it for a moment now and then as long, whoever's process that is (fill_loop.c says why).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Breather(Protocol):
    """Whose copies take turns: a :class:`~phos.gpu_engine.fill_plan.FillPlan`. Called from any thread."""

    def breathe(self, wanted: bool) -> None:
        """Whether they are to, from now on."""


class EngineTurns:
    """Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below, and what is told
        self._at_work = 0
        self._told: list[Breather] = []

    @contextmanager
    def driver_at_work(self) -> Iterator[None]:
        """The driver saves a process's own part meanwhile, or brings it back."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._at_work += more
            for breather in self._told:
                breather.breathe(self._at_work > 0)

    @contextmanager
    def telling(self, breather: Breather) -> Iterator[None]:
        """Meanwhile it is told whether the driver is at work, at once and whenever that changes."""
        with self._lock:
            self._told.append(breather)
            breather.breathe(self._at_work > 0)
        try:
            yield
        finally:
            with self._lock:
                self._told.remove(breather)


engine_turns = EngineTurns()
"""This process's: it is one driver that works, on whichever GPU."""
