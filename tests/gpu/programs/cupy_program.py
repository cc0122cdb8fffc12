#!/usr/bin/env python3
"""CuPy: its own memory pool, compiled elementwise and raw kernels, reductions, cuBLAS, and a stream."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import cupy
from report import Report, parser

SOURCE = r"""
extern "C" __global__ void turn(unsigned int *words, unsigned int count, unsigned int salt)
{
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        words[i] = words[i] * 1664525u + (i ^ salt);
}
"""


def main() -> None:
    """Run the program."""
    options = parser("CuPy.", iterations=20, size=1 << 20, size_help="words").parse_args()
    report = Report(options)
    turn = cupy.RawKernel(SOURCE, "turn")
    words = cupy.arange(options.size, dtype=cupy.uint32)
    generator = cupy.random.RandomState(1)
    matrix = generator.randint(-8, 8, size=(256, 256)).astype(cupy.float32)
    vector = cupy.ones((256, 256), dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    report.device(f"CuPy {cupy.__version__}")
    for iteration in range(options.iterations):
        with stream:
            turn(((options.size + 255) // 256,), (256,), (words, cupy.uint32(options.size), cupy.uint32(iteration)))
            words ^= words >> cupy.uint32(7)
            # Small integers: exact in float32, whichever way cuBLAS adds them up.
            vector = cupy.mod(matrix @ vector, 16)
            digest = int(words.astype(cupy.uint64).sum()) + 31 * int(vector.astype(cupy.uint64).sum())
        report.step(digest)
    report.result()


if __name__ == "__main__":
    main()
