#!/usr/bin/env python3
"""Training and inference of small models of several architectures, for audits.

audited_torch.py MODEL[,MODEL...] train|infer[,...] [--compile] [--graph] [--steps N] [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

BATCH = 16
CLASSES = 10
WORDS = 2000
WIDTH = 128


class Recurrent(nn.Module):
    """An LSTM (cuDNN's) with a layer behind its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, WIDTH, num_layers=2, batch_first=True)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify sequences."""
        return self.last(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    """Two layers of a transformer's encoder over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify texts."""
        return self.last(self.layers(self.embed(x)).mean(1))


class Block(nn.Module):
    """Causal attention by PyTorch's fused kernels, and two layers; each with a normalised input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch, place, width; the same back."""
        batch, length, _ = x.shape
        heads = self.mix(self.before(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.wide(self.between(x))


class Decoder(nn.Module):
    """A small language model that guesses the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A score for each word after each word."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.last(self.blocks(self.embed(x) + self.place(places))).flatten(0, 1)


def twice(into: int, out: int) -> nn.Sequential:
    """Two convolutions, normalised by groups."""
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down, up again, and what was there before beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = twice(3, 16), twice(16, 32), twice(32, 16)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A class for each pixel."""
        fine = self.first(x)
        coarse = self.second(functional.max_pool2d(fine, 2))
        return self.last(self.third(torch.cat([fine, self.up(coarse)], 1))).permute(0, 2, 3, 1).flatten(0, 2)


class Recommender(nn.Module):
    """Bags of what somebody liked and a few numbers; every pair of vectors meets in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(WORDS, 32, mode=mode) for mode in ("sum", "mean", "max"))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 16, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify; the first 13 of a row are numbers."""
        dense, words = self.bottom(x[:, :13].float() / WORDS), x[:, 13:]
        vectors = torch.stack([dense, *(bag(words) for bag in self.bags)], 1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([dense, pairs], 1))


def convolutional() -> nn.Module:
    """Convolutions, batch normalisation and pooling."""
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, stride=2, padding=1, groups=4), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def perceptron() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (perceptron, (BATCH, 256), 0),
    "conv": (convolutional, (BATCH, 3, 32, 32), 0),
    "transformer": (Encoder, (BATCH, 32), WORDS),
    "gpt": (Decoder, (BATCH, 64), WORDS),
    "lstm": (Recurrent, (BATCH, 20, 64), 0),
    "unet": (UNet, (BATCH, 3, 32, 32), 0),
    "embedding": (Recommender, (BATCH, 13 + 16), WORDS),
}
"""How each is made, the shape of a batch, and how many words the batch is of; 0: it is of numbers."""


def optimiser_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Several kinds of optimisers: each has kernels of its own."""
    if name in ("conv", "embedding"):
        return torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    if name == "lstm":
        return torch.optim.Adam(model.parameters(), 1e-3, foreach=False)
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=name == "gpt")


def train(name: str, model: nn.Module, batch: torch.Tensor, options: argparse.Namespace) -> float:
    """A few steps; the last loss. The language model is trained in mixed precision."""
    forward = torch.compile(model) if options.compile else model
    optimiser = optimiser_of(name, model)
    target, loss = None, torch.zeros(())
    for _ in range(options.steps):
        optimiser.zero_grad()
        with torch.autocast(options.device, torch.bfloat16, enabled=name == "gpt"):
            out = forward(batch)
            if target is None:
                target = torch.randint(out.shape[-1], out.shape[:-1], device=options.device)
            loss = functional.cross_entropy(out, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return loss.item()


def infer(name: str, model: nn.Module, batch: torch.Tensor, options: argparse.Namespace) -> float:
    """A few times the same batch, or a graph of it; the sum of what comes out. In half precision where it is usual."""
    model = model.eval()
    if name in ("gpt", "transformer"):
        model = model.bfloat16()
    forward = torch.compile(model) if options.compile else model
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
        return out.float().sum().item()


def main() -> None:
    """Every mode of every model named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", help=", ".join(MODELS))
    parser.add_argument("modes", help="train, infer")
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--graph", action="store_true", help="inference as a CUDA graph")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    for name in options.models.split(","):
        make, shape, words = MODELS[name]
        for mode in options.modes.split(","):
            begun = time.perf_counter()
            torch.manual_seed(1)
            model = make().to(options.device)
            batch = torch.randint(words, shape) if words else torch.randn(shape)
            run = {"train": train, "infer": infer}[mode]
            found = run(name, model, batch.to(options.device), options)
            print(f"RESULT {name} {mode} {found} in {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
