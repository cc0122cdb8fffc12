"""Whether CRIU has dumped what phosd has saved: with processes that end, leave, and replace their program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.stop.dump import StopDump
from tests.unit.waiting import eventually

# Says that it runs, and replaces its program when it is told to.
PROGRAM = """
import os, sys
print("runs", flush=True)
sys.stdin.readline()
os.execv("/bin/sleep", ["sleep", "1000"])
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "runs\n"
        yield running
        running.kill()


def checked(pid: int, **changes: Any) -> None:
    """Check a dump of this process, of which all is as it should be but for these changes."""
    dump: Any = StopDump.__new__(StopDump)
    dump._programs = {pid: procfs.program(pid)}
    dump._frozen = {pid: procfs.program(pid)}
    dump._froze_unknown = False
    dump._tree = SimpleNamespace(unsaved=[])
    for name, value in changes.items():
        setattr(dump, name, value)
    dump._check_tasks()


def test_all_is_as_it_was(program: subprocess.Popen[str]) -> None:
    checked(program.pid)
    checked(program.pid, _frozen={}, _froze_unknown=True)
    checked(program.pid, _frozen={}, _tree=SimpleNamespace(unsaved=[program.pid]))


def test_one_has_ended(program: subprocess.Popen[str]) -> None:
    before = procfs.program(program.pid)
    program.kill()
    program.wait()
    with pytest.raises(CheckpointFailed, match=f"Process {program.pid} ended while it was being checkpointed"):
        checked(program.pid, _programs={program.pid: before}, _frozen={program.pid: before})


def test_one_is_not_among_those_that_criu_froze(program: subprocess.Popen[str]) -> None:
    with pytest.raises(CheckpointFailed, match=f"Process {program.pid} left the tree that CRIU dumps"):
        checked(program.pid, _frozen={1: procfs.program(1)})


def test_one_has_replaced_its_program(program: subprocess.Popen[str]) -> None:
    before = procfs.program(program.pid)
    assert len(before) == 3
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    eventually(lambda: procfs.executable(program.pid).endswith("sleep"))
    with pytest.raises(CheckpointFailed, match=f"Process {program.pid} replaced its program"):
        checked(program.pid, _programs={program.pid: before})
