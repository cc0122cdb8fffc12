#!/usr/bin/env python3
"""PyTorch in training, its batches made by worker processes that were forked after CUDA had been initialised.

As most training jobs are: torch.utils.data.DataLoader with workers, pinned memory and the thread that fills it. A
forked worker has no CUDA, but the driver's open files and mappings of its parent's.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import Report, parser
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH = 512, 64


class Samples(Dataset[Tensor]):
    """Sample n is what a generator with seed n makes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))


def main() -> None:
    """Run the program."""
    options = parser("PyTorch with a DataLoader.", iterations=60, size=2, size_help="worker processes").parse_args()
    report = Report(options)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.cuda.synchronize()
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    samples = Samples(options.iterations * BATCH)
    loader = DataLoader(samples, batch_size=BATCH, num_workers=options.size, pin_memory=True)
    for batch in loader:
        given, wanted = batch.cuda(non_blocking=True).unbind(1)
        loss = nn.functional.mse_loss(model(given), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()
        report.step(struct.unpack("<I", struct.pack("<f", value))[0], value.hex())
    report.result()


if __name__ == "__main__":
    main()
