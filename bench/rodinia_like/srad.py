"""Speckle reducing diffusion: a coefficient kernel that writes five arrays, and one that takes them up again."""

from __future__ import annotations

import ctypes

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
NAMES = ["coefficients", "diffuse"]


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
    expected = start
    for _ in range(6):
        expected = smoothed(expected, width)
    for at, (found, wanted) in enumerate(zip(read(image, "f"), expected, strict=True)):
        if abs(found - wanted) > 1e-3:
            return f"the image at {at}: {found}, not {wanted}"
    return ""


def smoothed(image: list[float], width: int) -> list[float]:
    """What both kernels do, in plain Python."""
    last, slopes, coefficients = width - 1, [], []
    for at, here in enumerate(image):
        y, x = divmod(at, width)
        n, s = image[max(y - 1, 0) * width + x] - here, image[min(y + 1, last) * width + x] - here
        w, e = image[y * width + max(x - 1, 0)] - here, image[y * width + min(x + 1, last)] - here
        g, laplace = (n * n + s * s + w * w + e * e) / (here * here), (n + s + w + e) / here
        q = (0.5 * g - laplace * laplace / 16) / (1 + 0.25 * laplace) ** 2
        slopes.append((n, s, w, e))
        coefficients.append(min(max(1 / (1 + (q - 0.5) / 0.75), 0.0), 1.0))
    changed = []
    for at, here in enumerate(image):
        y, x = divmod(at, width)
        n, s, w, e = slopes[at]
        c, south = coefficients[at], coefficients[min(y + 1, last) * width + x]
        east = coefficients[y * width + min(x + 1, last)]
        changed.append(here + 0.125 * (c * n + south * s + c * w + east * e))
    return changed


if __name__ == "__main__":
    main(run, SOURCE, NAMES)
