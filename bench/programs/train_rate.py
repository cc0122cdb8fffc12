#!/usr/bin/env python3
"""Milliseconds of a training step of examples/pytorch_train.py, when asked: see answering.py.

The tasks are `conv`, `transformer`, and `graph`, the transformer as a CUDA graph.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import answering
import pytorch_train
import torch

TASKS = {
    "conv": ["--model", "conv", "--batch", "16"],
    "transformer": ["--model", "transformer", "--batch", "8"],
    "graph": ["--model", "transformer", "--batch", "8", "--graph"],
}
WARM = 20
"""Steps before the first answer: cuDNN chooses, optimizers allocate, kernels are loaded."""


def main() -> None:
    """Make and warm every model, then answer."""
    # Not deterministic(): that setting fills new memory, which costs launches that ordinary training does not make.
    parser = pytorch_train.command_line()
    steps = {name: pytorch_train.Trainer(parser.parse_args(options)).train for name, options in TASKS.items()}
    for step in steps.values():
        for _ in range(WARM):
            step()
    answering.answer(steps, torch.cuda.synchronize)


if __name__ == "__main__":
    main()
