"""The nearest of many records to a place: distances of all, then the least by an atomic over distance and number."""

from __future__ import annotations

import struct

from common import Buffer, Program, f32, floats, i32, main, random_ints

SOURCE = r"""
typedef unsigned long long u64;

__global__ void distances(const float2 *places, float *distance, int count, float x, float y)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        distance[i] = (places[i].x - x) * (places[i].x - x) + (places[i].y - y) * (places[i].y - y);
}
__global__ void least(const float *distance, u64 *best, int count)
{
    __shared__ u64 of_block;
    if (!threadIdx.x)
        of_block = ~0ull;
    __syncthreads();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) // of positive numbers, the bits are ordered as the numbers are
        atomicMin(&of_block, (u64)__float_as_uint(distance[i]) << 32 | (unsigned)i);
    __syncthreads();
    if (!threadIdx.x)
        atomicMin(best, of_block);
}
"""
NAMES = ["distances", "least"]


def run(program: Program) -> str:
    count = 2048 * program.scale
    values = [float(value) for value in random_ints(2 * count, 1000)]
    places, distance, best = floats(values), floats([0.0] * count), Buffer(8)
    for x, y in ((100.0, 900.0), (512.0, 3.0)):
        best.upload(b"\xff" * 8)
        grid = -(-count // 128)
        program.launch("distances", grid, 128, places, distance, i32(count), f32(x), f32(y))
        program.launch("least", grid, 128, distance, best, i32(count))
        number = struct.unpack("<II", best.download())[0]
        expected = min(range(count), key=lambda i: ((values[2 * i] - x) ** 2 + (values[2 * i + 1] - y) ** 2, i))
        if number != expected:
            return f"record {number} for ({x}, {y}), not {expected}"
    return ""


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
