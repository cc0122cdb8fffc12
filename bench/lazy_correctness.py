#!/usr/bin/env python3
"""Lazy restores one after another, at random moments: the program must say what one says that nothing interrupts.

A decoder answers requests without a pause. Again and again it is dumped in the middle of a token, killed, and restored
lazily: strictly or fast, in the recorded order, that of allocation, or a random one. Some of the restores are
interrupted by the next checkpoint, which is asked for while memory is still being loaded. All this happens to one
program: what is wrong once stays wrong. Beside it, on the same GPU, the same program answers the same requests without
the frontend and without interruption; every answer must be the same, token by token.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
import restore_runs
from harness import GB, Results
from process import ProcessError, Program
from restore_runs import Answer, Server

AHEAD = 24  # requests that are there beyond those answered
ANSWERS_AFTER = 2  # of them the first was begun before the dump, the last after the restore
MORE = 5  # restores beyond those asked for, if too few checkpoints came while data was loading
SECONDS_EACH = 6.0  # kept free for what is still to be done when time runs out
WAITED_SECONDS = 0.05  # how late a checkpoint begins at most that waited for the last byte
ORDERS = ("recorded", "random", "allocation")
WORKER_BYTES = 8 << 20  # of phosd's pinned ring, for each of those that copy


def answers(lines: Sequence[str]) -> list[Answer]:
    """Return the answers that a program's lines hold."""
    return [Answer.parse(line) for line in lines if line.startswith("ANSWER ")]


def moment(lines: Sequence[str]) -> str:
    """Return where a program was when it wrote its last line: request, token, layer."""
    last = next((line for line in reversed(lines) if line.startswith(("LAYER ", "ANSWER "))), "")
    words = last.split()
    if not words:
        return ""
    return f"{words[1]}/{words[2]}/{words[3]}" if words[0] == "LAYER" else f"{words[1]}/end"


def spans(job: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """Return when a phase of one of phosd's jobs began and ended, since 1970; None if it had none."""
    for phase in job.get("phases", []):
        if phase["name"] == name:
            begin = job["since"] + phase["start"]
            return begin, begin + phase["seconds"]
    return None


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "lazy-correctness", "Lazy restores of a program, one after another")
        self.random = random.Random(chosen.seed)
        self.count = chosen.count or (2 if chosen.smoke else 50)
        self.interrupted = min(self.count, chosen.interrupted or (1 if chosen.smoke else 10))
        size = int(chosen.gigabytes * GB)
        # The software GPU's decoder is so fast that it would wait for requests most of the time.
        options = ["--token-seconds", "0.02"] if chosen.smoke else []
        self.job = Server(chosen, size, name="job", options=["--log-layers", *options])
        self.alone = Server(chosen, size, name="alone", frontend=False)
        self.alone.share(self.job)
        self.asked = 0
        self.images = [restore_runs.image_folder(chosen, f"lazy-{number}") for number in range(2)]
        self.failures: list[str] = []

    # The program.

    def ahead(self) -> None:
        """Let there be requests that are not answered yet."""
        answered = len(answers(self.program.lines()))
        while self.asked < answered + AHEAD:
            self.job.ask(self.asked)
            self.asked += 1

    @property
    def program(self) -> Program:
        """The one that is restored."""
        return self.job.program

    def wait_answers(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        before = len(answers(self.program.lines()))
        process.wait_until(
            lambda: len(answers(self.program.lines())) >= before + more or not self.program.alive(),
            120,
            "the restored program to answer",
        )
        if len(answers(self.program.lines())) < before + more:
            raise ProcessError(f"The restored program ended.{self.program._tail()}")

    def wait_line(self, lines: int) -> None:
        """Wait until the program has computed and said so, after so many lines."""
        process.wait_until(
            lambda: len(self.program.lines()) > lines or not self.program.alive(), 60, "the program to compute"
        )

    # Dumps and restores.

    def dump(self, folder: Path) -> float:
        """Dump and kill; returns when it was asked for, since 1970."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.time()
        process.criu_dump(self.program, folder)
        return began

    def settings(self, number: int) -> dict[str, str]:
        """Return how restore `number` is to be made."""
        return {"PHOS_LAZY": ("strict", "fast")[number % 2], "PHOS_PREFETCH": ORDERS[number % len(ORDERS)]}

    def restore(self, number: int, folder: Path) -> dict[str, Any]:
        """Restore lazily, CPU memory too, and let the program answer."""
        self.program.before_restore()
        settings = self.settings(number)
        words = [process.PHOS_GPU, "restore", "--lazy", "--json", str(folder)]
        seconds, _ = process.command(words, 180, {**os.environ, **settings})
        self.wait_answers(ANSWERS_AFTER)
        return self.row(folder, settings) | {"seconds": seconds}

    def restore_interrupted(self, number: int, folder: Path, other: Path) -> dict[str, Any]:
        """Restore lazily; as soon as the program computes, ask for the next checkpoint. Its image is in `other`."""
        self.program.before_restore()
        settings = self.settings(number)
        lines = len(self.program.lines())
        words = [process.CRIU, "restore", "-d", "--lib", "phos", "-D", str(folder), "-o", "restore.log", "-v2"]
        environment = {**os.environ, **settings, "PHOS_RESTORE": "lazy"}
        with open(self.chosen.work / "restore.output", "wb") as output:
            began = time.monotonic()
            child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, close_fds=True
            )
        try:
            process.wait_until(lambda: self.program.alive() or child.poll() is not None, 60, "CRIU to restore")
            self.wait_line(lines)
            asked = self.dump(other)
            child.wait(60)
        except subprocess.TimeoutExpired as expired:
            raise ProcessError("`criu restore` did not return once all memory was there.") from expired
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode != 0:
            said = (self.chosen.work / "restore.output").read_text(errors="replace")[-2000:]
            raise ProcessError(
                f"`{' '.join(words)}` failed with status {child.returncode}:\n{said}\n"
                f"{process.log_errors(folder, 'restore.log')}"
            )
        row = self.row(folder, settings) | {"seconds": time.monotonic() - began}
        job = restore_runs.restore_job(folder)
        data, ended = spans(job, "GPU data"), spans(job, "end windows")
        dumps = [job for job in process.status()["jobs"] if job["image"] == str(other.resolve())]
        if data and ended and dumps:
            # phosd begins a checkpoint that had to wait as soon as all memory is there and the windows have ended.
            row["interrupted"] = asked < ended[1] and dumps[-1]["since"] < ended[1] + WAITED_SECONDS
            row["asked_before_last_byte_s"] = data[1] - asked
        return row

    def row(self, folder: Path, settings: Mapping[str, str]) -> dict[str, Any]:
        """Return what phosd says of the restore."""
        job = restore_runs.restore_job(folder)
        window = job.get("window") or {}
        return {
            "strict": settings["PHOS_LAZY"] == "strict",
            "order": settings["PHOS_PREFETCH"],
            "mode": job.get("mode", ""),
            "waits": window.get("waits", 0) + window.get("anything", 0),
            "waited_s": window.get("wait_ns", 0) / 1e9,
            "on_demand_gb": window.get("on_demand_bytes", 0) / GB,
            "interrupted": False,
        }

    # All of it.

    def series(self) -> None:
        """Dump and restore, again and again."""
        chosen = self.chosen
        every = max(2, self.count // max(1, self.interrupted))
        current, other = self.images
        dumped = False  # by the restore before it
        interruptions = number = 0
        while number < self.count or (interruptions < self.interrupted and number < self.count + MORE):
            if harness.time_left(chosen) < SECONDS_EACH * (0 if chosen.smoke else 2):
                self.results.note(f"Restores from number {number + 1} on: no time left.")
                break
            number += 1
            self.ahead()
            if not dumped:
                done = answers(self.program.lines())[-ANSWERS_AFTER:]
                time.sleep(self.random.uniform(0, 2 * max(answer.last - answer.received for answer in done)))
                self.dump(current)
            at = moment(self.program.lines())
            # A checkpoint that did not come in time is tried again.
            missing = self.interrupted - interruptions
            wanted = missing > 0 and (number % every == 1 or self.count - number < missing)
            if wanted:
                row = self.restore_interrupted(number, current, other)
                current, other, dumped = other, current, True
                interruptions += row["interrupted"]
            else:
                row = self.restore(number, current)
                dumped = False
            self.results.add(f"restore {number}", restore=number, **row, dumped_at=at, asked_to_interrupt=wanted)
        if dumped:  # the last one answers in peace
            self.ahead()
            at = moment(self.program.lines())
            row = self.restore(number + 1, current)
            self.results.add(f"restore {number + 1}", restore=number + 1, **row, dumped_at=at, asked_to_interrupt=False)

    def run(self) -> None:
        """Start both programs, interrupt one, compare."""
        chosen, results = self.chosen, self.results
        results.begin_anew()  # in a row means: of one program
        restore_runs.prepare_machine(chosen, results, int(2 * chosen.gigabytes * GB))
        self.job.prepare()
        try:
            self.ahead()
            self.program.start()
            self.alone.program.start()
            self.program.wait_for("^READY", 300)
            self.wait_answers(ANSWERS_AFTER)
            try:
                self.series()
            except ProcessError as error:
                print(error, file=sys.stderr, flush=True)
                self.failures.append(str(error).splitlines()[0])
                results.note(f"After {len(results.rows)} restores: {self.failures[0]}")
            self.program.kill()
            self.compare()
        finally:
            self.program.kill()
            self.alone.program.kill()
            for folder in self.images:
                shutil.rmtree(folder, ignore_errors=True)
        process.stop_daemon()
        good = self.summarise()
        results.finish()
        if not good:
            raise SystemExit(1)

    def compare(self) -> None:
        """Compare every answer with that of the program left alone."""
        mine = answers(self.program.lines())
        last = max((answer.number for answer in mine), default=0)
        limit = max(10.0, min(90.0, harness.time_left(self.chosen)))
        try:
            self.alone.program.wait_for(f"^ANSWER {last} ", limit)
        except ProcessError as error:
            print(error, file=sys.stderr, flush=True)
        theirs = {answer.number: answer.tokens for answer in answers(self.alone.program.lines())}
        both = [answer for answer in mine if answer.number in theirs]
        different = [answer.number for answer in both if answer.tokens != theirs[answer.number]]
        summary = self.results.summary
        summary["answers"] = len(mine)
        summary["each request answered once, in order"] = [answer.number for answer in mine] == list(range(len(mine)))
        summary["compared with the program left alone"] = len(both)
        summary["of them different"] = len(different)
        summary["tokens compared"] = sum(len(answer.tokens) for answer in both)
        if different:
            self.results.note(f"The first request that was answered differently: {different[0]}.")

    def summarise(self) -> bool:
        """Work out the figures; return whether all is as it must be."""
        rows, summary = list(self.results.rows.values()), self.results.summary
        interrupted = sum(row["interrupted"] for row in rows)
        summary["restores"] = len(rows)
        summary["lazy, and no guess wrong"] = sum(row["mode"] == "lazy" for row in rows)
        summary["interrupted by the next checkpoint while data was loading"] = f"{interrupted} of {self.interrupted}"
        summary["restores in which calls waited"] = sum(row["waits"] > 0 for row in rows)
        summary["seconds that calls waited, in all"] = sum(row["waited_s"] for row in rows)
        whole = summary.get("compared with the program left alone", 0) == summary.get("answers") != 0
        same = summary.get("of them different") == 0 and summary.get("each request answered once, in order", False)
        lazy = all(row["mode"] == "lazy" for row in rows)
        enough = interrupted >= self.interrupted or len(rows) < self.count
        if not enough:
            self.results.note("Too few checkpoints came while data was loading: choose a larger --gigabytes.")
        return bool(rows) and not self.failures and whole and bool(same) and lazy and enough


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=400)
    parser.add_argument("--count", type=int, metavar="N", help="restores (50)")
    parser.add_argument(
        "--interrupted", type=int, metavar="N", help="restores that the next checkpoint interrupts (10)"
    )
    parser.add_argument(
        "--gigabytes",
        type=float,
        metavar="GB",
        help="of the weights (12); with less, all may be there before the program computes",
    )
    parser.add_argument("--seed", type=int, default=50, help="of the random moments (%(default)s)")
    restore_runs.add_options(parser)
    chosen = harness.prepare(parser)
    if chosen.smoke:
        os.environ.setdefault("SOFTGPU_COPY_BANDWIDTH", str(24 << 20))
    restore_runs.settle_options(chosen, tokens=8)
    chosen.gigabytes = chosen.gigabytes or (0.064 if chosen.smoke else 12.0)
    # Few workers: else all memory is there before the driver has its context back, and no call has to wait for any.
    os.environ.setdefault("PHOS_RING_BYTES", str(2 * WORKER_BYTES))
    Bench(chosen).run()


if __name__ == "__main__":
    main()
