"""CRIU in the foreground (no ``-d``): it stays, and with it its plugin, until what it has restored ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.site import Program, Site, wait_until
from tests.integration.test_lazy import restores
from tests.integration.test_residue import files
from tests.integration.test_without_frontend import BOTH, OPTIONS, POLLS, STENCIL


def restored(site: Site, image: Path, **changes: str) -> subprocess.Popen[bytes]:
    """CRIU, which waits for the end of what it has restored; all of it computes, and what that took is put away."""
    earlier = len(restores(site))
    criu = site.background("criu", "restore", "--lib", "phos", "-D", str(image), "-o", "restore.log", "-v4", **changes)

    def computes() -> bool:
        assert criu.poll() is None, site.errors(image / "restore.log")
        jobs = restores(site)[earlier:]
        return bool(jobs) and jobs[0]["state"] == "attached"

    wait_until(computes, "the end of the restore")
    numbers = [process["session"] for process in site.status()["processes"]]
    wait_until(lambda: not any(files(number) for number in numbers), "the driver's files to lose their names")
    assert criu.poll() is None
    return criu


def both(site: Site) -> Program:
    """A shell, a program under the frontend, and one that the driver alone saves."""
    program = site.until_awaited("sh", "-c", BOTH, "sh", sys.executable, str(STENCIL), str(POLLS), *OPTIONS, "--until")
    wait_until(lambda: sum(line.startswith("ITERATION 5 ") for line in program.lines()) == 2, "both to compute")
    return program


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("tree", ["one", "both"])
def test_what_it_restores_is_checkpointed_again(site: Site, tree: str, mode: str) -> None:
    """Running on, and killed; and restored again."""
    expected = site.reference("stencil", *OPTIONS[:4], small=False)
    if tree == "both":
        program = both(site)
    else:
        program = site.until_awaited(sys.executable, str(STENCIL), *OPTIONS, "--until")
        program.wait_iterations(5)
    image = site.image()
    site.dump(program, image)
    criu = restored(site, image, PHOS_RESTORE=mode)
    program.wait_progress()
    site.dump(program, site.image("running"), "--leave-running")
    program.wait_progress()
    assert criu.poll() is None
    again = site.image("again")
    site.dump(program, again)
    criu.wait(60)
    criu = restored(site, again, PHOS_RESTORE=mode)
    program.wait_end()
    assert program.lines().count(f"RESULT {expected}") == (2 if tree == "both" else 1)
    assert criu.wait(60) == 0
