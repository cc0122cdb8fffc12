#!/usr/bin/env python3
"""Triton kernels that make their tensor maps themselves: a copy, a persistent matrix product, a batch by a table."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
import triton
import triton.language as tl
from report import MASK_64, Report, parser

TILE = 64
PROGRAMS = 16
BATCH = 8


@triton.jit
def copy(source, target, rows, columns, TILE: tl.constexpr):
    """target = source + 1."""
    read = tl.make_tensor_descriptor(source, shape=[rows, columns], strides=[columns, 1], block_shape=[TILE, TILE])
    write = tl.make_tensor_descriptor(target, shape=[rows, columns], strides=[columns, 1], block_shape=[TILE, TILE])
    row, column = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    write.store([row, column], read.load([row, column]) + 1)


@triton.jit
def product(left, right, out, size, TILE: tl.constexpr, PROGRAMS: tl.constexpr):
    """out = left times right, transposed; each program computes several tiles."""
    a = tl.make_tensor_descriptor(left, shape=[size, size], strides=[size, 1], block_shape=[TILE, TILE])
    b = tl.make_tensor_descriptor(right, shape=[size, size], strides=[size, 1], block_shape=[TILE, TILE])
    c = tl.make_tensor_descriptor(out, shape=[size, size], strides=[size, 1], block_shape=[TILE, TILE])
    across = tl.cdiv(size, TILE)
    for tile in tl.range(tl.program_id(0), across * across, PROGRAMS):
        row, column = (tile // across) * TILE, (tile % across) * TILE
        total = tl.zeros((TILE, TILE), dtype=tl.float32)
        for depth in range(0, size, TILE):
            total = tl.dot(a.load([row, depth]), b.load([column, depth]).T, total)
        c.store([row, column], total.to(tl.float16))


@triton.jit
def batch(sources, targets, count, size, TILE: tl.constexpr):
    """Each target is its source plus 2; where they are lies in tables."""
    for number in range(count):
        source = tl.load(sources + number).to(tl.pointer_type(tl.float16))
        target = tl.load(targets + number).to(tl.pointer_type(tl.float16))
        read = tl.make_tensor_descriptor(source, shape=[size, size], strides=[size, 1], block_shape=[TILE, TILE])
        write = tl.make_tensor_descriptor(target, shape=[size, size], strides=[size, 1], block_shape=[TILE, TILE])
        row = tl.program_id(0) * TILE
        for column in range(0, size, TILE):
            write.store([row, column], read.load([row, column]) + 2)


def scratch(size: int, _alignment: int, _stream: int | None) -> torch.Tensor:
    """Where Triton's kernels make their maps."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def digest(*tensors: torch.Tensor) -> int:
    """Of every element: small integers, which float16 holds exactly."""
    total = 0
    for tensor in tensors:
        words = tensor.reshape(-1).to(torch.int64)
        places = torch.arange(1, words.numel() + 1, device=words.device)
        total = (total * 1000003 + int((words * places).sum().item())) & MASK_64
    return total


def main() -> None:
    """Run the program."""
    options = parser("Triton.", iterations=20, size=512, size_help="rows and columns").parse_args()
    report = Report(options)
    size = options.size
    triton.set_allocator(scratch)
    torch.manual_seed(1)
    left, right = (torch.randint(-2, 3, (size, size), device="cuda").half() for _ in range(2))
    out, moved = torch.zeros_like(left), torch.zeros_like(left)
    ones = [torch.full_like(left, number) for number in range(BATCH)]
    others = [torch.zeros_like(left) for _ in range(BATCH)]
    tables = [torch.tensor([t.data_ptr() for t in tensors], device="cuda") for tensors in (ones, others)]
    report.device(f"Triton {triton.__version__} on {torch.cuda.get_device_name()}")
    across = triton.cdiv(size, TILE)
    for iteration in range(options.iterations):
        product[(PROGRAMS,)](left, right, out, size, TILE=TILE, PROGRAMS=PROGRAMS)
        out.remainder_(5).sub_(2)
        copy[(across, across)](out, moved, size, size, TILE=TILE)
        left, moved = moved.remainder(5).sub_(2), left
        batch[(across,)](*tables[:: 1 if iteration % 2 else -1], BATCH, size, TILE=TILE)
        report.step(digest(left, out, *ones, *others))
    report.result()


if __name__ == "__main__":
    main()
