#!/usr/bin/env python3
"""Hold gigabytes of device memory with PyTorch, change them, and check every word when asked.

Each buffer holds a pattern that depends on the buffer, the position and how often the buffer was changed. An iteration
launches small kernels, and adds 1 to every word of one buffer, in turn. When the file of --check-file appears, all
buffers are compared with what they must hold, word by word; the program prints `CHECK ok <words>` or `CHECK FAILED
<wrong words>` and removes the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from report import Report, parser

MIX = 0x9E3779B1 - (1 << 32)  # as a signed 32-bit number
SLICE = 1 << 24  # words compared at a time


def pattern(buffer: int, first: int, count: int, version: int) -> torch.Tensor:
    """Return what words `first` to `first + count` of a buffer must hold after `version` changes."""
    words = torch.arange(first, first + count, dtype=torch.int32, device="cuda")
    words.mul_(MIX).bitwise_xor_(buffer * 0x85EBCA6B & 0x7FFFFFFF | 1)
    return words.add_(version)


class Buffers:
    """The buffers and how often each was changed."""

    def __init__(self, size: int, count: int) -> None:
        self.words = size // count // 4
        self.versions = [0] * count
        self.tensors = []
        for index in range(count):
            tensor = torch.empty(self.words, dtype=torch.int32, device="cuda")
            for first in range(0, self.words, SLICE):
                length = min(SLICE, self.words - first)
                tensor[first : first + length] = pattern(index, first, length, 0)
            self.tensors.append(tensor)

    def change(self, index: int) -> None:
        """Add 1 to every word of one buffer."""
        self.tensors[index].add_(1)
        self.versions[index] += 1

    def wrong(self) -> int:
        """Return how many words are not what they must be."""
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for index, (tensor, version) in enumerate(zip(self.tensors, self.versions, strict=True)):
            for first in range(0, self.words, SLICE):
                length = min(SLICE, self.words - first)
                wrong += (tensor[first : first + length] != pattern(index, first, length, version)).sum()
        return int(wrong.item())


def main() -> None:
    """Run the program."""
    options = parser("Hold and check gigabytes of device memory.", iterations=1_000_000_000)
    options.add_argument("--bytes", type=float, default=1e9, metavar="N", help="of all buffers (%(default)s)")
    options.add_argument("--buffers", type=int, default=64, metavar="N", help="how many (%(default)s)")
    options.add_argument("--launches", type=int, default=50, metavar="N", help="small kernels in an iteration")
    options.add_argument("--check-file", type=Path, metavar="FILE", help="check all buffers when this file appears")
    run(options.parse_args())


def run(options: argparse.Namespace) -> None:
    """Run as the options say."""
    report = Report(options)
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    buffers = Buffers(int(options.bytes), options.buffers)
    small = torch.zeros(1024, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    report.line(f"READY {options.buffers} buffers of {4 * buffers.words} bytes")
    for iteration in range(options.iterations):
        for _ in range(options.launches):
            small.add_(1)
        buffers.change(iteration % options.buffers)
        report.step(int(small.sum().item()))
        if options.check_file is not None and options.check_file.exists():
            wrong = buffers.wrong()
            report.line(f"CHECK FAILED {wrong}" if wrong else f"CHECK ok {buffers.words * options.buffers}")
            options.check_file.unlink()
    report.result()


if __name__ == "__main__":
    main()
