"""Where the time of a checkpoint or a restore went."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One step. ``start`` in seconds since the timeline began; ``concurrent`` when others ran beside it."""

    name: str
    start: float
    seconds: float
    concurrent: bool


class Timeline:
    """Phases of one job, measured on the monotonic clock; usable from several threads."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()  # guards _phases
        self._phases: list[Phase] = []

    def now(self) -> float:
        """Seconds since the job began."""
        return time.perf_counter() - self._began

    @contextmanager
    def phase(self, name: str, *, concurrent: bool = False) -> Iterator[None]:
        """Record the time of the block under it, also when it fails."""
        start = self.now()
        try:
            yield
        finally:
            self.add(name, start, concurrent=concurrent)

    def add(self, name: str, start: float, *, concurrent: bool = False) -> None:
        """Record a phase that began at ``start`` and ends now."""
        with self._lock:
            self._phases.append(Phase(name, start, self.now() - start, concurrent))

    def phases(self) -> list[Phase]:
        """All phases so far, by start."""
        with self._lock:
            return sorted(self._phases, key=lambda phase: phase.start)
