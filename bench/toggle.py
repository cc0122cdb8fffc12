#!/usr/bin/env python3
"""The application's stall at a dump that leaves it running, with each toggle reducer on and off.

The reducers are phosd's (PHOS_REDUCERS: 'stack-limit', 'huge-pages', 'residue', 'copy-threads') and, as an offer to the
user, the application's own CUDA_DEVICE_MAX_CONNECTIONS=1. The stall is measured twice: as the longest gap between two
iterations of the program, and as the phases that the image records.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results
from process import Program

VARIANTS = {
    "none": ("none", ""),
    "stack-limit": ("stack-limit", ""),
    "huge-pages": ("huge-pages", ""),
    "stack-limit, huge-pages": ("stack-limit,huge-pages", ""),
    "stack-limit, huge-pages, residue": ("stack-limit,huge-pages,residue", ""),
    "all (default)": ("stack-limit,huge-pages,residue,copy-threads", ""),
    "default, 1 connection": ("stack-limit,huge-pages,residue,copy-threads", "1"),
}


class Heartbeat:
    """Watches a program's report and remembers the longest time without a new line.

    It is never less than that was: a line may be as old as the look before the one that finds it.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.longest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        size, last = -1, time.perf_counter()
        before = last
        while not self._stop.is_set():
            looking = time.perf_counter()
            now = os.stat(self.program.report).st_size
            if now != size:
                if size >= 0:
                    self.longest = max(self.longest, time.perf_counter() - last)
                size, last = now, before
            before = looking
            time.sleep(process.POLL_SECONDS)

    def stop(self) -> float:
        """Stop watching; return the longest gap in seconds."""
        self._stop.set()
        self._thread.join()
        return self.longest


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "toggle", "The stall of a dump that leaves the application running")
        self.repeats = chosen.repeats or (1 if chosen.smoke else 3)

    def measure(self, key: str, reducers: str, connections: str) -> None:
        """Dump a running program a few times under one setting."""
        chosen = self.chosen
        process.stop_daemon()  # it reads its settings when it starts
        os.environ["PHOS_REDUCERS"] = reducers
        script = process.PROGRAMS / "buffers.py" if chosen.smoke else process.EXAMPLES / "pytorch_buffers.py"
        size = 4_000_000 if chosen.smoke else chosen.gigabytes * 1_000_000_000
        command = process.python_program(script, "--bytes", str(size), "--buffers", "16")
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}
        program = Program(command, chosen.work, chosen.device, True, environment, name="toggled")
        gaps, phases = [], []
        try:
            program.start().wait_for("^READY", 300)
            for _ in range(self.repeats):
                program.wait_iterations(50)
                folder = Path(chosen.image) / "phos-toggle"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                heartbeat = Heartbeat(program)
                process.criu_dump(program, folder, leave_running=True)
                program.wait_iterations(5)
                gaps.append(heartbeat.stop())
                phases.append(process.timings(folder))
                shutil.rmtree(folder)
        finally:
            program.kill()
        medians = {name: harness.median(run.get(name, 0.0) for run in phases) for name in phases[-1]}
        self.results.add(key, reducers=key, stall_s=harness.median(gaps), dumps=len(gaps), **medians)

    def run(self) -> None:
        """Measure every setting."""
        harness.measure_each(self.chosen, self.results, VARIANTS, lambda key: self.measure(key, *VARIANTS[key]))


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=240)
    parser.add_argument("--gigabytes", type=int, default=8, metavar="N", help="of the program's buffers (%(default)s)")
    harness.add_image_option(parser)
    Bench(harness.prepare(parser)).run()


if __name__ == "__main__":
    main()
