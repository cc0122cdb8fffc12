#!/usr/bin/env python3
"""A decoder in the shape of a Llama, built from a configuration with random weights, that answers requests.

bfloat16; RMSNorm, rotary positions, grouped-query attention by scaled_dot_product_attention, SwiGLU, a cache of keys
and values. It is as deep as --bytes allows. Answers are greedy and the same in every run. Weights are made on the GPU,
each allocated by itself, so that starting takes seconds at any size. Requests and lines: serving.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before PyTorch is loaded: sums in a fixed order

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving import Decoder, Layered, add_options, file_order, ready, serve, weight_seed
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from report import Report  # of examples

HEAD = 128  # width of a head
EPSILON = 1e-5
THETA = 500_000.0

EMBEDDING, HEAD_WEIGHT, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Shape:
    """A configuration."""

    width: int
    feed: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int = 0

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by its usual name, in the order of their use."""
        wide, narrow = self.heads * HEAD, self.kv_heads * HEAD
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.width)}
        for layer in range(self.layers):
            found |= {f"model.layers.{layer}.{name}.weight": size for name, size in self.layer(wide, narrow).items()}
        return found | {LAST_NORM: (self.width,), HEAD_WEIGHT: (self.vocabulary, self.width)}

    def layer(self, wide: int, narrow: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a layer, in the order of their use."""
        return {
            "input_layernorm": (self.width,),
            "self_attn.q_proj": (wide, self.width),
            "self_attn.k_proj": (narrow, self.width),
            "self_attn.v_proj": (narrow, self.width),
            "self_attn.o_proj": (self.width, wide),
            "post_attention_layernorm": (self.width,),
            "mlp.gate_proj": (self.feed, self.width),
            "mlp.up_proj": (self.feed, self.width),
            "mlp.down_proj": (self.width, self.feed),
        }

    def parameters(self) -> int:
        """Return how many weights there are."""
        return sum(torch.Size(size).numel() for size in self.sizes().values())


# From which size on: width, of SwiGLU, heads, heads of keys and values, vocabulary.
SHAPES = (
    (48e9, Shape(8192, 28672, 64, 8, 128256)),
    (16e9, Shape(5120, 17920, 40, 8, 128256)),
    (4e9, Shape(4096, 14336, 32, 8, 128256)),
    (2e8, Shape(1024, 2816, 8, 2, 32000)),
    (0, Shape(256, 768, 2, 1, 512)),
)


def shape(size: float) -> Shape:
    """Return the configuration whose weights come nearest to `size` bytes."""
    base = next(found for least, found in SHAPES if size >= least)
    fixed = 2 * base.parameters()
    layer = 2 * Shape(**{**vars(base), "layers": 1}).parameters() - fixed
    return Shape(**{**vars(base), "layers": max(1, round((size - fixed) / layer))})


class Llama(Decoder):
    """Weights, and the state of one answer."""

    def __init__(self, made: Shape, options: argparse.Namespace, number: int = 0) -> None:
        self.shape = made
        self.layers = made.layers
        self.device = options.on
        sizes = made.sizes()
        self.weights: dict[str, Tensor] = {}
        generator = torch.Generator(self.device)
        for name in file_order(list(sizes), options.build_order):
            weight = torch.empty(sizes[name], dtype=torch.bfloat16, device=self.device)
            generator.manual_seed(weight_seed(options.seed + number, name))
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02 if name == EMBEDDING else sizes[name][-1] ** -0.5, generator=generator)
            self.weights[name] = weight
        cache = (made.kv_heads, options.longest, HEAD)
        self.keys, self.values = (
            [torch.zeros(cache, dtype=torch.bfloat16, device=self.device) for _ in range(made.layers)] for _ in range(2)
        )
        steps = torch.arange(0, HEAD, 2, dtype=torch.float32, device=self.device) / HEAD
        angles = torch.outer(torch.arange(options.longest, dtype=torch.float32, device=self.device), THETA**-steps)
        self.cosine = torch.cat((angles.cos(), angles.cos()), -1).to(torch.bfloat16)
        self.sine = torch.cat((angles.sin(), angles.sin()), -1).to(torch.bfloat16)
        self.position = 0
        self.scores: Tensor | None = None

    def begin(self, prompt: Sequence[int], layered: Layered) -> None:
        """See serving.Decoder."""
        self.position = 0
        self._step(prompt, layered)

    def token(self) -> int:
        """See serving.Decoder."""
        assert self.scores is not None
        return int(self.scores.argmax().item())

    def go_on(self, token: int, layered: Layered) -> None:
        """See serving.Decoder."""
        self._step([token], layered)

    def _step(self, tokens: Sequence[int], layered: Layered) -> None:
        first, last = self.position, self.position + len(tokens)
        if last > self.cosine.shape[0]:
            raise ValueError(f"Prompt and answer are longer than --longest {self.cosine.shape[0]}.")
        x = functional.embedding(torch.tensor(tokens, device=self.device), self.weights[EMBEDDING])
        layered(-1)
        for layer in range(self.layers):
            x = x + self._attention(layer, x, first, last)
            x = x + self._feed(layer, x)
            layered(layer)
        self.position = last
        x = functional.rms_norm(x[-1:], (self.shape.width,), self.weights[LAST_NORM], EPSILON)
        self.scores = functional.linear(x, self.weights[HEAD_WEIGHT])[0]

    def _weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def _attention(self, layer: int, x: Tensor, first: int, last: int) -> Tensor:
        x = functional.rms_norm(x, (self.shape.width,), self._weight(layer, "input_layernorm"), EPSILON)
        query, key, value = (
            functional.linear(x, self._weight(layer, f"self_attn.{name}_proj")).view(len(x), -1, HEAD).transpose(0, 1)
            for name in "qkv"
        )
        keys, values = self.keys[layer], self.values[layer]
        keys[:, first:last] = self._turned(key, first, last)
        values[:, first:last] = value
        attended = functional.scaled_dot_product_attention(
            self._turned(query, first, last)[None],
            keys[None, :, :last],
            values[None, :, :last],
            is_causal=last - first > 1,  # a prompt, from its beginning; a single token sees all before it
            enable_gqa=True,
        )
        attended = attended[0].transpose(0, 1).reshape(len(x), -1)
        return functional.linear(attended, self._weight(layer, "self_attn.o_proj"))

    def _turned(self, x: Tensor, first: int, last: int) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cosine[first:last] + torch.cat((-right, left), -1) * self.sine[first:last]

    def _feed(self, layer: int, x: Tensor) -> Tensor:
        x = functional.rms_norm(x, (self.shape.width,), self._weight(layer, "post_attention_layernorm"), EPSILON)
        gate = functional.silu(functional.linear(x, self._weight(layer, "mlp.gate_proj")))
        up = functional.linear(x, self._weight(layer, "mlp.up_proj"))
        return functional.linear(gate * up, self._weight(layer, "mlp.down_proj"))


def main() -> None:
    """Run the program."""
    options = argparse.ArgumentParser(description="Answer requests with a decoder in the shape of a Llama.")
    add_options(options)
    options.add_argument("--on", default="cuda", metavar="DEVICE", help="PyTorch's name of it (%(default)s)")
    chosen = options.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs a launch for every new tensor
    report = Report(chosen)
    # The others choose their own libraries and sums; the second is for devices without the first.
    with torch.inference_mode(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        models = [Llama(shape(chosen.bytes / chosen.models), chosen, number) for number in range(chosen.models)]
        if chosen.on == "cuda":
            torch.cuda.synchronize()
        size = sum(2 * model.shape.parameters() for model in models)
        made = models[0].shape
        layers = f"{made.layers} layers of width {made.width}"
        ready(report, size, f"{chosen.models} model(s) of {layers}, PyTorch {torch.__version__}")
        serve(models, chosen, report)


if __name__ == "__main__":
    main()
