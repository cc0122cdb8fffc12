"""A program on two GPUs of one host: dumped, killed, restored, and compared with a run left alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import process
import pytest
from gpu_support import PROGRAMS, Starter, without_repeats
from process import PHOS_GPU

pytestmark = pytest.mark.nvidia_only


def gpus() -> int:
    """How many a program sees. The driver is started in another process."""
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, check=False
    )
    return int(found.stdout) if found.returncode == 0 else 0


needs_two = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or gpus() < 2, reason="needs two GPUs and PyTorch"
)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The lines of a run that nothing interrupts, without the frontend."""
    program = process.Program(command(), tmp_path_factory.mktemp("alone"), "nvidia", False, {}, "alone").start()
    try:
        yield program.finish()
    finally:
        program.kill()


def command(*more: str) -> list[str]:
    """The program."""
    return process.python_program(PROGRAMS / "two_gpus.py", *more)


@needs_two
@pytest.mark.parametrize("how", ["eager", "lazy"])
@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_both_gpus_hold_what_they_held(protocol: str, how: str, wanted: list[str], start: Starter, image: Path) -> None:
    """All lines are those of the run left alone; the image is made while the program runs on, which is killed later."""
    program = start(command("--iteration-seconds", "0.05"))
    program.wait_for("^ITERATION 8 ", 180)
    program.before_dump()
    process.command(
        [PHOS_GPU, "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol], 120
    )
    program.dumped(killed=False)
    _, text = process.command([PHOS_GPU, "inspect", "--json", str(image)], 60)
    said = json.loads(text)
    assert len(said["gpus"]) == 2
    assert said["protocol"] == protocol
    process.command([PHOS_GPU, "verify", str(image)], 120)
    program.wait_iterations(2)
    program.kill()
    os.environ["PHOS_RESTORE"] = how
    try:
        process.criu_restore(program, image)
    finally:
        del os.environ["PHOS_RESTORE"]
    assert without_repeats(program.finish()) == wanted
