#!/usr/bin/env python3
"""What the driver does while it checkpoints and restores a process's GPU state, and how long each kind of call takes.

Training is checkpointed while it runs, as in cow.py, with programs/driver_calls.c preloaded, which records calls. Those
that began while phosd waited for the driver are told by kind: ioctls by their request (and the class of what they
allocate), memcpy() of 64 KiB and more, munmap(). What is left is the driver's own. Only for x86-64.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
import training
from harness import GB, Results

STEPS = ("driver checkpoint", "driver restore")
KINDS = {2: "munmap", 3: "memcpy"}
MOST = 12
"""Kinds of calls that are told of, for each step: those that took the longest."""

HEAD, RECORD = struct.Struct("<Q"), struct.Struct("<QQIII4xQ")


class Call(NamedTuple):
    """One call: when it began and what it took, in seconds; its kind; bytes, if it has any."""

    began: float
    took: float
    kind: str
    size: int


def calls(path: Path) -> Iterator[Call]:
    """Read what programs/driver_calls.c has written."""
    data = path.read_bytes()
    (count,) = HEAD.unpack_from(data)
    room = (len(data) - HEAD.size) // RECORD.size
    if count > room:
        raise SystemExit(f"{path} has room for {room} calls, and there were {count}.")
    for number in range(count):
        began, took, kind, request, made, size = RECORD.unpack_from(data, HEAD.size + number * RECORD.size)
        name = KINDS.get(kind) or f"ioctl {request >> 8 & 0xFF:02x}.{request & 0xFF:02x}"
        yield Call(began / 1e9, took / 1e9, f"{name}, class {made:x}" if made else name, size)


def told(spans: list[training.Span], recorded: list[Call]) -> dict[str, dict[str, tuple[int, float, int]]]:
    """By step and kind: how many calls, the seconds of all, and bytes; ``all``: seconds of the step."""
    found: dict[str, dict[str, tuple[int, float, int]]] = {}
    for span in (span for span in spans if span.name in STEPS):
        step = found.setdefault(span.name, {})
        inside = [call for call in recorded if span.begin <= call.began < span.end]
        for call in inside:
            number, seconds, size = step.get(call.kind, (0, 0.0, 0))
            step[call.kind] = number + 1, seconds + call.took, size + call.size
        step["all"] = len(inside), span.end - span.begin, 0
    return found


def main() -> None:
    """Run as a program."""
    parser = harness.options(__doc__ or "", budget=120)
    parser.add_argument("--size", type=float, default=8, metavar="GB", help="of the training's buffers (%(default)s)")
    parser.add_argument("--image", type=Path, default=Path("/dev/shm"), metavar="DIR", help="(%(default)s)")
    chosen: argparse.Namespace = harness.prepare(parser)
    results = Results(chosen, "driver-calls", "What the driver does to checkpoint and restore a process's GPU state")
    library, folder = chosen.work / "driver_calls.so", chosen.work / "driver-calls"
    source = process.PROGRAMS / "driver_calls.c"
    flags = ["-O2", "-std=gnu11", "-fno-builtin", "-shared", "-fPIC"]
    process.command(["gcc", *flags, "-o", str(library), str(source)], 60)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    size = 1 << 20 if chosen.smoke else int(chosen.size * GB)
    options = ["--bytes", str(size), "--target-seconds", "0.05" if chosen.smoke else "0.3"]
    program = training.training_program(chosen.work, chosen.device, options, frontend=True, name="phos")
    program.environment |= {"LD_PRELOAD": str(library), "PHOS_DRIVER_CALLS": str(folder)}
    image = Path(chosen.image) / "phos-driver-calls"
    kept: dict[str, dict[str, list[tuple[int, float, int]]]] = {}
    program.start().wait_for("^READY", 300)
    try:
        for number in range(1 + (chosen.repeats or (1 if chosen.smoke else 3))):
            if kept and harness.time_left(chosen) <= 0:
                break
            training.wait_iterations(program, 2)
            shutil.rmtree(image, ignore_errors=True)
            training.checkpoint(program, image, "cow", [])
            spans = training.phase_spans(image)
            if not number:
                continue  # the first has to find out what the next ones know
            for step, kinds in told(spans, list(calls(folder / str(program.pid)))).items():
                for kind, call in kinds.items():
                    kept.setdefault(step, {}).setdefault(kind, []).append(call)
    finally:
        program.kill()
        shutil.rmtree(image, ignore_errors=True)
    for step, kinds in kept.items():
        rows: list[dict[str, Any]] = [
            {
                "calls": harness.median(call[0] for call in each),
                "ms": harness.median(call[1] for call in each) * 1e3,
                "mb": harness.median(call[2] for call in each) / 1e6,
                "kind": kind,
            }
            for kind, each in kinds.items()
        ]
        for row in sorted(rows, key=lambda row: -row["ms"])[: MOST + 1]:
            results.add(f"{step}: {row.pop('kind')}", **row)
    results.note("Calls of several threads may go at the same time. `all`: the whole step, and all its calls.")


if __name__ == "__main__":
    main()
