"""What the real driver answers, with the frontend and without."""

from __future__ import annotations

import subprocess
from difflib import unified_diff
from pathlib import Path

import process
from gpu_support import DEVICE, PROGRAMS, Starter, without_repeats
from process import PHOS_GPU


def test_the_same_answers_as_without_the_frontend(tmp_path: Path) -> None:
    """A driver may crash with streams that are none: the program is told to leave those out."""
    command = process.python_program(PROGRAMS / "driver_answers.py", "careful")
    said = []
    for words in (command, [PHOS_GPU, "run", "--device", DEVICE, "--", *command]):
        environment = process.device_environment(DEVICE)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert list(unified_diff(*said, "without", "with", lineterm="", n=0)) == []


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
