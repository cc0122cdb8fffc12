#!/usr/bin/env python3
"""What the driver answers while it has a process checkpointed, by entry point; without PhOS.

An entry point of which the frontend's list (cuda_api.def) says `pure` does not pass the gate, nor does a `query` about
any stream but a thread's own default stream: it may be called at any moment of a checkpoint. That is right if the
driver answers it as ever, or has its caller wait until the process is restored, and if it does not keep the driver from
checkpointing. programs/asks.py asks for everything of that kind, and for more that programs often ask and that changes
nothing, while the driver locks, checkpoints, restores and unlocks it a few times: a process for each question, one for
all that pass no gate, and one for all there are.

Exit status 1 if an entry point that passes no gate was ever answered differently, kept the driver from checkpointing,
or is not among those that are asked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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


def ungated() -> set[str]:
    """Return the entry points that pass no gate, or only for a thread's own stream; names without the version."""
    return {entry.name for entry in gen_api.parse(API) if entry.effect in ("pure", "query")}


def entry_points(questions: Sequence[str]) -> set[str]:
    """Return the entry points that these questions of programs/asks.py are for."""
    return {name for question in questions for name in question.partition(" (")[0].split(", ")}


def is_gated(question: str, never: set[str]) -> bool:
    """Say whether a question passes the gate, by the entry points that do not."""
    return question.endswith("(own)") or not entry_points([question]) <= never


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
        "answers": told["answers"][:4],
    }


class Asked(NamedTuple):
    """What came of a program that asks."""

    rows: dict[str, dict[str, Any]]
    """As judged() says it, by question; none if the driver refused."""
    refused: str
    """What the driver refused to do meanwhile, or that the process crashed, or nothing."""
    aways: list[Away]


def ask(chosen: argparse.Namespace, name: str, questions: Sequence[str]) -> Asked:
    """Run a program that asks these questions, all of them if there are none, through some checkpoints."""
    stop = chosen.work / f"{name}.stop"
    command = process.python_program(process.PROGRAMS / "asks.py", *questions, "--stop", str(stop))
    program = Program(command, chosen.work, chosen.device, frontend=False, name=name)
    aways: list[Away] = []
    try:
        program.start().wait_for("^READY", 120)
        for _ in range(chosen.repeats or (2 if chosen.smoke else 5)):
            try:
                aways.append(send_away(program.pid, chosen.seconds))
            except driver_checkpoint.DriverCheckpointError as error:
                time.sleep(0.5)  # of a process that crashes the driver notices it first
                refused = str(error).replace(f" {program.pid}", "") if program.alive() else "the process crashed"
                return Asked({}, refused, aways)
            time.sleep(0.2)
        stop.touch()
        process.wait_until(lambda: not program.alive(), 60, "the program to tell")
        told = [json.loads(line) for line in program.lines() if line.startswith("{")]
        rows = {each["name"]: judged(each, aways) for each in told}
        return Asked(rows, "" if rows.keys() >= set(questions) else "the process crashed", aways)
    finally:
        program.kill()


def known(chosen: argparse.Namespace) -> list[str]:
    """Return every question that programs/asks.py knows."""
    command = process.python_program(process.PROGRAMS / "asks.py", "--stop", str(chosen.work / "known.stop"))
    program = Program(command, chosen.work, chosen.device, frontend=False, name="known")
    try:
        names: list[str] = json.loads(program.start().wait_for("^KNOWN", 120).removeprefix("KNOWN "))
        return names
    finally:
        program.kill()


def main() -> None:
    """Run as a program."""
    parser = harness.options(__doc__ or "", budget=60)
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="checkpointed each time (%(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=max(4, (os.cpu_count() or 1) // 2), metavar="N", help="programs at a time"
    )
    chosen: argparse.Namespace = harness.prepare(parser)
    results = Results(chosen, "ungated", "What the driver answers while it has a process checkpointed")
    driver_checkpoint.start_driver(chosen.device)
    questions = known(chosen)
    never = ungated()
    groups = {question: [question] for question in questions}
    groups["all that pass none"] = [question for question in questions if not is_gated(question, never)]
    groups["all of them"] = questions
    bad = never - entry_points(questions)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        asked = pool.map(lambda pair: ask(chosen, f"asks-{pair[0]}", pair[1]), enumerate(groups.values()))
        for (group, names), (rows, refused, aways) in zip(groups.items(), asked, strict=True):
            gated = any(is_gated(name, never) for name in names)
            shown = rows[group] if names == [group] and rows else {}
            wrong = sum(row["wrong"] for row in rows.values())
            results.add(group, gated=gated, checkpoints=len(aways), refused=refused, **{**shown, "wrong": wrong})
            if wrong and shown:
                results.note(f"{group}: answers {shown['answers']}.")
            if (wrong or refused) and not gated:
                bad.add(group)
    if bad:
        results.note(
            f"Not gated according to {API.name}, and not as it should be, or not asked: {'; '.join(sorted(bad))}."
        )
    results.finish()
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
