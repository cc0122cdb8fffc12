"""The keeper outlives phosd as long as it holds the memory of a living process, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from phos.gpu_engine.daemon import keeper
from phos.gpu_engine.daemon.keeper_link import KeeperLink
from tests.integration.site import Site, opened, wait_until, words

SESSION = bytes(range(16))
LONELY = 0.3
"""Seconds of loneliness that the keepers of these tests bear, where it is not phosd that starts them."""


def keepers(site: Site) -> list[psutil.Process]:
    """The keepers that the site's phosd has started."""
    return [p for p in site.processes() if keeper.__file__ in words(p)]


def ended(process: psutil.Process) -> bool:
    """Whether a process that is not our child has ended, reaped or not."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_it_ends_soon_after_phosd(site: Site, end: str) -> None:
    site.run("phosd", "--ensure")
    (mine,) = keepers(site)
    daemon = site.daemon_pid()
    if end == "stopped":
        site.run("phosd", "--stop")
    else:
        os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: ended(mine), "the keeper's end", keeper.LONELY_SECONDS + 5)
    assert not (site.folder / "run" / "keeper.sock").exists()
    # Its end is no obstacle to the next.
    site.run("phosd", "--ensure")
    assert len(keepers(site)) == 1


def test_it_is_replaced_when_it_is_killed(site: Site) -> None:
    """And its successor has everything: imported handles cannot be exported again when phosd is killed as well."""
    options = ("--iterations", "400", "--iteration-seconds", "0.03")
    expected = site.reference("stencil", *options[:2])
    program = site.example("stencil", *options)
    program.wait_iterations(3)
    site.dump(program, site.image("first"), "--leave-running")
    (mine,) = keepers(site)
    mine.kill()
    wait_until(lambda: [k for k in keepers(site) if k.pid != mine.pid] != [], "another keeper")
    blocks = site.status()["processes"][0]["blocks"]
    wait_until(lambda: blocks_of(site) == blocks, "the blocks in the new keeper")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    site.run("phosd", "--ensure")
    program.wait_progress()
    image = site.image("second")
    site.dump(program, image)
    site.restore(image)
    assert program.wait_result() == expected


def blocks_of(site: Site) -> int:
    """Descriptors of GPU memory in the keeper."""
    (mine,) = keepers(site)
    return sum("memfd:softgpu-" in name for name, _ in opened(mine.pid))


def test_it_frees_the_memory_of_a_process_that_ends_while_no_phosd_runs(site: Site) -> None:
    program = site.example("stencil", "--iterations", "100000", "--iteration-seconds", "0.01")
    program.wait_iterations(3)
    wait_until(lambda: site.status()["processes"][0]["blocks"] > 0, "phosd to have heard of the program's memory")
    (mine,) = keepers(site)
    os.kill(site.daemon_pid(), signal.SIGKILL)
    program.wait_progress()
    assert site.gpu_memory() > 0
    program.process.kill()
    site.gone(program)
    site.wait_no_gpu_memory()
    wait_until(lambda: ended(mine), "the keeper's end", keeper.LONELY_SECONDS + 5)


# Below phosd: what it holds, said in the packets of keeper_link.


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Some process whose memory is held."""
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            yield sleeper
        finally:
            sleeper.kill()


def start(folder: Path, more: str = "") -> subprocess.Popen[bytes]:
    """Start a keeper that gives up after LONELY seconds, and wait until it listens; ``more`` is run before."""
    script = (
        "import os, runpy, sys, time\n"
        "parts = runpy.run_path(sys.argv[1])\n"
        f"parts['Keeper'].run.__globals__['LONELY_SECONDS'] = {LONELY}\n"
        "keeper = parts['Keeper'](sys.argv[2])\n"
        f"{more}"
        "keeper.run()\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script, keeper.__file__, str(folder)]
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: " 00010000 " in listening(folder / "keeper.sock"), "the keeper")
    except BaseException:
        started.kill()
        raise
    return started


def listening(path: Path) -> str:
    """What the kernel says of the socket at ``path``; flag 00010000 means that it listens."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return next((line for line in lines if line.endswith(f" {path}")), "")


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper that gives up after LONELY seconds, the first of which begin when somebody has come."""
    with start(tmp_path, "import select\nselect.select([keeper.listener], [], [])\n") as started:
        try:
            yield started
        finally:
            started.kill()


def memory(text: bytes) -> int:
    """A descriptor of memory that holds ``text``."""
    descriptor = os.memfd_create("held")
    os.write(descriptor, text)
    return descriptor


def test_it_hands_what_it_holds_to_the_next_phosd(
    impatient: subprocess.Popen[bytes], process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    first = KeeperLink(tmp_path / "keeper.sock")
    for block in (1, 2, 3):
        descriptor = memory(b"block %d" % block)
        first.add(SESSION, process.pid, block, 4096 * block, 0, descriptor)
        os.close(descriptor)
    first.remove(SESSION, 2)
    first.close()
    time.sleep(4 * LONELY)
    assert impatient.poll() is None
    for _ in range(2):  # as often as a phosd comes
        link = KeeperLink(tmp_path / "keeper.sock")
        found = {held.block: held for held in link.held()}
        link.close()
        assert {block: (held.session, held.pid, held.size) for block, held in found.items()} == {
            block: (SESSION, process.pid, 4096 * block) for block in (1, 3)
        }
        for block, held in found.items():
            assert os.pread(held.descriptor, 100, 0) == b"block %d" % block
            os.close(held.descriptor)


def test_it_drops_what_a_dead_process_held_when_no_phosd_is_there(
    impatient: subprocess.Popen[bytes], process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    link = KeeperLink(tmp_path / "keeper.sock")
    descriptor = memory(b"text")
    link.add(SESSION, process.pid, 1, 4096, 0, descriptor)
    process.kill()
    process.wait()
    time.sleep(2 * LONELY)
    # phosd may still write an image of it.
    held = list(link.held())
    assert [entry.block for entry in held] == [1]
    inode = os.fstat(descriptor).st_ino
    for number in (descriptor, *(entry.descriptor for entry in held)):
        os.close(number)
    assert inode in {status.st_ino for _, status in opened(impatient.pid)}
    link.close()
    assert impatient.wait(10 * LONELY + 5) == 0
    assert not (tmp_path / "keeper.sock").exists()


def test_it_ends_when_all_it_held_was_freed(
    impatient: subprocess.Popen[bytes], process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    link = KeeperLink(tmp_path / "keeper.sock")
    descriptor = memory(b"text")
    link.add(SESSION, process.pid, 1, 4096, 0, descriptor)
    os.close(descriptor)
    link.remove(SESSION, 1)
    link.close()
    assert impatient.wait(10 * LONELY + 5) == 0


def test_a_phosd_that_comes_as_it_ends_is_served(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """It connects between the keeper's decision to end and the end of its socket: it is answered, and found again."""
    # The keeper removes its socket when it has decided. Here it waits before that until `go` is there.
    more = (
        "def unlink(path, real=os.unlink):\n"
        f"    open({str(tmp_path / 'ending')!r}, 'w').close()\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "        time.sleep(0.01)\n"
        "    real(path)\n"
        "os.unlink = unlink\n"
    )
    with start(tmp_path, more) as ending:
        try:
            wait_until((tmp_path / "ending").exists, "the keeper's decision")
            first = KeeperLink(tmp_path / "keeper.sock")
            (tmp_path / "go").touch()
            descriptor = memory(b"text")
            first.add(SESSION, process.pid, 1, 4096, 0, descriptor)
            os.close(descriptor)
            assert [(held.block, os.close(held.descriptor)) for held in first.held()] == [(1, None)]
            first.close()
            second = KeeperLink(tmp_path / "keeper.sock")
            assert [(held.block, os.close(held.descriptor)) for held in second.held()] == [(1, None)]
            second.close()
            assert ending.poll() is None
        finally:
            ending.kill()
