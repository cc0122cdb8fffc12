"""phosd's side of a parked process: what is known of its warden (gpu_engine/restore/pool_process.py)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phos.gpu_engine.errors import RestoreFailed
from phos.gpu_engine.restore.pool_process import Warden


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A phosd of a few lines, which is told the folder."""
    words = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def test_a_warden_that_was_killed_has_not_taken_long(tmp_path: Path) -> None:
    mine, its = socket.socketpair()
    warden = Warden.__new__(Warden)
    warden.log, warden.pid, warden._said, warden._lifeline = tmp_path / "x.log", os.getpid(), b"", mine
    warden._given = []
    its.close()  # and its process is still being put away
    with mine, pytest.raises(RestoreFailed, match="it was ended"):
        warden.wait_restored()


WARDEN_THAT_ENDS_AT_ONCE = """
import ctypes, os, signal, sys, time
from pathlib import Path
from phos.gpu_engine.errors import RestoreFailed
from phos.gpu_engine.restore import pool_process
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what loses its parent is ours, and nobody waits
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
pool_process.launcher = lambda name: Path("/bin/false")
hear = pool_process.Warden._hear
def late(self, seconds):
    heard = hear(self, seconds)
    while os.path.exists(f"/proc/{heard.get('pid')}"):
        time.sleep(0.01)
    return heard
pool_process.Warden._hear = late
warden = pool_process.Warden(Path(sys.argv[1]), Path(sys.argv[1]) / "x.log", os.environ, [])
try:
    warden.wait_restored()
except RestoreFailed as error:
    print(error)
warden.end()
warden.wait_ended(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_a_warden_that_has_ended_before_it_is_looked_at_says_why(tmp_path: Path) -> None:
    """Its number may be somebody else's by then."""
    done = run(WARDEN_THAT_ENDS_AT_ONCE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("CRIU could not restore it: ")


WARDEN_WITH_HIGH_NUMBERS = """
import os, resource, sys
from pathlib import Path
from phos.gpu_engine.restore import pool_process
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
pool_process.launcher = lambda name: Path("/bin/true")
warden = pool_process.Warden(Path(sys.argv[1]), Path(sys.argv[1]) / "x.log", os.environ, [])
warden.wait_restored()
print("restored")
warden.end()
warden.wait_ended(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_a_process_is_parked_while_phosd_has_more_descriptors_than_select_takes(tmp_path: Path) -> None:
    """While one that was taken is loaded phosd has some for each of its blocks."""
    done = run(WARDEN_WITH_HIGH_NUMBERS, tmp_path)
    assert (done.stdout, done.returncode) == ("restored\n", 0), done.stderr


SLOW_TO_INTRODUCE = """
import os, socket, sys, time
from phos.gpu_engine.restore import pool_warden
mine, its = socket.socketpair()
if not os.fork():
    mine.close()
    known = os.pidfd_open
    os.pidfd_open = lambda pid: time.sleep(0.5) or known(pid)
    pool_warden.start(its, "1000", ["/bin/true"])
    os._exit(0)
its.close()
said = b""
while more := mine.recv(4096):
    said += more
print(*[line[:6].decode() for line in said.splitlines()])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_a_warden_is_introduced_before_it_says_anything(tmp_path: Path) -> None:
    """What it starts may end before its maker comes to that."""
    done = run(SLOW_TO_INTRODUCE, tmp_path)
    assert (done.stdout, done.stderr) == ('{"pid" {"criu\n', "")
