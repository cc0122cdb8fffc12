#!/usr/bin/env python3
"""Chase pointers through device memory.

Four buffers hold the nodes of one ring; each node holds the device address of the next one, in whichever buffer that
is. The addresses are written once. A restore that put any buffer elsewhere, or mixed two of them up, ends in a fault or
in another digest. The digest is made of node numbers, not of addresses, so it is the same on every machine.
"""

from __future__ import annotations

import argparse
import ctypes

from cuda_program import Buffer, CudaError, Device, blocks_for, fail, u32
from report import Report, parser, total

SOURCE = r"""
#define PARTS 4

struct node {
    struct node *next;
    u32 number;
    u32 visits;
};

struct parts { struct node *part[PARTS]; };

__device__ struct node *node_of(struct parts parts, u32 number, u32 each)
{
    return parts.part[number / each] + number % each;
}

// Node i points at node (5 * i + 12345) mod count: for a power of two, that visits every node once before it repeats.
extern "C" __global__ void link(struct parts parts, u32 count)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x, each = count / PARTS;
    if (i >= count)
        return;
    struct node *node = node_of(parts, i, each);
    node->next = node_of(parts, (5 * i + 12345) & (count - 1), each);
    node->number = i;
    node->visits = 0;
}

// Each thread follows `steps` pointers from where it stands, and remembers the address it has come to.
extern "C" __global__ void chase(struct node **standing, u64 *sums, u32 walkers, u32 steps)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= walkers)
        return;
    struct node *node = standing[i];
    u64 sum = sums[i];
    for (u32 step = 0; step < steps; step++) {
        u32 visit = atomicAdd(&node->visits, 1u);
        (void)visit;
        sum = mix(sum + node->number);
        node = node->next;
    }
    standing[i] = node;
    sums[i] = sum;
}

extern "C" __global__ void place(struct parts parts, struct node **standing, u64 *sums, u32 walkers, u32 count)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= walkers)
        return;
    standing[i] = node_of(parts, i * (count / walkers), count / PARTS);
    sums[i] = i;
}

extern "C" __global__ void collect_visits(struct parts parts, u32 *visits, u32 count)
{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        visits[i] = node_of(parts, i, count / PARTS)->visits;
}
"""

PARTS, NODE_SIZE = 4, 16


class Parts(ctypes.Structure):
    """The kernels' `struct parts`."""

    _fields_ = [("part", ctypes.c_uint64 * PARTS)]


def main(arguments: list[str] | None = None) -> None:
    """Run the program with the given command line (default: the process's own)."""
    options = parser("Chase pointers through device memory.", iterations=20, size=14, size_help="2**N nodes")
    options.add_argument("--walkers", type=int, default=256, metavar="N", help="threads, a power of two (%(default)s)")
    options.add_argument("--steps", type=int, default=200, metavar="N", help="pointers each follows (%(default)s)")
    run(options.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Chase as the options say."""
    report = Report(options)
    count, walkers = 1 << options.size, options.walkers
    with Device() as device:
        report.device(device.describe())
        module = device.load(SOURCE, "pointer_chase.cu")
        buffers = [Buffer(count // PARTS * NODE_SIZE) for _ in range(PARTS)]
        parts = Parts((ctypes.c_uint64 * PARTS)(*(buffer.address for buffer in buffers)))
        standing, sums, visits = Buffer(8 * walkers), Buffer(8 * walkers), Buffer(4 * count)
        module.launch("link", blocks_for(count, 128), 128, parts, u32(count))
        module.launch("place", blocks_for(walkers, 128), 128, parts, standing, sums, u32(walkers), u32(count))
        for _ in range(options.iterations):
            arguments = (standing, sums, u32(walkers), u32(options.steps))
            module.launch("chase", blocks_for(walkers, 64), 64, *arguments)
            module.launch("collect_visits", blocks_for(count, 128), 128, parts, visits, u32(count))
            report.step(total([module.digest(sums), module.digest(visits, 1)]))
        report.result()


if __name__ == "__main__":
    try:
        main()
    except CudaError as error:
        fail(error)
