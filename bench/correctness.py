#!/usr/bin/env python3
"""Training that is dumped, killed and restored at random moments prints the very losses of training left alone.

The uninterrupted run is made first and without the frontend: so the frontend itself must not change a bit either.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results
from process import ProcessError, Program


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(
            chosen, "correctness", "Training interrupted by dump, kill and restore at random moments"
        )
        self.random = random.Random(chosen.seed)
        if chosen.smoke:
            self.variants = {"mlp": process.python_program(process.EXAMPLES / "mlp.py", "--iterations", "40")}
        else:
            train = str(process.EXAMPLES / "pytorch_train.py")
            common = ["--iterations", "300"]
            self.variants = {
                "conv net, AdamW": process.python_program(Path(train), "--model", "conv", *common),
                "transformer, dropout, bfloat16, CUDA graph": process.python_program(
                    Path(train), "--model", "transformer", "--graph", *common
                ),
                "transformer, dropout, bfloat16": process.python_program(
                    Path(train), "--model", "transformer", *common
                ),
            }
        self.wanted: dict[str, list[str]] = {}

    def program(self, variant: str, until: Path | None) -> Program:
        """Make one of the programs. Until there is the file it is slow and does not end: there is something to hit."""
        command = [*self.variants[variant]]
        if until:
            command += ["--iteration-seconds", "0.06" if self.chosen.smoke else "0.005", "--until", str(until)]
        name = "train" if until else "alone"
        return Program(command, self.chosen.work, self.chosen.device, bool(until), name=name)

    def reference(self, variant: str) -> list[str]:
        """Return the lines of the uninterrupted run, made when first asked for."""
        if variant not in self.wanted:
            self.wanted[variant] = self.program(variant, None).start().finish()
        return self.wanted[variant]

    def interrupted(self, number: int, variant: str) -> None:
        """Run once, interrupted at a random moment, and store whether all lines are the same."""
        wanted = self.reference(variant)
        iterations = sum(line.startswith("ITERATION") for line in wanted)
        at = self.random.randrange(1, iterations * 3 // 4)
        delay = self.random.uniform(0, 0.02)  # anywhere inside an iteration
        folder = self.chosen.image / f"phos-correctness-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        restored = self.chosen.work / "restored"
        restored.unlink(missing_ok=True)
        program = self.program(variant, restored).start()
        error = ""
        lines: list[str] = []
        dump = restore = 0.0
        try:
            program.wait_for(f"^ITERATION {at} ")
            time.sleep(delay)
            dump = process.criu_dump(program, folder)
            _, restore = process.criu_restore(program, folder)
            restored.touch()
            lines = program.finish()
        except ProcessError as failure:
            error = str(failure)
            print(error, file=sys.stderr, flush=True)
        finally:
            program.kill()
            shutil.rmtree(folder, ignore_errors=True)
        # An iteration that was interrupted between computing and printing may be printed twice; it must be the same.
        same = not error and [line for index, line in enumerate(lines) if line not in lines[:index]] == wanted
        self.results.add(
            f"run {number}",
            run=number,
            program=variant,
            iteration=at,
            identical=same,
            dump_s=dump,
            restore_s=restore,
            error=error[:300].replace("\n", " ").replace("|", "/"),
        )

    def run(self) -> None:
        """Interrupt as often as asked, program after program in turn."""
        count = self.chosen.repeats or (2 if self.chosen.smoke else 20)
        names = list(self.variants)
        for number in range(1, count + 1):
            if f"run {number}" in self.results.rows:
                continue  # an earlier call of the same day and commit: this one goes on from there, whatever came of it
            if harness.time_left(self.chosen) <= 0:
                self.results.note(f"Runs {number} to {count}: no time left; call again to go on.")
                break
            self.interrupted(number, names[(number - 1) % len(names)])
        rows = list(self.results.rows.values())
        identical = sum(row["identical"] for row in rows)
        self.results.summary["bit-identical"] = f"{identical} of {len(rows)} runs"
        self.results.finish()
        if identical < len(rows):
            raise SystemExit(1)


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "")
    parser.add_argument("--seed", type=int, default=20, help="of the random moments (%(default)s)")
    harness.add_image_option(parser)
    Bench(harness.prepare(parser)).run()


if __name__ == "__main__":
    main()
