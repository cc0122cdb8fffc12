"""Programs that were started from a terminal: dumped with it open, and restored from another one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from phos.gpu_engine.installation import launcher
from tests.integration.site import Program, Site, end_file, example_words, wait_until

ON_TERMINAL = 'exec <"$1"; shift; exec "$@"'
"""Who has a session of its own, and opens a terminal, makes it that of the session."""
BY_A_SHELL = 'exec <"$1"; shift; "$@"; true'
RESTORE = 'exec <"$1"; "$2" restore "$3" && read -r word && echo "read $word"'


@contextmanager
def terminal() -> Iterator[tuple[int, str]]:
    """One end of a new one, and the name of the other."""
    ours, theirs = os.openpty()
    name = os.ttyname(theirs)
    os.close(theirs)
    try:
        yield ours, name
    finally:
        os.close(ours)


def started(site: Site, script: str, name: str) -> tuple[Program, int]:
    """An example that is at work on a terminal, and its pid."""
    end = end_file(site.folder / f"program-{len(site.programs)}.log")
    program = site.start("sh", "-c", script, "sh", name, *example_words("mlp"), "--until", str(end))
    program.wait_iterations(2)
    if script == ON_TERMINAL:
        return program, program.pid
    (child,) = psutil.Process(program.pid).children()
    return program, child.pid


@pytest.mark.parametrize("script", [ON_TERMINAL, BY_A_SHELL], ids=["a session's leader", "a shell's job"])
def test_a_program_goes_on_at_the_terminal_that_it_is_restored_from(site: Site, script: str) -> None:
    image = site.folder / "image"
    with terminal() as (_, name):
        program, pid = started(site, script, name)
        site.run("phos-gpu", "checkpoint", str(pid), str(image))
        program.process.wait()
        site.gone(program)
        site.freed(pid)
    refused = site.run("phos-gpu", "restore", str(image), check=False)
    assert refused.returncode == 7
    assert "Its processes have a terminal open: run this command in one" in refused.stderr
    site.freed(pid)
    with terminal() as (ours, name):
        words = ("sh", "-c", RESTORE, "sh", name, str(launcher("phos-gpu")), str(image))
        restoring = site.start(*words, under=False)
        os.write(ours, b"word\n")  # read by who has the terminal
        assert restoring.process.wait() == 0, restoring.lines()
        assert restoring.lines()[-1] == "read word"
        program.let_end()
        wait_until(lambda: program.result() is not None, "the result")
        site.freed(pid)


def test_a_guard_does_not_take_what_it_could_not_bring_back(site: Site, tmp_path: Path) -> None:
    with terminal() as (_, name):
        program, pid = started(site, ON_TERMINAL, name)
        refused = site.run("phos-gpu", "guard", "--images", str(tmp_path / "images"), str(pid), check=False)
        assert refused.returncode == 6
        assert f"Process {pid} has a terminal open ({name})" in refused.stderr
        program.wait_result()
