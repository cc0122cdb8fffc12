"""Between phosd's part of a dump and CRIU's, processes run: what they do then is in no image that passes for whole.

Of a process that CRIU does not dump, or dumps as another program, phosd must not hold half. Whether it happens in that
time is up to the machine: tests/unit/test_stop_check_tasks.py is not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.site import PATIENCE, Program, Site, Toggles, examples_folder, wait_until, words

STENCIL = examples_folder() / "stencil.py"
ENDLESS = ["--size", "48", "--iterations", "4000", "--iteration-seconds", "0.02"]
PARENT = """
import os, subprocess, sys, time
script, log, noted, others = sys.argv[1:5]
words = [sys.executable, script, *sys.argv[5:]]
if others == "sibling":
    killed = subprocess.Popen(words, stdout=open(log, "ab"), stderr=subprocess.STDOUT)
else:
    run = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    killed = subprocess.Popen([sys.executable, "-c", run, *words], stdout=open(log, "ab"), stderr=subprocess.STDOUT)
open(noted, "w").write(str(killed.pid))
if others == "sibling":
    os.execv(sys.executable, words)
number = 0
while True:
    number += 1
    print("ITERATION", number, flush=True)
    time.sleep(0.05)
"""
REPLACED = """
import os, runpy, sys, threading, time
hold, delay, may, other, script = sys.argv[1], float(sys.argv[2]), *sys.argv[3:6]

def replace():
    while not os.path.isdir(hold) or not os.listdir(hold):
        time.sleep(0.001)
    time.sleep(delay)
    while not os.path.exists(may):
        time.sleep(0.01)
    os.execv(words[0], words)

words = ["/bin/sleep", "1000"] if other == "sleep" else [sys.executable, *sys.argv[5:]]
threading.Thread(target=replace, daemon=True).start()
sys.argv = sys.argv[5:]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""
DELAYS = [0.0, 0.005, 0.01, 0.015, 0.02, 0.03]
"""Seconds after all of them are detached. CRIU freezes them some milliseconds later, sooner or later with the load."""


def held(site: Site) -> int:
    hold = site.folder / "run" / "hold"
    return len(list(hold.iterdir())) if hold.exists() else 0


def judge(site: Site, program: Program, image: Path, status: int) -> None:
    """Was the dump a success, its image restores; else the program runs on."""
    if status:
        program.wait_progress(3)
        assert not list(image.glob("phos-*"))
    else:
        site.gone(program)
        site.restore(image)
        program.wait_progress(3)


def end(site: Site) -> None:
    """Whatever is left of the programs."""
    for process in site.processes():
        if not any(name in " ".join(words(process)) for name in ("phosd", "keeper", "daemon")):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    site.wait_no_gpu_memory()


@pytest.mark.parametrize("others", ["sibling", "parent"])
def test_a_gpu_process_that_leaves_the_tree(site: Site, others: str) -> None:
    """One of two is killed; or the parent of the only one, with which that is no descendant any more."""
    script = site.folder / "tree.py"
    script.write_text(PARENT)
    for number, delay in enumerate(DELAYS):
        log, noted = site.folder / f"child-{number}.log", site.folder / f"child-{number}.pid"
        program = site.start(sys.executable, str(script), str(STENCIL), str(log), str(noted), others, *ENDLESS)
        program.wait_iterations(3)
        wait_until(lambda log=log: log.exists() and log.read_text().count("ITER") > 3, "the child")  # type: ignore[misc]
        image = site.image(f"image-{number}")
        dump = site.begin_dump(program, image)
        while held(site) < (2 if others == "sibling" else 1) and dump.poll() is None:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(int(noted.read_text()), signal.SIGKILL)
        judge(site, program, image, dump.wait(60))
        end(site)


def test_one_that_replaces_its_program(site: Site) -> None:
    """What phosd had of it is nobody's any more."""
    script = site.folder / "replaced.py"
    script.write_text(REPLACED)
    for number, delay in enumerate(DELAYS):
        hold = str(site.folder / "run" / "hold")
        may = site.folder / "may"
        may.touch()
        program = site.start(sys.executable, str(script), hold, str(delay), str(may), "sleep", str(STENCIL), *ENDLESS)
        program.wait_iterations(3)
        image = site.image(f"image-{number}")
        if site.dump(program, image, "--leave-running", check=False).returncode == 0:
            program.process.kill()
            site.gone(program)
            may.unlink()  # or it would be replaced while CRIU lets it go
            site.restore(image)
            program.wait_progress(3)
        else:
            assert program.alive()
            wait_until(lambda: not site.status()["processes"], "phosd to forget what it had")
        end(site)


@pytest.mark.parametrize("delay", [DELAYS[1], DELAYS[-1]])
def test_one_that_becomes_another_program_with_a_gpu(site: Site, delay: float) -> None:
    """What it had before would be kept for as long as that runs."""
    script = site.folder / "replaced.py"
    script.write_text(REPLACED)
    hold = str(site.folder / "run" / "hold")
    program = site.start(sys.executable, str(script), hold, str(delay), "/", "itself", str(STENCIL), *ENDLESS)
    program.wait_iterations(3)
    before = {process["session"] for process in site.status()["processes"]}
    site.dump(program, site.image("image"), "--leave-running", check=False)

    def only_the_other() -> bool:
        return not before & {process["session"] for process in site.status()["processes"]}

    wait_until(only_the_other, "phosd to forget what it had")
    assert program.alive()
    end(site)


def test_one_that_becomes_another_program_while_it_is_restored(site: Site) -> None:
    """The restore would wait for it, for as long as that runs."""
    script, may = site.folder / "replaced.py", site.folder / "may"
    script.write_text(REPLACED)
    restores = Toggles(site, "restore")
    command = [sys.executable, str(script), "/", "0", str(may), "itself", str(STENCIL), *ENDLESS]
    program = site.start(*command, **restores.environment)
    program.wait_iterations(3)
    image = site.image()
    site.dump(program, image)
    restore = site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image))
    restores.wait(program.pid)
    may.touch()
    assert restore.wait(PATIENCE) != 0
    assert "replaced its program" in site.status()["jobs"][-1]["error"]
    end(site)
