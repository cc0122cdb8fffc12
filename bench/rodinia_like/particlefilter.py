"""A particle filter: weights from what was seen, their running sum, and each particle anew from where a draw falls."""

from __future__ import annotations

import ctypes

from common import Program, f32, floats, i32, ints, main, random_ints, read

SOURCE = r"""
struct Particles { float *x, *weight; int count; };

__global__ void weigh(Particles p, float seen)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count)
        p.weight[i] = 1.0f / (1.0f + (p.x[i] - seen) * (p.x[i] - seen));
}
__global__ void running_sum(Particles p, float *sum)
{
    __shared__ float part[2][256];
    float before = 0;
    for (int start = 0; start < p.count; start += 256) {
        int i = start + threadIdx.x, turn = 0;
        part[0][threadIdx.x] = i < p.count ? p.weight[i] : 0;
        for (int step = 1; step < 256; step *= 2) {
            __syncthreads();
            float left = threadIdx.x >= step ? part[turn][threadIdx.x - step] : 0;
            part[turn ^ 1][threadIdx.x] = part[turn][threadIdx.x] + left;
            turn ^= 1;
        }
        __syncthreads();
        if (i < p.count)
            sum[i] = before + part[turn][threadIdx.x];
        before += part[turn][255];
        __syncthreads();
    }
}
__global__ void draw(Particles from, Particles to, const float *sum, int *parent, float shift)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= from.count)
        return;
    float wanted = (i + shift) / from.count * sum[from.count - 1];
    int low = 0, high = from.count - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (sum[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    parent[i] = low;
    to.x[i] = from.x[low];
}
"""
NAMES = ["weigh", "running_sum", "draw"]


class Particles(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint64), ("weight", ctypes.c_uint64), ("count", i32))


def run(program: Program) -> str:
    count, seen, shift = 512 * program.scale, 50.0, 0.5
    grid = -(-count // 128)
    sum_, parent = floats([0.0] * count), ints([0] * count)
    arrays = [floats([float(value) for value in random_ints(count, 100)]), floats([0.0] * count), floats([0.0] * count)]
    weight = floats([0.0] * count)
    now = Particles(arrays[0].address, weight.address, count)
    then = Particles(arrays[1].address, weight.address, count)
    for _ in range(3):
        before = read(arrays[0], "f")
        program.launch("weigh", grid, 128, now, f32(seen))
        program.launch("running_sum", 1, 256, now, sum_)
        program.launch("draw", grid, 128, now, then, sum_, parent, f32(shift))
        total, sums = 0.0, read(sum_, "f")
        for i, x in enumerate(before):
            total += 1 / (1 + (x - seen) ** 2)
            if abs(sums[i] - total) > 1e-3 * (1 + total):
                return f"the sum up to particle {i}: {sums[i]}, not {total}"
        parents, after = read(parent, "i"), read(arrays[1], "f")
        for i in range(count):
            wanted, p = (i + shift) / count * sums[-1], parents[i]
            least = p == 0 or sums[p - 1] < wanted * (1 + 1e-5)
            if not (least and sums[p] >= wanted * (1 - 1e-5)) or after[i] != before[p]:
                return f"particle {i} comes from {p}"
        arrays[0], arrays[1] = arrays[1], arrays[0]
        now, then = then, now
    return ""


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
