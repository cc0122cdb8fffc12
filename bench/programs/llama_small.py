#!/usr/bin/env python3
"""llama_serve.py without PyTorch: the same options and lines from a decoder of whole numbers.

For the software GPU, and for machines that have no PyTorch. A layer's weights are 2 MiB, of which a token reads a few
words from all over; what it computes has nothing to do with language, but every token depends on weights of every
layer, and on all tokens before it through the cache.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from serving import Decoder, Layered, add_options, file_order, ready, serve, weight_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from cuda_program import Buffer, CudaError, Device, fail, u32
from report import Report  # of examples

WIDTH = 32
VOCABULARY = 128
LAYER_BYTES = 2 << 20  # a block of its own under the frontend
TABLE_BYTES = 4 * VOCABULARY * WIDTH

SOURCE = r"""
#define WIDTH 32u
#define TAPS 12u

extern "C" __global__ void embed(u32 *x, const u32 *table, u32 token)
{
    x[threadIdx.x] = table[token * WIDTH + threadIdx.x];
}

extern "C" __global__ void layer(u32 *out, const u32 *x, const u32 *weights, u32 words, u32 *cache, u32 position)
{
    u32 me = threadIdx.x;
    u32 sum = x[me];
    for (u32 tap = 0; tap < TAPS; tap++)
        sum += weights[(u32)(mix(me * TAPS + tap) % words)] * x[(me + tap) % WIDTH];
    cache[position * WIDTH + me] = sum;
    for (u32 before = 0; before < position; before++)
        sum += cache[before * WIDTH + me] ^ x[me];
    out[me] = (u32)mix(sum);
}

extern "C" __global__ void choose(u32 *token, const u32 *x, const u32 *table, u32 count)
{
    // One thread: the order in which equal scores are met is fixed.
    u32 best = 0, most = 0;
    for (u32 word = 0; word < count; word++) {
        u32 score = 0;
        for (u32 i = 0; i < WIDTH; i += 4)
            score += table[word * WIDTH + i] ^ x[i];
        if (score > most)
            most = score, best = word;
    }
    *token = best;
}
"""


class Small(Decoder):
    """Weights, and the state of one answer."""

    def __init__(self, device: Device, options: argparse.Namespace, number: int) -> None:
        self.module = device.load(SOURCE, "llama_small.cu")
        self.layers = max(2, round((options.bytes / options.models - 2 * TABLE_BYTES) / LAYER_BYTES))
        self.longest = options.longest
        sizes = {"embedding": TABLE_BYTES}
        sizes |= {f"layers.{layer}": LAYER_BYTES for layer in range(self.layers)} | {"head": TABLE_BYTES}
        self.size = sum(sizes.values())
        self.weights: dict[str, Buffer] = {}
        for name in file_order(list(sizes), options.build_order):
            self.weights[name] = Buffer(sizes[name])
            self.weights[name].upload(random.Random(weight_seed(options.seed + number, name)).randbytes(sizes[name]))
        self.caches = [Buffer(4 * WIDTH * self.longest) for _ in range(self.layers)]
        for cache in self.caches:
            cache.fill(0)
        self.x, self.y, self.chosen = Buffer(4 * WIDTH), Buffer(4 * WIDTH), Buffer(4)
        self.position = 0

    def begin(self, prompt: Sequence[int], layered: Layered) -> None:
        """See serving.Decoder."""
        self.position = 0
        for token in prompt:
            self.go_on(token, layered)

    def token(self) -> int:
        """See serving.Decoder."""
        self.module.launch("choose", 1, 1, self.chosen, self.x, self.weights["head"], u32(VOCABULARY))
        return int.from_bytes(self.chosen.download(), "little")

    def go_on(self, token: int, layered: Layered) -> None:
        """See serving.Decoder."""
        if self.position >= self.longest:
            raise ValueError(f"Prompt and answer are longer than --longest {self.longest}.")
        self.module.launch("embed", 1, WIDTH, self.x, self.weights["embedding"], u32(token % VOCABULARY))
        layered(-1)
        words = u32(LAYER_BYTES // 4)
        for layer in range(self.layers):
            arguments = (self.y, self.x, self.weights[f"layers.{layer}"], words)
            self.module.launch("layer", 1, WIDTH, *arguments, self.caches[layer], u32(self.position))
            self.x, self.y = self.y, self.x
            layered(layer)
        self.position += 1


def main() -> None:
    """Run the program."""
    options = argparse.ArgumentParser(description="Answer requests with a small decoder.")
    add_options(options)
    chosen = options.parse_args()
    report = Report(chosen)
    with Device() as device:
        decoders = [Small(device, chosen, number) for number in range(chosen.models)]
        device.synchronize()
        layers = f"{decoders[0].layers} layers of width {WIDTH}"
        size = sum(decoder.size for decoder in decoders)
        ready(report, size, f"{chosen.models} model(s) of {layers}, {device.describe()}")
        serve(decoders, chosen, report)


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
