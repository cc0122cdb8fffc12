#!/usr/bin/env python3
"""A kernel that writes through a `__device__` pointer variable.

The kernels take no pointers at all: the addresses are in the module's own variables, and a kernel swaps them, so the
host does not even know which buffer is written next. Module variables are neither allocated nor freed by the program:
a checkpoint must bring them back with the module.
"""

from __future__ import annotations

import argparse

from cuda.bindings import driver
from cuda_program import Buffer, CudaError, Device, blocks_for, check, fail, u32
from report import Report, parser, total

SOURCE = r"""
__device__ u32 *target;
__device__ u32 *other;
__device__ u64 written = 1000;      // initial values come from the module's image
__constant__ u32 weights[4] = {3, 5, 7, 11};

extern "C" __global__ void write_through(u32 count, u32 iteration)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    target[i] += weights[(i + iteration) & 3] * (iteration + 1) + (other[count - 1 - i] >> 3);
    atomicAdd(&written, 1ull);
}

extern "C" __global__ void swap(void)
{
    u32 *old = target;
    target = other;
    other = old;
}
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the program with the given command line (default: the process's own)."""
    description = "Write through a __device__ pointer."
    run(parser(description, iterations=20, size=1 << 14, size_help="words").parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Run as the options say."""
    report = Report(options)
    count = options.size
    with Device() as device:
        report.device(device.describe())
        module = device.load(SOURCE, "device_pointer.cu")
        buffers = [Buffer(4 * count), Buffer(4 * count)]
        for name, buffer in zip(("target", "other"), buffers, strict=True):
            buffer.fill(0)
            address, size = module.variable(name)
            pointer = buffer.address.to_bytes(8, "little")
            check(driver.cuMemcpyHtoD(address, pointer, size), f"set the device variable {name}")
        written, _ = module.variable("written")
        for iteration in range(options.iterations):
            module.launch("write_through", blocks_for(count, 128), 128, u32(count), u32(iteration))
            if iteration % 3 == 2:
                module.launch("swap", 1, 1)
            value = bytearray(8)
            check(driver.cuMemcpyDtoH(value, written, 8), "read the device variable written")
            digests = [module.digest(buffer, salt) for salt, buffer in enumerate(buffers)]
            report.step(total(digests), f"written {int.from_bytes(value, 'little')}")
        report.result()


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
