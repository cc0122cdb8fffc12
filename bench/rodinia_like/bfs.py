"""Breadth-first search over a graph in adjacency lists, one launch a level, a flag that says whether to go on."""

from __future__ import annotations

from common import Program, i32, ints, main, random_ints, read

SOURCE = r"""
__global__ void expand(const int *first, const int *edges, int *level, int *again, int depth, int nodes)
{
    int node = blockIdx.x * blockDim.x + threadIdx.x;
    if (node >= nodes || level[node] != depth)
        return;
    for (int e = first[node]; e < first[node + 1]; e++)
        if (level[edges[e]] < 0) {
            level[edges[e]] = depth + 1;
            *again = 1;
        }
}
"""
NAMES = ["expand"]


def run(program: Program) -> str:
    nodes, degree = 2048 * program.scale, 3
    targets = random_ints(nodes * degree, nodes)
    first, edges = ints(range(0, nodes * degree + 1, degree)), ints(targets)
    level, again = ints([0] + [-1] * (nodes - 1)), ints([0])
    depth = 0
    while True:
        again.fill(0)
        program.launch("expand", -(-nodes // 128), 128, first, edges, level, again, i32(depth), i32(nodes))
        depth += 1
        if not read(again, "i")[0]:
            break
    expected = [0] + [-1] * (nodes - 1)
    front = [0]
    while front:
        following = []
        for node in front:
            for target in targets[node * degree : (node + 1) * degree]:
                if expected[target] < 0:
                    expected[target] = expected[node] + 1
                    following.append(target)
        front = following
    return "" if read(level, "i") == expected else "a node's level"


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
