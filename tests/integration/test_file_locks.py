"""Locks on files, which CRIU carries if it is told to: phos-gpu tells it."""

from __future__ import annotations

import fcntl
import sys
import time
from pathlib import Path

import pytest

from tests.integration.pool_commands import create, ended, take
from tests.integration.site import Site, wait_until

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


@pytest.mark.parametrize("lazy", [[], ["--lazy"]], ids=["eager", "lazy"])
def test_locks_are_kept_and_taken_again(site: Site, lazy: list[str]) -> None:
    program = site.start(
        sys.executable, str(PROGRAM), "--iterations", "40", "--iteration-seconds", "0.1", LOCKED=str(site.folder)
    )
    program.wait_iterations(5)
    assert held(site.folder) == [True, True]
    running, image = site.folder / "running", site.folder / "image"
    site.run("phos-gpu", "checkpoint", "--leave-running", str(program.pid), str(running))
    program.wait_iterations(2)
    assert held(site.folder) == [True, True]
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image))
    wait_until(lambda: not program.alive(), "the pid to be free")
    assert held(site.folder) == [False, False]
    site.run("phos-gpu", "restore", *lazy, str(image))
    assert held(site.folder) == [True, True]
    assert program.wait_result()
    assert held(site.folder) == [False, False]


def test_a_restore_waits_for_a_lock_that_somebody_else_has_by_then(site: Site) -> None:
    program = site.start(
        sys.executable, str(PROGRAM), "--iterations", "40", "--iteration-seconds", "0.1", LOCKED=str(site.folder)
    )
    program.wait_iterations(5)
    image = site.folder / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image))
    wait_until(lambda: not program.alive(), "the pid to be free")
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
    program = site.start(
        sys.executable, str(PROGRAM), "--iterations", "20", "--iteration-seconds", "0.1", LOCKED=str(site.folder)
    )
    program.wait_iterations(5)
    image = site.folder / "image"
    site.run("phos-gpu", "checkpoint", str(program.pid), str(image))
    create(site, image, 2, "--name", "two")
    taken = [take(site, "two", "--quick") for _ in range(2)]
    assert held(site.folder) == [False, False]
    for one in taken:
        ended(site, one)
