"""What a program is told of a call that cannot be made, or of its memory: the same as without the frontend."""

from __future__ import annotations

import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.unit.frontend_fake import FakePhosd, built, environment_for

pytestmark = [pytest.mark.timeout(240), built]

PROGRAMS = Path(__file__).resolve().parents[1] / "gpu" / "programs"


@pytest.mark.parametrize("about", ["memory", "capture", "objects"])
def test_the_same_answers_as_without_the_frontend(phosd: FakePhosd, about: str) -> None:
    said = []
    for preload in (False, True):
        environment = environment_for(phosd.path, preload=preload)
        command = [sys.executable, PROGRAMS / f"answers_{about}.py"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    difference = "\n".join(unified_diff(*said, "without", "with", lineterm="", n=0))
    assert not difference, difference
