"""What became of each piece that was copied out or in, and when: to find out where the time goes.

PHOS_TRACE_COPIES names a folder. Each checkpoint and each restore leaves a file of JSON there, for bench/copy_trace.py:

    {"image": path, "began": seconds,
     "steps": [[worker, asked, taken, landed, saved, [[bytes, kind, urgent], ...]], ...],
     "checks": [[worker, began, ended, bytes], ...]}

``began`` is when the first step did, by the monotonic clock; other times are seconds since then: a worker asked for
pieces, had taken them, had the last of them in host memory (in a restore, had queued it), had seen to all that follows
from that; it began to compare a piece that had been saved, and had done so.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

VARIABLE = "PHOS_TRACE_COPIES"

PLACE, SHADOW, HOST, FILE, ZEROS = "place", "shadow", "host", "file", "zeros"
"""Where a piece came from: GPU memory or a copy in it, page-locked memory or a file; zeros are not copied."""


class Step(NamedTuple):
    """What one worker did once; seconds by time.perf_counter()."""

    worker: int
    asked: float
    taken: float
    landed: float
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

    def add(
        self,
        worker: int,
        asked: float,
        taken: float,
        landed: float,
        pieces: Sequence[tuple[int, str, bool]],
        saved: float | None = None,
    ) -> None:
        """Pieces (bytes, where they came from, whether somebody waited) have been seen to, just now unless said."""
        saved = time.perf_counter() if saved is None else saved
        self._steps.append(Step(worker, asked, taken, landed, saved, list(pieces)))

    def checked(self, worker: int, began: float, size: int) -> None:
        """A piece has been compared just now."""
        self._checks.append(Check(worker, began, time.perf_counter(), size))

    def write(self, image: str) -> None:
        """Leave the file; the job is over. A folder that cannot be written to is no reason to fail."""
        first = min((step.asked for step in self._steps), default=0.0)
        steps = [
            [s.worker, *(round(at - first, 6) for at in (s.asked, s.taken, s.landed, s.saved)), s.pieces]
            for s in self._steps
        ]
        checks = [[c.worker, round(c.began - first, 6), round(c.ended - first, 6), c.size] for c in self._checks]
        path = self._folder / f"copies-{os.getpid()}-{time.time_ns()}.json"
        try:
            path.write_text(json.dumps({"image": image, "began": first, "steps": steps, "checks": checks}))
        except OSError as error:
            log.warning("%s=%s: %s", VARIABLE, self._folder, error)


@contextmanager
def tracing(image: str) -> Iterator[CopyTrace | None]:
    """A trace of what is copied to or from an image meanwhile, if PHOS_TRACE_COPIES is set."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        yield None
        return
    trace = CopyTrace(Path(folder))
    yield trace
    trace.write(image)
