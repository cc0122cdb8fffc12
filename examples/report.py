"""What every example program has in common on the outside: its options, the lines it prints, and its chained digest.

A program prints `ITERATION <n> ...` lines and, as its last line, `RESULT <16 hex digits>`: a digest chained over every
iteration, so that a program that was stopped, stored and brought back at any moment must print the very same line.
Lines that begin with `#` describe the machine and are not part of the result. Nothing depends on the time of day.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

MASK_64 = (1 << 64) - 1


def parser(
    description: str, *, iterations: int, size: int | None = None, size_help: str = ""
) -> argparse.ArgumentParser:
    """Return the options that every example has, with this example's default sizes."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--iterations", type=int, default=iterations, metavar="N", help="how many (%(default)s)")
    if size is not None:
        options.add_argument("--size", type=int, default=size, metavar="N", help=f"{size_help} (%(default)s)")
    options.add_argument("--every", type=int, default=1, metavar="K", help="print every K-th iteration (%(default)s)")
    options.add_argument(
        "--iteration-seconds", type=float, default=0.0, metavar="S", help="sleep S seconds after each iteration"
    )
    options.add_argument(
        "--until",
        type=Path,
        metavar="FILE",
        help="sleep only until there is FILE, longer in the second half, and do not end before there is",
    )
    options.add_argument("--report", type=Path, metavar="FILE", help="append the printed lines to FILE as well")
    return options


class Report:
    """Prints a program's lines and chains its digests.

    The file of --report is opened for each line and closed again: between lines the process holds no descriptor of it,
    so an image of the process can be restored after the file has grown.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.chain = 0
        self.iteration = 0

    def line(self, text: str) -> None:
        """Print one line, and append it to the report file if there is one."""
        print(f"{text}\n", end="", flush=True)  # in one piece: another process may write to the same file
        if self.options.report is not None:
            with open(self.options.report, "a", encoding="utf-8") as file:
                file.write(text + "\n")

    def device(self, description: str) -> None:
        """Print which device and which process this is."""
        self.line(f"# {description}, process {os.getpid()}")

    def step(self, digest: int, text: str = "") -> None:
        """End an iteration: chain its digest, print its line if it is its turn, sleep and wait if told to."""
        self.iteration += 1
        self.chain = (self.chain * 0x100000001B3 + digest) & MASK_64
        if self.iteration % self.options.every == 0 or self.iteration == self.options.iterations:
            self.line(f"ITERATION {self.iteration} digest {digest:016x}{' ' + text if text else ''}")
        self._sleep()

    def _sleep(self) -> None:
        seconds, until = self.options.iteration_seconds, self.options.until
        if until is None:
            time.sleep(seconds)
            return
        if self.iteration > self.options.iterations // 2:
            seconds = max(seconds, min(10 * seconds, 0.5))  # who waits for progress still finds some
        is_last_but_one = self.iteration == self.options.iterations - 1
        while not until.exists() and (is_last_but_one or seconds > 0):
            time.sleep(0.01 if is_last_but_one else min(seconds, 0.01))
            seconds -= 0.01

    def result(self) -> None:
        """Print the last line."""
        self.line(f"RESULT {self.chain:016x}")


def total(sizes: Sequence[int]) -> int:
    """Return the sum of digests, modulo 2**64."""
    return sum(sizes) & MASK_64
