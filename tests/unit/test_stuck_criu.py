"""CRIU that waits for ever for a task that was killed under its hands is ended; one that works, or waits, is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import serve_dump, wire
from tests.unit.waiting import eventually

TASK = "import threading, time; threading.Thread(target=time.sleep, args=(100,)).start(); print('READY', flush=True)"

# As CRIU does it: seizes all threads, and then waits for the first one alone.
TRACER = """
import ctypes, os, signal, socket, sys
phosd = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
phosd.connect(sys.argv[3])
PTRACE_SEIZE, WALL = 0x4206, 0x40000000
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
task = int(sys.argv[1])
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
for thread in os.listdir(f"/proc/{task}/task"):
    assert ptrace(PTRACE_SEIZE, int(thread), None, None) == 0, os.strerror(ctypes.get_errno())
if sys.argv[2] != "seize":
    os.kill(task, signal.SIGKILL)
print("WAITS", flush=True)
os.waitpid(task, WALL)
"""


@contextmanager
def tracing(folder: Path, task: int, how: str) -> Iterator[tuple[subprocess.Popen[str], wire.Connection]]:
    """Such a tracer of a task, and its connection to phosd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen()
        with python(TRACER, str(task), how, str(folder / "socket")) as tracer:
            accepted, _ = listening.accept()
            yield tracer, wire.Connection(accepted)


@contextmanager
def python(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_dump, "NOTICE_SECONDS", 1.0)


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "no descriptor left"])
@pytest.mark.parametrize(("how", "ends_by"), [("kill", signal.SIGALRM), ("deaf", signal.SIGKILL)])
def test_one_that_waits_for_a_killed_task_is_ended(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    ends_by: signal.Signals,
    pidfd: bool,
) -> None:
    if not pidfd:
        monkeypatch.setattr(wire.Connection, "peer_pidfd", lambda _connection: -1)
    with python(TASK) as task, tracing(tmp_path, task.pid, how) as (tracer, criu):
        eventually(lambda: procfs.is_remains(task.pid), "the end of the task")
        eventually(lambda: procfs.waited_for(tracer.pid) == task.pid, "the wait for it")
        began, over = time.monotonic(), threading.Event()
        watch = threading.Thread(target=serve_dump._free_criu, args=(criu, over))
        watch.start()
        assert tracer.wait(20) == -ends_by
        assert time.monotonic() - began >= 1.0
        over.set()
        watch.join(5)
        assert not watch.is_alive()
        assert f"CRIU (process {tracer.pid}) waits for ever for process {task.pid}" in caplog.text
        task.wait(5)


def test_one_that_waits_for_a_living_task_goes_on(tmp_path: Path) -> None:
    over = threading.Event()
    with python(TASK) as task, tracing(tmp_path, task.pid, "seize") as (tracer, criu):
        eventually(lambda: procfs.waited_for(tracer.pid) == task.pid, "the wait")
        watch = threading.Thread(target=serve_dump._free_criu, args=(criu, over))
        watch.start()
        time.sleep(2)
        assert tracer.poll() is None
        assert not procfs.is_remains(task.pid)
        over.set()
        watch.join(5)
        assert not watch.is_alive()


def test_what_is_not_waited_for() -> None:
    with python(TASK) as task:
        assert procfs.waited_for(task.pid) == 0
        assert procfs.waited_for(os.getpid()) == 0
    assert procfs.waited_for(task.pid) == 0
    assert not procfs.is_remains(task.pid)
