"""Whoever maps another process's memory keeps it when that one ends, in the middle of a checkpoint too."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from phos.gpu_engine.installation import application_environment
from tests.integration.pool_commands import create, dump_at, ended, take
from tests.integration.site import CAP_SYS_RESOURCE, PATIENCE, Program, Site, Toggles, has_capability, wait_until
from tests.unit.as_user import NOBODY

PROGRAMS = Path(__file__).parent / "programs"


def log_of(site: Site) -> str:
    return (site.folder / "run" / "phosd.log").read_text()


def owner_of(program: Program) -> int:
    """The child whose memory it maps."""
    return next(int(line.split()[1]) for line in program.lines() if line.startswith("OWNER"))


class Pair:
    """A process that maps memory of its child's, and both are being dumped and will run on."""

    def __init__(self, site: Site, protocol: str, toggle: str = "checkpoint") -> None:
        """Returns when both are in the driver's checkpoint (or restore), and stay there until they are let go."""
        self.site = site
        self.handle = site.folder / "handle"
        site.run("phosd", "--ensure")
        program = (sys.executable, str(PROGRAMS / "survivor.py"), "survive", str(self.handle))
        self.toggles = Toggles(site, toggle)
        self.program = site.until_awaited(*program, **self.toggles.environment)
        self.program.wait_iterations(5)
        self.owner = owner_of(self.program)
        wait_until(lambda: len(site.status()["processes"]) == 2, "phosd to know both")
        self.image = site.image()
        self.dump = site.begin_dump(self.program, self.image, "--leave-running", PHOS_PROTOCOL=protocol)
        self.toggles.wait(self.owner, self.program.pid)
        self.held = site.status()["gpus"][0]["held"]  # phosd knows all blocks by now, not only the processes

    def end_owner(self, how: str) -> None:
        """Returns when phosd knows of it."""
        if how == "killed":
            os.kill(self.owner, signal.SIGKILL)
        else:
            self.handle.with_suffix(".leave").touch()
        said = f"Process {self.owner} has ended"
        wait_until(lambda: said in log_of(self.site), "phosd to notice the owner's end")

    def survives(self) -> None:
        """The process computes on with what the buffer had, and nothing is left behind it."""
        self.toggles.let_go()
        status = self.dump.wait(PATIENCE)
        self.handle.with_suffix(".leave").touch()
        self.program.wait_progress(5)
        whole = self.site.run("phos-gpu", "verify", str(self.image), check=False).returncode == 0
        assert whole or status != 0
        assert (self.image / "phos-commit.img").exists() == whole
        assert self.program.wait_result() == "12345"
        self.site.wait_no_gpu_memory()


@pytest.mark.parametrize("how", ["killed", "leaves"])
@pytest.mark.parametrize("toggle", ["checkpoint", "restore"])
@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_memory_outlives_its_owner_until_it_is_mapped_again(site: Site, protocol: str, toggle: str, how: str) -> None:
    pair = Pair(site, protocol, toggle)
    pair.end_owner(how)
    pair.survives()


def test_memory_that_an_owner_has_left_cannot_be_checkpointed_again(site: Site) -> None:
    """phosd held it while nobody mapped it; nobody could say whose it is when it is restored."""
    pair = Pair(site, "stop")
    pair.end_owner("killed")
    pair.toggles.let_go()
    pair.dump.wait(PATIENCE)
    pair.program.wait_progress(2)
    wait_until(lambda: site.status()["gpus"][0]["held"] == 0, "phosd to leave it to the mapping")
    image = site.image("again")
    done = site.dump(pair.program, image, "--leave-running", check=False)
    assert done.returncode != 0
    assert "of another process that has ended" in done.stderr + (image / "dump.log").read_text()
    assert not list(image.glob("phos-*"))
    pair.survives()


@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_nothing_is_left_of_two_that_are_killed_while_they_are_detached(site: Site, protocol: str) -> None:
    pair = Pair(site, protocol)
    pair.end_owner("killed")
    held = site.status()["gpus"][0]["held"]
    assert held == pair.held, "what is left is nobody's own, and takes room all the same"
    os.kill(pair.program.pid, signal.SIGKILL)
    assert pair.dump.wait(PATIENCE) != 0
    site.gone(pair.program)
    site.wait_no_gpu_memory()
    wait_until(lambda: site.status()["gpus"][0]["held"] == 0, "phosd to say so")
    assert not list(pair.image.glob("phos-*"))


@pytest.mark.parametrize("first", ["owner", "phosd", "phosd alone"])
def test_the_next_phosd_has_what_was_mapped_of_others(site: Site, first: str) -> None:
    pair = Pair(site, "stop")
    if first == "owner":
        pair.end_owner("killed")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    if first == "phosd":
        os.kill(pair.owner, signal.SIGKILL)
    pair.toggles.let_go()
    assert pair.dump.wait(PATIENCE) != 0
    pair.survives()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.parametrize("user", ["root", "nobody"])
def test_a_phosd_that_never_knew_the_owner_knows_who_maps_its_memory(open_site: Site, user: str) -> None:
    """It cannot tell whose that memory is, so it hands it to nobody; once it is unmapped, all is as ever."""
    site = open_site
    folder = site.folder / "users"
    folder.mkdir()
    folder.chmod(0o777)
    handle = folder / "handle"
    site.run("phosd", "--ensure")
    command = (sys.executable, str(PROGRAMS / "survivor.py"), "survive", str(handle))
    become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--") if user == "nobody" else ()
    under = application_environment("software", Path(site.environment["PHOS_SOCKET"]))
    program = site.until_awaited(*become, *command, under=False, **under)
    program.wait_iterations(5)
    wait_until(lambda: len(site.status()["processes"]) == 2, "phosd to know both")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    handle.with_suffix(".leave").touch()
    wait_until(lambda: not psutil.pid_exists(owner_of(program)), "the owner's end")
    site.run("phosd", "--ensure")
    wait_until(lambda: [p["pid"] for p in site.status()["processes"]] == [program.pid], "the next phosd to know it")
    program.wait_progress(5)
    refused = site.dump(program, site.image("refused"), "--leave-running", check=False)
    assert refused.returncode != 0
    said = refused.stderr + (site.folder / "refused" / "dump.log").read_text()
    assert "of another process that has ended" in said
    handle.with_suffix(".close").touch()
    wait_until(lambda: "CLOSED" in program.lines(), "the program to let go of it")
    assert "Connection of process" not in log_of(site)
    image = site.image("taken")
    able = user == "root" or has_capability(CAP_SYS_RESOURCE)
    site.dump(program, image, "--leave-running", check=able)
    if able:
        site.run("phos-gpu", "verify", str(image))
    else:  # CRIU fails, after phosd has done its part
        assert f"processes [{program.pid}] are detached" in log_of(site)
    assert program.wait_result() == "12345"
    site.wait_no_gpu_memory()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_an_owner_may_end_before_the_other_has_been_restored(site: Site, mode: str) -> None:
    """It has all of its own back, and nothing more to do."""
    handle = site.folder / "handle"
    toggles = Toggles(site, "restore")
    words = (sys.executable, str(PROGRAMS / "survivor.py"), "survive", str(handle))
    program = site.until_awaited(*words, **toggles.environment, OWNER_TOGGLE_HOLD="")
    program.wait_iterations(5)
    owner = owner_of(program)
    image = site.image()
    site.dump(program, image)
    restore = site.background(
        *("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4"), PHOS_RESTORE=mode
    )
    wait_until(lambda: f"Process {owner} is attached" in log_of(site), "the owner to be back")
    handle.with_suffix(".leave").touch()
    wait_until(lambda: f"Process {owner} has ended" in log_of(site), "phosd to notice the owner's end")
    assert f"Process {program.pid} is attached" not in log_of(site)
    toggles.let_go()
    assert restore.wait(PATIENCE) == 0, site.errors(image / "restore.log")
    program.wait_progress(5)
    assert program.wait_result() == "12345"
    site.wait_no_gpu_memory()


def test_an_owner_that_came_from_a_pool_may_end(site: Site) -> None:
    handle = site.folder / "handle"
    program = site.until_awaited(sys.executable, str(PROGRAMS / "survivor.py"), "survive", str(handle))
    image = dump_at(site, program)
    made = create(site, image, 1)
    taken = take(site, made["name"])
    handle.with_suffix(".leave").touch()
    wait_until(lambda: sum(map(psutil.pid_exists, taken["pids"])) == 1, "the owner's end")
    before = program.iterations()
    wait_until(lambda: program.iterations() > before + 2, "progress of the other")
    ended(site, taken)
    assert program.result() == "12345"
    site.run("phos-gpu", "pool", "drop", made["name"])
    site.wait_no_gpu_memory()
