"""What the benchmarks of restores are made of: parts of which one may fail, ways measured several times."""

from __future__ import annotations

import argparse
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import driver_checkpoint
import harness
from harness import Results
from process import ProcessError
from restore_runs import Unavailable


class RestoreBench(ABC):
    """One run of a benchmark."""

    def __init__(self, chosen: argparse.Namespace, results: Results) -> None:
        self.chosen = chosen
        self.results = results
        self.repeats = chosen.repeats or (1 if chosen.smoke else 3)
        self.failed = False

    @abstractmethod
    def add(self, size: int, name: str, runs: list[dict[str, Any]]) -> None:
        """Store the medians of one way, and each run."""

    def several(self, size: int, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure and store one way several times."""
        runs: list[dict[str, Any]] = []
        while len(runs) < self.repeats:
            began = time.monotonic()
            runs.append(work())
            self.add(size, name, runs)
            if harness.time_left(self.chosen) < 1.2 * (time.monotonic() - began):
                break

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        """Do a part if there is time; a failure is noted and does not end the others."""
        if harness.time_left(self.chosen) <= 0:
            self.results.note(f"{what}: no time left.")
            return
        try:
            work()
        except Unavailable as reason:
            self.results.note(f"{what}: not measured, {reason}.")
        except (ProcessError, driver_checkpoint.DriverCheckpointError) as error:
            self.failed = True
            print(error, file=sys.stderr, flush=True)
            self.results.note(f"{what}: failed. {str(error).splitlines()[0]}")

    def end(self, complaint: str) -> None:
        """Exit with status 1 if an answer was wrong, which `complaint` says, or a part failed."""
        wrong = [row["key"] for row in self.results.rows.values() if not row["tokens_equal"]]
        if wrong:
            print(f"{complaint}: {', '.join(wrong)}.", file=sys.stderr)
        if wrong or self.failed:
            raise SystemExit(1)
