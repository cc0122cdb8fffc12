"""kill -9 of CRIU, phosd and the application at every step: the application computes on correctly wherever it was
running before, nothing leaks, and no partial image passes for a whole one."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.integration.site import Site, Toggles, wait_until, words

OPTIONS = ("--iterations", "400", "--iteration-seconds", "0.03")
SLOW = {"SOFTGPU_TOGGLE_MS": "300"}
BY_CRIU = (signal.SIGTRAP, signal.SIGSEGV, signal.SIGSYS)
"""What a process ends by that CRIU has left with its own code, or the code's registers, in it."""


def criu_processes(site: Site) -> list[int]:
    """The processes of CRIU itself, not its launcher."""
    found = []
    for process in site.processes():
        command = words(process)
        launches = command and ("python" in command[0] or command[0].endswith("/sh"))  # or a part of that shell's
        if any(word.endswith("bin/criu") for word in command) and "dump" in command and not launches:
            found.append(process.pid)
    return found


def expected_result(site: Site) -> str:
    return site.reference("stencil", *OPTIONS[:2])


class Dumping:
    """A dump that leaves its program running, begun: CRIU is there."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.expected = expected_result(site)
        self.program = site.example("stencil", *OPTIONS, **SLOW)
        self.program.wait_iterations(5)
        self.daemon = site.daemon_pid()
        self.image = site.image()
        self.dump = site.begin_dump(self.program, self.image, "--leave-running")
        wait_until(lambda: criu_processes(site) or self.dump.poll() is not None, "CRIU")

    def ends_well(self, *, inside: bool = False) -> None:
        """The program computes on, and no half image passes for a whole one.

        ``inside``: CRIU may have been killed in the few milliseconds in which it works inside the program, which
        may then end by one of BY_CRIU (docs/troubleshooting.md).
        """
        status = self.dump.wait(60)
        self.program.wait_end()
        if inside and -self.program.process.returncode in BY_CRIU:
            assert not (self.image / "phos-commit.img").exists()
            return
        assert self.program.wait_result() == self.expected
        whole = self.site.run("phos-gpu", "verify", str(self.image), check=False).returncode == 0
        assert whole or status != 0  # what happens after the commit leaves a whole image, although the command failed
        assert (self.image / "phos-commit.img").exists() == whole


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.3, 0.45, 0.6, 0.9])
def test_criu_is_killed(site: Site, delay: float) -> None:
    dumping = Dumping(site)
    time.sleep(delay)
    for pid in criu_processes(site):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    dumping.ends_well(inside=True)


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6])
def test_interrupted_from_the_keyboard(site: Site, delay: float) -> None:
    """Ctrl-C goes to the launcher; it must not leave the program without its GPU."""
    dumping = Dumping(site)
    time.sleep(delay)
    dumping.dump.send_signal(signal.SIGINT)
    dumping.ends_well()


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.3, 0.45, 0.6, 0.9])
def test_phosd_is_killed_while_dumping(site: Site, delay: float) -> None:
    dumping = Dumping(site)
    time.sleep(delay)
    os.kill(dumping.daemon, signal.SIGKILL)
    dumping.ends_well()


@pytest.mark.parametrize("anew", [True, False])
def test_phosd_ends_when_the_image_is_whole_and_before_it_could_be_asked(site: Site, anew: bool) -> None:
    """The process was ended because it is safe on disk: nobody is to take it for lost."""
    expected = expected_result(site)
    program = site.example("stencil", *OPTIONS, **SLOW)
    program.wait_iterations(5)
    image = site.image()
    dump = site.begin_dump(program, image)
    started: list[int] = []

    def has_started() -> list[int]:
        started[:] = criu_processes(site)
        return started

    wait_until(has_started, "CRIU")
    criu = started[0]
    os.kill(dump.pid, signal.SIGSTOP)  # who asks phosd
    wait_until(lambda: psutil.Process(criu).status() == psutil.STATUS_ZOMBIE, "CRIU's end")
    site.stop_phosd()
    if anew:
        site.run("phosd", "--ensure")
    os.kill(dump.pid, signal.SIGCONT)
    assert dump.wait(60) == 0
    site.gone(program)
    site.restore(image)
    assert program.wait_result() == expected


def test_phosd_is_killed_while_all_is_detached_and_nobody_reaps_it(site: Site) -> None:
    """The frontend notices by itself, without the launcher, that its phosd is no more than a number."""
    expected = expected_result(site)
    toggles = Toggles(site, "checkpoint")
    program = site.example("stencil", *OPTIONS, **toggles.environment)
    program.wait_iterations(5)
    daemon = site.daemon_pid()
    dump = site.begin_dump(program, site.image(), "--leave-running")
    toggles.wait(program.pid)
    for process in (*(p for p in site.processes() if "supervise.py" in " ".join(words(p))), psutil.Process(daemon)):
        process.kill()
    for pid in criu_processes(site):
        os.kill(pid, signal.SIGKILL)
    toggles.let_go()
    dump.wait(60)
    program.wait_progress(1)
    assert psutil.Process(daemon).status() == psutil.STATUS_ZOMBIE
    assert program.wait_result() == expected


@pytest.mark.parametrize("delay", [0.0, 0.15, 0.3, 0.6])
def test_application_is_killed_while_dumping(site: Site, delay: float) -> None:
    program = site.example("stencil", *OPTIONS, **SLOW)
    program.wait_iterations(5)
    image = site.image()
    dump = site.begin_dump(program, image)
    wait_until(lambda: criu_processes(site) or dump.poll() is not None, "CRIU")
    time.sleep(delay)
    try:
        os.kill(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    status = dump.wait(60)
    site.gone(program)
    site.wait_no_gpu_memory()
    whole = site.run("phos-gpu", "verify", str(image), check=False).returncode == 0
    assert whole or status != 0  # killed after the commit, it is whole although the command failed
    assert (image / "phos-commit.img").exists() == whole
    # phosd is fit for the next one.
    again = site.example("stencil", *OPTIONS)
    again.wait_iterations(3)
    site.dump(again, site.image("next"))


def test_phosd_is_killed_and_a_new_one_adopts(site: Site) -> None:
    """Also after an attach, when the frontend's handles are imported ones and only the keeper has descriptors."""
    options = ("--iterations", "400", "--iteration-seconds", "0.03")
    expected = site.reference("stencil", *options[:2])
    program = site.example("stencil", *options)
    program.wait_iterations(3)
    for generation in range(3):
        os.kill(site.daemon_pid(), signal.SIGKILL)
        site.run("phosd", "--ensure")
        program.wait_progress(2)
        image = site.image(f"image-{generation}")
        site.dump(program, image, "--leave-running")
        site.run("phos-gpu", "verify", str(image))
    assert program.wait_result() == expected


def test_application_does_not_need_phosd(site: Site) -> None:
    expected = expected_result(site)
    program = site.example("stencil", *OPTIONS)
    program.wait_iterations(3)
    os.kill(site.daemon_pid(), signal.SIGKILL)
    assert program.wait_result() == expected


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3])
def test_phosd_is_killed_while_restoring(site: Site, delay: float) -> None:
    # So long that what computes in spite of a restore that failed is ended here before it is through.
    options = ("--iterations", "400", "--iteration-seconds", "0.03")
    expected = site.reference("stencil", *options[:2])
    program = site.example("stencil", *options)
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image)
    before = program.output.read_bytes()
    daemon = site.daemon_pid()
    words = ["criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4"]
    restore = site.background(*words)
    time.sleep(delay)
    os.kill(daemon, signal.SIGKILL)
    status = restore.wait(60)
    if status == 0:
        assert program.wait_result() == expected
        return
    # Refused or given up: whatever was restored must not compute with memory it does not have.
    time.sleep(1)
    for pid in [p.pid for p in site.processes() if p.pid == program.pid]:
        os.kill(pid, signal.SIGKILL)
    site.gone(program)
    assert program.result() is None
    program.output.write_bytes(before)
    site.restore(image)
    assert program.wait_result() == expected
