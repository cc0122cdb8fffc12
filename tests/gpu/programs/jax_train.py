#!/usr/bin/env python3
"""Train a small causal transformer with JAX: one jitted step, Adam's state and the random key among its arguments.

XLA takes most of the GPU's memory in one block when it starts, unless its environment says otherwise, compiles in
threads of its own, and puts what it can of the step into CUDA graphs. Losses are printed bit for bit.
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

# Nothing is chosen by measuring, nothing adds up in an order of its own. For the same kernels in two runs, the second
# must be given what the first one compiled, too (process.kept_by_jax).
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0")

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import jax
import jax.numpy as jnp
from report import Report, parser

LAYERS, HEADS, LENGTH, BATCH, WORDS = 2, 4, 64, 16, 256

Tree = dict[str, jax.Array]


def initial(key: jax.Array, width: int) -> Tree:
    """Return the parameters."""
    shapes = {"embed": (WORDS, width), "position": (LENGTH, width), "head": (width, WORDS)}
    for layer in range(LAYERS):
        shapes |= {f"qkv{layer}": (width, 3 * width), f"out{layer}": (width, width)}
        shapes |= {f"up{layer}": (width, 4 * width), f"down{layer}": (4 * width, width)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.02 * jax.random.normal(one, shape) for one, (name, shape) in zip(keys, shapes.items(), strict=True)}


def normal(x: jax.Array) -> jax.Array:
    """Return x with mean 0 and variance 1 over its last axis."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def loss_of(parameters: Tree, words: jax.Array) -> jax.Array:
    """Return the mean cross entropy of each word after those before it."""
    x = parameters["embed"][words] + parameters["position"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in range(LAYERS):
        q, k, v = jnp.split(normal(x) @ parameters[f"qkv{layer}"], 3, -1)
        q, k, v = (part.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3) for part in (q, k, v))
        weights = jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5, -1e9))
        x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ parameters[f"out{layer}"]
        x = x + jax.nn.gelu(normal(x) @ parameters[f"up{layer}"]) @ parameters[f"down{layer}"]
    scores = jax.nn.log_softmax(normal(x) @ parameters["head"])[:, :-1]
    wanted = jax.nn.one_hot(words[:, 1:], WORDS)
    return -(scores * wanted).sum() / wanted.sum()


@jax.jit
def step(
    parameters: Tree, first: Tree, second: Tree, count: jax.Array, key: jax.Array
) -> tuple[Tree, Tree, Tree, jax.Array, jax.Array, jax.Array]:
    """Return what one step of Adam makes of all state, and the loss before it."""
    key, now = jax.random.split(key)
    words = jnp.cumsum(jax.random.randint(now, (BATCH, LENGTH), 0, 3), axis=1) % WORDS
    loss, slopes = jax.value_and_grad(loss_of)(parameters, words)
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, slopes)
    parameters = jax.tree.map(
        lambda p, m, v: p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-8),
        parameters,
        first,
        second,
    )
    return parameters, first, second, count, key, loss


def main() -> None:
    """Run the program."""
    options = parser("JAX in training.", iterations=40, size=256, size_help="width of the model").parse_args()
    report = Report(options)
    parameters = initial(jax.random.key(1), options.size)
    first = jax.tree.map(jnp.zeros_like, parameters)
    second = jax.tree.map(jnp.zeros_like, parameters)
    state = (parameters, first, second, jnp.float32(0), jax.random.key(2))
    report.device(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    for _ in range(options.iterations):
        *state, loss = step(*state)
        report.step(struct.unpack("<I", struct.pack("<f", float(loss)))[0], float(loss).hex())
    report.result()


if __name__ == "__main__":
    main()
