"""Restores that are not lazy, whose memory the plugin's server brings in CRIU's place (criu_plugin/fill_server.c)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pycriu import images

from phos.gpu_engine.installation import plugin_folder
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
    expected = site.reference("mlp", *EXAMPLES["mlp"][:2])
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
    expected = site.reference("mlp", *EXAMPLES["mlp"][:2])
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    site.dump(program, image)
    site.run("phos-gpu", "restore", str(image), PHOS_CRIU_VERBOSITY="4")
    assert bool(BROUGHT.search((image / "restore.log").read_text())) == fills(image)
    assert program.wait_result() == expected


def test_gpu_memory_may_be_lazy_when_the_rest_is_not(site: Site, image: Path) -> None:
    expected = site.reference("mlp", *EXAMPLES["mlp"][:2])
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
    wait_until(lambda: len({line.split()[-1] for line in program.lines()}) == 2, "both processes")
    site.run("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4")
    site.gone(program)
    site.restore(image)
    assert not BROUGHT.search((image / "restore.log").read_text())
    tree = [psutil.Process(program.pid), *psutil.Process(program.pid).children()]
    assert len(tree) == 2
    assert sum(process.memory_full_info().pss for process in tree) < 100 << 20
    for process in tree:
        process.kill()


def goes_on(program: Program) -> None:
    """See to it that it looks at its memory again, and finds what it should."""
    before = len(program.lines())
    wait_until(lambda: len(program.lines()) >= before + 2, "the program to look at its memory")
    assert {line.split()[0] for line in program.lines()} == {"RIGHT"}


def large(site: Site, image: Path, **changes: str) -> Program:
    """A program with much memory, dumped."""
    program = site.start(sys.executable, str(SHARES), str(LARGE_MIB), "0", under=False, **changes)
    wait_until(lambda: bool(program.lines()), "the program to fill its memory")
    site.run("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log")
    site.gone(program)
    if not fills(image):
        pytest.skip("this machine has CRIU bring the memory")
    return program


def stopped_servers(image: Path) -> list[int]:
    """Wait for the server, and stop it at once: it works for less than a second."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = servers(image)
        return bool(found)

    wait_until(is_there, "the server")
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    return found


def said(image: Path) -> str:
    """CRIU's log."""
    log = image / "restore.log"
    return log.read_text() if log.exists() else ""


def in_late_hook(site: Site, image: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """CRIU, which has put everything together and waits for the server, and the server, which is stopped.

    The program has met with no fault: its threads have told the kernel no address to write to.
    """
    restoring = site.background("criu", "restore", "--lib", "phos", "-D", str(image), "-o", "restore.log", "-v4")
    found = stopped_servers(image)
    wait_until(lambda: "Run late stage hook" in said(image), "CRIU to put everything together")
    return restoring, found


NO_RSEQ = {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}


def test_a_server_that_is_killed_ends_the_restore(site: Site, image: Path) -> None:
    program = large(site, image, **NO_RSEQ)
    restoring, found = in_late_hook(site, image)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    assert restoring.wait() != 0
    assert f"was ended (process {SERVER})" in said(image)
    site.freed(program.pid)
    site.restore(image)
    goes_on(program)
    os.kill(program.pid, signal.SIGKILL)


def test_a_task_that_criu_has_left_has_its_memory(site: Site, image: Path) -> None:
    """It runs as soon as CRIU is dead."""
    program = large(site, image, **NO_RSEQ)
    restoring, found = in_late_hook(site, image)
    restoring.kill()
    restoring.wait()
    for pid in found:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not servers(image), "the server to end")
    goes_on(program)
    os.kill(program.pid, signal.SIGKILL)


def test_it_ends_when_criu_ends_early(site: Site, image: Path) -> None:
    program = large(site, image)
    restoring = site.background("criu", "restore", "--lib", "phos", "-D", str(image), "-o", "restore.log")
    found = stopped_servers(image)
    restoring.kill()
    restoring.wait()
    for pid in found:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not servers(image), "the server to end")
    assert not (image / "lazy-pages.socket").exists()
    if psutil.pid_exists(program.pid):
        os.kill(program.pid, signal.SIGKILL)
    site.freed(program.pid)


def test_its_pid_is_none_that_the_image_may_need(site: Site, image: Path) -> None:
    """The kernel gives it the next one, which is what a task of the image may have had."""
    program = large(site, image)
    last = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
    needed = range(last + 1, last + 500)
    for pid in needed:
        (image / f"core-{pid}.img").touch()
    restoring = site.background("criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log")
    found = stopped_servers(image)
    for pid in found:
        os.kill(pid, signal.SIGCONT)
    assert restoring.wait() == 0
    goes_on(program)
    assert found
    assert not any(pid in needed for pid in found)
    os.kill(program.pid, signal.SIGKILL)


def test_two_restores_have_one_working_directory(site: Site, image: Path, tmp_path: Path) -> None:
    programs = [site.start(sys.executable, str(SHARES), "64", "0", under=False) for _ in range(2)]
    for number, program in enumerate(programs):
        wait_until(lambda program=program: bool(program.lines()), "the program to fill its memory")  # type: ignore[misc]
        folder = image / str(number)
        folder.mkdir()
        site.run("criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(folder), "-o", "dump.log")
        site.gone(program)
    restoring = [
        site.background(
            *("criu", "restore", "--lib", "phos", "-d", "-W", str(tmp_path), "-D", str(image / str(number))),
            *("-o", f"{number}.log", "-v4"),
        )
        for number in range(2)
    ]
    assert [process.wait() for process in restoring] == [0, 0]
    for number, program in enumerate(programs):
        assert bool(BROUGHT.search((tmp_path / f"{number}.log").read_text())) == fills(image / str(number))
        goes_on(program)
        os.kill(program.pid, signal.SIGKILL)


def test_memory_that_cannot_be_brought_ends_the_restore(site: Site, image: Path) -> None:
    """A pagemap as CRIU made them before version 3 says nothing of what is lazy; the launcher would not ask for it."""
    program = large(site, image)
    (pagemap,) = image.glob("pagemap-[0-9]*.img")
    whole = pagemap.read_bytes()
    with pagemap.open("rb") as file:
        content = images.load(file)
    del content["entries"][-1]["flags"]
    with pagemap.open("wb") as file:
        images.dump(content, file)
    words = ["criu", "restore", "-L", str(plugin_folder()), "--lazy-pages", "-d", "-D", str(image), "-o", "restore.log"]
    site.run("phosd", "--ensure")
    assert site.run(*words, check=False, PHOS_FILL_PAGES="1").returncode != 0
    assert re.search(
        rf"of the memory of task {program.pid}, 0 of 0 bytes could be brought: .* PHOS_FILL_THREADS=0", said(image)
    )
    site.freed(program.pid)
    wait_until(lambda: not servers(image), "the server to end")
    site.restore(image)  # CRIU takes even that
    goes_on(program)
    os.kill(program.pid, signal.SIGKILL)
    site.freed(program.pid)
    pagemap.write_bytes(whole)
    site.restore(image)
    goes_on(program)
    os.kill(program.pid, signal.SIGKILL)
