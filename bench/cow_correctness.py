#!/usr/bin/env python3
"""Concurrent checkpoints of a running training job, many in a row: every image must be the state of its one moment.

Each image is compared with the truth in several ways. phosd's: the content hashes of all GPU memory while the processes
stood still. The program's own: after each iteration it prints a checksum of all parameters and both moments, which must
be that of the same bytes in the image; an image that was taken in the middle of an update, which is of no iteration, is
restored instead. Some images are restored: from there on every line must be as the job went on. And the job itself must
print what the same training prints that is never checkpointed, without the frontend, beside it on the same GPU.

The images go to a disk: what memory takes in while the driver's own part stops the processes would leave nothing to be
copied beside the computing program, and nothing to be proven.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import harness
import machine
import process
import training
from harness import GB, Results
from process import ProcessError, Program
from training_log import combine  # of examples

RESTORE_SECONDS = 4.0  # kept free for each image that is to be restored
MOST_KEPT = 8  # images taken in the middle of an update that are kept to be restored
RUN_ON = 5  # iterations after a restore
SLICE = 8 << 20  # words


def numbered(lines: Sequence[str]) -> dict[int, str]:
    """Return the ITERATION lines by number; of a number that came twice, the first."""
    found: dict[int, str] = {}
    for line in lines:
        if line.startswith("ITERATION "):
            found.setdefault(int(line.split()[1]), line)
    return found


def checksum(path: Path, lengths: Sequence[int]) -> int:
    """Return the checksum of tensors that lie one after the other in a file: see training_log.combine."""
    try:
        import torch
    except ImportError:
        sums, data = [], path.read_bytes()
        at = 0
        for length in lengths:
            words = array("i", data[at : at + length])
            sums.append(sum(word * (2 * index + 1) for index, word in enumerate(words)))
            at += length
        return combine(sums)
    everything = torch.from_file(str(path), shared=False, size=sum(lengths) // 4, dtype=torch.int32)
    odd = torch.arange(1, 2 * SLICE + 1, 2, dtype=torch.int64)
    sums, at = [], 0
    for length in lengths:
        total, words = 0, everything[at // 4 : (at + length) // 4]
        for first in range(0, words.numel(), SLICE):
            piece = words[first : first + SLICE].to(torch.int64)
            # The sum of word * (2 * (first + i) + 1), in numbers of 64 bits that may run over.
            total += int((piece * odd[: piece.numel()]).sum()) + 2 * first * int(piece.sum())
        sums.append(total)
        at += length
    return combine(sums)


@dataclass
class Taken:
    """One image and what is known of it."""

    number: int
    image: Path
    before: int  # the last iteration that had ended when the checkpoint was asked for
    errors_size: int  # of the program's stderr, as CRIU remembers it
    row: dict[str, Any] = field(default_factory=dict)
    sum: int | None = None
    problem: str = ""


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "cow-correctness", "Concurrent checkpoints of a training job, one after another")
        self.random = random.Random(chosen.seed)
        self.count = chosen.count or (4 if chosen.smoke else 100)
        self.restores = min(self.count, chosen.restores or (2 if chosen.smoke else 10))
        self.state: list[tuple[int, int]] = []
        self.readers = threading.BoundedSemaphore(2)  # images that are read at a time: they take host memory

    def program(self, *, frontend: bool) -> Program:
        """Return the job, or the same training left alone."""
        chosen = self.chosen
        options = ["--bytes", str(int(chosen.gigabytes * GB)), "--checksum"]
        options += ["--micro-batches", str(chosen.micro_batches)]
        if chosen.device != "software":
            options += ["--attention", "written-out", "--dropout", "0.1"]
        name = "job" if frontend else "alone"
        return training.training_program(chosen.work, chosen.device, options, frontend=frontend, name=name)

    # Taking images.

    def take(self, number: int, job: Program) -> Taken:
        """Make one checkpoint at a random moment of an iteration."""
        training.wait_iterations(job, 1)
        before = max(numbered(job.lines()))
        gaps = training.iterations(job.lines())[-10:]
        time.sleep(self.random.uniform(0, harness.median(step.end - step.begin for step in gaps)))
        image = Path(self.chosen.image) / f"phos-cow-{number}"
        shutil.rmtree(image, ignore_errors=True)
        image.mkdir(parents=True)
        start = time.monotonic()
        said = training.checkpoint(job, image, "cow")
        taken = Taken(number, image, before, job.errors_size)
        taken.row = {"checkpoint": number, "seconds": time.monotonic() - start, "stall_s": said["stall"]}
        return taken

    def read(self, taken: Taken) -> None:
        """Find out what an image says of itself, and the checksum of the training's state in it."""
        output = taken.image.with_suffix(".state")
        listing = taken.image.with_suffix(".list")
        try:
            said = process.inspect(taken.image)
            window = said.get("window") or {}
            taken.row |= {
                "protocol": said["protocol"],
                "validated": bool(said.get("validated", False)),
                "gpu_gb": said["gpu_data"]["total_bytes"] / GB,
                "shadowed": window.get("shadowed", 0),
                "waits": window.get("waits", 0),
                "calls": window.get("calls", 0),
            }
            listing.write_text("".join(f"{address:#x} {length}\n" for address, length in self.state))
            script = process.PROGRAMS / "image_state.py"
            process.command(process.phos_python(script, str(taken.image), str(listing), str(output)), 120)
            taken.sum = checksum(output, [length for _, length in self.state])
        except (ProcessError, OSError, KeyError) as error:
            taken.problem = str(error)
        finally:
            output.unlink(missing_ok=True)
            listing.unlink(missing_ok=True)

    def judge(self, taken: Taken, job: Program) -> None:
        """Compare an image's checksum with those that the program printed around its moment."""
        of = None
        for wait in (0, 1):  # after its update and before its line, the image is a line ahead
            if wait and job.alive():
                training.wait_iterations(job, wait)
            lines = numbered(job.lines())
            printed = {int(line.split()[3], 16): number for number, line in lines.items() if number >= taken.before}
            if taken.sum in printed:
                of = printed[taken.sum]
                break
        taken.row |= {
            "state_of_iteration": of if of is not None else "",
            "state_equal": of is not None,
            "error": taken.problem[:300].replace("\n", " ").replace("|", "/"),
        }

    def series(self, job: Program) -> list[Taken]:
        """Make all checkpoints; each image is read while the next is made. Returns those that are to be restored."""
        chosen = self.chosen
        every = max(1, self.count // self.restores)
        kept: list[Taken] = []
        between = 0
        reading: list[tuple[Taken, threading.Thread]] = []

        def collect(most: int) -> None:
            nonlocal between
            while len(reading) > most:
                taken, thread = reading.pop(0)
                thread.join()
                self.judge(taken, job)
                wanted = taken.number % every == 0 and len(kept) - between < self.restores
                if not taken.row["state_equal"] and not taken.problem and between < MOST_KEPT:
                    between += not wanted
                    wanted = True
                if wanted and not taken.problem:
                    kept.append(taken)
                else:
                    shutil.rmtree(taken.image, ignore_errors=True)
                self.results.add(f"checkpoint {taken.number}", **taken.row)

        for number in range(1, self.count + 1):
            if harness.time_left(chosen) < RESTORE_SECONDS * (self.restores if not chosen.smoke else 1):
                self.results.note(f"Checkpoints {number} to {self.count}: no time left.")
                break
            try:
                taken = self.take(number, job)
            except ProcessError as error:
                print(error, file=sys.stderr, flush=True)
                shutil.rmtree(Path(chosen.image) / f"phos-cow-{number}", ignore_errors=True)
                said = str(error)[:300].replace("\n", " ").replace("|", "/")
                self.results.add(f"checkpoint {number}", checkpoint=number, state_equal=False, error=said)
                if not job.alive():
                    break
                continue
            thread = threading.Thread(target=self.read, args=(taken,))
            thread.start()
            reading.append((taken, thread))
            collect(1)
        collect(0)
        return kept

    # Restoring some.

    def restore(self, taken: Taken, job: Program, wanted: dict[int, str]) -> None:
        """Bring the job back from an image, let it run on, and compare every line."""
        job.errors_size = taken.errors_size
        before = len(job.lines())
        try:
            process.criu_restore(job, taken.image)
            end = time.monotonic() + 60
            while len(numbered(job.lines()[before:])) < RUN_ON and job.alive() and time.monotonic() < end:
                time.sleep(0.01)
            again = [line for line in job.lines()[before:] if line.startswith("ITERATION ")]
            known = [line for line in again if int(line.split()[1]) in wanted]
            first = int(again[0].split()[1])
            same = len(known) >= min(RUN_ON, max(wanted) - first + 1) > 0
            same = same and all(wanted[int(line.split()[1])] == line for line in known)
            same = same and taken.before < first <= taken.before + 1000
            taken.row |= {"restored": True, "went_on_at": first, "compared": len(known), "identical": same}
        except ProcessError as error:
            print(error, file=sys.stderr, flush=True)
            taken.row |= {"restored": True, "identical": False}
            taken.row["error"] = str(error)[:300].replace("\n", " ").replace("|", "/")
        finally:
            job.kill()
            shutil.rmtree(taken.image, ignore_errors=True)
        self.results.add(f"checkpoint {taken.number}", **taken.row)

    # All of it.

    def run(self) -> None:
        """Checkpoint, compare, restore."""
        chosen, results = self.chosen, self.results
        results.begin_anew()  # in a row means: of one job
        if not chosen.smoke:
            machine.touch_memory(chosen.touch_gib << 30)
            machine.enlarge_tmpfs(Path(chosen.image), chosen.touch_gib << 30)
        job, alone = self.program(frontend=True), self.program(frontend=False)
        kept: list[Taken] = []
        try:
            job.start().wait_for("^READY", 300)
            if chosen.reference:
                alone.start()
            for line in job.lines():
                if line.startswith("# STATE "):
                    address, length = line.split()[2:4]
                    self.state.append((int(address, 0), int(length)))
            training.wait_iterations(job, 3)
            kept = self.series(job)
            if job.alive():
                training.wait_iterations(job, RUN_ON + 1)
            job.kill()
            wanted = numbered(job.lines())
            if chosen.reference:
                self.compare_with(alone, wanted)
            for taken in kept:
                if harness.time_left(chosen) <= 0:
                    results.note(f"The image of checkpoint {taken.number}: no time left to restore it.")
                    continue
                self.restore(taken, job, wanted)
        finally:
            job.kill()
            alone.kill()
            for left in Path(chosen.image).glob("phos-cow-[0-9]*"):
                shutil.rmtree(left, ignore_errors=True)
        process.stop_daemon()
        good = self.summarise()
        results.finish()
        if not good:
            raise SystemExit(1)

    def compare_with(self, alone: Program, wanted: dict[int, str]) -> None:
        """Compare the job's lines with those of the training that was left alone, as far as both got."""
        last = max(wanted)
        try:
            alone.wait_for(f"^ITERATION {last} ", max(5.0, min(60.0, harness.time_left(self.chosen) / 3)))
        except ProcessError as error:
            print(error, file=sys.stderr, flush=True)
        lines = numbered(alone.lines())
        alone.kill()
        both = [number for number in wanted if number in lines]
        different = [number for number in both if wanted[number] != lines[number]]
        self.results.summary["iterations compared with training left alone"] = len(both)
        self.results.summary["of them different"] = len(different)

    def summarise(self) -> bool:
        """Work out the figures; return whether all is as it must be."""
        rows, summary = list(self.results.rows.values()), self.results.summary
        restored = [row for row in rows if row.get("restored")]
        proven = [row for row in rows if row["state_equal"] or row.get("identical")]
        cow = [row for row in rows if row.get("protocol") == "cow" and row.get("validated")]
        identical = sum(row["identical"] for row in restored)
        summary["checkpoints"] = len(rows)
        summary["by copy-on-write, every chunk as its hash of t1"] = f"{len(cow)} of {len(rows)}"
        summary["state in the image equal to the program's own checksum"] = (
            f"{sum(row['state_equal'] for row in rows)} of {len(rows)}"
        )
        summary["proven by checksum or by restoring"] = f"{len(proven)} of {len(rows)}"
        summary["restored, and every line identical"] = f"{identical} of {len(restored)}"
        met = sum(bool(row.get("shadowed") or row.get("waits")) for row in rows)
        summary["the program wrote to memory that was not saved yet"] = f"during {met} of {len(rows)}"
        for name in ("seconds", "stall_s", "shadowed", "waits"):
            values = [float(row[name]) for row in rows if row.get(name) is not None]
            summary[f"{name}, median"] = harness.median(values)
            summary[f"{name}, largest"] = max(values, default=0.0)
        different = summary.get("of them different", 0)
        return len(proven) == len(rows) and identical == len(restored) > 0 and different == 0 and met > 0


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=300)
    parser.add_argument("--count", type=int, metavar="N", help="checkpoints (100)")
    parser.add_argument("--restores", type=int, metavar="N", help="images that are restored (10)")
    parser.add_argument("--gigabytes", type=float, metavar="GB", help="GPU memory of the job (2.5)")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="in an iteration (4)")
    parser.add_argument("--no-reference", dest="reference", action="store_false", help="no second training beside it")
    parser.add_argument("--seed", type=int, default=100, help="of the random moments (%(default)s)")
    harness.add_image_option(parser, "/var/tmp")
    parser.add_argument("--touch-gib", type=int, default=24, metavar="N", help="host memory to touch before timing")
    chosen = harness.prepare(parser)
    if chosen.smoke:
        training.slow_copies()
    # Without PyTorch each micro-batch is an update.
    chosen.micro_batches = chosen.micro_batches or (1 if chosen.smoke else 4)
    chosen.gigabytes = chosen.gigabytes or (0.0002 if chosen.smoke else 2.5)
    Bench(chosen).run()


if __name__ == "__main__":
    main()
