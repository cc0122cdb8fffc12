"""Speckle reducing diffusion: a coefficient kernel that writes five arrays, and one that takes them up again."""

from __future__ import annotations

import ctypes
import itertools

from common import Program, f32, floats, i32, main, random_ints, read

SOURCE = r"""
struct Derivatives { float *north, *south, *west, *east; };

__global__ void coefficients(const float *image, float *coefficient, Derivatives d, int width, int height, float q0)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x >= width)
        return;
    int at = y * width + x;
    float here = image[at];
    float n = image[max(y - 1, 0) * width + x] - here, s = image[min(y + 1, height - 1) * width + x] - here;
    float w = image[y * width + max(x - 1, 0)] - here, e = image[y * width + min(x + 1, width - 1)] - here;
    d.north[at] = n, d.south[at] = s, d.west[at] = w, d.east[at] = e;
    float g = (n * n + s * s + w * w + e * e) / (here * here), l = (n + s + w + e) / here;
    float q = (0.5f * g - l * l / 16) / ((1 + 0.25f * l) * (1 + 0.25f * l));
    float c = 1 / (1 + (q - q0) / (q0 * (1 + q0)));
    coefficient[at] = fminf(fmaxf(c, 0.0f), 1.0f);
}
__global__ void diffuse(float *image, const float *coefficient, Derivatives d, int width, int height, float lambda)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x >= width)
        return;
    int at = y * width + x;
    float here = coefficient[at], south = coefficient[min(y + 1, height - 1) * width + x];
    float east = coefficient[y * width + min(x + 1, width - 1)];
    image[at] += 0.25f * lambda * (here * d.north[at] + south * d.south[at] + here * d.west[at] + east * d.east[at]);
}
"""


def run(program: Program) -> str:
    width = 64 * program.scale
    start = [1.0 + value / 100 for value in random_ints(width * width, 100)]
    image, coefficient = floats(start), floats([0.0] * (width * width))
    arrays = [floats([0.0] * (width * width)) for _ in range(4)]
    derivatives = (ctypes.c_uint64 * 4)(*(array.address for array in arrays))
    grid, size = (-(-width // 64), width), (i32(width), i32(width))
    for _ in range(6):
        program.launch("coefficients", grid, 64, image, coefficient, derivatives, *size, f32(0.5))
        program.launch("diffuse", grid, 64, image, coefficient, derivatives, *size, f32(0.5))
    found = read(image, "f")

    def roughness(values: list[float]) -> float:
        return sum(abs(a - b) for a, b in itertools.pairwise(values))

    return "" if roughness(found) < 0.7 * roughness(start) and min(found) > 0.5 else "the image is not smoother"


if __name__ == "__main__":
    main(run, SOURCE, ["coefficients", "diffuse"])
