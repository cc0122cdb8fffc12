#!/usr/bin/env python3
"""Train a multi-layer perceptron with Adam, every kernel written by hand.

Tiled matrix products with shared memory and barriers, reductions in a fixed order, integer atomics. Parameters, their
moments and the activations live in device memory from the first iteration to the last; nothing is uploaded again, so
whatever a checkpoint lost would show in the very next line.
"""

from __future__ import annotations

import argparse
import itertools
import struct
from dataclasses import dataclass

from cuda_program import Buffer, CudaError, Device, blocks_for, f32, fail, u32
from report import Report, parser, total

SOURCE = r"""
#define TILE 16

// c[m][n] = sum over k of a[m][k] * b[k][n], each operand read through its two strides, so that transposed
// operands need no copy. `bias` (one per column) and `gate` (the output is kept where gate > 0, else 0) may be null.
// The sum runs over k in order, one fused multiply-add at a time.
extern "C" __global__ void product(const float *a, u32 a_row, u32 a_column, const float *b, u32 b_row, u32 b_column,
                                   float *c, u32 rows, u32 columns, u32 depth, const float *bias, const float *gate,
                                   u32 rectify)
{
    __shared__ float left[TILE][TILE];
    __shared__ float right[TILE][TILE];
    u32 row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (u32 start = 0; start < depth; start += TILE) {
        u32 k = start + threadIdx.x;
        left[threadIdx.y][threadIdx.x] = row < rows && k < depth ? a[row * a_row + k * a_column] : 0.0f;
        k = start + threadIdx.y;
        right[threadIdx.y][threadIdx.x] = k < depth && column < columns ? b[k * b_row + column * b_column] : 0.0f;
        __syncthreads();
        for (u32 i = 0; i < TILE; i++)
            sum = __fmaf_rn(left[threadIdx.y][i], right[i][threadIdx.x], sum);
        __syncthreads();
    }
    if (row >= rows || column >= columns)
        return;
    u32 index = row * columns + column;
    if (bias)
        sum = sum + bias[column];
    if (rectify)
        sum = sum > 0.0f ? sum : 0.0f;
    if (gate)
        sum = gate[index] > 0.0f ? sum : 0.0f;
    c[index] = sum;
}

// A float in [-1, 1) with 24 random bits, a function of its three inputs only.
__device__ float noise(u32 seed, u32 stream, u32 index)
{
    u64 bits = mix(((u64)seed << 48) ^ ((u64)stream << 32) ^ index);
    return (float)(u32)(bits >> 40) * 0x1p-23f - 1.0f;
}

extern "C" __global__ void initialize(float *parameters, u32 first, u32 count, float scale)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        parameters[first + i] = scale * noise(1, 0, first + i);
}

// A batch of inputs and the values that the network is to learn from them.
extern "C" __global__ void make_batch(float *inputs, float *targets, u32 batch, u32 width, u32 outputs, u32 iteration)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < batch * width)
        inputs[i] = noise(2, iteration, i);
    if (i < batch * outputs) {
        u32 first = i / outputs * width, k = i % outputs;
        float x = noise(2, iteration, first + k % width), y = noise(2, iteration, first + (k + 1) % width);
        targets[i] = 0.5f * x + x * y - 0.25f * y;
    }
}

// The slope of the mean squared error, and its sum: each block adds up its own part as a tree in shared memory.
extern "C" __global__ void error_slope(const float *outputs, const float *targets, float *slope, u32 count, float scale,
                                       float *sums)
{
    __shared__ float partial[256];
    u32 i = blockIdx.x * 256 + threadIdx.x;
    float difference = i < count ? outputs[i] - targets[i] : 0.0f;
    if (i < count)
        slope[i] = 2.0f * scale * difference;
    partial[threadIdx.x] = difference * difference;
    __syncthreads();
    for (u32 half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half)
            partial[threadIdx.x] = partial[threadIdx.x] + partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        sums[blockIdx.x] = partial[0];
}

extern "C" __global__ void add_up(const float *sums, u32 count, float scale, float *loss)
{
    float sum = 0.0f;
    for (u32 i = 0; i < count; i++)
        sum = sum + sums[i];
    *loss = sum * scale;
}

extern "C" __global__ void sum_columns(const float *values, u32 rows, u32 columns, float *sums)
{
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns)
        return;
    float sum = 0.0f;
    for (u32 row = 0; row < rows; row++)
        sum = sum + values[row * columns + column];
    sums[column] = sum;
}

// How many hidden units are on, and the bits of the steepest slope: integers both, so atomics may come in any order.
extern "C" __global__ void observe(const float *activations, u32 count, const float *slopes, u32 slope_count, u32 *on,
                                   u32 *steepest)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count && activations[i] > 0.0f)
        atomicAdd(on, 1u);
    if (i < slope_count)
        atomicMax(steepest, __float_as_uint(slopes[i]) & 0x7fffffffu);
}

extern "C" __global__ void adam(float *parameters, const float *slopes, float *first, float *second, u32 count,
                                float rate, float keep_first, float keep_second, float correct_first,
                                float correct_second)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    float slope = slopes[i];
    float mean = keep_first * first[i] + (1.0f - keep_first) * slope;
    float square = keep_second * second[i] + (1.0f - keep_second) * (slope * slope);
    first[i] = mean;
    second[i] = square;
    parameters[i] = parameters[i] - rate * (mean * correct_first) / (__fsqrt_rn(square * correct_second) + 1e-8f);
}
"""

RATE, KEEP_FIRST, KEEP_SECOND = 1e-2, 0.9, 0.999


class Part(Buffer):
    """A piece of a Buffer: `count` floats from float `first` on. Owns nothing."""

    def __init__(self, whole: Buffer, first: int, count: int) -> None:
        self.size = 4 * count
        self.address = whole.address + 4 * first


@dataclass(frozen=True)
class Layer:
    """One layer: its shape, and where its weights and biases begin in the parameters (in floats)."""

    inputs: int
    outputs: int
    weights: int
    biases: int


class Network:
    """The perceptron and its buffers, for one batch size."""

    def __init__(self, device: Device, widths: list[int], batch: int) -> None:
        self.module = device.load(SOURCE, "mlp.cu")
        self.batch = batch
        self.layers: list[Layer] = []
        count = 0
        for inputs, outputs in itertools.pairwise(widths):
            self.layers.append(Layer(inputs, outputs, count, count + inputs * outputs))
            count += inputs * outputs + outputs
        self.parameter_count = count
        self.power_first = self.power_second = 1.0  # KEEP_FIRST and KEEP_SECOND to the power of the iteration
        self.parameters, self.slopes = Buffer(4 * count), Buffer(4 * count)
        self.first, self.second = Buffer(4 * count), Buffer(4 * count)
        for buffer in (self.parameters, self.slopes, self.first, self.second):
            buffer.fill(0)
        self.values = [Buffer(4 * batch * width) for width in widths]
        self.value_slopes = [Buffer(4 * batch * width) for width in widths[1:]]
        self.output_count = batch * widths[-1]
        self.targets = Buffer(4 * self.output_count)
        self.sums = Buffer(4 * blocks_for(self.output_count, 256))
        self.seen = Buffer(12)  # the loss, how many units are on, the bits of the steepest slope
        for layer in self.layers:
            weights = layer.inputs * layer.outputs
            # A power of two near 1 / sqrt(inputs): no square root needed, and exact.
            scale = 2.0 ** -((layer.inputs.bit_length()) // 2)
            self._launch("initialize", weights, self.parameters, u32(layer.weights), u32(weights), f32(scale))

    def _launch(self, kernel: str, threads: int, *arguments: object) -> None:
        self.module.launch(kernel, blocks_for(threads, 256), 256, *arguments)

    def _product(
        self,
        a: tuple[Buffer, int, int],
        b: tuple[Buffer, int, int],
        c: Buffer,
        shape: tuple[int, int, int],
        *,
        bias: Buffer | None = None,
        gate: Buffer | None = None,
        rectify: bool = False,
    ) -> None:
        """Launch the product; operands are (buffer, row stride, column stride), shape is (rows, columns, depth)."""
        rows, columns, depth = shape
        nothing = Part(c, 0, 0)
        nothing.address = 0
        self.module.launch(
            "product",
            (blocks_for(columns, 16), blocks_for(rows, 16)),
            (16, 16),
            *(a[0], u32(a[1]), u32(a[2]), b[0], u32(b[1]), u32(b[2]), c, u32(rows), u32(columns), u32(depth)),
            *(bias or nothing, gate or nothing, u32(rectify)),
        )

    def _forward(self) -> None:
        for index, layer in enumerate(self.layers):
            self._product(
                (self.values[index], layer.inputs, 1),
                (Part(self.parameters, layer.weights, layer.inputs * layer.outputs), layer.outputs, 1),
                self.values[index + 1],
                (self.batch, layer.outputs, layer.inputs),
                bias=Part(self.parameters, layer.biases, layer.outputs),
                rectify=index + 1 < len(self.layers),
            )

    def _backward(self) -> None:
        for index in range(len(self.layers) - 1, -1, -1):
            layer, slope = self.layers[index], self.value_slopes[index]
            self._product(
                (self.values[index], 1, layer.inputs),
                (slope, layer.outputs, 1),
                Part(self.slopes, layer.weights, layer.inputs * layer.outputs),
                (layer.inputs, layer.outputs, self.batch),
            )
            biases = Part(self.slopes, layer.biases, layer.outputs)
            self._launch("sum_columns", layer.outputs, slope, u32(self.batch), u32(layer.outputs), biases)
            if index > 0:
                self._product(
                    (slope, layer.outputs, 1),
                    (Part(self.parameters, layer.weights, layer.inputs * layer.outputs), 1, layer.outputs),
                    self.value_slopes[index - 1],
                    (self.batch, layer.inputs, layer.outputs),
                    gate=self.values[index],
                )

    def train(self, iteration: int) -> tuple[float, int, float]:
        """One step of Adam on a fresh batch: returns the loss, how many hidden units are on, and the steepest slope."""
        batch, width, outputs = self.batch, self.layers[0].inputs, self.layers[-1].outputs
        threads = batch * max(width, outputs)
        where = (self.values[0], self.targets, u32(batch), u32(width), u32(outputs), u32(iteration))
        self._launch("make_batch", threads, *where)
        self._forward()
        count, scale = self.output_count, f32(1.0 / self.output_count)
        arguments = (self.values[-1], self.targets, self.value_slopes[-1], u32(count), scale, self.sums)
        self._launch("error_slope", count, *arguments)
        loss, on, steepest = (Part(self.seen, index, 1) for index in range(3))
        self.seen.fill(0)
        self.module.launch("add_up", 1, 1, self.sums, u32(blocks_for(count, 256)), scale, loss)
        self._backward()
        hidden = batch * self.layers[0].outputs
        seen = (self.values[1], u32(hidden), self.slopes, u32(self.parameter_count), on, steepest)
        self._launch("observe", max(hidden, self.parameter_count), *seen)
        # Products, not powers: a multiplication rounds alike everywhere, pow() depends on the C library.
        self.power_first *= KEEP_FIRST
        self.power_second *= KEEP_SECOND
        correct = (f32(1.0 / (1.0 - self.power_first)), f32(1.0 / (1.0 - self.power_second)))
        state = (self.parameters, self.slopes, self.first, self.second, u32(self.parameter_count))
        self._launch("adam", self.parameter_count, *state, f32(RATE), f32(KEEP_FIRST), f32(KEEP_SECOND), *correct)
        loss_seen, on_seen, steepest_seen = struct.unpack("<fIf", self.seen.download())
        return loss_seen, on_seen, steepest_seen

    def digest(self) -> int:
        """Digest of the parameters and both moments."""
        buffers = (self.parameters, self.first, self.second)
        return total([self.module.digest(buffer, salt) for salt, buffer in enumerate(buffers)])


def main(arguments: list[str] | None = None) -> None:
    """Run the program with the given command line (default: the process's own)."""
    options = parser(
        "Train a multi-layer perceptron with Adam.", iterations=20, size=64, size_help="width of a hidden layer"
    )
    options.add_argument("--batch", type=int, default=64, metavar="N", help="samples in a batch (%(default)s)")
    options.add_argument("--hidden", type=int, default=2, metavar="N", help="hidden layers (%(default)s)")
    run(options.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Train as the options say."""
    report = Report(options)
    with Device() as device:
        report.device(device.describe())
        widths = [options.size] * (options.hidden + 1) + [max(1, options.size // 4)]
        network = Network(device, widths, options.batch)
        for iteration in range(1, options.iterations + 1):
            loss, on, steepest = network.train(iteration)
            report.step(network.digest(), f"loss {loss.hex()} on {on} steepest {steepest.hex()}")
        report.result()


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
