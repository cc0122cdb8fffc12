"""Gaussian elimination over rows that a table of addresses names: what is written is reached through memory alone."""

from __future__ import annotations

import ctypes

from common import Buffer, Program, floats, i32, main, random_ints, read

SOURCE = r"""
__global__ void multipliers(float *const *rows, float *factor, int size, int step)
{
    int row = blockIdx.x * blockDim.x + threadIdx.x + step + 1;
    if (row < size)
        factor[row] = rows[row][step] / rows[step][step];
}
__global__ void subtract(float *const *rows, float *right, const float *factor, int size, int step)
{
    int column = blockIdx.x * blockDim.x + threadIdx.x + step, row = blockIdx.y + step + 1;
    if (row >= size || column >= size)
        return;
    rows[row][column] -= factor[row] * rows[step][column];
    if (column == step)
        right[row] -= factor[row] * right[step];
}
"""
NAMES = ["multipliers", "subtract"]


def run(program: Program) -> str:
    size = 24 * program.scale
    values = [value / 10 for value in random_ints(size * size, 10)]
    for i in range(size):
        values[i * size + i] += size
    solution = [1.0 + value / 10 for value in random_ints(size, 10, 3)]
    products = [sum(values[y * size + x] * solution[x] for x in range(size)) for y in range(size)]
    rows = [floats(values[y * size : (y + 1) * size]) for y in range(size)]
    table = Buffer(8 * size)
    table.upload(bytes((ctypes.c_uint64 * size)(*(row.address for row in rows))))
    right, factor = floats(products), floats([0.0] * size)
    for step in range(size - 1):
        program.launch("multipliers", -(-size // 64), 64, table, factor, i32(size), i32(step))
        program.launch("subtract", (-(-size // 64), size - step - 1), 64, table, right, factor, i32(size), i32(step))
    found, rest = [0.0] * size, read(right, "f")
    for y in reversed(range(size)):
        row = read(rows[y], "f")
        if any(abs(value) > 1e-3 for value in row[:y]):
            return f"row {y} is not eliminated"
        found[y] = (rest[y] - sum(row[x] * found[x] for x in range(y + 1, size))) / row[y]
    worst = max(abs(a - b) for a, b in zip(found, solution, strict=True))
    return "" if worst < 1e-2 else f"the solution is off by {worst}"


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
