#!/usr/bin/env python3
"""What the frontend costs while nobody takes a checkpoint.

Each measurement is a pair of processes, one without and one with the frontend, one right after the other and in turns
first; what counts is the median over the pairs. Launch-bound: a C program that launches empty kernels and does nothing
else, so this is the dearest a launch can look. Allocation: cuMemAlloc and cuMemFree from 512 bytes to 1 GiB, one at a
time and with many alive at once. Training: the PyTorch example, small enough to be bound by launches, and as a CUDA
graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results

SIZES = (512, 4096, 65536, 1 << 20, 2 << 20, 16 << 20, 128 << 20, 1 << 30)


def size_text(size: int) -> str:
    """Return a power of two as 512 B, 4 KiB, 1 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "steady-state", "The cost of the frontend while no checkpoint is taken")
        self.pairs = chosen.repeats or (1 if chosen.smoke else 9)
        self.program = chosen.work / "launch_rate"
        source = process.PROGRAMS / "launch_rate.c"
        process.command(["gcc", "-O2", "-std=gnu11", "-o", str(self.program), str(source), "-ldl"], 60)

    def output(self, command: Sequence[str], *, frontend: bool) -> str:
        """Run a program to its end, with or without the frontend; return what it printed."""
        chosen = self.chosen
        if frontend:
            command = [process.PHOS_GPU, "run", "--device", chosen.device, "--", *command]
        environment = None if frontend else process.device_environment(chosen.device)
        return process.command(command, 300, environment)[1]

    def pair(self, command: Sequence[str], number: int) -> tuple[str, str]:
        """Run a program without and with the frontend; which goes first alternates."""
        order = (False, True) if number % 2 == 0 else (True, False)
        outputs = {frontend: self.output(command, frontend=frontend) for frontend in order}
        return outputs[False], outputs[True]

    def add(self, key: str, unit: str, without: Sequence[float], with_: Sequence[float]) -> None:
        """Store what was measured in pairs."""
        percent, spread = harness.paired_percent(without, with_)
        self.results.add(
            key,
            what=key,
            unit=unit,
            without=harness.median(without),
            with_frontend=harness.median(with_),
            percent=percent,
            spread_percent=spread,
            pairs=len(without),
            each=[without, with_],
        )

    def rate(self, key: str, unit: str, command: Sequence[str], pairs: int) -> None:
        """Measure a program that prints one number a batch; a process counts with its median batch."""
        without: list[float] = []
        with_: list[float] = []
        for number in range(pairs):
            if number and harness.time_left(self.chosen) <= 0:
                break
            for values, output in zip((without, with_), self.pair(command, number), strict=True):
                values.append(harness.median(float(line) for line in output.split()))
        self.add(key, unit, without, with_)

    def in_one_process(self, batches: str, launches: str) -> None:
        """Compare launches through the frontend with those by the driver's own function, batch by batch.

        Processes differ from each other by more than what is looked for.
        """
        output = self.output([str(self.program), "both", batches, launches], frontend=True)
        columns = list(zip(*([float(word) for word in line.split()] for line in output.splitlines()), strict=True))
        for key, through, own in (("submission", 0, 1), ("until done", 2, 3)):
            self.add(f"launch, {key}, in one process", "ns", columns[own], columns[through])

    def memory(self, mode: str, argument: str, remark: str) -> None:
        """Measure cuMemAlloc and cuMemFree in one of launch_rate's two ways."""
        sizes = SIZES[:4] if self.chosen.smoke else SIZES
        command = [str(self.program), mode, argument, *(str(size) for size in sizes)]
        outputs = []
        for number in range(self.pairs):
            if number and harness.time_left(self.chosen) <= 0:
                break
            outputs.append(self.pair(command, number))
        for row, size in enumerate(sizes):
            for column, call in ((1, "cuMemAlloc"), (2, "cuMemFree")):
                without = [float(pair[0].splitlines()[row].split()[column]) / 1000 for pair in outputs]
                with_ = [float(pair[1].splitlines()[row].split()[column]) / 1000 for pair in outputs]
                self.add(f"{call} {size_text(size)}{remark}", "µs", without, with_)

    def run(self) -> None:
        """Measure everything, the most telling first."""
        chosen = self.chosen
        batches, launches = ("3", "50") if chosen.smoke else ("40", "5000")
        for kind, key in (("launch", "launch, submission"), ("finish", "launch, until done")):
            self.rate(key, "ns", [str(self.program), kind, batches, launches], self.pairs)
        self.in_one_process(batches if chosen.smoke else "400", launches)
        if chosen.only_launches:
            self.finish()
            return
        self.memory("memory", "5" if chosen.smoke else "200", "")
        # Alive at once: the frontend cannot answer with what it has just been given back.
        self.memory("many", "16" if chosen.smoke else "16384", ", many")
        if not chosen.smoke:
            script = process.PROGRAMS / "train_rate.py"
            for key, options in (
                ("training step, conv net", ["--model", "conv", "--batch", "16"]),
                ("training step, transformer", ["--model", "transformer", "--batch", "8"]),
                ("training step, transformer as a CUDA graph", ["--model", "transformer", "--batch", "8", "--graph"]),
            ):
                if harness.time_left(chosen) <= 0:
                    self.results.note(f"{key}: no time left.")
                    continue
                self.rate(key, "ms", process.python_program(script, "20", "50", *options), max(1, self.pairs // 3))
        self.finish()

    def finish(self) -> None:
        """Store and show all of it."""
        columns = ["what", "unit", "without", "with_frontend", "percent", "spread_percent", "pairs"]
        rows = [[row[name] for name in columns] for row in self.results.rows.values()]
        names = ["", "unit", "without", "with the frontend", "% more", "± %", "pairs"]
        self.results.finish([harness.table(names, rows)])


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=400)
    parser.add_argument("--only-launches", action="store_true", help="neither allocations nor training")
    Bench(harness.prepare(parser)).run()


if __name__ == "__main__":
    main()
