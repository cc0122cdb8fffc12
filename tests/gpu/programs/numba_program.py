#!/usr/bin/env python3
"""Numba: kernels compiled from Python, shared memory and atomics, a stream, pinned and mapped host memory."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import numpy

if not hasattr(numpy, "row_stack"):  # numba-cuda asks for it, and NumPy 2.5 has it no more
    numpy.row_stack = numpy.vstack
from numba import cuda, uint32
from report import Report, parser

THREADS = 256


@cuda.jit
def turn(words, salt):  # type: ignore[no-untyped-def]
    """Mix each word with its place."""
    i = cuda.grid(1)
    if i < words.size:
        words[i] = uint32(words[i] * uint32(1664525) + (uint32(i) ^ salt))


@cuda.jit
def count(words, bins):  # type: ignore[no-untyped-def]
    """A histogram, first in shared memory."""
    own = cuda.shared.array(THREADS, dtype=uint32)
    own[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < words.size:
        cuda.atomic.add(own, words[i] >> uint32(24), 1)
    cuda.syncthreads()
    cuda.atomic.add(bins, cuda.threadIdx.x, own[cuda.threadIdx.x])


def main() -> None:
    """Run the program."""
    options = parser("Numba.", iterations=20, size=1 << 20, size_help="words").parse_args()
    report = Report(options)
    blocks = options.size // THREADS
    stream = cuda.stream()
    words = cuda.to_device(numpy.arange(options.size, dtype=numpy.uint32), stream=stream)
    pinned = cuda.pinned_array(THREADS, dtype=numpy.uint32)
    mapped = cuda.mapped_array(THREADS, dtype=numpy.uint32)
    mapped[:] = 0
    report.device(f"Numba on {cuda.get_current_device().name}")
    for iteration in range(options.iterations):
        turn[blocks, THREADS, stream](words, numpy.uint32(iteration))
        bins = cuda.to_device(numpy.zeros(THREADS, dtype=numpy.uint32), stream=stream)
        count[blocks, THREADS, stream](words, bins)
        count[blocks, THREADS, stream](words, mapped)
        bins.copy_to_host(pinned, stream=stream)
        stream.synchronize()
        places = numpy.arange(1, THREADS + 1, dtype=numpy.uint64)
        report.step(int((pinned * places).sum() + 7 * (mapped * places).sum()))
    report.result()


if __name__ == "__main__":
    main()
