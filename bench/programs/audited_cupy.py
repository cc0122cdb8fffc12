#!/usr/bin/env python3
"""CuPy for audits: elementwise, reduction and raw kernels, sorting, a matrix product, a transform."""

from __future__ import annotations

import cupy

RAW = r"""
extern "C" __global__ void scale(float *to, const float *from, float by, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        to[i] = by * from[i];
}
"""


def main() -> None:
    """A few rounds of each."""
    raw = cupy.RawKernel(RAW, "scale")
    square = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x", "square")
    generator = cupy.random.default_rng(1)
    x = generator.standard_normal((512, 512), dtype=cupy.float32)
    to = cupy.zeros_like(x)
    total = 0.0
    for _ in range(4):
        y = square(x) + cupy.sin(x)
        raw((x.size // 128,), (128,), (to, y, cupy.float32(2), x.size))
        assert cupy.allclose(to, 2 * y)
        total += float(y.sum()) + float((x @ y).max()) + float(cupy.sort(y, axis=1)[0, 0])
        total += float(cupy.abs(cupy.fft.fft(x[0])).max())
        x += 0.5 * y
        x /= cupy.abs(x).max()
    print("RESULT", total)


if __name__ == "__main__":
    main()
