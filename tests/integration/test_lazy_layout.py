"""A lazy restore lays its chunks out while CRIU works already: nobody computes before that is done, or if it fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.site import Program, Site, wait_until

LAYING_OUT = """
import os, sys, time
from pathlib import Path
if "phos.gpu_engine.daemon" in getattr(sys, "orig_argv", ()):
    from phos.gpu_engine.restore import lazy
    lay_out = lazy.LazyRestore._lay_out
    site = Path(os.environ["PHOS_TEST_SITE"])
    def held(self, blocks):
        (site / "laying-out").touch()
        while (site / "hold").exists():
            time.sleep(0.005)
        if (site / "fail").exists():
            raise OSError(24, "Too many open files")
        lay_out(self, blocks)
    lazy.LazyRestore._lay_out = held
"""
"""Laying out stands still while `hold` is there, and fails if `fail` is."""

ITERATIONS = ("--iterations", "400")


class Held:
    """An image, and a phosd whose laying out the test is master of."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.expected = site.reference("mlp", *ITERATIONS)
        self.program: Program = site.example("mlp", *ITERATIONS, "--iteration-seconds", "0.05")
        self.program.wait_iterations(5)
        self.image = site.image()
        site.dump(self.program, self.image)
        (site.folder / "custom").mkdir()
        (site.folder / "custom" / "sitecustomize.py").write_text(LAYING_OUT)
        site.environment["PYTHONPATH"] = str(site.folder / "custom")
        self.hold.touch()
        site.serve("phos.gpu_engine.daemon")

    @property
    def hold(self) -> Path:
        return self.site.folder / "hold"

    def begin(self) -> psutil.Popen:
        """A restore that lays out."""
        words = ["criu", "restore", "--lib", "phos", "-d", "-D", str(self.image), "-o", "restore.log", "-v4"]
        restoring = self.site.background(*words, PHOS_RESTORE="lazy")
        wait_until((self.site.folder / "laying-out").exists, "the laying out")
        return restoring

    def restored(self) -> bool:
        """Whether CRIU has put the process together, and let it go."""
        log = self.image / "restore.log"
        return log.exists() and "Restore finished successfully" in log.read_text(errors="replace")

    def comes_back(self) -> None:
        """phosd is fit for the next restore."""
        self.site.gone(self.program)
        self.site.restore(self.image, PHOS_RESTORE="lazy")
        assert self.program.wait_result() == self.expected


@pytest.fixture(name="held")
def held_restore(site: Site) -> Iterator[Held]:
    made = Held(site)
    yield made
    made.hold.unlink(missing_ok=True)


def descriptors(site: Site) -> int:
    """phosd's."""
    return psutil.Process(site.daemon_pid()).num_fds()


def test_nobody_computes_before(held: Held) -> None:
    done = held.program.iterations()
    restoring = held.begin()
    wait_until(held.restored, "CRIU")
    time.sleep(0.5)
    assert restoring.poll() is None
    assert held.program.iterations() == done
    held.hold.unlink()
    assert restoring.wait(60) == 0
    assert held.program.wait_result() == held.expected


def test_if_it_fails_the_processes_end_and_phosd_goes_on(held: Held) -> None:
    before = descriptors(held.site)
    done = held.program.iterations()
    (held.site.folder / "fail").touch()
    restoring = held.begin()
    wait_until(held.restored, "CRIU")
    held.hold.unlink()
    assert restoring.wait(60) != 0
    wait_until(lambda: not held.program.alive(), "the end of the process")
    assert held.program.iterations() == done
    assert "Too many open files" in held.site.status()["jobs"][-1]["error"]
    (held.site.folder / "fail").unlink()
    wait_until(lambda: descriptors(held.site) <= before, "phosd to let its descriptors go")
    held.comes_back()


def test_if_criu_is_killed_meanwhile_the_next_restore_works(held: Held) -> None:
    restoring = held.begin()
    wait_until(held.restored, "CRIU")
    held.program.alive()
    psutil.Process(held.program.pid).send_signal(signal.SIGKILL)
    held.hold.unlink()
    assert restoring.wait(60) != 0
    held.comes_back()
