#!/usr/bin/env python3
"""Shards are copied as FSDP copies them: by kernels that find in arrays in GPU memory where to read and where to write.

pytorch_shards.py [--size MIB] and the options of every example. Its memory is MIB in sets of tensors, which are written
to in a random order, a set in an iteration: a checkpoint has not seen before what is written while it is made.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import Report, parser

RANKS = 4
SHAPES = ((1 << 18,), (192, 1024), (3, 5, 7), (1 << 19,), (1, 1000), (1 << 19,))
"""Of the parameters' shards, each of which every rank has as much of."""


def main() -> None:
    """Run the program."""
    size_help = "MiB of memory in sets of tensors"
    options = parser(
        "Shards copied through arrays of addresses.", iterations=200, size=64, size_help=size_help
    ).parse_args()
    report = Report(options)
    report.device(torch.cuda.get_device_name())
    torch.manual_seed(1)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    gathered = torch.randint(0, 1 << 20, (RANKS, sum(sizes)), dtype=torch.int32, device="cuda")
    sets = [
        [torch.full((RANKS, *shape), number + 1, dtype=torch.int32, device="cuda") for shape in SHAPES]
        for number in range((options.size << 20) // gathered.nbytes)
    ]
    scattered = torch.zeros(RANKS, sum(sizes), dtype=torch.int32, device="cuda")
    for number in range(options.iterations):
        if number % len(sets) == 0:
            order = random.Random(number).sample(sets, len(sets))
        whole = order[number % len(sets)]
        torch.split_with_sizes_copy(gathered, sizes, dim=1, out=[one.view(RANKS, -1) for one in whole])
        torch._chunk_cat([one.view(RANKS, -1) for one in whole], dim=0, num_chunks=RANKS, out=scattered)
        assert torch.equal(scattered, gathered)
        gathered.mul_(5).add_(7)
        tensors = [one for tensors in sets for one in tensors] + [scattered]
        total = int(torch.stack([one.sum(dtype=torch.int64) for one in tensors]).sum().item())
        report.step(total & (1 << 64) - 1)
    report.result()


if __name__ == "__main__":
    main()
