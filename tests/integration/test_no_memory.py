"""A process without GPU memory has none to lose, whoever is killed while it is detached."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.site import PATIENCE, Site, Toggles, wait_until
from tests.integration.test_kills import criu_processes

PROGRAM = Path(__file__).parent / "programs" / "context_only.py"


class Dumping:
    """Such a process, and the beginning of a checkpoint that is to leave it running."""

    def __init__(self, site: Site, kind: str, **changes: str) -> None:
        self.site = site
        self.program = site.until_awaited(sys.executable, str(PROGRAM), kind, **changes)
        self.program.wait_iterations(3)
        wait_until(lambda: [p["blocks"] for p in site.status()["processes"]] == [0], "phosd to know it")
        self.daemon = site.daemon_pid()
        self.image = site.image()
        self.dump = site.begin_dump(self.program, self.image, "--leave-running")

    def log(self) -> str:
        return (self.site.folder / "run" / "phosd.log").read_text()

    def knows_it(self) -> bool:
        """Whether a phosd that has come since knows the process."""
        status = self.site.status()
        return status["pid"] != self.daemon and [p["pid"] for p in status["processes"]] == [self.program.pid]

    def comes_back(self) -> None:
        """It computes on, and the next image is whole."""
        assert self.dump.wait(PATIENCE) != 0
        assert not (self.image / "phos-commit.img").exists()
        self.program.wait_progress(3)
        assert "is lost" not in "\n".join(self.program.lines())
        # It computes without its gate, and so perhaps before phosd has done with it.
        wait_until(lambda: [p["state"] for p in self.site.status()["processes"]] == ["running"], "phosd to be done")
        image = self.site.image("next")
        self.site.dump(self.program, image)
        self.site.restore(image)
        self.program.wait_progress(3)
        assert self.program.wait_result() == "12345"


@pytest.mark.parametrize("kind", ["context", "initialised"])
def test_the_next_phosd_brings_it_back(site: Site, kind: str) -> None:
    site.run("phosd", "--ensure")
    toggles = Toggles(site, "checkpoint")
    dumping = Dumping(site, kind, **toggles.environment)
    toggles.wait(dumping.program.pid)
    os.kill(dumping.daemon, signal.SIGKILL)
    toggles.let_go()
    dumping.comes_back()


@pytest.mark.parametrize("killed", ["phosd", "CRIU", "phosd, CRIU later"])
def test_it_comes_back_although_criu_had_frozen_it(site: Site, killed: str) -> None:
    """While it is frozen it can tell the next phosd nothing, and that must not ask the driver for it."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="frozen")
    dumping = Dumping(site, "context")
    wait_until(lambda: "all is frozen" in dumping.log(), "CRIU to freeze it")
    (criu,) = criu_processes(site)
    if "later" in killed:
        os.kill(criu, signal.SIGSTOP)
    if "phosd" in killed:
        os.kill(dumping.daemon, signal.SIGKILL)
    if "later" in killed:
        site.run("phosd", "--ensure")
        wait_until(dumping.knows_it, "the next phosd to know it")
    if "CRIU" in killed:
        os.kill(criu, signal.SIGKILL)
    if killed == "CRIU":
        wait_until(lambda: "is attached" in dumping.log(), "phosd to bring it back")
        site.stop_phosd()  # the next one lets CRIU go on
        site.run("phosd", "--ensure")
    dumping.comes_back()
