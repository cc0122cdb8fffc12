#!/usr/bin/env python3
"""Triton kernels for audits: a sum, a softmax by rows, a matrix product, an in-place update by atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0) * width
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row + at, mask=at < width, other=-float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row + at, values / tl.sum(values, 0), mask=at < width)


@triton.jit
def product(a, b, c, size, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        left = tl.load(a + rows[:, None] * size + (start + depth)[None, :])
        right = tl.load(b + (start + depth)[:, None] * size + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * size + columns[None, :], total)


@triton.jit
def histogram(x, bins, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(bins + tl.load(x + at, mask=at < count, other=0), 1, mask=at < count)


def main() -> None:
    """Launch each a few times and check what it computed."""
    torch.manual_seed(1)
    size = 512
    x, y = torch.randn(size, size, device="cuda"), torch.randn(size, size, device="cuda")
    out = torch.empty_like(x)
    numbers = torch.randint(64, (size * size,), device="cuda", dtype=torch.int32)
    bins = torch.zeros(64, device="cuda", dtype=torch.int32)
    for _ in range(4):
        add[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
        assert torch.equal(out, x + y)
        softmax[(size,)](x, out, size, BLOCK=512)
        assert torch.allclose(out, torch.softmax(x, 1), atol=1e-5)
        half_x, half_y = x.half(), y.half()
        product[(size // 64, size // 64)](half_x, half_y, out, size, BLOCK=64)
        assert torch.allclose(out, half_x.float() @ half_y.float(), atol=0.5)
        bins.zero_()
        histogram[(triton.cdiv(numbers.numel(), 1024),)](numbers, bins, numbers.numel(), BLOCK=1024)
        assert torch.equal(bins, torch.bincount(numbers, minlength=64).int())
    print("RESULT right")


if __name__ == "__main__":
    main()
