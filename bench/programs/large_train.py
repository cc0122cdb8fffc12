#!/usr/bin/env python3
"""examples/pytorch_large_train.py without PyTorch: the same options and lines from the perceptron of examples/mlp.py.

For the software GPU, and for machines that have no PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from cuda_program import CudaError, Device, fail
from mlp import Network
from report import Report, parser
from training_log import TrainingLog, add_options, combine

BATCH = 16


def checksum(network: Network) -> int:
    """Return the checksum of the parameters and both moments: see training_log.combine."""
    sums = []
    for buffer in (network.parameters, network.first, network.second):
        words = array("i", buffer.download())
        sums.append(sum(word * (2 * index + 1) for index, word in enumerate(words)))
    return combine(sums)


def main() -> None:
    """Run the program."""
    options = parser("Train a perceptron as pytorch_large_train.py trains a transformer.", iterations=1_000_000)
    add_options(options)
    run(options.parse_args())


def run(options: argparse.Namespace) -> None:
    """Train as the options say."""
    report = Report(options)
    with Device() as device:
        report.device(device.describe())
        # Parameters, gradients and two moments of 4 bytes, of two square layers and one of a quarter.
        width = max(8, int((options.bytes / 36) ** 0.5) // 8 * 8)
        network = Network(device, [width, width, width, width // 4], BATCH)
        log = TrainingLog(report, options, device.synchronize)
        network.train(1)
        device.synchronize()
        micro_batches = options.micro_batches
        if options.target_seconds:
            start = time.perf_counter()
            network.train(2)
            micro_batches = max(1, round(options.target_seconds / (time.perf_counter() - start)))
        state = [(buffer.address, buffer.size) for buffer in (network.parameters, network.first, network.second)]
        log.ready(4 * network.parameter_count * 4, state if options.checksum else [])
        batch = 3
        for _ in range(options.iterations):
            log.begin()
            loss = 0.0
            for number in range(micro_batches):
                log.moment(number / micro_batches)
                loss, _, _ = network.train(batch)
                batch += 1
            log.moment(1.0)
            log.end(checksum(network) if options.checksum else network.digest(), f"loss {loss.hex()}")
        report.result()


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
