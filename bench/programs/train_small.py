#!/usr/bin/env python3
"""train_rate.py without PyTorch: the same tasks with the perceptron of examples/mlp.py, for the software GPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import answering
from cuda_program import CudaError, Device, fail
from mlp import Network

WIDTHS = {"conv": [8, 8, 2], "transformer": [16, 8, 2], "graph": [8, 2]}


def training(network: Network) -> Callable[[], object]:
    """Return what does the network's next step."""
    iterations = itertools.count(1)
    return lambda: network.train(next(iterations))


def main() -> None:
    """Make a network for every task, then answer."""
    with Device() as device:
        answering.answer(
            {name: training(Network(device, widths, 4)) for name, widths in WIDTHS.items()}, device.synchronize
        )


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
