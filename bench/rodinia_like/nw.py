"""Needleman-Wunsch: the score matrix of two sequences, a diagonal a launch, in place."""

from __future__ import annotations

from common import Program, i32, ints, main, random_ints, read

SOURCE = r"""
__global__ void diagonal(int *score, const int *similar, int width, int number, int penalty)
{
    int row = blockIdx.x * blockDim.x + threadIdx.x + 1;
    int column = number - row;
    if (row >= width || column < 1 || column >= width)
        return;
    int at = row * width + column;
    int best = score[at - width - 1] + similar[at];
    best = max(best, score[at - width] - penalty);
    score[at] = max(best, score[at - 1] - penalty);
}
"""
NAMES = ["diagonal"]


def run(program: Program) -> str:
    width, penalty = 48 * program.scale, 10
    similar = [value - 5 for value in random_ints(width * width, 20)]
    start = [0] * (width * width)
    for i in range(width):
        start[i] = start[i * width] = -penalty * i
    score, table = ints(start), ints(similar)
    for number in range(2, 2 * width - 1):
        program.launch("diagonal", -(-width // 64), 64, score, table, i32(width), i32(number), i32(penalty))
    for row in range(1, width):
        for column in range(1, width):
            at = row * width + column
            start[at] = max(
                start[at - width - 1] + similar[at], start[at - width] - penalty, start[at - 1] - penalty
            )  # fmt: skip
    return "" if read(score, "i") == start else "a score"


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
