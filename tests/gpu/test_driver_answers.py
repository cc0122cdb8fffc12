"""What the real driver answers, with the frontend and without."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import process
import pytest
from gpu_support import DEVICE, PROGRAMS, Starter, without_repeats
from process import PHOS_GPU


def both_ways(command: list[str], seconds: float) -> list[subprocess.CompletedProcess[str]]:
    """What comes of a command alone, and under PhOS."""
    return [
        subprocess.run(
            words,
            env=process.device_environment(DEVICE),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        for words in (command, [PHOS_GPU, "run", "--device", DEVICE, "--", *command])
    ]


@pytest.mark.parametrize("about", ["memory", "capture", "objects"])
def test_the_same_answers_as_without_the_frontend(about: str) -> None:
    """A driver may crash with streams that are none: the program is told to leave those out."""
    command = process.python_program(PROGRAMS / f"answers_{about}.py", *(["careful"] if about == "memory" else []))
    said = []
    for done in both_ways(command, 120):
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    difference = "\n".join(unified_diff(*said, "without", "with", lineterm="", n=0))
    assert not difference, difference


@pytest.mark.parametrize("about", ["memory", "capture", "objects"])
def test_the_answers_are_the_same_after_a_dump_and_a_restore(
    start: Starter, image: Path, tmp_path: Path, about: str
) -> None:
    words = ["careful"] if about == "memory" else []
    command = process.python_program(PROGRAMS / "answers_again.py", "--iterations", "20", f"answers_{about}.py", *words)
    expected = start(command, frontend=False, name="undisturbed").finish()
    end = tmp_path / "end"
    program = start([*command, "--iteration-seconds", "0.1", "--until", str(end)])
    program.wait_for("^ITERATION 4 ")
    process.criu_dump(program, image, leave_running=True)
    program.kill()
    end.touch()
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == expected


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("numba_cuda", "filecheck")),
    reason="numba-cuda, or filecheck, which its tests need, is not installed",
)
@pytest.mark.parametrize(
    "suite",
    [
        "cudadrv",  # what follows needs a GPU that takes machine code
        pytest.param("cudapy.test_ipc", marks=pytest.mark.nvidia_only),
        pytest.param("cudapy.test_multithreads", marks=pytest.mark.nvidia_only),
        pytest.param("cudapy.test_cooperative_groups", marks=pytest.mark.nvidia_only),
        pytest.param("cudapy.test_cuda_array_interface", marks=pytest.mark.nvidia_only),
    ],
)
def test_numba_s_own_tests_pass_as_without_us(suite: str) -> None:
    """They try much of the driver: memory of all kinds, contexts, streams, events, modules, linking, what is shared."""
    if suite.endswith("cooperative_groups"):
        pytest.importorskip("cffi")
    command = [sys.executable, "-m", "numba.runtests", "-v", f"numba.cuda.tests.{suite}"]
    said = [done.stdout + done.stderr for done in both_ways(command, 140)]
    alone, under = (set(re.findall(r"^(\S+ \([\w.]+\)).* \.\.\. ok$", text, re.M)) for text in said)
    assert len(alone) > (100 if suite == "cudadrv" else 0), said[0]
    assert not alone - under, said[1]


def test_memory_that_is_synchronous_stays_so(start: Starter, image: Path) -> None:
    """Through a dump that leaves it running, and a restore: a guess of ours about the driver's part of it."""
    command = process.python_program(PROGRAMS / "synchronous_memory.py")
    expected = start(command, frontend=False, name="undisturbed").finish()
    program = start([*command, "--iteration-seconds", "0.1"])
    program.wait_for("^ITERATION 4 ")
    process.criu_dump(program, image, leave_running=True)
    program.wait_iterations(3)
    program.kill()
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == expected
