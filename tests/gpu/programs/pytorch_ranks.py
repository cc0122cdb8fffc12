#!/usr/bin/env python3
"""A rank of a job that torchrun starts: one network, whose gradients gloo adds up, by TCP. Rank 0 reports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
import torch.distributed as ranks
from report import Report, parser
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_device import training_device

WIDTH, BATCH = 256, 32


def main() -> None:
    """Run the program."""
    options = parser("PyTorch under torchrun.", iterations=60).parse_args()
    report = Report(options)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    ranks.init_process_group("gloo")
    first = ranks.get_rank() == 0
    generator = torch.Generator().manual_seed(2 + ranks.get_rank())
    with training_device() as (device, name, beside):
        layers = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        network = DistributedDataParallel(nn.Sequential(*layers).to(device))
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        if first:
            report.device(f"{name}, PyTorch {torch.__version__}")
        for _ in range(options.iterations):
            x = torch.randn(BATCH, WIDTH, generator=generator).to(device)
            loss = nn.functional.mse_loss(network(x), x.roll(1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            beside(next(network.parameters())[0])
            words = (
                torch.stack([weight.detach().view(torch.int32).sum() for weight in network.parameters()]).sum().cpu()
            )
            most, least = words.clone(), words.clone()
            ranks.all_reduce(most, ranks.ReduceOp.MAX)
            ranks.all_reduce(least, ranks.ReduceOp.MIN)
            if int(most) != int(least):
                raise SystemExit("the ranks' weights differ")
            if first:
                report.step(int(words) & (1 << 63) - 1)
        if first:
            report.result()
    ranks.destroy_process_group()


if __name__ == "__main__":
    main()
