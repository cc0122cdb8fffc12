#!/usr/bin/env python3
"""PyTorch's profiler, which loads CUPTI, in the iterations from --begin to --end; no options: in none."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import Report, parser
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    """Run the program."""
    options = parser("PyTorch's profiler.", iterations=24, size=1 << 20, size_help="words")
    options.add_argument("--begin", type=int, default=0, metavar="N", help="its first iteration (%(default)s)")
    options.add_argument("--end", type=int, default=0, metavar="N", help="the one after its last (%(default)s)")
    chosen = options.parse_args()
    report = Report(chosen)
    words = torch.arange(chosen.size, dtype=torch.int64, device="cuda")
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for iteration in range(chosen.iterations):
        if iteration == chosen.begin < chosen.end:
            profiler.start()
        words.mul_(6364136223846793005).add_(iteration)
        digest = int(words.sum().item()) & (1 << 63) - 1
        if iteration + 1 == chosen.end:
            profiler.stop()
            assert any(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())
        report.step(digest)
    report.result()


if __name__ == "__main__":
    main()
