"""What became of each piece that was copied out, and when: to find out where the time of a window goes.

PHOS_TRACE_COPIES names a folder. Each concurrent checkpoint leaves a file of JSON there, for bench/copy_trace.py:

    {"image": path, "steps": [[worker, asked, allowed, taken, saved, [[bytes, kind, urgent], ...]], ...],
     "checks": [[worker, began, ended, bytes], ...]}

Times are seconds since the first step: a worker asked for a permit, had it, had taken the pieces, had saved them; it
began to compare a piece that had been saved, and had done so.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from phos.gpu_engine.copy_work import Piece

log = logging.getLogger(__name__)

VARIABLE = "PHOS_TRACE_COPIES"

PLACE, SHADOW, ZEROS = "place", "shadow", "zeros"
"""Where a piece came from; zeros are not copied."""


class Step(NamedTuple):
    """What one worker did once; seconds by time.perf_counter()."""

    worker: int
    asked: float
    allowed: float
    taken: float
    saved: float
    pieces: list[tuple[int, str, bool]]


class Check(NamedTuple):
    """A piece was compared; seconds by time.perf_counter()."""

    worker: int
    began: float
    ended: float
    size: int


class CopyTrace:
    """The steps of one job. Any thread may add one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: list[Step] = []  # list.append is one step under the GIL
        self._checks: list[Check] = []

    @staticmethod
    def wanted() -> CopyTrace | None:
        """One, if PHOS_TRACE_COPIES is set."""
        folder = os.environ.get(VARIABLE)
        return CopyTrace(Path(folder)) if folder else None

    def add(self, worker: int, asked: float, allowed: float, taken: float, pieces: Sequence[Piece]) -> None:
        """Pieces have been saved just now."""
        kinds = [(p.size, ZEROS if not p.address else SHADOW if p.slot >= 0 else PLACE, p.urgent) for p in pieces]
        self._steps.append(Step(worker, asked, allowed, taken, time.perf_counter(), kinds))

    def checked(self, worker: int, began: float, size: int) -> None:
        """A piece has been compared just now."""
        self._checks.append(Check(worker, began, time.perf_counter(), size))

    def write(self, image: str) -> None:
        """Leave the file; the job is over. A folder that cannot be written to is no reason to fail."""
        first = min((step.asked for step in self._steps), default=0.0)
        steps = [
            [s.worker, *(round(at - first, 6) for at in (s.asked, s.allowed, s.taken, s.saved)), s.pieces]
            for s in self._steps
        ]
        checks = [[c.worker, round(c.began - first, 6), round(c.ended - first, 6), c.size] for c in self._checks]
        path = self._folder / f"copies-{os.getpid()}-{time.time_ns()}.json"
        try:
            path.write_text(json.dumps({"image": image, "steps": steps, "checks": checks}))
        except OSError as error:
            log.warning("%s=%s: %s", VARIABLE, self._folder, error)
