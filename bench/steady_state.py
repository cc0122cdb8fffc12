#!/usr/bin/env python3
"""What the frontend costs while nobody takes a checkpoint.

Two processes are there at the same time, one without and one with the frontend. They compute in turns, a fraction of
a second each, while the other one waits; what counts is the median over the pairs. Launch-bound: a C program that
launches empty kernels and does nothing else, so this is the dearest a launch can look. Allocation: cuMemAlloc and
cuMemFree from 512 bytes to 1 GiB, one at a time and with many alive at once. Training: the PyTorch example, small
enough to be bound by launches, and as a CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
import turns
from harness import Results

SIZES = (512, 4096, 65536, 1 << 20, 2 << 20, 16 << 20, 128 << 20, 1 << 30)
PARTS = ("launches", "memory", "training")


class Figure(NamedTuple):
    """One number of an answer."""

    key: str
    unit: str
    scale: float = 1.0
    """What the number is multiplied with to be in that unit."""


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
        self.rounds = chosen.repeats or (2 if chosen.smoke else 20)
        self.program = chosen.work / "launch_rate"
        source = process.PROGRAMS / "launch_rate.c"
        process.command(["gcc", "-O2", "-std=gnu11", "-o", str(self.program), str(source), "-ldl"], 60)

    def add(self, figure: Figure, starts: Sequence[Sequence[tuple[float, float]]]) -> None:
        """Store what was measured in pairs (without, with the frontend), a list for each start of the processes."""
        without, with_ = ([figure.scale * pair[side] for start in starts for pair in start] for side in (0, 1))
        compared = harness.paired_percent(without, with_)
        self.results.add(
            figure.key,
            unit=figure.unit,
            without=harness.median(without),
            with_frontend=harness.median(with_),
            percent=compared.percent,
            median_from=compared.low,
            median_to=compared.high,
            spread_percent=compared.spread,
            pairs=len(without),
            percent_by_start=[harness.paired_percent(*zip(*start, strict=True)).percent for start in starts],
            each=[without, with_],
        )

    def in_turns(
        self,
        command: Sequence[str],
        questions: Mapping[str, Sequence[Figure]],
        more: int = 1,
        *,
        one_processor: bool = False,
    ) -> None:
        """Measure a program that answers questions with numbers, each of which is a figure.

        ``more``: so many times as many rounds. ``one_processor``: see `turns.Pair`.
        """
        chosen = self.chosen
        asked = list(questions)
        measured: dict[Figure, list[list[tuple[float, float]]]] = {
            figure: [] for figures in questions.values() for figure in figures
        }
        for start in range(1, chosen.starts + 1):
            began = time.monotonic()
            with turns.Pair(command, chosen.device, chosen.work, one_processor=one_processor) as pair:
                pair.round(asked, 0)  # warms up
                process.settle(pair.pid, min(chosen.settle, max(0.0, harness.time_left(chosen))))
                rounds = pair.rounds(asked, more * self.rounds, lambda: harness.time_left(chosen) > 0)
            for index, figures in enumerate(questions.values()):
                for column, figure in enumerate(figures):
                    answers = [answered[index] for answered in rounds]
                    measured[figure].append([(without[column], with_[column]) for without, with_ in answers])
            for figure, starts in measured.items():
                self.add(figure, starts)
            if start < chosen.starts and harness.time_left(chosen) < time.monotonic() - began:
                name = Path(command[-1]).name
                self.results.note(f"{name}: started {start} times instead of {chosen.starts}, no time left.")
                break

    def launches(self) -> None:
        """Measure launches, in turns and within one process.

        Processes differ from each other by more than what is looked for. So in a process under the frontend launches
        through it take turns with launches by the driver's own function.
        """
        chosen = self.chosen
        count = 50 if chosen.smoke else 5000
        figures = [Figure("launch, submission", "ns"), Figure("launch, until done", "ns")]
        self.in_turns([str(self.program)], {f"launch {count}": figures})
        errors = chosen.work / "both.stderr"
        with turns.Answering([str(self.program)], chosen.device, errors, frontend=True) as program:
            program.ready()
            answers = [program.ask(f"both {count}") for _ in range((3 if chosen.smoke else 400) + 2)][2:]
        for figure, through, own in zip(figures, (0, 2), (1, 3), strict=True):
            pairs = [(answer[own], answer[through]) for answer in answers]
            self.add(figure._replace(key=f"{figure.key}, in one process"), [pairs])

    def memory(self) -> None:
        """Measure cuMemAlloc and cuMemFree in launch_rate's two ways."""
        smoke = self.chosen.smoke
        sizes = SIZES[:4] if smoke else SIZES
        # Of what it was given back the frontend keeps what came last, less than 2 % of the GPU's memory. So if the
        # largest size ends a turn, nearly all of the next one's many are fresh.
        ways = {("memory 5" if smoke else "memory 50"): "", ("many 16" if smoke else "many 16384"): ", many"}
        self.in_turns(
            [str(self.program)],
            {
                " ".join([way, *map(str, sizes)]): [
                    Figure(f"{call} {size_text(size)}{remark}", "µs", 0.001)
                    for size in sizes
                    for call in ("cuMemAlloc", "cuMemFree")
                ]
                for way, remark in ways.items()
            },
        )

    def training(self) -> None:
        """Measure training steps, all models in the same processes: starting PyTorch takes the most time.

        In turns, and within one process that goes past the frontend and through it (programs/bypass.py): two processes
        differ from each other by percents for as long as they live, with or without a frontend.
        """
        chosen = self.chosen
        program = process.python_program(process.PROGRAMS / ("train_small.py" if chosen.smoke else "train_rate.py"))
        figures = {
            task: Figure(f"training step, {name}", "ms")
            for task, name in (
                ("conv", "conv net"),
                ("transformer", "transformer"),
                ("graph", "transformer as a CUDA graph"),
            )
        }
        few, many = (
            ({"conv": 2, "transformer": 2, "graph": 2},) * 2
            if chosen.smoke
            else (
                {"conv": 4, "transformer": 4, "graph": 16},  # steps a turn; those of a graph are short
                {"conv": 10, "transformer": 10, "graph": 40},
            )
        )
        errors = chosen.work / "both.stderr"
        with turns.Answering(program, chosen.device, errors, frontend=True, processor=turns.the_processor()) as both:
            both.ready()
            for task in figures:
                both.ask(f"both {task} {few[task]}")  # warms up
            process.settle(both.pid, min(chosen.settle, max(0.0, harness.time_left(chosen))))
            answers: dict[str, list[tuple[float, float]]] = {task: [] for task in figures}
            for _ in range(30 * self.rounds):
                for task, pairs in answers.items():
                    past, through = both.ask(f"both {task} {few[task]}")
                    pairs.append((past, through))
                if harness.time_left(chosen) < chosen.budget / 4:
                    break
        for task, figure in figures.items():
            self.add(figure._replace(key=f"{figure.key}, in one process"), [answers[task]])
        # Short turns, and many: a virtual machine is faster and slower for seconds at a time. Nor are its processors
        # alike, and which threads meet on one is chance.
        questions = {f"{task} {many[task]}": [figure] for task, figure in figures.items()}
        self.in_turns(program, questions, 1 if chosen.smoke else 4, one_processor=True)

    def run(self) -> None:
        """Measure what was asked for, the most telling first."""
        parts = {"launches": self.launches, "memory": self.memory, "training": self.training}
        harness.measure_each(self.chosen, self.results, self.chosen.only, lambda part: parts[part](), self.tables)

    def tables(self) -> list[str]:
        """Return all rows as a table."""
        columns = ["key", "unit", "without", "with_frontend", "percent", "median_from", "median_to"]
        columns += ["percent_by_start", "spread_percent", "pairs"]
        names = [
            "",
            "unit",
            "without",
            "with the frontend",
            "% more",
            "95 %: from",
            "to",
            "by start",
            "one pair ± %",
            "pairs",
        ]
        rows = [[row[name] for name in columns] for row in self.results.rows.values()]
        shown = [[", ".join(map(harness.show, c)) if isinstance(c, list) else c for c in row] for row in rows]
        return [harness.table(names, shown)]


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=400)
    parser.add_argument("--only", type=harness.words, default=PARTS, metavar="P,...", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--starts", type=int, metavar="N", help="how often the two processes are started (3)")
    harness.add_settle_option(parser)
    chosen = harness.prepare(parser)
    harness.refuse_unknown(parser, chosen.only, PARTS)
    chosen.starts = chosen.starts or (2 if chosen.smoke else 3)
    Bench(chosen).run()


if __name__ == "__main__":
    main()
