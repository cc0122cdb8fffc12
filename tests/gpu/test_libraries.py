"""What programs use beside a framework's usual path: dumped and killed, checkpointed as they run, restored lazily."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import process
import pytest
from gpu_support import PROGRAMS, Starter, without_repeats

pytestmark = pytest.mark.nvidia_only

# Compiling in a pool of worker processes would put them into the image as well; that is not what is tested here.
COMPILE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
# These do not work with the driver's own pools: torch.cuda.MemPool refuses.
PARTS = (
    "fft,solver,sparse,recurrent,attention,attention_backwards,grouped,compiled_at_run_time,drawn,sorted_and_counted"
)


def has(*modules: str) -> pytest.MarkDecorator:
    """Skip where one is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@pytest.mark.parametrize(
    ("name", "options", "environment"),
    [
        pytest.param("pytorch_libraries", ("--parts", f"{PARTS},pooled"), {}, marks=has("torch"), id="pytorch"),
        pytest.param("pytorch_libraries", ("--parts", PARTS), ASYNC, marks=has("torch"), id="driver-pools"),
        pytest.param("pytorch_libraries", ("--parts", "replayed"), COMPILE, marks=has("torch"), id="graph-trees"),
        pytest.param("transformers_generate", (), {}, marks=has("torch", "transformers"), id="transformers"),
        pytest.param("numba_program", (), {}, marks=has("numba_cuda"), id="numba"),
        pytest.param("cupy_textures", (), {}, marks=has("cupy"), id="textures"),
        pytest.param("triton_maps", (), {}, marks=has("torch", "triton"), id="tensor-maps"),
    ],
)
def test_both_ways(
    name: str, options: tuple[str, ...], environment: dict[str, str], start: Starter, image: Path
) -> None:
    """All lines are those of a run left alone without the frontend."""
    command = process.python_program(PROGRAMS / f"{name}.py", *options)
    wanted = start(command, frontend=False, environment=environment, name="alone").finish()
    end = image.parent / "end"
    program = start([*command, "--iteration-seconds", "0.5", "--until", str(end)], environment=environment)
    program.wait_for("^ITERATION 3 ", 180)
    killed, running = image / "killed", image / "running"
    killed.mkdir()
    process.criu_dump(program, killed)
    process.criu_restore(program, killed)
    program.before_dump()
    process.command([process.PHOS_GPU, "checkpoint", "--leave-running", str(program.pid), str(running)], 120)
    program.dumped(killed=False)
    assert process.find_key(process.inspect(running), "protocol") == "cow"
    program.wait_iterations(2)
    program.kill()
    os.environ["PHOS_RESTORE"] = "lazy"
    try:
        process.criu_restore(program, running)
    finally:
        del os.environ["PHOS_RESTORE"]
    end.touch()
    assert without_repeats(program.finish()) == wanted


@has("torch", "triton")
def test_tensor_maps_that_kernels_make_are_followed(tmp_path: Path) -> None:
    """No kernel passes for one that may write anywhere, and each writes where it is expected to."""
    found = tmp_path / "audit.json"
    command = process.python_program(PROGRAMS / "triton_maps.py", "--iterations", "4")
    process.command([process.PHOS_GPU, "audit", "--output", str(found), "--", *command], 180)
    kernels = {one["kernel"]: one for one in json.loads(found.read_text())["kernels"]}
    for name in ("copy", "product", "batch"):
        assert kernels[name]["source"] == "sass"
        assert kernels[name]["audited"] == 4
        assert (kernels[name]["anything"], kernels[name]["wrong_launches"]) == (0, 0)
        assert kernels[name]["written_chunks"] > 0


@has("torch")
def test_a_profiled_process_is_refused(start: Starter, image: Path) -> None:
    """The driver refuses while CUPTI is at work, and when it has been; the program goes on."""
    command = process.python_program(PROGRAMS / "pytorch_profiled.py")
    wanted = start(command, frontend=False, name="alone").finish()
    end = image.parent / "end"
    program = start([*command, "--begin", "2", "--end", "8", "--iteration-seconds", "0.5", "--until", str(end)])
    for iteration in (4, 10):
        program.wait_for(f"^ITERATION {iteration} ", 180)
        checkpoint = [process.PHOS_GPU, "checkpoint", "--leave-running", str(program.pid), str(image / str(iteration))]
        with pytest.raises(process.ProcessError, match=r"a profiler \(CUPTI"):
            process.command(checkpoint, 120)
    end.touch()
    assert program.finish() == wanted
