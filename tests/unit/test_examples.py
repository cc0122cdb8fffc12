"""The examples compile without a GPU, and print their reference output on the host oracle and on the software GPU."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import host_cuda

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = ("mlp", "pointer_chase", "struct_argument", "device_pointer", "stencil")
SOFTWARE_GPU = ROOT / "build" / "softgpu" / "libcuda.so.1"
FRONTEND = ROOT / "build" / "lib" / "libphos.so"

Oracle = Callable[..., list[str]]

needs_software_gpu = pytest.mark.skipif(not SOFTWARE_GPU.exists(), reason="the software GPU is not built: make softgpu")
needs_frontend = pytest.mark.skipif(not FRONTEND.exists(), reason="the frontend is not built: make frontend")


def result_lines(output: str) -> list[str]:
    """Return the lines of an example's output that must be the same on every device."""
    return [line for line in output.splitlines() if not line.startswith("#")]


def reference(name: str) -> list[str]:
    """Return the stored output of an example with its default sizes."""
    return (EXAMPLES / "reference" / f"{name}.txt").read_text().splitlines()


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example the way running it does: with its own folder first on the path."""
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles_without_a_gpu(name: str, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC makes PTX of every example, and none of it holds an approximation that a device may round as it likes."""
    program, shared = load(name, monkeypatch), load("cuda_program", monkeypatch)
    try:
        ptx = shared.compile_ptx(shared.DIGEST_SOURCE + program.SOURCE, architecture, name).decode()
    except RuntimeError as error:
        if "libnvrtc" in str(error) or "Failed to" in str(error):
            pytest.skip(f"NVRTC is not installed: {error}")
        raise
    assert ".visible .entry digest(" in ptx
    assert not re.findall(r"\b\w+\.(?:approx|ftz|full)\b\S*", ptx)


def test_a_wrong_source_is_refused_with_the_compiler_s_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, the architecture and the line."""
    shared = load("cuda_program", monkeypatch)
    with pytest.raises(shared.CudaError, match=r"Could not compile bad\.cu for compute_90(?s:.)*bad\.cu\(2\): error"):
        shared.compile_ptx("\nnonsense", "compute_90", "bad.cu")


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Oracle:
    """Return a function that runs an example on the host oracle and returns its result lines."""

    def run(name: str, *options: str) -> list[str]:
        return on_the_oracle(name, options, monkeypatch, capsys, tmp_path)

    return run


def on_the_oracle(
    name: str,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
) -> list[str]:
    """Run an example with its kernels compiled for the host, behind a fake driver."""
    program, shared = load(name, monkeypatch), load("cuda_program", monkeypatch)
    driver = host_cuda.HostDriver(folder)
    monkeypatch.setattr(shared, "driver", driver)
    if hasattr(program, "driver"):
        monkeypatch.setattr(program, "driver", driver)
    monkeypatch.setattr(shared, "compile_ptx", lambda source, architecture, name: source.encode())
    monkeypatch.setattr(shared, "supported_architecture", lambda major, minor: "host")
    program.main(list(options))
    return result_lines(capsys.readouterr().out)


@pytest.mark.parametrize("name", PROGRAMS)
def test_matches_the_reference_on_the_host_oracle(name: str, oracle: Oracle) -> None:
    """The stored reference is what the source says, computed by another compiler without any GPU in between."""
    assert oracle(name) == reference(name)


@needs_software_gpu
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", ("--size", "37", "--batch", "19", "--hidden", "3", "--iterations", "4")),
        ("stencil", ("--size", "77", "--iterations", "5", "--steps", "3")),
        ("struct_argument", ("--size", "1001", "--iterations", "6")),
        ("device_pointer", ("--size", "999", "--iterations", "8")),
        ("pointer_chase", ("--size", "9", "--walkers", "32", "--steps", "77", "--iterations", "3")),
    ],
)
def test_sizes_that_fill_no_block_agree_with_the_oracle(name: str, options: tuple[str, ...], oracle: Oracle) -> None:
    """Partial tiles, blocks and warps: the software GPU and the host compiler compute the same."""
    done = run_example(name, *options)
    assert done.returncode == 0, done.stderr
    assert result_lines(done.stdout) == oracle(name, *options)


def test_the_network_learns() -> None:
    """The reference of the perceptron is that of a working optimizer: the error falls by a third."""
    losses = [float.fromhex(line.split()[5]) for line in reference("mlp") if line.startswith("ITERATION")]
    assert losses[-1] < 0.67 * losses[0]


def run_example(name: str, *options: str, preload: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run an example on the software GPU."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(SOFTWARE_GPU.parent), "PHOS_DEVICE": "software"}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
        environment["PHOS_SOCKET"] = "/nonexistent/phosd.sock"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@needs_software_gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_matches_the_reference_on_the_software_gpu(name: str, tmp_path: Path) -> None:
    """The interpreter computes what the source says; --report holds the same lines as the output."""
    done = run_example(name, "--report", str(tmp_path / "report"))
    assert done.returncode == 0, done.stderr
    assert result_lines(done.stdout) == reference(name)
    assert (tmp_path / "report").read_text() == done.stdout


@needs_software_gpu
@needs_frontend
@pytest.mark.parametrize("name", PROGRAMS)
def test_matches_the_reference_under_the_frontend(name: str) -> None:
    """With the frontend preloaded, and no daemon to be found, nothing changes."""
    done = run_example(name, preload=FRONTEND)
    assert done.returncode == 0, done.stderr
    assert result_lines(done.stdout) == reference(name)


@needs_software_gpu
def test_every_k_th_line_leaves_the_result_as_it_is() -> None:
    """The last line chains all iterations, printed or not."""
    done = run_example("struct_argument", "--every", "7")
    assert done.returncode == 0, done.stderr
    expected = reference("struct_argument")
    assert result_lines(done.stdout) == [expected[6], expected[13], expected[19], expected[20]]


@needs_software_gpu
def test_without_a_device_the_program_says_so() -> None:
    """A CUDA error ends the program with a sentence and status 1."""
    os_environment = {**os.environ, "LD_LIBRARY_PATH": str(SOFTWARE_GPU.parent), "SOFTGPU_DEVICES": "0"}
    command = [sys.executable, str(EXAMPLES / "mlp.py")]
    done = subprocess.run(command, env=os_environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Could not ")
    assert "CUDA_ERROR_NO_DEVICE" in done.stderr
