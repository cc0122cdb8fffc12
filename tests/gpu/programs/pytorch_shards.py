#!/usr/bin/env python3
"""Shards are copied as FSDP copies them: by kernels that find in arrays in GPU memory where to read and where to write.

pytorch_shards.py [--size MIB] and the options of every example. MIB of memory that does nothing make a checkpoint last.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import Report, parser

RANKS = 4
SHAPES = ((1 << 20,), (768, 1024), (3, 5, 7), (2 << 20,), (1, 1000), (1 << 21,))
"""Of the parameters' shards, each of which every rank has as much of."""


def main() -> None:
    """Run the program."""
    size_help = "MiB of memory besides"
    options = parser(
        "Shards copied through arrays of addresses.", iterations=200, size=64, size_help=size_help
    ).parse_args()
    report = Report(options)
    report.device(torch.cuda.get_device_name())
    torch.manual_seed(1)
    besides = torch.full((options.size << 18,), 3, dtype=torch.int32, device="cuda")
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    gathered = torch.randint(0, 1 << 20, (RANKS, sum(sizes)), dtype=torch.int32, device="cuda")
    whole = [torch.zeros(RANKS, *shape, dtype=torch.int32, device="cuda") for shape in SHAPES]
    scattered = torch.zeros(RANKS, sum(sizes), dtype=torch.int32, device="cuda")
    for _ in range(options.iterations):
        torch.split_with_sizes_copy(gathered, sizes, dim=1, out=[one.view(RANKS, -1) for one in whole])
        torch._chunk_cat([one.view(RANKS, -1) for one in whole], dim=0, num_chunks=RANKS, out=scattered)
        assert torch.equal(scattered, gathered)
        gathered.mul_(5).add_(7)
        total = sum(int(one.sum(dtype=torch.int64).item()) for one in (*whole, scattered))
        report.step((total + int(besides[:: 1 << 16].sum().item())) & (1 << 64) - 1)
    report.result()


if __name__ == "__main__":
    main()
