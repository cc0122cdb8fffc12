"""The seconds that CRIU gives itself to freeze tasks: none of them is for phosd's work, and all are for what hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phos.gpu_engine import procfs
from tests.integration.many_blocks import log_of
from tests.integration.site import PATIENCE, Site, Toggles, examples_folder, wait_until
from tests.integration.test_kills import criu_processes
from tests.unit.test_scheduler_hooks import allowed, events

pytestmark = pytest.mark.root

ENDLESS = [str(examples_folder() / "stencil.py"), "--size", "48", "--iterations", "4000", "--iteration-seconds", "0.02"]

WITH_A_CHILD = """
import os, subprocess, sys
noted, replaced, *words = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-c", replaced], stdin=subprocess.DEVNULL)
open(noted + ".part", "w").write(str(child.pid))
os.rename(noted + ".part", noted)
os.execv(sys.executable, [sys.executable, *words])
"""

REPLACED = """
import os, threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
while not os.path.exists(f"/proc/{os.getpid()}/cwd/may-{os.getpid()}"):
    time.sleep(0.01)
os.execv("/bin/sleep", ["sleep", "1000"])
"""

HOLDER = """
import ctypes, sys, time
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE = 0x4206
assert ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None) == 0
print("HOLDS", flush=True)
time.sleep(1000)
"""


@contextmanager
def one_that_cannot_be_frozen(pid: int, may: Path) -> Iterator[None]:
    """Its execve() waits for a thread that a tracer does not collect, with the lock that PTRACE_SEIZE takes."""
    (thread,) = {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - {pid}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(thread)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"HOLDS\n"
        may.touch()
        try:
            wait_until(lambda: procfs.state(thread) == "Z", "the end of its other thread")
            yield
        finally:
            holder.kill()


def test_one_in_the_middle_of_an_execve_holds_nobody_up_for_long(site: Site) -> None:
    """It waits, and CRIU for it, and all that CRIU has frozen by then: the time for that is CRIU's ten seconds."""
    script, noted = site.folder / "tree.py", site.folder / "child.pid"
    script.write_text(WITH_A_CHILD)
    program = site.start(sys.executable, str(script), str(noted), REPLACED, *ENDLESS)
    program.wait_iterations(3)
    child = int(noted.read_text())
    image = site.image("image")
    may = Path(f"/proc/{child}/cwd").readlink() / f"may-{child}"
    wait_until(lambda: len(list(Path(f"/proc/{child}/task").iterdir())) == 2, "its threads")
    try:
        with one_that_cannot_be_frozen(child, may):
            began = time.monotonic()
            failed = site.dump(program, image, "--leave-running", check=False)
            assert failed.returncode
            assert 8 < time.monotonic() - began < 40
            program.wait_progress(3)
    finally:
        may.unlink(missing_ok=True)
    assert not list(image.glob("phos-*"))
    assert "Timeout reached" in (image / "dump.log").read_text()
    wait_until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n", "its other program")
    site.dump(program, site.image("next"), "--leave-running")


def test_what_the_driver_takes_is_not_freezing(site: Site) -> None:
    toggles = Toggles(site, "checkpoint")
    program = site.start(sys.executable, *ENDLESS, **toggles.environment)
    program.wait_iterations(3)
    image = site.image("image")
    dump = site.begin_dump(program, image, "--timeout", "1")
    toggles.wait(program.pid)
    time.sleep(8)
    assert dump.poll() is None
    toggles.let_go()
    assert dump.wait(PATIENCE) == 0
    assert "Timeout reached" not in (image / "dump.log").read_text()
    site.gone(program)
    site.restore(image)
    program.wait_progress(3)


def test_the_kernel_need_not_prepare_for_breakpoints_meanwhile(site: Site) -> None:
    """phosd has a performance event from before CRIU freezes the tasks until they run again, and no longer."""
    if not allowed():
        pytest.skip("this machine allows no performance events")
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="frozen")
    phosd = site.daemon_pid()
    program = site.example("stencil", "--iterations", "1000", "--iteration-seconds", "0.02")
    program.wait_iterations(3)
    assert not events(phosd)
    dump = site.begin_dump(program, site.image(), "--leave-running")
    wait_until(lambda: "all is frozen" in log_of(site), "CRIU to freeze it")
    assert events(phosd) == 1
    (criu,) = criu_processes(site)
    os.kill(criu, signal.SIGKILL)
    assert dump.wait(60) != 0
    wait_until(lambda: not events(phosd), "the end of the event")
    program.wait_progress(3)
