"""Restores that are not lazy, whose memory the plugin's server brings in CRIU's place (criu_plugin/fill_server.c)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pycriu import images

from tests.integration.site import Program, Site, wait_until
from tests.integration.test_lazy import EXAMPLES
from tests.integration.test_lazy_fill import CHANGES, rounds
from tests.unit.machine_fills import memory_is_filled

SHARES = Path(__file__).parent / "programs" / "shares_pages.py"
BROUGHT = re.compile(r"phos: (\d+) bytes of the tasks' memory were brought")
SERVER = "phos-fill"
LARGE_MIB = 768
"""So much that it is still being brought when somebody has seen that it is."""


@pytest.fixture
def image() -> Iterator[Path]:
    """A directory in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def servers(image: Path) -> list[int]:
    """Those of an image's restores that live. A zombie, whose parent is this process, has done its work."""
    found = []
    for process in psutil.process_iter(["name", "cwd"]):  # a zombie is nowhere
        if process.info["name"] == SERVER and process.info["cwd"] == str(image):
            found.append(process.pid)
    return found


def fills(image: Path) -> bool:
    """Whether the plugin's server brings what this machine restores from an image."""
    return len(list(image.glob("pagemap-[0-9]*.img"))) == 1 and memory_is_filled()


@pytest.mark.parametrize("threads", ["", "0", "1", "3"])
def test_a_program_finds_its_memory_as_it_was(site: Site, image: Path, threads: str) -> None:
    program = site.start(sys.executable, str(CHANGES), "48", under=False)
    wait_until(lambda: rounds(program) >= 2, "the program to change its memory")
    site.run("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4")
    site.gone(program)
    before = rounds(program)
    site.restore(image, PHOS_FILL_THREADS=threads)
    wait_until(lambda: rounds(program) >= before + 5, "the program to go on")
    found = BROUGHT.search((image / "restore.log").read_text())
    assert bool(found) == (threads != "0" and fills(image))
    if found:
        assert 1 << 20 <= int(found[1]) <= (image / "pages-1.img").stat().st_size
    assert not servers(image)
    assert not (image / "lazy-pages.socket").exists()


@pytest.mark.parametrize("detached", [True, False])
def test_a_gpu_program_goes_on(site: Site, image: Path, detached: bool) -> None:
    """Twice, the second time from an image of what was restored."""
    expected = site.example("mlp", *EXAMPLES["mlp"][:2], under=False).wait_result()
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    words = ["criu", "restore", "--lib", "phos", "-D", str(image), "-o", "restore.log", "-v4"]
    for _ in range(2):
        site.dump(program, image)
        program.process.poll()
        if detached:
            site.restore(image)
        else:
            site.background(*words)
            wait_until(program.alive, "the program to be restored")
        program.wait_progress()
        assert bool(BROUGHT.search((image / "restore.log").read_text())) == fills(image)
        assert [job["mode"] for job in site.status()["jobs"] if job["kind"] == "restore"][-1] == "eager"
        for entry in image.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert program.wait_result() == expected


def test_phos_gpu_restore_goes_the_same_way(site: Site, image: Path) -> None:
    expected = site.example("mlp", *EXAMPLES["mlp"][:2], under=False).wait_result()
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    site.dump(program, image)
    site.run("phos-gpu", "restore", str(image), PHOS_CRIU_VERBOSITY="4")
    assert bool(BROUGHT.search((image / "restore.log").read_text())) == fills(image)
    assert program.wait_result() == expected


def test_gpu_memory_may_be_lazy_when_the_rest_is_not(site: Site, image: Path) -> None:
    expected = site.example("mlp", *EXAMPLES["mlp"][:2], under=False).wait_result()
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    site.dump(program, image)
    site.restore(image, PHOS_RESTORE="lazy")
    assert bool(BROUGHT.search((image / "restore.log").read_text())) == fills(image)
    assert [job["mode"] for job in site.status()["jobs"] if job["kind"] == "restore"] == ["lazy"]
    assert program.wait_result() == expected


def test_a_tree_of_processes_shares_its_pages_as_before(site: Site, image: Path) -> None:
    """Only CRIU knows which pages a child has never made its own."""
    program = site.start(sys.executable, str(SHARES), "64", "1", under=False)
    wait_until(lambda: len(program.lines()) >= 2, "both processes")
    site.run("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4")
    site.gone(program)
    site.restore(image)
    assert not BROUGHT.search((image / "restore.log").read_text())
    tree = [psutil.Process(program.pid), *psutil.Process(program.pid).children()]
    assert len(tree) == 2
    assert sum(process.memory_full_info().pss for process in tree) < 100 << 20
    for process in tree:
        process.kill()


def large(site: Site, image: Path) -> Program:
    """A program with much memory, dumped."""
    program = site.start(sys.executable, str(SHARES), str(LARGE_MIB), "0", under=False)
    wait_until(lambda: bool(program.lines()), "the program to fill its memory")
    site.run("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log")
    site.gone(program)
    if not fills(image):
        pytest.skip("this machine has CRIU bring the memory")
    return program


def when_it_serves(image: Path, action: signal.Signals) -> threading.Thread:
    """Send a signal to the server as soon as there is one."""

    def act() -> None:
        wait_until(lambda: bool(servers(image)), "the server")
        for pid in servers(image):
            os.kill(pid, action)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_server_that_is_killed_ends_the_restore(site: Site, image: Path) -> None:
    program = large(site, image)
    acting = when_it_serves(image, signal.SIGKILL)
    restored = site.restore(image, check=False, PHOS_FILL_THREADS="1")
    acting.join()
    assert restored.returncode != 0
    site.freed(program.pid)
    site.restore(image)
    assert program.alive()
    os.kill(program.pid, signal.SIGKILL)


def test_it_ends_with_criu(site: Site, image: Path) -> None:
    program = large(site, image)
    restoring = site.background("criu", "restore", "--lib", "phos", "-D", str(image), "-o", "restore.log")
    wait_until(lambda: bool(servers(image)), "the server")
    for pid in servers(image):
        os.kill(pid, signal.SIGSTOP)
    restoring.kill()
    restoring.wait()
    for pid in servers(image):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not servers(image), "the server to end")
    if psutil.pid_exists(program.pid):
        os.kill(program.pid, signal.SIGKILL)
    site.freed(program.pid)


def test_memory_that_cannot_be_brought_ends_the_restore(site: Site, image: Path) -> None:
    """A pagemap as CRIU made them before version 3, which it still takes, says nothing of what is lazy."""
    program = large(site, image)
    (pagemap,) = image.glob("pagemap-[0-9]*.img")
    whole = pagemap.read_bytes()
    with pagemap.open("rb") as file:
        content = images.load(file)
    del content["entries"][-1]["flags"]
    with pagemap.open("wb") as file:
        images.dump(content, file)
    restored = site.restore(image, check=False)
    assert restored.returncode != 0
    assert re.search(
        rf"of the memory of task {program.pid}, 0 of 0 bytes could be brought: .* PHOS_FILL_THREADS=0",
        (image / "restore.log").read_text(),
    )
    site.freed(program.pid)
    assert not servers(image)
    pagemap.write_bytes(whole)
    site.restore(image)
    assert program.alive()
    os.kill(program.pid, signal.SIGKILL)
