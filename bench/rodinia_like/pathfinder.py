"""The cheapest way through a grid from top to bottom, a row a launch, two buffers that change places."""

from __future__ import annotations

from common import Program, i32, ints, main, random_ints, read

SOURCE = r"""
__global__ void next_row(const int *wall, const int *from, int *to, int columns, int row)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    if (x >= columns)
        return;
    int best = from[x];
    if (x > 0 && from[x - 1] < best)
        best = from[x - 1];
    if (x + 1 < columns && from[x + 1] < best)
        best = from[x + 1];
    to[x] = best + wall[row * columns + x];
}
"""
NAMES = ["next_row"]


def run(program: Program) -> str:
    columns, rows = 1024 * program.scale, 12
    numbers = random_ints(columns * rows, 10)
    wall = ints(numbers)
    buffers = [ints(numbers[:columns]), ints([0] * columns)]
    expected = numbers[:columns]
    for row in range(1, rows):
        program.launch("next_row", -(-columns // 128), 128, wall, *buffers, i32(columns), i32(row))
        buffers.reverse()
        expected = [
            min(expected[max(0, x - 1) : x + 2]) + numbers[row * columns + x] for x in range(columns)
        ]  # fmt: skip
    return "" if read(buffers[0], "i") == expected else "the cost of a way"


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
