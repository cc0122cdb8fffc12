"""PyTorch, JAX, CuPy and a program made by nvcc: dumped, killed, restored, and compared with a run left alone."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import process
import pytest
from gpu_support import PROGRAMS, Starter, example, without_repeats

pytestmark = pytest.mark.nvidia_only

# Compiling in a pool of worker processes would put them into the image as well; that is not what is tested here.
COMPILE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def interrupted_is_the_same(
    command: list[str],
    start: Starter,
    image: Path,
    environment: dict[str, str] | None = None,
    at: int = 6,
    times: int = 1,
    frontend: bool = True,
) -> None:
    """Run alone and without the frontend; run with `times` dumps, kills and restores; compare all lines."""
    wanted = start(command, frontend=False, environment=environment, name="alone").finish()
    assert any(line.startswith("ITERATION") for line in wanted)
    program = start([*command, "--iteration-seconds", "0.05"], environment=environment, frontend=frontend)
    program.wait_for(f"^ITERATION {at} ", 180)
    for number in range(times):
        folder = image / str(number)
        folder.mkdir()
        process.criu_dump(program, folder)
        process.criu_restore(program, folder)
    assert without_repeats(program.finish()) == wanted


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


@needs_torch
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (("--model", "conv"), {}),
        (("--model", "transformer"), {}),
        (("--model", "transformer", "--graph"), {}),
        (("--model", "conv", "--graph"), {}),
        (("--model", "transformer", "--compile"), COMPILE),
        (("--model", "transformer"), EXPANDABLE),
        (("--model", "conv", "--graph"), EXPANDABLE),
    ],
    ids=["conv", "transformer", "graph", "conv-graph", "compile", "expandable", "expandable-graph"],
)
def test_pytorch_training(options: tuple[str, ...], environment: dict[str, str], start: Starter, image: Path) -> None:
    """Losses are bit-identical: eager, compiled, as a graph, with expandable segments."""
    interrupted_is_the_same(example("pytorch_train", "--iterations", "40", *options), start, image, environment)


@needs_torch
def test_pytorch_threads_streams_and_pinned_memory(start: Starter, image: Path) -> None:
    """Four threads inside CUDA, pinned buffers copied both ways."""
    command = process.python_program(PROGRAMS / "pytorch_threads.py")
    interrupted_is_the_same(command, start, image, times=2)


@needs_torch
@pytest.mark.parametrize("frontend", [True, False], ids=["frontend", "driver-alone"])
def test_pytorch_loader(start: Starter, image: Path, frontend: bool) -> None:
    """Worker processes that were forked after CUDA had been initialised, with the driver's files open and mapped."""
    command = process.python_program(PROGRAMS / "pytorch_loader.py")
    interrupted_is_the_same(command, start, image, times=2, frontend=frontend)


@needs_torch
def test_pytorch_beside_nvml(start: Starter, image: Path) -> None:
    """Who asks NVML, the program or a child that does nothing else, is answered as before."""
    command = process.python_program(PROGRAMS / "pytorch_nvml.py")
    interrupted_is_the_same(command, start, image, times=2)


@needs_torch
def test_pytorch_shares_tensors(start: Starter, image: Path) -> None:
    """CUDA IPC between two processes; spawned ones have semaphores with names."""
    command = process.python_program(PROGRAMS / "pytorch_ipc.py")
    interrupted_is_the_same(command, start, image, times=2)


@needs_jax
def test_jax(start: Starter, image: Path, tmp_path: Path) -> None:
    """XLA's one large block of memory, its threads, its CUDA graphs."""
    command = process.python_program(PROGRAMS / "jax_train.py")
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", **process.kept_by_jax(tmp_path / "compiled")}
    interrupted_is_the_same(command, start, image, environment, times=2)


@needs_torch
def test_pytorch_gigabytes_hold(start: Starter, image: Path, tmp_path: Path) -> None:
    """Every word of 4 GB is right after a restore."""
    check = tmp_path / "check"
    command = example("pytorch_buffers", "--bytes", "4e9", "--buffers", "16", "--check-file", str(check))
    program = start(command)
    program.wait_for("^READY", 180)
    program.wait_iterations(20)
    process.criu_dump(program, image)
    process.criu_restore(program, image)
    check.touch()
    assert program.wait_for("^CHECK", 60) == "CHECK ok 1000000000"
    program.kill()


@needs_cupy
def test_cupy(start: Starter, image: Path) -> None:
    """CuPy's memory pool, kernels, cuBLAS and stream."""
    interrupted_is_the_same(process.python_program(PROGRAMS / "cupy_program.py"), start, image)


@needs_nvcc
def test_static_cudart(start: Starter, image: Path, tmp_path: Path) -> None:
    """A program with the CUDA runtime linked statically: streams, threads, stream-ordered memory, a module variable."""
    program = tmp_path / "static_cudart"
    source = PROGRAMS / "static_cudart.cu"
    command = ["nvcc", "-O2", "-std=c++17", "-arch=native", "-cudart", "static", "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=120)
    interrupted_is_the_same([str(program)], start, image, times=2)
