"""Locks on files, which CRIU carries if it is told to: phos-gpu tells it."""

from __future__ import annotations

import fcntl
import sys
import time
from pathlib import Path

import pytest

from tests.integration.pool_commands import create, ended, take
from tests.integration.site import Program, Site, wait_until

PROGRAM = Path(__file__).parent / "programs" / "locks_files.py"


def held(folder: Path) -> list[bool]:
    """Whether somebody else holds the locks on the one file, and on the part of the other."""
    found = []
    for name, lock in (
        ("whole", lambda file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        ("part", lambda file: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 149)),
    ):
        with open(folder / name, "r+b") as file:
            try:
                lock(file)
                found.append(False)
            except OSError:
                found.append(True)
    return found


def locker(site: Site, iterations: int = 40) -> Program:
    """The program, when it has its locks and computes."""
    words = (str(PROGRAM), "--iterations", str(iterations), "--iteration-seconds", "0.1", "--until")
    program = site.until_awaited(sys.executable, *words, LOCKED=str(site.folder))
    program.wait_iterations(5)
    return program


def dumped(site: Site, program: Program) -> Path:
    """Its image, when it is gone."""
    image = site.folder / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image))
    wait_until(lambda: not program.alive(), "the pid to be free")
    return image


@pytest.mark.parametrize("lazy", [[], ["--lazy"]], ids=["eager", "lazy"])
def test_locks_are_kept_and_taken_again(site: Site, lazy: list[str]) -> None:
    program = locker(site)
    assert held(site.folder) == [True, True]
    site.run("phos-gpu", "checkpoint", "--leave-running", str(program.pid), str(site.folder / "running"))
    program.wait_iterations(2)
    assert held(site.folder) == [True, True]
    image = dumped(site, program)
    assert held(site.folder) == [False, False]
    site.run("phos-gpu", "restore", *lazy, str(image))
    assert held(site.folder) == [True, True]
    assert program.wait_result()
    assert held(site.folder) == [False, False]


def test_a_restore_waits_for_a_lock_that_somebody_else_has_by_then(site: Site) -> None:
    program = locker(site)
    image = dumped(site, program)
    with open(site.folder / "whole", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        restore = site.background("phos-gpu", "restore", str(image))
        time.sleep(2)
        assert restore.poll() is None
        assert program.result() is None
    assert restore.wait() == 0
    assert program.wait_result()


def test_processes_of_a_pool_take_no_locks(site: Site) -> None:
    """Two cannot have them, and the second would wait for ever."""
    program = locker(site, 20)
    image = dumped(site, program)
    create(site, image, 2, "--name", "two")
    taken = [take(site, "two", "--quick") for _ in range(2)]
    assert held(site.folder) == [False, False]
    for one in taken:
        ended(site, one)
