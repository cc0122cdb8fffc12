"""Where the time of a checkpoint or a restore went."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Phase:
    """One step. ``start`` in seconds since the timeline began; ``concurrent`` when others ran beside it."""

    name: str
    start: float
    seconds: float
    concurrent: bool


class TimedPhase(Protocol):
    """A phase: of a timeline, or as phosd's status reports it."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def seconds(self) -> float: ...


STALL = "stall"
"""Who measures it as a whole says so by a phase of this name."""

STALL_BEGINS = ("detach", "driver checkpoint")
"""The first of these that a checkpoint has. During "quiesce" before it the GPU still computes what was queued."""

STALL_ENDS = ("attach", "driver restore", "CRIU freeze and dump")
"""The first of these that a checkpoint has: after it the processes compute again."""


def stall_seconds(phases: Iterable[TimedPhase]) -> float:
    """For how long a checkpoint let its processes stand still, in seconds; 0 if its phases do not tell."""
    spans: dict[str, tuple[float, float]] = {}
    for phase in phases:  # a checkpoint that was made anew has phases twice: it stalled from the first to the last
        begin, end = spans.get(phase.name, (phase.start, 0.0))
        spans[phase.name] = (min(begin, phase.start), max(end, phase.start + phase.seconds))
    if STALL in spans:
        return spans[STALL][1] - spans[STALL][0]
    begins = next((spans[name][0] for name in STALL_BEGINS if name in spans), None)
    ends = next((spans[name][1] for name in STALL_ENDS if name in spans), None)
    return 0.0 if begins is None or ends is None else max(0.0, ends - begins)


def _now_by_both_clocks() -> tuple[float, float]:
    """This moment by the monotonic clock and by the calendar: between two looks much may go by, under load."""
    looks = []
    for _ in range(3):
        before, calendar, after = time.perf_counter(), time.time(), time.perf_counter()
        looks.append((after - before, (before + after) / 2, calendar))
    _, monotonic, calendar = min(looks)
    return monotonic, calendar


class Timeline:
    """Phases of one job, on the monotonic clock; usable from several threads. ``since``: its begin, since 1970."""

    def __init__(self) -> None:
        self._began, self.since = _now_by_both_clocks()
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
