"""The gate alone: gate.c under gate_stress.c, with and without ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]


def _build(folder: Path, *flags: str) -> Path:
    program = folder / "gate_stress"
    sources = [ROOT / "tests/unit/gate_stress.c", ROOT / "frontend/gate.c"]
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    subprocess.run([*command, f"-I{ROOT / 'frontend'}", "-o", program, *sources], check=True)
    return program


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # gcc warns that it does not check fences; the pairs that matter are acquire and release operations.
    return _build(tmp_path_factory.mktemp("tsan"), "-g", "-fsanitize=thread", "-Wno-error=tsan")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("scenario", ["stress", "fenced", "trace", "straggler", "early", "exit", "fork"])
def test_gate(plain: Path, scenario: str) -> None:
    # Each round of tracing waits for every thread to be run once: on a busy machine that is what takes time.
    _run(plain, scenario, "500" if scenario == "trace" else "2000")


@pytest.mark.parametrize("scenario", ["fenced", "straggler", "early", "exit"])
def test_gate_has_no_data_race(sanitized: Path, scenario: str) -> None:
    # Address randomisation of newer kernels is more than this ThreadSanitizer takes.
    _run("setarch", "-R", sanitized, scenario, "300")


def test_the_end_of_tracing_has_no_data_race(sanitized: Path) -> None:
    _run("setarch", "-R", sanitized, "trace", "300", "fenced")


def test_an_open_gate_costs_a_few_nanoseconds(plain: Path) -> None:
    direct, gated = (float(word) for word in _run(plain, "overhead").split())
    assert gated - direct < 8, f"{gated} ns with the gate, {direct} ns without"


def test_the_fast_path_has_no_lock_prefix_and_no_fence(plain: Path) -> None:
    listing = _run("objdump", "-d", "--no-show-raw-insn", "--disassemble=gated", str(plain))
    assert "%fs:" in listing
    assert not [line for line in listing.splitlines() if "lock " in line or "mfence" in line or "xchg" in line]
