"""Processes without the frontend: the driver alone saves them, and nothing keeps their threads from calling it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.site import Program, Site, wait_until

POLLS = Path(__file__).parents[1] / "gpu" / "programs" / "polls.py"
OPTIONS = ("--size", "32", "--iterations", "400", "--iteration-seconds", "0.04")  # phosd has to be started first


def polling(site: Site, **changes: str) -> Program:
    """A program whose threads crash if they run while it is checkpointed."""
    program = site.until_awaited(sys.executable, str(POLLS), *OPTIONS, "--until", under=False, **changes)
    program.wait_iterations(5)
    return program


@pytest.fixture
def expected(site: Site) -> str:
    return site.until_awaited(
        sys.executable, str(POLLS.parents[3] / "examples" / "stencil.py"), *OPTIONS[:4], "--until", under=False
    ).wait_result()


def test_one_that_polls_is_dumped_and_restored(site: Site, expected: str) -> None:
    program = polling(site)
    image = site.image()
    site.dump(program, image)
    assert "was not started under 'phos-gpu run'" in (image / "dump.log").read_text()
    site.run("phos-gpu", "verify", str(image))
    for _ in range(2):
        site.restore(image)
        program.wait_progress()
        if not _:
            os.kill(program.pid, signal.SIGKILL)
            site.gone(program)
    assert program.wait_result() == expected


def test_one_that_polls_runs_on_through_dumps(site: Site, expected: str) -> None:
    program = polling(site)
    for number in range(3):
        image = site.image(f"image-{number}")
        site.dump(program, image, "--leave-running")
        program.wait_progress()
    assert program.wait_result() == expected


def test_one_that_polls_is_stopped_and_goes_on(site: Site, expected: str) -> None:
    program = polling(site)
    assert site.begin_dump(program, site.image(), "--leave-stopped").wait() == 0
    wait_until(lambda: Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "its stop")
    os.kill(program.pid, signal.SIGCONT)
    assert program.wait_result() == expected


@pytest.mark.parametrize("fault", ["checkpoint-fail:1", "restore-oom:1"])
def test_the_driver_refuses_and_one_that_polls_goes_on(site: Site, expected: str, fault: str) -> None:
    """It is not checkpointed; or it comes back later, when there is room, and stands still until then."""
    program = polling(site, SOFTGPU_FAULTS=fault)
    result = site.dump(program, site.image(), "--leave-running", check=False)
    assert (result.returncode != 0) == fault.startswith("checkpoint")
    assert program.wait_result() == expected


def test_a_script_keeps_one_that_polls_and_it_goes_on(site: Site, expected: str) -> None:
    """CRIU does not say so before it lets the tasks go."""
    program = polling(site)
    script = site.folder / "fails"
    script.write_text('#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ]\n')
    script.chmod(0o755)
    result = site.dump(program, site.image(), "--action-script", str(script), check=False)
    assert result.returncode != 0
    assert program.wait_result() == expected


def test_criu_fails_and_one_that_polls_goes_on(site: Site, expected: str) -> None:
    """After everything was saved: CRIU carries no userfaultfd, and finds it when it looks at open files."""
    wrapper = site.folder / "with_userfaultfd.py"
    wrapper.write_text(
        "import ctypes, runpy, sys\n"
        "ctypes.CDLL(None).syscall(323, 1)  # userfaultfd(UFFD_USER_MODE_ONLY)\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    program = site.until_awaited(sys.executable, str(wrapper), str(POLLS), *OPTIONS, "--until", under=False)
    program.wait_iterations(5)
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    assert "userfaultfd" in (image / "dump.log").read_text()
    program.wait_progress()
    assert program.wait_result() == expected
