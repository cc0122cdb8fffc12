"""Training that is checkpointed while it runs: the program, its times, and what a checkpoint cost it.

Used by the benchmarks of concurrent checkpoints. The program tells when each of its iterations began and ended
(examples/training_log.py); phosd tells when the phases of a checkpoint did; both are brought to the monotonic clock.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import process
from process import ProcessError, Program


def training_program(folder: Path, device: str, options: Sequence[str], *, frontend: bool, name: str) -> Program:
    """Return the large training program, not started; on the software GPU its likeness without PyTorch."""
    script = process.EXAMPLES / "pytorch_large_train.py"
    if device == "software":
        script = process.PROGRAMS / "large_train.py"
    return Program(process.python_program(script, *options), folder, device, frontend, name=name)


def slow_copies() -> None:
    """Let copies of the software GPU take so long that there is a window to compute in, whatever else runs."""
    os.environ.setdefault("SOFTGPU_COPY_BANDWIDTH", str(8 << 20))


@dataclass(frozen=True)
class Iteration:
    """One iteration: its number, and when it began and ended on the monotonic clock, in seconds."""

    number: int
    begin: float
    end: float


def iterations(lines: Sequence[str]) -> list[Iteration]:
    """Return the iterations that a program's lines tell of."""
    found = []
    for line in lines:
        if line.startswith("# TIME "):
            number, begin, end = line.split()[2:5]
            found.append(Iteration(int(number), float(begin), float(end)))
    return found


def wait_iterations(program: Program, count: int, timeout: float = 180.0) -> None:
    """Wait until `count` more iterations have ended."""
    program.wait_for(f"^# TIME {len(iterations(program.lines())) + count} ", timeout)


def wait_until_past(program: Program, moment: float, timeout: float = 180.0) -> None:
    """Wait until an iteration has ended that began after a moment of the monotonic clock."""
    end = time.monotonic() + timeout
    while True:
        done = iterations(program.lines())
        if done and done[-1].begin > moment:
            return
        if not program.alive():
            raise ProcessError(f"{program.name} ended instead of training on.")
        if time.monotonic() > end:
            raise ProcessError(f"{program.name} did not train on within {timeout:.0f} s.")
        time.sleep(0.01)


@dataclass(frozen=True)
class Span:
    """A phase of a checkpoint on the monotonic clock, in seconds."""

    name: str
    begin: float
    end: float


def phase_spans(image: Path) -> list[Span]:
    """Return the phases of the checkpoint that phosd made in this directory, of its last try first to last."""
    _, text = process.command([process.PHOS_GPU, "status", "--json"], 60)
    where = str(image.resolve())
    jobs = [job for job in json.loads(text)["jobs"] if job["kind"] == "dump" and job["image"] == where]
    if not jobs:
        raise ProcessError(f"phosd does not know of a checkpoint in {where}.")
    looks = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(3)]
    before, calendar, after = min(looks, key=lambda look: look[2] - look[0])
    began = jobs[-1]["since"] - calendar + (before + after) / 2
    return [
        Span(phase["name"], began + phase["start"], began + phase["start"] + phase["seconds"])
        for phase in jobs[-1]["phases"]
    ]


@dataclass(frozen=True)
class Felt:
    """What a program felt of a checkpoint, in seconds."""

    normal: float  # the median of the time from the end of an iteration to that of the next, before the checkpoint
    longest: float  # the largest such time while the checkpoint was made, less the median
    total: float  # all such times while it was made, less the median of each


def felt(done: Sequence[Iteration], begin: float, end: float, most: int = 20) -> Felt:
    """Return what was felt of a checkpoint between two moments; `most` iterations before it say what is normal."""
    gaps = [(before.end, after.end, after.end - before.end) for before, after in itertools.pairwise(done)]
    normal = harness.median([gap for _, last, gap in gaps if last < begin][-most:])
    during = [gap - normal for first, last, gap in gaps if last >= begin and first <= end]
    return Felt(normal, max(during, default=0.0), sum(during))


def window_iterations(done: Sequence[Iteration], spans: Sequence[Span]) -> list[float]:
    """Return the seconds of each iteration that computed in the window, without the standstill before it.

    The window goes from the end of the standstill to the last byte of GPU data. An iteration counts with less than half
    of it outside the window only if no other does.
    """
    stall = [span for span in spans if span.name == "stall"]
    data = [span for span in spans if span.name == "GPU data"]
    if not stall or not data:
        return []
    first, last = stall[-1].end, data[-1].end
    found: list[tuple[float, float]] = []
    for before, after in itertools.pairwise(done):
        length = after.end - before.end
        still = max(0.0, min(after.end, first) - max(before.end, stall[-1].begin))
        inside = max(0.0, min(after.end, last) - max(before.end, first))
        if inside > 0:
            found.append((inside / length, length - still))
    inner = [length for share, length in found if share >= 0.5]
    return inner or [length for _, length in found]


def optimal_frequency(gpus: int, failure_rate: float, overhead: float) -> float:
    """Checkpoints an hour that waste the least GPU time (the paper's appendix); as cli/guard_policy.py has it.

    `failure_rate`: failures of one GPU an hour; `overhead`: seconds that a checkpoint stalls the job.
    """
    return math.sqrt(gpus * failure_rate / (2 * overhead / 3600))


def wasted_share(gpus: int, failure_rate: float, overhead: float, frequency: float) -> float:
    """The share of GPU time lost to stalls and to work done again, without the time of the restore."""
    return overhead / 3600 * frequency + failure_rate * gpus / (2 * frequency)


def tracing_microseconds(window: dict[str, Any]) -> float:
    """What tracing a call cost, on average, without the time it waited; 0 if none was traced."""
    calls = window.get("calls", 0)
    return (window.get("call_ns", 0) - window.get("wait_ns", 0)) / calls / 1000 if calls else 0.0


def checkpoint(
    program: Program, image: Path, protocol: str, options: Sequence[str] = (), timeout: float = 300.0
) -> Any:
    """Checkpoint a program that runs on; return what `phos-gpu checkpoint --json` prints."""
    command = [process.PHOS_GPU, "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol]
    program.before_dump()
    _, text = process.command([*command, "--json", *options], timeout)
    program.dumped(killed=False)
    return json.loads(text)


def ask(program: Program, file: Path, image: Path, share: float, timeout: float = 120.0) -> tuple[float, str]:
    """Let the program ask for a checkpoint of itself once `share` of an iteration is done, and wait for its end.

    Returns when it asked, on the monotonic clock, and the line that says what came of it.
    """
    start = len(program.lines())
    scratch = file.with_suffix(".new")
    scratch.write_text(f"{image} cow {share}\n")
    program.before_dump()
    scratch.rename(file)
    asked = float(program.wait_for("^# ASKED ", timeout, after=start).split()[3])
    ended = program.wait_for("^# ENDED ", timeout, after=start)
    program.dumped(killed=False)
    return asked, ended
