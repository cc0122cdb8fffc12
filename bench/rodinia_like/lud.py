"""LU decomposition in place, without pivoting: a column and then the rest, for each step."""

from __future__ import annotations

from common import Program, floats, i32, main, random_ints, read

SOURCE = r"""
__global__ void column(float *matrix, int size, int step)
{
    int row = blockIdx.x * blockDim.x + threadIdx.x + step + 1;
    if (row < size)
        matrix[row * size + step] /= matrix[step * size + step];
}
__global__ void rest(float *matrix, int size, int step)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x + step + 1, y = blockIdx.y * blockDim.y + threadIdx.y + step + 1;
    if (x < size && y < size)
        matrix[y * size + x] -= matrix[y * size + step] * matrix[step * size + x];
}
"""
NAMES = ["column", "rest"]


def run(program: Program) -> str:
    size = 24 * program.scale
    values = [value / 10 for value in random_ints(size * size, 10)]
    for i in range(size):
        values[i * size + i] += size
    matrix = floats(values)
    grid = -(-size // 8)
    for step in range(size - 1):
        program.launch("column", -(-size // 32), 32, matrix, i32(size), i32(step))
        program.launch("rest", (grid, grid), (8, 8), matrix, i32(size), i32(step))
    lu = read(matrix, "f")
    for y in range(size):
        for x in range(size):
            product = sum((lu[y * size + k] if k < y else 1.0) * lu[k * size + x] for k in range(min(x, y) + 1))
            if abs(product - values[y * size + x]) > 1e-3 * size:
                return f"element {y}, {x}: {product}, not {values[y * size + x]}"
    return ""


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
