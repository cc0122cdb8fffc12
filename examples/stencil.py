#!/usr/bin/env python3
"""A five-point stencil on two streams.

The upper half of the grid belongs to one stream and the lower half to another. Each step needs a row of the other half
from the step before, so each stream waits for the other's event; nothing else orders them. Results come back through
pinned host memory. Every buffer, event and stream lives from the first step to the last.
"""

from __future__ import annotations

import argparse
import ctypes

from cuda.bindings import driver
from cuda_program import Buffer, CudaError, Device, Event, Stream, blocks_for, check, f32, fail, u32, u64
from report import Report, parser

SOURCE = r"""
// One step for the rows first .. first + rows - 1 of a grid that is `width` wide; its border stays as it is.
extern "C" __global__ void relax(const float *from, float *to, u32 width, u32 first, u32 rows, float weight)
{
    u32 x = blockIdx.x * blockDim.x + threadIdx.x, y = first + blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= first + rows)
        return;
    u32 i = y * width + x;
    float here = from[i];
    if (x > 0 && x + 1 < width && y > 0 && y + 1 < width) {
        float around = (from[i - 1] + from[i + 1]) + (from[i - width] + from[i + width]);
        here = here + weight * (around - 4.0f * here);
    }
    to[i] = here;
}

extern "C" __global__ void prepare(float *grid, u32 width)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width * width)
        grid[i] = (float)(u32)(mix(i) >> 40) * 0x1p-24f;
}
"""

BLOCK = (32, 4)


def main(arguments: list[str] | None = None) -> None:
    """Run the program with the given command line (default: the process's own)."""
    options = parser("Relax a grid on two streams.", iterations=20, size=128, size_help="width of the square grid")
    options.add_argument("--steps", type=int, default=4, metavar="N", help="steps in an iteration (%(default)s)")
    run(options.parse_args(arguments))


class HostResult:
    """Eight bytes of pinned host memory, and the device word that is copied to it."""

    def __init__(self) -> None:
        self.sum = Buffer(8)
        self.address = int(check(driver.cuMemHostAlloc(8, 0), "allocate pinned host memory"))

    def value(self) -> int:
        """Return what the last copy brought."""
        return ctypes.c_uint64.from_address(self.address).value


def run(options: argparse.Namespace) -> None:
    """Relax as the options say."""
    report = Report(options)
    width = options.size
    with Device() as device:
        report.device(device.describe())
        module = device.load(SOURCE, "stencil.cu")
        grids = [Buffer(4 * width * width) for _ in range(2)]
        module.launch("prepare", blocks_for(width * width, 128), 128, grids[0], u32(width))
        device.synchronize()  # the streams below do not wait for the default stream
        streams, done = [Stream(), Stream()], [Event(), Event()]
        halves = [(0, width // 2), (width // 2, width - width // 2)]
        result = HostResult()
        for _ in range(options.iterations):
            for _ in range(options.steps):
                for stream, event, (first, rows) in zip(streams, done, halves, strict=True):
                    grid = (blocks_for(width, BLOCK[0]), blocks_for(rows, BLOCK[1]))
                    arguments = (grids[0], grids[1], u32(width), u32(first), u32(rows), f32(0.2))
                    module.launch("relax", grid, BLOCK, *arguments, stream=stream.handle)
                    event.record(stream)
                streams[0].wait(done[1])
                streams[1].wait(done[0])
                grids.reverse()
            doing = "sum up on a stream"
            check(driver.cuMemsetD32Async(result.sum.address, 0, 2, streams[0].handle), doing)
            summed = (grids[0], u32(width * width), u64(7), result.sum)
            module.launch("digest", 16, 128, *summed, stream=streams[0].handle)
            check(driver.cuMemcpyDtoHAsync(result.address, result.sum.address, 8, streams[0].handle), doing)
            done[0].record(streams[0])
            streams[1].wait(done[0])
            streams[0].synchronize()
            report.step(result.value())
        report.result()


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
