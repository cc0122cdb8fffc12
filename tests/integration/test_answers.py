"""What the driver answers does not change because of checkpoints, nor after a restore."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.site import Site
from tests.integration.test_cow import SLOW, dump_concurrently, restore_at

PROGRAMS = Path(__file__).resolve().parents[1] / "gpu" / "programs"
ROUNDS = {"memory": 120, "capture": 10, "objects": 30}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("about", ROUNDS)
def test_the_answers_are_the_same_while_checkpoints_are_made(site: Site, about: str) -> None:
    command = (
        *(sys.executable, str(PROGRAMS / "answers_again.py"), f"answers_{about}.py"),
        *("--iterations", str(ROUNDS[about]), "--iteration-seconds", "0.001", "--until"),
    )
    expected = site.reference_of(*command)
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = SLOW
    program = site.until_awaited(*command)
    program.wait_iterations(3)
    for number in range(3):
        image = dump_concurrently(site, program, f"image-{number}")
    site.dump(program, site.image("stopped"), "--leave-running", check=True)
    program.let_end()
    assert program.wait_result() == expected, program.output.read_text()
    restore_at(site, program, image)
    assert program.wait_result() == expected, program.output.read_text()
