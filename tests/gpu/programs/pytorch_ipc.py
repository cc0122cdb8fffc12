#!/usr/bin/env python3
"""PyTorch with tensors on the GPU that two processes share: what torch.multiprocessing hands over, by CUDA IPC.

The child, which is spawned, changes each tensor that it is given and adds it up. The parent hands over the same memory
again and again, and each third time a copy, which the child lets go of.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import MASK_64, Report, parser
from torch import multiprocessing


def work(asked: Any, ready: Any) -> None:
    """The child."""
    while (words := asked.get()) is not None:
        words.mul_(3).add_(1).remainder_(1000003)
        torch.cuda.synchronize()
        ready.put(int(words.sum().item()))
        del words


def main() -> None:
    """Run the program."""
    options = parser("PyTorch, two processes.", iterations=60, size=1 << 20, size_help="words").parse_args()
    report = Report(options)
    context = multiprocessing.get_context("spawn")
    asked, ready = context.Queue(), context.Queue()
    child = context.Process(target=work, args=(asked, ready), daemon=True)
    child.start()
    words = torch.arange(options.size, dtype=torch.int64, device="cuda")
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for iteration in range(options.iterations):
        asked.put(words.clone() if iteration % 3 == 2 else words)
        found = ready.get()
        words.add_(iteration)
        report.step((found + 31 * int(words.sum().item())) & MASK_64)
    report.result()
    asked.put(None)
    child.join()


if __name__ == "__main__":
    main()
