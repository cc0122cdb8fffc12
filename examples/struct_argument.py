#!/usr/bin/env python3
"""A kernel that reads and writes through pointers inside a struct that it gets by value.

No parameter of the kernel is a pointer: the addresses sit in the middle of a struct, two of them in a struct inside it
and three in an array. Whoever wants to know what the kernel writes has to look inside.
"""

from __future__ import annotations

import argparse
import ctypes

from cuda_program import Buffer, CudaError, Device, blocks_for, fail
from report import Report, parser, total

SOURCE = r"""
struct span { u32 *values; u32 count; };

struct job {
    u32 factor;
    struct span input;
    u32 *outputs[3];
    u64 *counter;
};

extern "C" __global__ void run_job(struct job job)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= job.input.count)
        return;
    u32 value = job.input.values[i] * job.factor + i;
    job.outputs[value % 3][i] ^= value;
    if (value & 1)
        atomicAdd(job.counter, (u64)value);
}

// The outputs become the next input.
extern "C" __global__ void fold(struct job job)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < job.input.count)
        job.input.values[i] += job.outputs[0][i] ^ (job.outputs[1][i] >> 1) ^ (job.outputs[2][i] << 1);
}
"""


class Span(ctypes.Structure):
    """The kernels' `struct span`."""

    _fields_ = [("values", ctypes.c_uint64), ("count", ctypes.c_uint32)]


class Job(ctypes.Structure):
    """The kernels' `struct job`."""

    _fields_ = [
        ("factor", ctypes.c_uint32),
        ("input", Span),
        ("outputs", ctypes.c_uint64 * 3),
        ("counter", ctypes.c_uint64),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run the program with the given command line (default: the process's own)."""
    run(
        parser("Write through a struct argument.", iterations=20, size=1 << 14, size_help="words").parse_args(arguments)
    )


def run(options: argparse.Namespace) -> None:
    """Run as the options say."""
    report = Report(options)
    count = options.size
    with Device() as device:
        report.device(device.describe())
        module = device.load(SOURCE, "struct_argument.cu")
        values, counter = Buffer(4 * count), Buffer(8)
        outputs = [Buffer(4 * count) for _ in range(3)]
        for buffer in (values, counter, *outputs):
            buffer.fill(0)
        addresses = (ctypes.c_uint64 * 3)(*(output.address for output in outputs))
        for iteration in range(1, options.iterations + 1):
            job = Job(2 * iteration + 1, Span(values.address, count), addresses, counter.address)
            module.launch("run_job", blocks_for(count, 128), 128, job)
            module.launch("fold", blocks_for(count, 128), 128, job)
            digests = [module.digest(buffer, salt) for salt, buffer in enumerate((values, counter, *outputs))]
            report.step(total(digests))
        report.result()


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
