#!/usr/bin/env python3
"""PyTorch with several threads, a stream each, pinned memory both ways, and events between the streams."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import Report, parser


class Worker:
    """One thread's stream and buffers."""

    def __init__(self, number: int, size: int) -> None:
        self.stream = torch.cuda.Stream()
        self.done = torch.cuda.Event()
        self.device = torch.arange(size, dtype=torch.int64, device="cuda") + number
        self.up = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.down = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.sum = 0

    def run(self, iteration: int, neighbour: Worker) -> None:
        """Send a pattern up, mix it in, bring the result down and add it up on the host."""
        self.up.fill_(iteration * 2654435761 % (1 << 31))
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(neighbour.done)  # recorded in the iteration before, or never: then nothing waits
            self.device.mul_(6364136223846793005).add_(self.up.to("cuda", non_blocking=True))
            self.down.copy_(self.device, non_blocking=True)
        self.stream.synchronize()
        self.sum = int(self.down.sum().item()) & (1 << 63) - 1


def main() -> None:
    """Run the program."""
    options = parser("PyTorch with threads.", iterations=30, size=1 << 20, size_help="words a thread").parse_args()
    report = Report(options)
    workers = [Worker(number, options.size) for number in range(4)]
    torch.cuda.synchronize()
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    # The threads live as long as the program, and wait for each other: at any moment several are inside CUDA.
    begin, end = threading.Barrier(len(workers) + 1), threading.Barrier(len(workers) + 1)

    def loop(index: int) -> None:
        for iteration in range(options.iterations):
            begin.wait()
            workers[index].run(iteration, workers[(index + 1) % len(workers)])
            workers[index].done.record(workers[index].stream)
            end.wait()

    threads = [threading.Thread(target=loop, args=(index,), daemon=True) for index in range(len(workers))]
    for thread in threads:
        thread.start()
    for _ in range(options.iterations):
        begin.wait()
        end.wait()
        report.step(sum(worker.sum * (index + 1) for index, worker in enumerate(workers)) & (1 << 64) - 1)
    report.result()


if __name__ == "__main__":
    main()
