#!/usr/bin/env python3
"""Train a small network with PyTorch so that every run prints the same losses, bit for bit.

`--model conv`: a convolutional net with batch norm, trained in float32 with AdamW. `--model transformer`: causal
self-attention with dropout, trained under bfloat16 autocast. `--graph` captures the whole step, optimizer included, in
a CUDA graph and replays it. `--compile` hands the model to torch.compile. Batches and dropout masks come from the
device's random generator, whose state is thus part of what a checkpoint has to keep. Losses are printed as hexadecimal
floats.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable

# cuBLAS picks the same algorithms in every run only with a workspace of fixed size; read when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from report import Report, parser
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


class ConvNet(nn.Module):
    """Three convolutions with batch norm, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in range(3):
            out = width << stage
            layers += [
                nn.Conv2d(channels, out, 3, stride=1 if stage == 0 else 2, padding=1),
                nn.BatchNorm2d(out),
                nn.ReLU(),
            ]
            channels = out
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the classes' scores for images of shape (batch, 3, height, width)."""
        # The mean over both axes, not adaptive pooling, whose backward pass is not deterministic.
        return self.head(self.features(images).mean(dim=(2, 3)))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, with dropout behind each.

    Attention is written out: which fused kernel scaled_dot_product_attention takes depends on the machine, and some of
    them add up in no fixed order on the way back.
    """

    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.project_in(self.first_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        weights = self.dropout(scores.masked_fill(self.future, float("-inf")).softmax(-1))
        attended = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.project_out(attended))
        return x + self.dropout(self.feed(self.second_norm(x)))


class Transformer(nn.Module):
    """A few blocks over sequences of feature vectors; the score of each class comes from the last position."""

    def __init__(self, width: int, length: int, depth: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 32), length, dropout) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes' scores for sequences of shape (batch, length, width)."""
        return self.head(self.blocks(x)[:, -1])


class Trainer:
    """A model, its optimizer, and the tensors that every batch is written into."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        size, batch = options.size, options.batch
        if options.model == "conv":
            self.model: nn.Module = ConvNet(size // 2).cuda()
            self.inputs = torch.empty(batch, 3, 32, 32, device="cuda")
        else:
            self.model = Transformer(size, 64).cuda()
            self.inputs = torch.empty(batch, 64, size, device="cuda")
        self.autocast = options.model == "transformer"
        # `capturable` keeps the step count on the device, as a graph needs; used without a graph too, so that both
        # do the same arithmetic.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, capturable=True)
        self.labels = torch.empty(batch, dtype=torch.long, device="cuda")
        self.called: Callable[[Tensor], Tensor] = torch.compile(self.model) if options.compile else self.model
        self.loss = torch.zeros((), device="cuda")
        self.graph: torch.cuda.CUDAGraph | None = None
        if options.graph:
            self._capture()

    def _make_batch(self) -> None:
        self.inputs.normal_()
        # Something to learn: the label says which tenth of the batch's first feature values is largest.
        first = self.inputs.reshape(self.inputs.shape[0], -1)[:, : CLASSES * 8].view(-1, CLASSES, 8).sum(-1)
        self.labels.copy_(first.argmax(-1))

    def _step(self) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            scores = self.called(self.inputs)
        loss = functional.cross_entropy(scores.float(), self.labels)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # capture needs kernels, workspaces and the optimizer's state to exist already
            for _ in range(3):
                self._make_batch()
                self.optimizer.zero_grad(set_to_none=True)
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self._step()

    def train(self) -> float:
        """Do one step on a fresh batch and return its loss."""
        self._make_batch()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self._step()
        return float(self.loss.item())

    def digest(self) -> int:
        """Return a 64-bit digest of all parameters, buffers and the optimizer's state."""
        hasher = hashlib.blake2b(digest_size=8)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        for tensor in tensors:
            hasher.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return int.from_bytes(hasher.digest(), "big")


def deterministic() -> None:
    """Let PyTorch refuse, or warn of, every operation whose result depends on the order in which threads run."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def command_line() -> argparse.ArgumentParser:
    """Return the program's options."""
    options = parser("Train with PyTorch, deterministically.", iterations=200, size=64, size_help="the model's width")
    options.add_argument("--model", choices=("conv", "transformer"), default="conv")
    options.add_argument("--graph", action="store_true", help="capture the training step in a CUDA graph")
    options.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    options.add_argument("--batch", type=int, default=64, metavar="N", help="samples in a batch (%(default)s)")
    options.add_argument("--seed", type=int, default=1)
    return options


def main() -> None:
    """Run the program."""
    chosen = command_line().parse_args()
    deterministic()
    report = Report(chosen)
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    trainer = Trainer(chosen)
    for _ in range(chosen.iterations):
        loss = trainer.train()
        report.step(
            int.from_bytes(hashlib.blake2b(loss.hex().encode(), digest_size=8).digest(), "big"), f"loss {loss.hex()}"
        )
    report.line(f"PARAMETERS {trainer.digest():016x}")
    report.result()


if __name__ == "__main__":
    main()
