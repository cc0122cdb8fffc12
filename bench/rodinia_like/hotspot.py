"""Heat on a chip: a stencil with shared memory over temperature and power, sizes in a struct by value."""

from __future__ import annotations

import ctypes

from common import Program, floats, i32, main, random_ints, read

SOURCE = r"""
struct Chip { const float *power; float step, across, down, ambient; int width, height; };

__global__ void heat(float *to, const float *from, Chip chip)
{
    __shared__ float tile[18][18];
    int x = blockIdx.x * 16 + threadIdx.x - 1, y = blockIdx.y * 16 + threadIdx.y - 1;
    int inside_x = min(max(x, 0), chip.width - 1), inside_y = min(max(y, 0), chip.height - 1);
    tile[threadIdx.y][threadIdx.x] = from[inside_y * chip.width + inside_x];
    __syncthreads();
    bool border = threadIdx.x < 1 || threadIdx.x > 16 || threadIdx.y < 1 || threadIdx.y > 16;
    if (border || x >= chip.width || y >= chip.height)
        return;
    float t = tile[threadIdx.y][threadIdx.x];
    float change = chip.power[y * chip.width + x];
    change += (tile[threadIdx.y][threadIdx.x - 1] + tile[threadIdx.y][threadIdx.x + 1] - 2 * t) * chip.across;
    change += (tile[threadIdx.y - 1][threadIdx.x] + tile[threadIdx.y + 1][threadIdx.x] - 2 * t) * chip.down;
    to[y * chip.width + x] = t + chip.step * (change + (chip.ambient - t) * 0.01f);
}
"""
NAMES = ["heat"]


class Chip(ctypes.Structure):
    _fields_ = (
        ("power", ctypes.c_uint64),
        ("step", ctypes.c_float),
        ("across", ctypes.c_float),
        ("down", ctypes.c_float),
        ("ambient", ctypes.c_float),
        ("width", i32),
        ("height", i32),
    )


def run(program: Program) -> str:
    width = 64 * program.scale
    watts = [value / 100 for value in random_ints(width * width, 100)]
    power = floats(watts)
    grids = [floats([80.0] * (width * width)) for _ in range(2)]
    chip = Chip(power.address, 0.1, 0.5, 0.5, 80.0, width, width)
    for _ in range(8):
        program.launch("heat", (width // 16, width // 16), (18, 18), grids[1], grids[0], chip)
        grids.reverse()
    expected = [80.0] * (width * width)
    for _ in range(8):
        expected = step(expected, watts, width)
    for at, (found, wanted) in enumerate(zip(read(grids[0], "f"), expected, strict=True)):
        if abs(found - wanted) > 1e-3:
            return f"the temperature at {at}: {found}, not {wanted}"
    return "" if max(expected) > 80.1 else "it does not get warm"


def step(from_: list[float], power: list[float], width: int) -> list[float]:
    """What the kernel does, in plain Python; at the borders a cell is its own neighbour."""
    to = []
    for y in range(width):
        up, here, down = (from_[r * width : (r + 1) * width] for r in (max(y - 1, 0), y, min(y + 1, width - 1)))
        for x, t in enumerate(here):
            across = here[max(x - 1, 0)] + here[min(x + 1, width - 1)] - 2 * t
            change = power[y * width + x] + (across + up[x] + down[x] - 2 * t) * 0.5
            to.append(t + 0.1 * (change + (80.0 - t) * 0.01))
    return to


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
