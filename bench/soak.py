#!/usr/bin/env python3
"""Checkpoints and restores of one program, hundreds in a row: nothing may grow with their number.

Each kind of round is made again and again, of one training job that lives through all of them: concurrent and
stop-the-world checkpoints from which it runs on, dumps that kill it and restores that bring it back, eagerly or lazily.
`programs` starts and ends a program a round instead. After every round the memory, descriptors, threads and mappings of
phosd, its keeper and the program are counted, and the size of the image. What is larger in each of the last rounds than
in any of those between a quarter and half of the way has grown. Afterwards the job must have computed what the same
training computes that nothing interrupts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import harness
import process
import training
from harness import GB, Results
from process import ProcessError, Program

OVER = ("committed", "attached", "failed", "mispredicted")  # a checkpoint may be made anew after the last
KINDS = ("cow", "stop", "restore", "lazy", "programs")
QUIET_SECONDS = 20.0  # for what ends in the background after a round
SLACK = {"MB": 2.0, "threads": 2.0, "mappings": 8.0}  # what may come and go; of all else, nothing
GROWTH_ROUNDS = 12  # fewer say nothing of growth


def figures(pid: int) -> dict[str, float]:
    """Return what a process takes that could grow: private memory, descriptors, threads, mappings."""
    place = Path(f"/proc/{pid}")
    private = re.findall(r"^Private_\w+:\s+(\d+) kB", (place / "smaps_rollup").read_text(), re.MULTILINE)
    return {
        "private MB": sum(map(int, private)) * 1024 / 1e6,
        "descriptors": len(os.listdir(place / "fd")),
        "threads": len(os.listdir(place / "task")),
        "mappings": len((place / "maps").read_text().splitlines()),
    }


def run_folder() -> Path:
    """Return where phosd's socket is, and all that it keeps beside."""
    return Path(os.environ.get("PHOS_SOCKET", "/run/phos/phosd.sock")).parent


def keeper_pid() -> int:
    """Return the keeper's pid: phosd's child, unless it has outlived the phosd that started it."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_text(errors="replace").split("\0")
            if any(word.endswith("/keeper.py") for word in words) and str(run_folder()) in words:
                return int(file.parent.name)
    raise ProcessError("phosd's keeper is not to be found.")


def grown(values: Sequence[float], slack: float = 0.0) -> bool:
    """Say whether all of the last quarter are above all of the second, by more than `slack`."""
    quarter = len(values) // 4
    return min(values[-quarter:]) > max(values[quarter : 2 * quarter]) + slack


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "soak", "Checkpoints and restores in a row: what grows")
        self.image = Path(chosen.image) / "phos-soak"
        self.wrong: list[str] = []

    # Rounds.

    def checkpoint(self, protocol: str, job: Program) -> dict[str, float]:
        """Make a checkpoint from which the job runs on."""
        return {"stall, s": training.checkpoint(job, self.image, protocol)["stall"]}

    def generation(self, lazily: bool, job: Program) -> dict[str, float]:
        """Dump the job, which kills it, and restore it from that."""
        process.criu_dump(job, self.image)
        job.before_restore()
        options = ["--lazy"] if lazily else []
        seconds, _ = process.command([process.PHOS_GPU, "restore", *options, "--json", str(self.image)], 180)
        return {"restore, s": seconds}

    def one_program(self) -> dict[str, float]:
        """Start a program, and end it."""
        job = self.job("short")
        try:
            job.start()
            training.wait_iterations(job, 1)
        finally:
            job.kill()
        return {}

    def job(self, name: str, *, frontend: bool = True) -> Program:
        """Return the training, not started."""
        options = ["--bytes", str(int(self.chosen.gigabytes * GB)), "--micro-batches", "1"]
        if self.chosen.device != "software":
            options += ["--attention", "written-out", "--dropout", "0.1"]
        return training.training_program(self.chosen.work, self.chosen.device, options, frontend=frontend, name=name)

    # What is counted.

    def quiet(self) -> None:
        """Wait until phosd has no job and none of the programs that have ended."""

        def idle() -> bool:
            said = process.status()
            alive = all(Path(f"/proc/{entry['pid']}").exists() for entry in said["processes"])
            return alive and all(job["state"] in OVER for job in said["jobs"])

        process.wait_until(idle, QUIET_SECONDS, "phosd to be idle")

    def sample(self, job: Program | None) -> dict[str, float]:
        """Count what could grow."""
        self.quiet()
        daemon = process.daemon_pid()
        counted: dict[str, float] = {}
        of = {"phosd": daemon, "keeper": keeper_pid()} | ({"program": job.pid} if job else {})
        for name, pid in of.items():
            counted |= {f"{name}: {what}": value for what, value in figures(pid).items()}
        if job:
            counted["image: MB"] = process.folder_size(self.image) / 1e6
        counted["files of phosd"] = sum(1 for _ in run_folder().rglob("*"))
        return counted

    # All of it.

    def kind(self, kind: str) -> None:
        """Make the rounds of one kind."""
        chosen = self.chosen
        rounds: dict[str, Callable[[Program], dict[str, float]]] = {
            "cow": lambda job: self.checkpoint("cow", job),
            "stop": lambda job: self.checkpoint("stop", job),
            "restore": lambda job: self.generation(False, job),
            "lazy": lambda job: self.generation(True, job),
        }
        job = self.job(kind)
        rows: list[dict[str, float]] = []
        end = time.monotonic() + min(chosen.seconds, harness.time_left(chosen))
        try:
            if kind in rounds:
                job.start()
                job.wait_for("^READY", 300)
            for number in range(1, chosen.rounds + 1):
                if time.monotonic() > end:
                    self.results.note(f"{kind}: {number - 1} rounds, then the time was up.")
                    break
                shutil.rmtree(self.image, ignore_errors=True)
                self.image.mkdir(parents=True)
                began = time.monotonic()
                if kind in rounds:
                    row = rounds[kind](job)
                    seconds = time.monotonic() - began
                    training.wait_iterations(job, 1)
                else:
                    row = self.one_program()
                    seconds = time.monotonic() - began
                row |= {"round, s": seconds} | self.sample(job if kind in rounds else None)
                rows.append(row)
                with open(self.chosen.work / f"{kind}.rounds", "a") as file:
                    print(json.dumps(row), file=file)
            if kind in rounds:
                mine = [line for line in job.lines() if line.startswith("ITERATION ")]
                job.kill()
                self.compare(kind, mine)
        finally:
            job.kill()
            shutil.rmtree(self.image, ignore_errors=True)
        self.judge(kind, rows)

    def compare(self, kind: str, mine: Sequence[str]) -> None:
        """Let the same training compute as far, without anything of ours."""
        alone = self.job("alone", frontend=False).start()
        try:
            last = mine[-1].split()[1]
            alone.wait_for(f"^ITERATION {last} ", max(30.0, harness.time_left(self.chosen)))
            theirs = [line for line in alone.lines() if line.startswith("ITERATION ")][: len(mine)]
        finally:
            alone.kill()
        if mine != theirs:
            self.found(f"{kind}: the job did not compute what the training left alone computed.")

    def found(self, what: str) -> None:
        """Note what must not be."""
        self.wrong.append(what)
        self.results.note(what)

    def judge(self, kind: str, rows: Sequence[dict[str, float]]) -> None:
        """Note what has grown."""
        for what in rows[0] if rows else ():
            values = [row[what] for row in rows]
            quarter = max(1, len(values) // 4)
            early, late = values[quarter : 2 * quarter] or values, values[-quarter:]
            slack = SLACK.get(what.split()[-1], 0.0)
            judged = not what.endswith(", s") and len(values) >= GROWTH_ROUNDS
            more = judged and grown(values, slack)
            if more:
                self.found(f"{kind}: {what} grew: {max(early):g}, {min(late):g}.")
            self.results.add(
                f"{kind}, {what}",
                rounds=len(rows),
                second_quarter=harness.median(early),
                last_quarter=harness.median(late),
                grew=("yes" if more else "no") if judged else "not judged",
            )


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=3600)
    parser.add_argument("--kinds", type=harness.words, default=list(KINDS), metavar="LIST", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each kind (100)")
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="for each kind at most (%(default)s)")
    parser.add_argument("--gigabytes", type=float, metavar="GB", help="of buffers (8; on the software GPU 0.004)")
    harness.add_image_option(parser)
    chosen = harness.prepare(parser)
    harness.refuse_unknown(parser, chosen.kinds, KINDS)
    chosen.rounds = chosen.rounds or (1 if chosen.smoke else 100)
    chosen.gigabytes = chosen.gigabytes or (0.004 if chosen.device == "software" else 8.0)
    bench = Bench(chosen)
    harness.measure_each(chosen, bench.results, chosen.kinds, bench.kind)
    sys.exit(bool(bench.wrong))


if __name__ == "__main__":
    main()
