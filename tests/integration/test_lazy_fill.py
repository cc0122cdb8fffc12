"""``criu lazy-pages`` with what is preloaded into it: all of a process's memory comes at once (lazy_fill/)."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.site import Program, Site, launcher, opened, wait_until
from tests.integration.test_lazy import EXAMPLES

CHANGES = Path(__file__).parent / "programs" / "changes_memory.py"
SIOCOUTQ = 0x5411
"""How much of what was sent nobody has read; include/uapi/linux/sockios.h."""

KEEPER = "phos-keep-pages"
"""Whom criu lazy-pages leaves behind if it ends too soon."""

MUCH = re.compile(r"uffd: (\d+)-\d+: uffd_copy: 0x\w+/\d{6}")
FILLED = re.compile(r"phos: (\d+) bytes of process (\d+) are there")


def rounds(program: Program) -> int:
    """How many rounds the program has made. What it found wrong is no round."""
    wrong = [line for line in program.lines() if line.startswith("WRONG")]
    assert not wrong, wrong
    return sum(line.startswith("ROUND") for line in program.lines())


def userfaultfds(pid: int) -> int:
    """How many a process has."""
    return sum(name == "anon_inode:[userfaultfd]" for name, _ in opened(pid))


def names(site: Site) -> list[str]:
    """Of the site's processes."""
    found = []
    for process in site.processes():
        with suppress(psutil.Error):  # it has ended just now
            found.append(process.name())
    return found


def waits_for_a_page(pid: int) -> bool:
    """Whether a process stands still because nobody has brought a page yet."""
    return "handle_userfault" in Path(f"/proc/{pid}/wchan").read_text()


@pytest.fixture
def image() -> Iterator[Path]:
    """A directory in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("threads", ["0", "1", "3"])
def test_a_program_that_changes_its_memory_finds_it_right(site: Site, image: Path, threads: str) -> None:
    """With CRIU alone: a program that has nothing to do with GPUs is restored with it as well."""
    program = site.start(sys.executable, str(CHANGES), "48", under=False)
    wait_until(lambda: rounds(program) >= 2, "the program to change its memory")
    site.run("criu", "dump", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4")
    site.gone(program)
    before = rounds(program)
    options = "-D", str(image), "-v4"
    pages = site.background("criu", "lazy-pages", "-o", "pages.log", *options, PHOS_FILL_THREADS=threads)
    wait_until((image / "lazy-pages.socket").exists, "criu lazy-pages")
    site.run("criu", "restore", "-d", "--lazy-pages", "-o", "restore.log", *options)
    wait_until(lambda: rounds(program) >= before + 5 or not program.alive(), "the program to go on")
    assert rounds(program) >= before + 5, "it has ended"
    assert pages.wait() == 0
    assert KEEPER not in names(site)
    filled = [int(found[1]) for found in FILLED.finditer((image / "pages.log").read_text())]
    if threads == "0":
        assert not filled
    elif not filled:  # nobody waits for that here: the program may have been quicker
        assert "it is left to CRIU" in (image / "pages.log").read_text()
    if filled:
        # Some of it may have been the program's to change by then; of a child, which has pages of its own, all of it.
        assert 1 << 20 <= sum(filled) <= sum(pages.stat().st_size for pages in image.glob("pages-*.img"))


def test_phos_gpu_restore_fills(site: Site, image: Path) -> None:
    expected = site.reference("mlp", *EXAMPLES["mlp"][:2])
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    site.dump(program, image)
    said = site.run("phos-gpu", "restore", "--lazy", "--json", str(image), PHOS_FILL_THREADS="2")
    assert json.loads(said.stdout)["mode"] == "lazy"
    assert program.wait_result() == expected


@pytest.mark.parametrize("end", ["is killed", "is killed with its group", "fails"])
def test_nobody_goes_on_with_zeros_when_the_server_ends_too_soon(site: Site, image: Path, end: str) -> None:
    """The kernel gives those out for what has not come, once nobody has the descriptor any more."""
    binary, size = site.folder / "keeps_memory", 320 << 20
    subprocess.run(["gcc", "-O2", "-o", binary, CHANGES.with_name("keeps_memory.c")], check=True)
    program = site.start(str(binary), str(size >> 20), under=False)
    wait_until(lambda: {"ROUND 1", "ROUND 2"} <= set(program.lines()), "both to look at their memory")
    site.run("criu", "dump", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4")
    site.gone(program)
    words = ["setsid", str(launcher("criu")), "lazy-pages", "-D", str(image), "-o", "pages.log", "-v4"]
    pages = subprocess.Popen(words, env={**site.environment, "PHOS_FILL_THREADS": "0"})
    wait_until((image / "lazy-pages.socket").exists, "criu lazy-pages")
    site.run("criu", "restore", "-d", "--lazy-pages", "-D", str(image), "-o", "restore.log", "-v4")
    log = image / "pages.log"

    def until(condition: Callable[[], object], what: str) -> None:
        """It works for a moment at a time: the rest of the memory must not come meanwhile."""

        def after_a_moment() -> object:
            pages.send_signal(signal.SIGCONT)
            time.sleep(0.002)
            pages.send_signal(signal.SIGSTOP)
            return condition()

        wait_until(after_a_moment, what)

    until(lambda: MUCH.search(log.read_text()), "CRIU to bring much")
    copied = psutil.Process(int(MUCH.findall(log.read_text())[0]))  # it notices the end of the other one only later
    first = psutil.Process(program.pid)
    for one in [first, *first.children()]:
        one.send_signal(signal.SIGUSR2 if one == copied else signal.SIGUSR1)
    until(lambda: len(first.children(recursive=True)) == 3 and copied.name() == "sleep", "both to fork")
    until(lambda: userfaultfds(pages.pid) == 3, "CRIU to notice that one is another program now")
    kept = [one for one in [first, *first.children(recursive=True)] if one != copied]
    assert all(one.memory_info().rss < size for one in kept), "all pages were there already"
    assert names(site).count(KEEPER) == 1
    # The dump may have met one at the end of its round, which it ends now.
    wait_until(lambda: all(waits_for_a_page(one.pid) for one in kept), "all to miss a page")
    before = rounds(program)
    if end == "fails":
        for file in image.glob("pages-*.img"):
            os.truncate(file, 0)
        pages.send_signal(signal.SIGCONT)
    elif end == "is killed":
        pages.kill()
    else:
        os.killpg(pages.pid, signal.SIGKILL)
    assert pages.wait(timeout=30) != 0
    wait_until(lambda: KEEPER not in names(site), "the keeper to end")
    # It depends on nothing any more, but may be below the other one.
    assert copied.status() == (psutil.STATUS_SLEEPING if copied == first else psutil.STATUS_ZOMBIE)
    copied.kill()
    ends = [os.waitpid(one.pid, 0)[1] for one in (copied, *kept)]  # this process is the subreaper
    assert [os.WIFSIGNALED(status) and os.WTERMSIG(status) for status in ends] == [signal.SIGKILL] * 4
    assert rounds(program) == before


STARTS_NOTHING_MORE = """
import sys, time
from phos.cli import restore_first
restore_first.Begun.start = lambda *_words, **_options: None  # CRIU
print(restore_first.Begun(sys.argv[1], lazy=True).pages, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("came", [False, True], ids=["before CRIU has come", "after that"])
def test_the_server_ends_with_who_has_started_it(site: Site, image: Path, came: bool) -> None:
    """Killed, that one ends nothing any more. Once CRIU has told of a process, that depends on the server."""
    program = site.start(sys.executable, str(CHANGES), "48", under=False)
    wait_until(lambda: rounds(program) >= 1, "the program to change its memory")
    site.run("criu", "dump", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4")
    path = os.pathsep.join([str(launcher("criu").parent), os.environ["PATH"]])
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTS_NOTHING_MORE, str(image)],
        env={**site.environment, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    pages = psutil.Process(int(starter.stdout.readline()))
    wait_until((image / "lazy-pages.socket").exists, "criu lazy-pages")
    wait_until(lambda: pages.status() == psutil.STATUS_SLEEPING, "it to listen")
    with socket.socket(socket.AF_UNIX) as criu:
        if came:
            criu.connect(str(image / "lazy-pages.socket"))
            criu.send(struct.pack("i", program.pid))
            wait_until(lambda: not fcntl.ioctl(criu, SIOCOUTQ, b"    ").strip(b"\0"), "it to read that")
            time.sleep(0.1)
        starter.kill()
        starter.wait()
        if came:
            time.sleep(0.5)
            assert pages.is_running()
            assert pages.status() != psutil.STATUS_ZOMBIE
    site.freed(pages.pid)


@pytest.mark.parametrize("server", ["the one", "another"])
def test_a_restored_process_runs_when_it_has_been_filled(site: Site, image: Path, server: str) -> None:
    """Whoever fills says so under a name that has its pid; somebody else there is not waited for."""
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    site.dump(program, image)
    before = program.iterations()
    with ExitStack() as undo:
        sleeping = subprocess.Popen(["sleep", "60"])
        undo.callback(sleeping.wait)
        undo.callback(sleeping.kill)
        pid = os.getpid() if server == "the one" else sleeping.pid
        filling = undo.enter_context(socket.socket(socket.AF_UNIX))
        filling.bind(f"\0phos-lazy-fill-{pid}")
        filling.listen()
        (image / "lazy-pages.socket").touch()  # as if one listened
        with ThreadPoolExecutor(1) as executor:
            restoring = executor.submit(site.restore, image, PHOS_LAZY_PAGES=str(pid), PHOS_RESTORE="eager")
            connection, _ = filling.accept()
            if server == "the one":
                time.sleep(0.5)
                assert not restoring.done()
                assert program.iterations() == before
                connection.close()
            restoring.result()
    wait_until(lambda: program.iterations() > before, "the program to go on")


def test_another_criu_is_started_as_it_is(site: Site, tmp_path: Path) -> None:
    """A launcher of somebody else's stands for any CRIU that nothing may be preloaded into."""
    other = tmp_path / "criu"
    other.write_text('#!/bin/sh\necho "$@"\n')
    other.chmod(0o755)
    said = site.run("criu", "lazy-pages", "-D", str(tmp_path), PHOS_CRIU=str(other))
    assert said.stdout.split() == ["lazy-pages", "-D", str(tmp_path)]
