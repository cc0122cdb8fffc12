"""What the training examples that are checkpointed in the middle have in common: times, checkpoints, where state lies.

Beside the ITERATION lines of report.py they print, as lines that begin with `#`:

    # STATE <address> <bytes>        one tensor of the parameters and the optimizer's state, in a fixed order
    # TIME <iteration> <begin> <end>  seconds on the monotonic clock
    # ASKED <iteration> <time>       a checkpoint of this process was asked for, through the SDK
    # ENDED <committed|failed|restored|skipped> <seconds> <stall> <why>
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from report import MASK_64, Report

MIX = 0x9E3779B97F4A7C15


def add_options(options: argparse.ArgumentParser) -> None:
    """Add what these examples have beside the options of every example."""
    options.add_argument("--bytes", type=float, default=1e9, metavar="N", help="GPU memory to use (%(default)s)")
    options.add_argument(
        "--target-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="as many micro-batches in an iteration as take S seconds; 0: as --micro-batches says",
    )
    options.add_argument("--micro-batches", type=int, default=4, metavar="N", help="in an iteration (%(default)s)")
    options.add_argument("--host-batches", action="store_true", help="batches come from the host, one by one")
    options.add_argument(
        "--checksum",
        action="store_true",
        help="the digest is of all parameters and the optimizer's state, not the loss",
    )
    options.add_argument(
        "--checkpoint-file",
        type=Path,
        metavar="FILE",
        help="when FILE appears, ask for the checkpoint that it describes: a directory, a protocol and a share of an "
        "iteration (0: its begin, 0.5: half way), one word each",
    )


class TrainingLog:
    """Writes the lines above, and asks for checkpoints."""

    def __init__(self, report: Report, options: argparse.Namespace, synchronize: Callable[[], object]) -> None:
        """`synchronize` waits until the GPU has done all that it was given."""
        self.report = report
        self._options = options
        self._synchronize = synchronize
        self._began = 0.0
        self._wanted: tuple[str, str, float] | None = None
        self._made: Any = None

    def ready(self, size: int, state: Iterable[tuple[int, int]]) -> None:
        """Say that training begins: `size` bytes of GPU memory, and each tensor of the state as (address, bytes)."""
        for address, length in state:
            self.report.line(f"# STATE {address:#x} {length}")
        self.report.line(f"READY {size} bytes")

    def begin(self) -> None:
        """Begin an iteration."""
        self._began = time.monotonic()
        if self._made is not None and self._made.done:
            made, self._made = self._made, None
            word = "restored" if made.restored else "committed" if made.committed else "failed"
            word = "skipped" if made.skipped else word
            self.report.line(
                f"# ENDED {word} {made.seconds or 0:.6f} {made.stall or 0:.6f} {made.error or ''}".rstrip()
            )
        file = self._options.checkpoint_file
        if file is not None and self._made is None and file.exists():
            directory, protocol, share = file.read_text().split()
            file.unlink()
            self._wanted = (directory, protocol, float(share))

    def moment(self, share: float) -> None:
        """So much of the iteration has been given to the GPU: ask for a checkpoint if it is wanted here."""
        if self._wanted is None:
            return
        self._synchronize()  # the GPU must be where the program is
        directory, protocol, wanted = self._wanted
        if share < wanted:
            return
        self._wanted = None
        import phos

        self.report.line(f"# ASKED {self.report.iteration + 1} {time.monotonic():.6f}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not under PhOS: ENDED says so
            self._made = phos.checkpoint(directory, protocol=protocol)

    def end(self, digest: int, text: str) -> None:
        """End an iteration: its line, and its times."""
        self.report.step(digest, text)
        self.report.line(f"# TIME {self.report.iteration} {self._began:.6f} {time.monotonic():.6f}")


def combine(sums: Sequence[int]) -> int:
    """Return the checksum of several tensors, from those of each.

    A tensor's is the sum over its 32-bit words, as signed numbers, of the word times (2 * position + 1), modulo 2**64:
    whole numbers, so that the order in which a GPU adds them does not matter.
    """
    chained = 0
    for value in sums:
        chained = (chained * MIX + (value & MASK_64)) & MASK_64
    return chained
