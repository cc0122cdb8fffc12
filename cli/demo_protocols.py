"""``phos-gpu demo --protocol``: checkpoints of a program that runs on, by each protocol, side by side.

The program is checkpointed in the middle and computes to its end. Its image, which is of that moment, is verified and
restored; the restored program must end with the same result.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.timeline import stall_seconds

if TYPE_CHECKING:
    from phos.cli.demo import Demo

ITERATIONS = 160
PROGRAM_SECONDS = 300.0
PACE = 0.02
"""Seconds that the program sleeps at least after each iteration: else the software GPU computes on all cores."""

SOFTWARE_BANDWIDTH = 16 << 20
"""Bytes per second that the software GPU copies: it has little memory, which should take as long to copy as much."""

MEASURE_SECONDS = 0.5
"""How long the program is watched at least before the checkpoint and after it."""

POLL_SECONDS = 0.002


def pace(start_seconds: float, iterations: int) -> float:
    """Seconds to sleep after each iteration, so that the program is watched, dumped and watched again before its end.

    A dump begins with the start of a Python that talks to phosd, as ``start_seconds`` did.
    """
    return max(PACE, 2 * (MEASURE_SECONDS + start_seconds) / (iterations - iterations // 4))


@dataclass
class Measured:
    """One protocol's checkpoint; rates in iterations per second, times in seconds."""

    protocol: str
    before: float
    during: float
    after: float
    stall: float
    longest_pause: float
    seconds: float
    result: str = ""
    restored: str = ""


class Watch:
    """When each iteration of a program was done, seen from outside."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._stop = threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with open(self._output, "rb") as file:
            file.seek(0, os.SEEK_END)  # what was done before is of no time that we know
            rest = b""
            while not self._stop.is_set():
                now = time.perf_counter()
                *lines, rest = (rest + file.read()).split(b"\n")
                self.times += [now for line in lines if line.startswith(b"ITERATION")]
                time.sleep(POLL_SECONDS)

    def rate(self, begin: float, end: float) -> float:
        """Iterations per second in a span of time."""
        return sum(begin <= at < end for at in self.times) / (end - begin) if end > begin else 0.0

    def longest_pause(self, begin: float, end: float) -> float:
        """The longest time from one iteration to the next, of those that begin or end in a span of time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if b >= begin and a <= end), default=0.0)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def compare(demo: Demo, protocols: Sequence[str]) -> None:
    """All steps.

    Raises:
        PhosError: one failed.
    """
    expected = demo.begin(SOFTWARE_BANDWIDTH)
    measured = [_checkpoint(demo, protocol, expected) for protocol in protocols]
    _show(demo, measured)
    demo.console.print(
        f"Every program, checkpointed or restored, ends with the same result, {expected}; every image is whole."
    )


def _checkpoint(demo: Demo, protocol: str, expected: str) -> Measured:
    output, image = demo.folder / f"{protocol}.log", demo.folder / f"image-{protocol}"
    image.mkdir()
    with demo.timed(f"{protocol}: start it again and let it compute"):
        process = demo.start(output, pace(demo.start_seconds, demo.iterations))
        demo.wait_iteration(output, demo.iterations // 4, process)
    with Watch(output) as watch:
        started = time.perf_counter()
        time.sleep(MEASURE_SECONDS)
        with demo.timed(f"{protocol}: criu dump --lib phos --leave-running -t {process.pid} -D {image.name}/"):
            begin = time.perf_counter()
            _dump(demo, protocol, process.pid, output, image)
            end = time.perf_counter()
        with demo.timed(f"{protocol}: let it compute to its end"):
            process.wait(PROGRAM_SECONDS)
            ended = time.perf_counter()
    found = Measured(
        protocol,
        before=watch.rate(started, begin),
        during=watch.rate(begin, end),
        after=watch.rate(end, min(ended, watch.times[-1] if watch.times else ended)),
        stall=_stall(demo, image),
        longest_pause=watch.longest_pause(begin, end),
        seconds=end - begin,
        result=demo.result(output),
    )
    with demo.timed(f"{protocol}: phos-gpu verify {image.name}/"):
        demo.command("phos-gpu", "verify", str(image))
    with demo.timed(f"{protocol}: restore it from the image and let it compute to its end"):
        output.rename(output.with_suffix(".end"))
        (image / "output").rename(output)  # the program goes on writing where it was
        demo.criu("restore", "-d")
        demo.wait_end(process.pid)
    found.restored = demo.result(output)
    for what, result in (("after the checkpoint", found.result), ("after the restore", found.restored)):
        if result != expected:
            raise CheckpointFailed(
                f"The results differ: {expected} without interruption, {result} {what} ({protocol})."
            )
    return found


def _dump(demo: Demo, protocol: str, pid: int, output: Path, image: Path) -> None:
    """``criu dump``; what the program had printed at that moment is kept in the image's folder."""
    script = demo.folder / "post-dump"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || cp "{output}" "{image}/output"\n')
    script.chmod(0o755)
    demo.image = image
    demo.criu("dump", "--leave-running", "-t", str(pid), "--action-script", str(script), PHOS_PROTOCOL=protocol)


def _stall(demo: Demo, image: Path) -> float:
    """For how long phosd says that the program stood still."""
    where = client.image_name(image)
    jobs = client.status(Path(demo.environment["PHOS_SOCKET"])).jobs
    return next((stall_seconds(job.phases) for job in reversed(jobs) if job.kind == "dump" and job.image == where), 0.0)


def _show(demo: Demo, measured: Sequence[Measured]) -> None:
    table = Table("Protocol", title="Iterations per second, and seconds", title_justify="left")
    for title in ("before", "during", "after", "stall, s", "longest pause, s", "checkpoint, s"):
        table.add_column(title, justify="right")
    for m in measured:
        rates = [f"{rate:.1f}" for rate in (m.before, m.during, m.after)]
        table.add_row(m.protocol, *rates, f"{m.stall:.3f}", f"{m.longest_pause:.3f}", f"{m.seconds:.2f}")
    demo.console.print(table)
