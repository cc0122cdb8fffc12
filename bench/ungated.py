#!/usr/bin/env python3
"""What the driver answers while it has a process checkpointed, by entry point; without PhOS.

An entry point of which the frontend's list (cuda_api.def) says `pure` does not pass the gate: it may be called at any
moment of a checkpoint. That is right if the driver answers it as ever, or has its caller wait until the process is
restored. programs/asks.py asks for everything pure, and for more that programs often ask and that changes nothing,
while the driver locks, checkpoints, restores and unlocks it a few times.

Exit status 1 if an entry point that is pure was ever answered differently, or is not among those that are asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import driver_checkpoint
import harness
import process

sys.path.append(str(process.ROOT / "frontend"))
import gen_api
from harness import Results
from process import Program

API = process.ROOT / "frontend" / "cuda_api.def"
WAIT_NS = 10_000_000
"""An answer that took so long, and came as the process was restored, waited for that."""


class Away(NamedTuple):
    """A time in which the driver had the process checkpointed, by CLOCK_MONOTONIC in nanoseconds."""

    locked: int
    """It was checkpointed from here on."""
    restoring: int
    """The driver was asked to restore it."""


def pure() -> set[str]:
    """Return the entry points that never pass the gate, without the version in their names."""
    return {entry.name for entry in gen_api.parse(API) if entry.effect == "pure"}


def send_away(pid: int, seconds: float) -> Away:
    """Have the driver checkpoint a process, and restore it after so long."""
    driver_checkpoint.suspend(pid)
    locked = time.monotonic_ns()
    time.sleep(seconds)
    away = Away(locked, time.monotonic_ns())
    driver_checkpoint.resume(pid)
    return away


def judged(told: dict[str, Any], aways: list[Away]) -> dict[str, Any]:
    """Say how often a question was asked, answered meanwhile, answered only afterwards, and answered differently."""
    answered = waited = 0
    longest = 0.0
    for began, ended, _ in told["asked"]:
        longest = max(longest, (ended - began) / 1e9)
        for away in aways:
            answered += away.locked <= began and ended <= away.restoring
            waited += began < away.restoring < ended and ended - began > WAIT_NS
    wrong = sum(number != 0 for _, _, number in told["asked"])
    return {
        "asked": len(told["asked"]),
        "answered_meanwhile": answered,
        "waited": waited,
        "wrong": wrong,
        "longest_ms": longest * 1e3,
    }


def main() -> None:
    """Run as a program."""
    parser = harness.options(__doc__ or "", budget=60)
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="checkpointed each time (%(default)s)")
    chosen: argparse.Namespace = harness.prepare(parser)
    results = Results(chosen, "ungated", "What the driver answers while it has a process checkpointed")
    stop = chosen.work / "stop"
    command = process.python_program(process.PROGRAMS / "asks.py", "--stop", str(stop))
    program = Program(command, chosen.work, chosen.device, frontend=False, name="asks")
    never = pure()
    seen: set[str] = set()
    bad: list[str] = []
    try:
        program.start().wait_for("^READY", 120)
        driver_checkpoint.start_driver(chosen.device)
        aways = []
        for _ in range(chosen.repeats or (2 if chosen.smoke else 5)):
            aways.append(send_away(program.pid, chosen.seconds))
            time.sleep(0.2)
        stop.touch()
        process.wait_until(lambda: not program.alive(), 60, "the program to tell")
        for line in program.lines():
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            names = set(told["name"].split(", "))
            seen |= names
            row = judged(told, aways)
            results.add(told["name"], gated=not names <= never, **row)
            if row["wrong"]:
                results.note(f"{told['name']}: answers {told['answers'][:4]}.")
                bad += names & never
    finally:
        program.kill()
    bad += sorted(never - seen)
    results.summary["checkpoints"] = len(aways)
    results.summary["seconds_checkpointed"] = sum(away.restoring - away.locked for away in aways) / 1e9
    if bad:
        results.note(f"Pure in {API.name}, and answered differently or not asked: {', '.join(bad)}.")
    results.finish()
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
