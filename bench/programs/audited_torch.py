#!/usr/bin/env python3
"""Training or inference of a small model of one architecture, for audits.

audited_torch.py MODEL train|infer [--compile] [--graph] [--steps N]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

BATCH = 32
CLASSES = 10
WORDS = 5000


class Recurrent(nn.Module):
    """An LSTM (cuDNN's) with a layer behind its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.last = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify sequences."""
        return self.last(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    """Two transformer layers over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify texts."""
        return self.last(self.layers(self.embed(x)).mean(1))


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and one batch of inputs."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, CLASSES)), torch.randn(BATCH, 256)
    if name == "conv":
        first = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(64, CLASSES)), torch.randn(BATCH, 3, 32, 32)
    if name == "transformer":
        return Attention(), torch.randint(WORDS, (BATCH, 64))
    if name == "lstm":
        return Recurrent(), torch.randn(BATCH, 20, 64)
    if name == "embedding":
        bag = nn.EmbeddingBag(WORDS, 64, mode="mean")
        return nn.Sequential(bag, nn.Linear(64, CLASSES)), torch.randint(WORDS, (BATCH, 16))
    raise SystemExit(f"There is no model {name}.")


def main() -> None:
    """Do so many steps and print the last loss, or the sum of the last outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("mode", choices=("train", "infer"))
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--graph", action="store_true", help="inference as a CUDA graph")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.manual_seed(1)
    model, batch = build(options.model)
    model, batch = model.cuda(), batch.cuda()
    target = torch.randint(CLASSES, (BATCH,), device="cuda")
    forward = torch.compile(model) if options.compile else model
    if options.mode == "train":
        optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
        loss = torch.zeros(())
        for _ in range(options.steps):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(forward(batch), target)
            loss.backward()
            optimiser.step()
        print("RESULT", loss.item())
        return
    model.eval()
    with torch.inference_mode():
        out = forward(batch)
        if options.graph:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                out = forward(batch)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = forward(batch)
            for _ in range(options.steps):
                graph.replay()
        else:
            for _ in range(options.steps):
                out = forward(batch)
    print("RESULT", out.float().sum().item())


if __name__ == "__main__":
    main()
