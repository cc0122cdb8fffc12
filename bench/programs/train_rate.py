#!/usr/bin/env python3
"""Milliseconds of a training step of examples/pytorch_train.py: one line per batch of steps.

train_rate.py BATCHES STEPS OPTION...     the options are those of pytorch_train.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import pytorch_train
import torch


def main() -> None:
    """Warm up, then time batches of steps, each with the wait for its last loss."""
    batches, steps = int(sys.argv[1]), int(sys.argv[2])
    # Not deterministic(): that setting fills new memory, which costs launches that ordinary training does not make.
    trainer = pytorch_train.Trainer(pytorch_train.command_line().parse_args(sys.argv[3:]))
    for batch in range(batches + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            trainer.train()
        torch.cuda.synchronize()
        if batch >= 2:
            print(f"{1000 * (time.perf_counter() - start) / steps:.5f}", flush=True)


if __name__ == "__main__":
    main()
