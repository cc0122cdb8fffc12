"""What the programs share: CUDA C++ compiled by NVRTC to PTX or machine code, kernels under their mangled names."""

from __future__ import annotations

import argparse
import array
import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for candidate in (Path(__file__).resolve().parents[2] / "examples", Path(__file__).resolve().parents[2]):
    if (candidate / "cuda_program.py").exists():
        sys.path.insert(0, str(candidate))

from cuda.bindings import nvrtc  # noqa: E402
from cuda_program import COMPILE_OPTIONS, Buffer, Device, Module, check, supported_architecture  # noqa: E402

i32 = ctypes.c_int
f32 = ctypes.c_float

__all__ = ["Buffer", "Program", "f32", "floats", "i32", "ints", "main", "random_ints", "read"]


def compile_kernels(source: str, names: Sequence[str], architecture: str, *, cubin: bool) -> tuple[bytes, list[str]]:
    """Compile, and say what each kernel is called after mangling: the name is one source of access descriptors."""
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []), "create an NVRTC program")
    try:
        for name in names:
            check(nvrtc.nvrtcAddNameExpression(program, name.encode()), f"ask for the name of {name}")
        target = architecture.replace("compute_", "sm_") if cubin else architecture
        options = [f"--gpu-architecture={target}".encode(), *(option.encode() for option in COMPILE_OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program), "read the size of the log")
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.decode())
        mangled = [check(nvrtc.nvrtcGetLoweredName(program, name.encode()), name).decode() for name in names]
        size, get = (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if cubin else (
            nvrtc.nvrtcGetPTXSize,
            nvrtc.nvrtcGetPTX,
        )  # fmt: skip
        image = b" " * check(size(program), "read the size of the code")
        check(get(program, image), "read the code")
        return image, mangled
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Program:
    """A device with the kernels of one program on it."""

    def __init__(self, device: Device, source: str, names: Sequence[str], *, cubin: bool, scale: int) -> None:
        architecture = supported_architecture(device.major, device.minor)
        image, mangled = compile_kernels(source, names, architecture, cubin=cubin)
        self.module = Module(image, names[0])
        self.names = dict(zip(names, mangled, strict=True))
        self.device = device
        self.scale = scale

    def launch(self, kernel: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], *arguments: Any) -> None:
        """Launch a kernel under its name in the source."""
        self.module.launch(self.names[kernel], grid, block, *arguments)


def floats(values: Sequence[float]) -> Buffer:
    """A buffer of 32-bit floating point numbers."""
    return _upload(array.array("f", values))


def ints(values: Sequence[int]) -> Buffer:
    """A buffer of 32-bit integers."""
    return _upload(array.array("i", values))


def _upload(values: array.array[Any]) -> Buffer:
    buffer = Buffer(max(4, 4 * len(values)))
    if values:
        buffer.upload(values.tobytes())
    return buffer


def read(buffer: Buffer, kind: str) -> list[Any]:
    """What is in a buffer: kind "i" or "f"."""
    found = array.array(kind)
    found.frombytes(buffer.download())
    return found.tolist()


def random_ints(count: int, below: int, seed: int = 1) -> list[int]:
    """Numbers that look random and are the same in every run."""
    numbers = []
    for _ in range(count):
        seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        numbers.append((seed >> 8) % below)
    return numbers


def main(run: Callable[[Program], str], source: str, names: Sequence[str]) -> None:
    """Run a program: ``run`` returns what is wrong with its result, or nothing."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--code", choices=("ptx", "cubin"), default="ptx", help="what the driver is given (%(default)s)"
    )
    parser.add_argument("--scale", type=int, default=1, help="size of the problem (%(default)s)")
    options = parser.parse_args()
    with Device() as device:
        wrong = run(Program(device, source, names, cubin=options.code == "cubin", scale=options.scale))
        device.synchronize()
    if wrong:
        raise SystemExit(f"The result is wrong: {wrong}")
    print("RESULT right")
