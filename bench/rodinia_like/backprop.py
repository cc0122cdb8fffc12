"""One hidden layer: a reduction in shared memory forward, weights and their momentum changed in place backward."""

from __future__ import annotations

import math

from common import Program, f32, floats, i32, main, random_ints, read

SOURCE = r"""
template <int THREADS> __global__ void forward(const float *input, const float *weights, float *hidden, int inputs)
{
    __shared__ float part[THREADS];
    float sum = 0;
    for (int i = threadIdx.x; i < inputs; i += THREADS)
        sum += input[i] * weights[blockIdx.x * inputs + i];
    part[threadIdx.x] = sum;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (!threadIdx.x)
        hidden[blockIdx.x] = 1.0f / (1.0f + expf(-part[0]));
}
__global__ void adjust(const float *delta, const float *input, float *weights, float *before, int inputs, float rate)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x, unit = blockIdx.y;
    if (i >= inputs)
        return;
    float change = rate * delta[unit] * input[i] + 0.3f * before[unit * inputs + i];
    weights[unit * inputs + i] += change;
    before[unit * inputs + i] = change;
}
"""
NAMES = ["forward<128>", "adjust"]


def run(program: Program) -> str:
    inputs, units, rate = 512 * program.scale, 16, 0.1
    values = [value / 1000 for value in random_ints(inputs, 100)]
    weights = [value / 1000 - 0.05 for value in random_ints(inputs * units, 100, 7)]
    deltas = [0.01 * u for u in range(units)]
    x, w, hidden = floats(values), floats(weights), floats([0.0] * units)
    before, delta = floats([0.0] * (inputs * units)), floats(deltas)
    for _ in range(2):
        program.launch("forward<128>", units, 128, x, w, hidden, i32(inputs))
        program.launch("adjust", (-(-inputs // 128), units), 128, delta, x, w, before, i32(inputs), f32(rate))
    once = [w_ + rate * deltas[n // inputs] * values[n % inputs] for n, w_ in enumerate(weights)]
    for unit, found in enumerate(read(hidden, "f")):
        sum_ = sum(values[i] * once[unit * inputs + i] for i in range(inputs))
        if abs(found - 1 / (1 + math.exp(-sum_))) > 1e-4:
            return f"the activation of unit {unit}"
    return ""


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
