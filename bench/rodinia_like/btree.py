"""Look-ups in a tree of nodes that hold the addresses of their children, and an update of what is found."""

from __future__ import annotations

import bisect
import struct

from common import Buffer, Program, i32, ints, main, random_ints, read

FAN = 8
NODE = struct.Struct(f"<{FAN}i{FAN}Qi4x")

SOURCE = r"""
struct Node { int least[8]; Node *child[8]; int used; };

// Leaves have the address of a counter in place of a child.
__global__ void find(const Node *root, const int *wanted, int *found, int count, int depth)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count)
        return;
    const Node *node = root;
    for (int level = 0; ; level++) {
        int at = 0;
        while (at + 1 < node->used && node->least[at + 1] <= wanted[i])
            at++;
        if (level == depth) {
            found[i] = node->least[at] == wanted[i];
            if (found[i])
                atomicAdd((int *)node->child[at], 1);
            return;
        }
        node = node->child[at];
    }
}
"""
NAMES = ["find"]


def build(keys: list[int], counters: Buffer) -> tuple[Buffer, int]:
    """The nodes of all levels in one buffer, the root first; returns it and the depth of the leaves."""
    levels = [[(key, counters.address + 4 * i) for i, key in enumerate(keys)]]
    while len(levels[-1]) > FAN:
        levels.append([(levels[-1][at][0], at // FAN) for at in range(0, len(levels[-1]), FAN)])
    counts = [-(-len(level) // FAN) for level in reversed(levels)]
    nodes = Buffer(NODE.size * sum(counts))
    first = 0
    for depth, level in enumerate(reversed(levels)):
        below = nodes.address + NODE.size * (first + counts[depth])
        leaf = depth == len(levels) - 1
        for number in range(counts[depth]):
            part = level[number * FAN : (number + 1) * FAN]
            children = [where if leaf else below + NODE.size * where for _, where in part]
            pad = [0] * (FAN - len(part))
            packed = NODE.pack(*(key for key, _ in part), *pad, *children, *pad, len(part))
            nodes.upload(packed, NODE.size * (first + number))
        first += counts[depth]
    return nodes, len(levels) - 1


def run(program: Program) -> str:
    keys = sorted(set(random_ints(512 * program.scale, 10000)))
    wanted = random_ints(1024 * program.scale, 10000, 5)
    counters = ints([0] * len(keys))
    nodes, depth = build(keys, counters)
    questions, found = ints(wanted), ints([-1] * len(wanted))
    for _ in range(2):
        program.launch("find", -(-len(wanted) // 128), 128, nodes, questions, found, i32(len(wanted)), i32(depth))
    known = set(keys)
    expected = [int(key in known) for key in wanted]
    times = [0] * len(keys)
    for key in wanted:
        if key in known:
            times[bisect.bisect_left(keys, key)] += 2
    if read(found, "i") != expected:
        return "what was found"
    return "" if read(counters, "i") == times else "how often it was found"


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
