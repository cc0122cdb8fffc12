#!/usr/bin/env python3
"""Train a transformer that fills a given amount of GPU memory, as large models do, deterministically.

The model is as deep as --bytes allows: parameters, gradients and AdamW's two moments in float32, activations under
bfloat16 autocast. An iteration is several micro-batches, whose gradients add up, and one update: compute-bound, as
training is. Prints the loss as a hexadecimal float, and when each iteration began and ended; asks for a checkpoint of
itself at a chosen moment of an iteration (training_log.py).
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from pytorch_train import Block, deterministic
from report import Report, parser
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_log import TrainingLog, add_options, combine

CLASSES = 64
LENGTH = 512
SLICE = 8 << 20  # words that are summed up at a time: what that needs beside them stays below 200 MB
PINNED_BATCHES = 4


class FusedBlock(Block):
    """The same block with flash attention, which adds up in a fixed order when told to be deterministic."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.project_in(self.first_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project_out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.feed(self.second_norm(x)))


class Model(nn.Module):
    """Blocks, and scores at every position."""

    def __init__(self, width: int, depth: int, *, fused: bool, dropout: float) -> None:
        super().__init__()
        kind = FusedBlock if fused else Block
        heads = max(1, width // 128)
        self.blocks = nn.Sequential(*(kind(width, heads, LENGTH, dropout) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (batch, length, classes)."""
        return self.head(self.blocks(x))


def shape(size: float, tokens: int, *, fused: bool) -> tuple[int, int]:
    """Return width and depth of a model whose training takes about `size` bytes."""
    width = next(
        width for least, width in ((48e9, 4096), (16e9, 3072), (4e9, 2048), (1e9, 1024), (0, 512)) if size >= least
    )
    # A block has 12 width² parameters, of 4 bytes four times over, and of 2 bytes as autocast keeps them.
    block = 18 * 12 * width * width + 46 * tokens * width
    if not fused:
        block += 9 * tokens * LENGTH * max(1, width // 128)  # the attention's weights, kept for the way back
    return width, max(1, int(0.94 * size / block))


class Trainer:
    """Model, optimizer and batches."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        fused = options.attention == "flash"
        self.width, depth = shape(options.bytes, options.batch * LENGTH, fused=fused)
        with torch.device("cuda"):
            self.model = Model(self.width, depth, fused=fused, dropout=options.dropout)
            self.inputs = torch.empty(options.batch, LENGTH, self.width)
            self.loss = torch.zeros(())
        # `fused` updates in place, without copies of all gradients beside them.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        self.pinned: list[Tensor] = []
        if options.host_batches:
            self.pinned = [torch.randn(self.inputs.shape, pin_memory=True) for _ in range(PINNED_BATCHES)]
        self.micro_batches = options.micro_batches
        self._batches = 0

    def micro_batch(self) -> None:
        """Forward and backward of one fresh micro-batch."""
        if self.pinned:
            self.inputs.copy_(self.pinned[self._batches % PINNED_BATCHES], non_blocking=True)
        else:
            self.inputs.normal_()
        self._batches += 1
        labels = self.inputs[..., :CLASSES].argmax(-1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = self.model(self.inputs)
        loss = functional.cross_entropy(scores.float().view(-1, CLASSES), labels.view(-1)) / self.micro_batches
        loss.backward()
        self.loss += loss.detach()

    def update(self) -> None:
        """Let the optimizer step, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def iteration(self, log: TrainingLog) -> float:
        """One iteration; returns its loss."""
        self.loss.zero_()
        for number in range(self.micro_batches):
            log.moment(number / self.micro_batches)
            self.micro_batch()
        log.moment(1.0)
        self.update()
        return float(self.loss.item())

    def calibrate(self, seconds: float) -> None:
        """Choose how many micro-batches an iteration has so that it takes `seconds`. Trains a little on the way."""
        times = []
        for count in (1, 1, 5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                self.micro_batch()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / count)
            self.update()
        start = time.perf_counter()
        self.micro_batch()
        self.update()
        torch.cuda.synchronize()
        update = time.perf_counter() - start - times[-1]
        self.micro_batches = max(1, round((seconds - max(0.0, update)) / times[-1]))

    def state(self) -> list[Tensor]:
        """Return the parameters and the optimizer's moments, in a fixed order."""
        tensors: list[Tensor] = []
        for parameter in self.model.parameters():
            kept = self.optimizer.state[parameter]
            tensors += [parameter.detach(), kept["exp_avg"], kept["exp_avg_sq"]]
        return tensors

    def checksum(self) -> int:
        """Return a checksum of the state, computed on the GPU: see training_log.combine."""
        sums = []
        for tensor in self.state():
            words = tensor.view(-1).view(torch.int32)
            total = torch.zeros((), dtype=torch.int64, device="cuda")
            for first in range(0, words.numel(), SLICE):
                piece = words[first : first + SLICE].to(torch.int64)
                odd = torch.arange(2 * first + 1, 2 * (first + piece.numel()) + 1, 2, device="cuda")
                total += (piece * odd).sum()
            sums.append(total)
        return combine([int(value) for value in torch.stack(sums).tolist()])


def command_line() -> argparse.ArgumentParser:
    """Return the program's options."""
    options = parser("Train a transformer that fills GPU memory.", iterations=1_000_000)
    add_options(options)
    options.add_argument("--attention", choices=("flash", "written-out"), default="flash")
    options.add_argument("--dropout", type=float, default=0.0)
    options.add_argument("--batch", type=int, default=4, metavar="N", help=f"sequences of {LENGTH} in a micro-batch")
    options.add_argument("--seed", type=int, default=1)
    return options


def main() -> None:
    """Run the program."""
    chosen = command_line().parse_args()
    deterministic()
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a launch for every new tensor
    report = Report(chosen)
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    log = TrainingLog(report, chosen, torch.cuda.synchronize)
    trainer = Trainer(chosen)
    if chosen.target_seconds:
        trainer.calibrate(chosen.target_seconds)
    else:
        trainer.micro_batch()
        trainer.update()  # makes the moments
    torch.cuda.synchronize()
    report.line(f"# width {trainer.width}, depth {len(trainer.model.blocks)}, micro-batches {trainer.micro_batches}")
    state = [(tensor.data_ptr(), tensor.numel() * 4) for tensor in trainer.state()] if chosen.checksum else []
    log.ready(torch.cuda.memory_reserved(), state)
    for _ in range(chosen.iterations):
        log.begin()
        loss = trainer.iteration(log)
        if chosen.checksum:
            digest = trainer.checksum()
        else:
            digest = int.from_bytes(hashlib.blake2b(loss.hex().encode(), digest_size=8).digest(), "big")
        log.end(digest, f"loss {loss.hex()}")
    report.result()


if __name__ == "__main__":
    main()
