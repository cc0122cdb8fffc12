"""phosd as a service manager starts it: when it says that it is ready, one can connect."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import client, reach
from phos.gpu_engine.installation import launcher
from tests.integration.site import PATIENCE, Site, wait_until


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, site: Site) -> Iterator[socket.socket]:
    """The socket of a service manager, to which phosd has its address."""
    if request.param == "path":
        address = name = str(site.folder / "notify")
    else:
        name = f"@phos-test-{os.getpid()}-{site.folder.name}"
        address = "\0" + name[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(address)
        made.settimeout(PATIENCE)
        site.environment["NOTIFY_SOCKET"] = name
        yield made


def test_a_manager_learns_when_one_can_connect_and_when_phosd_ends(site: Site, manager: socket.socket) -> None:
    with subprocess.Popen([str(launcher("phosd"))], env=site.environment) as phosd:
        assert manager.recv(100) == b"READY=1"
        path = Path(site.environment["PHOS_SOCKET"])
        reach.connect(path).close()
        assert client.status(path).pid == phosd.pid
        phosd.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert phosd.wait(PATIENCE) == 0


def test_it_ends_whichever_thread_gets_the_signal(site: Site, manager: socket.socket) -> None:
    """Python's handlers run in the first thread, which waits for connections and is not woken by another's signal."""
    with subprocess.Popen([str(launcher("phosd"))], env=site.environment) as phosd:
        assert manager.recv(100) == b"READY=1"
        client.status(Path(site.environment["PHOS_SOCKET"]))
        time.sleep(0.2)  # the first thread waits for the next one by then
        *_, other = (thread.id for thread in psutil.Process(phosd.pid).threads())  # the newest: numbers wrap around
        assert other != phosd.pid
        tgkill = 234  # on x86-64; glibc has a function for threads of the caller alone
        assert ctypes.CDLL(None).syscall(tgkill, phosd.pid, other, int(signal.SIGTERM)) == 0
        assert manager.recv(100) == b"STOPPING=1"
        assert phosd.wait(PATIENCE) == 0


BLOCKS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_it_ends_by_a_signal_that_who_started_it_has_blocked(site: Site) -> None:
    """What is blocked stays so in every program that is started."""
    command = [sys.executable, "-c", BLOCKS, str(launcher("phosd")), "--ensure"]
    subprocess.run(command, env=site.environment, check=True)
    pid = site.daemon_pid()
    os.kill(pid, signal.SIGTERM)
    try:
        wait_until(lambda: procfs.has_ended(pid), "phosd to end", 10)
    finally:
        if not procfs.has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_who_starts_phosd_on_demand_does_not_become_ready_by_that(site: Site, manager: socket.socket) -> None:
    site.run("phosd", "--ensure")
    site.run("phosd", "--stop")
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


def test_programs_started_at_the_same_moment_share_one_phosd(site: Site) -> None:
    """Each starts one where none runs yet; those that come second are there before the first one answers."""
    command = [str(launcher("phosd")), "--ensure"]
    starting = [subprocess.Popen(command, env=site.environment, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    for one in starting:
        _, said = one.communicate(timeout=PATIENCE)
        assert one.returncode == 0, said
    reach.connect(Path(site.environment["PHOS_SOCKET"])).close()
    assert (site.folder / "run" / "phosd.log").read_text().count("phosd serves") == 1


def test_one_that_is_started_while_another_ends_comes_after_it(site: Site) -> None:
    """Who holds the lock does not answer, and then is gone: as phosd in its last moments."""
    folder = Path(site.environment["PHOS_SOCKET"]).parent
    folder.mkdir(parents=True, exist_ok=True)
    holder = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(folder / "phosd.lock"), "phosd"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ending:
        assert ending.stdin
        assert ending.stdout
        ending.stdout.readline()
        starting = subprocess.Popen([str(launcher("phosd")), "--ensure"], env=site.environment)
        with pytest.raises(subprocess.TimeoutExpired):
            starting.wait(1.5)
        ending.stdin.close()
    assert starting.wait(PATIENCE) == 0
    reach.connect(folder / "phosd.sock").close()


def test_one_that_was_killed_and_still_takes_connections_is_not_taken_for_alive(site: Site) -> None:
    """The kernel takes a while to let go of a large process; its socket is among the last."""
    folder = Path(site.environment["PHOS_SOCKET"]).parent
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dying:
        dying.bind(str(folder / "phosd.sock"))
        dying.listen(8)
        starting = subprocess.Popen([str(launcher("phosd")), "--ensure"], env=site.environment)
        with pytest.raises(subprocess.TimeoutExpired):
            starting.wait(1.5)
    assert starting.wait(PATIENCE) == 0
    assert site.run("phos-gpu", "status").returncode == 0


DIES = """
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
    own.bind(sys.argv[1] + ".new")
    own.listen(8)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    taken, _ = own.accept()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nor_is_one_that_dies_with_a_connection(site: Site) -> None:
    """The kernel closes it as phosd would."""
    path = Path(site.environment["PHOS_SOCKET"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", DIES, str(path)]) as dying:
        wait_until(path.exists, "its socket")
        assert site.run("phosd", "--ensure").returncode == 0
        assert dying.wait(PATIENCE) == -signal.SIGKILL
    assert site.run("phos-gpu", "status").returncode == 0


def test_phosd_serves_though_its_manager_is_gone(site: Site) -> None:
    environment = {**site.environment, "NOTIFY_SOCKET": str(site.folder / "nobody")}
    with subprocess.Popen([str(launcher("phosd"))], env=environment) as phosd:
        wait_until(site.answers, "phosd")
        site.run("phosd", "--stop")
        assert phosd.wait(PATIENCE) == 0


def test_the_unit_waits_for_it() -> None:
    unit = Path(__file__).resolve().parents[2] / "packaging" / "phosd.service"
    assert "Type=notify" in unit.read_text().splitlines()
