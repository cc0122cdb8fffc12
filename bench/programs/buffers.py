#!/usr/bin/env python3
"""examples/pytorch_buffers.py without PyTorch: the same options and lines, for the software GPU and for machines that
have no PyTorch.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from cuda_program import Buffer, CudaError, Device, blocks_for, fail, u32
from report import Report, parser

SOURCE = r"""
__device__ u32 pattern(u32 buffer, u32 word, u32 version)
{
    return (word * 0x9e3779b1u ^ (buffer * 0x85ebca6bu | 1u)) + version;
}

extern "C" __global__ void fill(u32 *words, u32 count, u32 buffer)
{
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        words[i] = pattern(buffer, i, 0);
}

extern "C" __global__ void change(u32 *words, u32 count)
{
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        words[i] += 1;
}

extern "C" __global__ void compare(const u32 *words, u32 count, u32 buffer, u32 version, u64 *wrong)
{
    u64 mine = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        mine += words[i] != pattern(buffer, i, version);
    if (mine)
        atomicAdd(wrong, mine);
}

extern "C" __global__ void tick(u64 *small)
{
    small[threadIdx.x] += 1;
}
"""


def main() -> None:
    """Run the program."""
    options = parser("Hold and check device memory.", iterations=1_000_000_000)
    options.add_argument("--bytes", type=float, default=1e6, metavar="N", help="of all buffers (%(default)s)")
    options.add_argument("--buffers", type=int, default=8, metavar="N", help="how many (%(default)s)")
    options.add_argument("--host-bytes", type=int, default=0, metavar="N", help="of its own memory, written once")
    options.add_argument("--launches", type=int, default=10, metavar="N", help="small kernels in an iteration")
    options.add_argument("--check-file", type=Path, metavar="FILE", help="check all buffers when this file appears")
    run(options.parse_args())


def run(options: argparse.Namespace) -> None:
    """Run as the options say."""
    report = Report(options)
    words = int(options.bytes) // options.buffers // 4
    with Device() as device:
        report.device(device.describe())
        module = device.load(SOURCE, "buffers.cu")
        grid = min(1024, blocks_for(words, 128))
        buffers, versions = [Buffer(4 * words) for _ in range(options.buffers)], [0] * options.buffers
        for index, buffer in enumerate(buffers):
            module.launch("fill", grid, 128, buffer, u32(words), u32(index))
        small, wrong = Buffer(8 * 32), Buffer(8)
        small.fill(0)
        device.synchronize()
        host = mmap.mmap(-1, options.host_bytes, mmap.MAP_PRIVATE) if options.host_bytes else b""
        for at in range(0, options.host_bytes, 4096):
            host[at : at + 8] = (at + 1).to_bytes(8, "little")
        report.line(f"READY {options.buffers} buffers of {4 * words} bytes")
        for iteration in range(options.iterations):
            for _ in range(options.launches):
                module.launch("tick", 1, 32, small)
            index = iteration % options.buffers
            module.launch("change", grid, 128, buffers[index], u32(words))
            versions[index] += 1
            report.step(module.digest(small))
            if options.check_file is not None and options.check_file.exists():
                wrong.fill(0)
                for index, buffer in enumerate(buffers):
                    check = (buffer, u32(words), u32(index), u32(versions[index]), wrong)
                    module.launch("compare", grid, 128, *check)
                found = ctypes.c_uint64.from_buffer_copy(wrong.download()).value
                report.line(f"CHECK FAILED {found}" if found else f"CHECK ok {words * options.buffers}")
                options.check_file.unlink()
        report.result()


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
