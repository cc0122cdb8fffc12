"""Applications of other shapes than usual: many threads, many blocks, several trees, trees that change."""

from __future__ import annotations

import sys
from contextlib import suppress

import psutil
import pytest

from tests.integration.many_blocks import BLOCKS, blocks, fit_for_the_next, text_of
from tests.integration.site import Site, wait_until, words


def test_threads_and_streams(site: Site) -> None:
    program = blocks(site, "--served", "--threads", "8", "--blocks", "16", "--size", "65536")
    for generation in range(2):
        program.wait_progress(20)
        image = site.image(f"image-{generation}")
        site.dump(program, image)
        site.restore(image)
    assert program.wait_result() == "right"


def test_more_than_a_thousand_blocks(site: Site) -> None:
    """More descriptors than select() and the usual soft limit take, in six packets. (3,000 work as well.)"""
    site.environment["SOFTGPU_MEMORY"] = "8G"
    program = blocks(site, "--blocks", "1100")
    image = site.image()
    site.dump(program, image)
    site.restore(image)
    assert program.wait_result() == "right"
    site.wait_no_gpu_memory()


def test_two_trees_at_the_same_time(site: Site) -> None:
    programs = [blocks(site) for _ in range(2)]
    images = [site.image(f"image-{n}") for n in range(2)]
    running = [
        site.background(
            "criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4"
        )
        for program, image in zip(programs, images, strict=True)
    ]
    assert [one.wait(60) for one in running] == [0, 0], [site.errors(i / "dump.log") for i in images]
    for program, image in zip(programs, images, strict=True):
        site.gone(program)
        site.run("phos-gpu", "verify", str(image))
        site.restore(image)
    assert [program.wait_result() for program in programs] == ["right", "right"]


FAMILY = """
import os, subprocess, sys, time
mode, script = sys.argv[1:3]
work = [sys.executable, script]
child = subprocess.Popen(work, stdout=open("child.log", "wb"))
while True:
    time.sleep(0.01)
    if mode == "fork":
        if os.fork() == 0:
            time.sleep(0.005)
            os._exit(0)
        os.wait3(os.WNOHANG)
    elif mode == "spawn":
        subprocess.run(["true"])
    elif mode == "exec":
        pid = os.fork()
        if pid == 0:
            os.execv("/bin/sleep", ["sleep", "0.01"])
        os.waitpid(pid, 0)
    elif mode == "crash":
        if child.poll() is not None:
            child = subprocess.Popen(work, stdout=open("child.log", "wb"))
        elif os.path.exists("child.log") and open("child.log").read().count("ITERATION") > 5:
            child.kill()
            child.wait()
            child = subprocess.Popen(work, stdout=open("child.log", "wb"))
"""


@pytest.mark.parametrize("mode", ["fork", "spawn", "exec", "crash"])
def test_tree_that_changes_while_it_is_dumped(site: Site, mode: str) -> None:
    """Whatever CRIU makes of it: it succeeds with a whole image, or says no and the tree runs on."""
    (site.folder / "blocks.py").write_text(BLOCKS)
    (site.folder / "family.py").write_text(FAMILY)
    program = site.start(sys.executable, str(site.folder / "family.py"), mode, str(site.folder / "blocks.py"))
    log = site.folder / "child.log"
    wait_until(lambda: "ITERATION 3" in text_of(log), "the child")
    for attempt in range(3):
        image = site.image(f"image-{attempt}")
        result = site.dump(program, image, "--leave-running", check=False)
        if result.returncode == 0 and list(image.glob("phos-*")):  # none: no child used CUDA at that moment
            site.run("phos-gpu", "verify", str(image))
        elif result.returncode != 0:
            assert not (image / "phos-commit.img").exists()
            errors = [line for line in text_of(image / "dump.log").splitlines() if "Error" in line]
            assert any("RLIMIT" not in line for line in errors)  # that one says no more than that CRIU lacks a right
        assert program.alive()
        before = text_of(log)
        wait_until(lambda before=before: text_of(log) != before, "the child's progress")  # type: ignore[misc]
        assert "WRONG" not in text_of(log)
        assert "ERROR" not in text_of(log)
    for process in site.processes():
        if "family.py" in " ".join(words(process)):
            with suppress(psutil.NoSuchProcess):  # one of its children, which end all the time
                process.kill()
    for process in site.processes():
        if "blocks.py" in " ".join(words(process)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    site.wait_no_gpu_memory()
    fit_for_the_next(site)
