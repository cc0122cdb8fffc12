#!/usr/bin/env python3
"""Textures and a surface on a CUDA array, a texture on plain memory, and cuFFT's plans, by CuPy."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import cupy
from cupy.cuda import runtime, texture
from report import Report, parser

WIDTH, HEIGHT = 256, 128

SOURCE = r"""
extern "C" __global__ void look(cudaTextureObject_t image, cudaTextureObject_t row, float *sums, int width)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    sums[y * width + x] = tex2D<float>(image, x, y) + tex1Dfetch<float>(row, x);
}

extern "C" __global__ void draw(cudaSurfaceObject_t image, const float *sums, int width)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    surf2Dwrite(fmodf(sums[y * width + x] * 3.0f + (float)(x ^ y), 1021.0f), image, x * 4, y);
}
"""


def main() -> None:
    """Run the program."""
    options = parser("Textures.", iterations=20).parse_args()
    report = Report(options)
    module = cupy.RawModule(code=SOURCE)
    look, draw = module.get_function("look"), module.get_function("draw")
    floats = texture.ChannelFormatDescriptor(32, 0, 0, 0, runtime.cudaChannelFormatKindFloat)
    array = texture.CUDAarray(floats, WIDTH, HEIGHT, flags=runtime.cudaArraySurfaceLoadStore)
    array.copy_from(cupy.arange(WIDTH * HEIGHT, dtype=cupy.float32).reshape(HEIGHT, WIDTH))
    row = cupy.arange(WIDTH, dtype=cupy.float32)
    described = texture.ResourceDescriptor(runtime.cudaResourceTypeArray, cuArr=array)
    linear = texture.ResourceDescriptor(runtime.cudaResourceTypeLinear, arr=row, chDesc=floats, sizeInBytes=row.nbytes)
    sampling = texture.TextureDescriptor((runtime.cudaAddressModeClamp,) * 2, runtime.cudaFilterModePoint)
    image, of_row = texture.TextureObject(described, sampling), texture.TextureObject(linear, sampling)
    surface = texture.SurfaceObject(described)
    sums = cupy.zeros((HEIGHT, WIDTH), dtype=cupy.float32)
    report.device(f"CuPy {cupy.__version__}")
    grid, block = (WIDTH // 128, HEIGHT), (128,)
    for iteration in range(options.iterations):
        look(grid, block, (image, of_row, sums, cupy.int32(WIDTH)))
        draw(grid, block, (surface, sums, cupy.int32(WIDTH)))
        row += cupy.float32(iteration % 3)
        report.step(int(sums.astype(cupy.int64).sum()))
    report.result()


if __name__ == "__main__":
    main()
