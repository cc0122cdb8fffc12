#!/usr/bin/env python3
"""PyTorch in training, its batches made by worker processes: forked after CUDA had been initialised, or spawned.

As most training jobs are: torch.utils.data.DataLoader with workers, pinned memory and the thread that fills it. A
forked worker has no CUDA, but the driver's open files and mappings of its parent's. Spawned ones have semaphores with
names, those of a forkserver sockets, too; tensors come by descriptors or by names.
"""

from __future__ import annotations

import functools
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
from training_device import training_device

WIDTH, BATCH = 512, 64


class Samples(Dataset[Tensor]):
    """Sample n is what a generator with seed n makes."""

    def __init__(self, count: int, sharing: str) -> None:
        self.count = count
        self.sharing = sharing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        assert torch.multiprocessing.get_sharing_strategy() == self.sharing
        return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index))


def share(strategy: str, _: int) -> None:
    """How a worker sends what it has made: one that was not forked does not know what its parent has chosen."""
    torch.multiprocessing.set_sharing_strategy(strategy)


def main() -> None:
    """Run the program."""
    options = parser("PyTorch with a DataLoader.", iterations=60, size=2, size_help="worker processes")
    options.add_argument("--start", choices=("fork", "spawn", "forkserver"), default="fork", help="of workers")
    options.add_argument("--sharing", choices=("file_descriptor", "file_system"), default="file_descriptor")
    chosen = options.parse_args()
    report = Report(chosen)
    torch.multiprocessing.set_sharing_strategy(chosen.sharing)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    with training_device() as (device, name, beside):
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        report.device(f"{name}, PyTorch {torch.__version__}")
        loader = DataLoader(
            Samples(chosen.iterations * BATCH, chosen.sharing),
            batch_size=BATCH,
            num_workers=chosen.size,
            pin_memory=device.type == "cuda",
            multiprocessing_context=chosen.start,
            worker_init_fn=functools.partial(share, chosen.sharing),
        )
        for batch in loader:
            given, wanted = batch.to(device, non_blocking=True).unbind(1)
            loss = nn.functional.mse_loss(model(given), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            beside(model[0].bias)
            value = loss.item()
            report.step(struct.unpack("<I", struct.pack("<f", value))[0], value.hex())
        report.result()


if __name__ == "__main__":
    main()
