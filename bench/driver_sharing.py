#!/usr/bin/env python3
"""What the driver does with memory, pools and events that two processes share through it; without PhOS.

programs/shares_by_the_driver.py twice: one makes memory and hands it over, the other opens it. One of them, or both,
are checkpointed by the driver and restored where they are. Told of each: whether they were restored, and whether the
guest still sees what the owner writes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import driver_checkpoint
import harness
import process
from harness import Results
from process import Program

HOW = {
    "ipc": "memory by CUDA IPC",
    "pool": "a pool by its handle, and memory in it",
    "pool-only": "a pool by its handle",
    "event": "an event by CUDA IPC",
}
WHOM = {"the owner": ("owner",), "the guest": ("guest",), "both": ("guest", "owner")}
SEEN_WITHIN_S = 1.0
"""A guest reads a hundred times a second."""


def through_a_checkpoint(programs: dict[str, Program], whom: tuple[str, ...]) -> str:
    """Have the driver checkpoint and restore these; return what it refused, or nothing."""
    try:
        for name in whom:
            driver_checkpoint.suspend(programs[name].pid)
        for name in reversed(whom):
            driver_checkpoint.resume(programs[name].pid)
    except driver_checkpoint.DriverCheckpointError as error:
        name = next(name for name, program in programs.items() if f" {program.pid}:" in str(error))
        return str(error).replace(f"process {programs[name].pid}", f"the {name}")
    return ""


def sees(programs: dict[str, Program], base: Path, value: int) -> bool:
    """Say whether the guest reads what the owner writes."""
    base.with_suffix(".value").write_text(str(value))
    programs["owner"].wait_for(f"^READS {value}$", 30)
    time.sleep(SEEN_WITHIN_S)
    return f"READS {value}" in programs["guest"].lines()


def measure(chosen: argparse.Namespace, how: str, whom: str) -> dict[str, object]:
    """Return what came of one way to share and one choice of processes."""
    base = chosen.work / f"{how}-{whom.replace(' ', '-')}"
    script = process.PROGRAMS / "shares_by_the_driver.py"
    programs = {
        role: Program(
            process.python_program(script, how, role, str(base)),
            chosen.work,
            chosen.device,
            frontend=False,
            name=f"{base.name}-{role}",
        )
        for role in ("owner", "guest")
    }
    shares = how in ("ipc", "pool")
    try:
        for program in programs.values():
            program.start()
        for program in programs.values():
            program.wait_for("^ITERATION 3$", 60)
        before = sees(programs, base, 8) if shares else None
        refused = through_a_checkpoint(programs, WHOM[whom])
        went_on = None
        if not refused:
            for program in programs.values():
                program.wait_iterations(3)
            went_on = True
        return {
            "refused": refused,
            "both_went_on": went_on,
            "shared_before": before,
            "shared_after": sees(programs, base, 9) if shares and not refused else None,
        }
    finally:
        for program in programs.values():
            program.kill()


def main() -> None:
    """Run as a program."""
    chosen = harness.prepare(harness.options(__doc__ or "", budget=90))
    results = Results(chosen, "driver-sharing", "What the driver does with what two processes share through it")
    driver_checkpoint.start_driver(chosen.device)
    for how, told in HOW.items():
        if how == "event" and chosen.device == "software":
            continue
        for whom in WHOM:
            if harness.time_left(chosen) < 5:
                results.note(f"{told}, {whom} checkpointed: no time left.")
                continue
            results.add(f"{told}; {whom} checkpointed", **measure(chosen, how, whom))
    results.finish()


if __name__ == "__main__":
    main()
