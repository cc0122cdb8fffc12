#!/usr/bin/env python3
"""A network whose halves are on two GPUs: activations and gradients go from one to the other in every iteration."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before PyTorch is loaded: sums in a fixed order

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import Report, parser

WIDTH = 1024


def half(device: str) -> torch.nn.Module:
    """A block with a residual path."""
    layers = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    return torch.nn.Sequential(*layers).to(device)


def main() -> None:
    """Run the program."""
    size_help = "words of other memory on each GPU, every one changed in each iteration"
    options = parser("PyTorch on two GPUs.", iterations=200, size=1 << 27, size_help=size_help).parse_args()
    report = Report(options)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    halves = half("cuda:0"), half("cuda:1")
    optimiser = torch.optim.AdamW([weight for each in halves for weight in each.parameters()], lr=1e-3)
    others = [torch.arange(options.size, dtype=torch.int32, device=f"cuda:{number}") for number in (0, 1)]
    generator = torch.Generator("cuda:0").manual_seed(2)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    peers = torch.cuda.can_device_access_peer(0, 1)
    report.device(f"{torch.cuda.get_device_name(0)}, two, peers: {peers}, PyTorch {torch.__version__}")
    for iteration in range(options.iterations):
        x = torch.randn(256, WIDTH, generator=generator, device="cuda:0")
        between = x + halves[0](x)
        y = between.to("cuda:1") + halves[1](between.to("cuda:1"))
        loss = (y.to("cuda:0") - x.roll(1, 1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        others[iteration % 2].add_(others[1 - iteration % 2].to(f"cuda:{iteration % 2}"))
        words = int(others[0].sum().item()) ^ int(others[1].sum().item())
        report.step(int(loss.detach().view(torch.int32).item()) ^ words & (1 << 63) - 1)
    report.result()


if __name__ == "__main__":
    main()
