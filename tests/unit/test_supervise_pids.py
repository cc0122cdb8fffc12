"""packaging/supervise.py starts CRIU under a pid that the image does not need."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.packaging_script import packaging_script


@pytest.fixture
def supervise() -> ModuleType:
    return packaging_script("supervise")


def test_a_pid_of_the_image_is_passed_over(supervise: ModuleType, tmp_path: Path) -> None:
    """The next hundred numbers are the image's, whoever else starts processes meanwhile."""
    first = os.fork()
    if first == 0:
        os._exit(0)
    os.waitpid(first, 0)
    needed = set(range(first, first + 101))
    for pid in needed:
        (tmp_path / f"core-{pid}.img").touch()
    child = supervise.fork_beside(str(tmp_path))
    if child == 0:
        os._exit(7)
    assert child not in needed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with pytest.raises(ChildProcessError):  # those that were passed over have been collected
        os.waitpid(-1, os.WNOHANG)


def test_without_an_image_the_first_one_does(supervise: ModuleType, tmp_path: Path) -> None:
    child = supervise.fork_beside(str(tmp_path / "missing"))
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[0] == child
