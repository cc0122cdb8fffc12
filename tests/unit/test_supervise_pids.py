"""packaging/supervise.py: the pid that CRIU is started under, and what is ended with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import reach
from tests.unit.packaging_script import packaging_script
from tests.unit.waiting import eventually


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


def test_what_is_for_one_command_is_the_same_for_all_that_start_phosd(supervise: ModuleType) -> None:
    root = Path(__file__).parents[2]
    launcher = (root / "packaging" / "criu").read_text()
    lines = [line.split()[1:] for line in launcher.splitlines() if line.startswith("        unset PHOS_")]
    unset = {name for line in lines for name in line}
    assert set(supervise.FOR_ONE_COMMAND) == set(reach.FOR_ONE_COMMAND) == unset
    plugin = (
        (root / "criu_plugin" / "daemon_link.c").read_text().partition("for_one_command[] = {")[2].partition("}")[0]
    )
    assert set(re.findall(r'"(\w+)"', plugin)) == unset | {"PHOS_CRIU_SERVES", "PHOS_MAY_KEEP", "PHOS_CRIU_RUN"}


FORKS = """
import os, signal, subprocess, sys
other = subprocess.Popen(["sleep", "60"])
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
os.waitpid(child, os.WUNTRACED)
print(child, other.pid, flush=True)
signal.pause()
"""


def test_what_waits_to_be_traced_is_ended_with_criu(supervise: ModuleType) -> None:
    """As the children with which it tries what the kernel can do; another program, an action script, is left alone."""
    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True) as criu:
        assert criu.stdout is not None
        fork, other = map(int, criu.stdout.readline().split())
        supervise.end_untraced(criu.pid)
    assert criu.returncode == -signal.SIGKILL
    try:
        eventually(lambda: procfs.has_ended(fork))
        assert procfs.is_alive(other)
    finally:
        os.kill(other, signal.SIGKILL)
        if not procfs.has_ended(fork):
            os.kill(fork, signal.SIGKILL)
