"""How phosd waits for the end of a CRIU whose plugin it no longer understands: not for ever, and harming nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gpu_engine.daemon import serve_dump, wire

# Connects, says that it has, and reads until there is no more: what came, and when it was over.
PEER = """
import socket, sys, time
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect(sys.argv[1])
came = b""
while part := peer.recv(65536):
    came += part
print(came.decode(errors="replace"), flush=True)
time.sleep(float(sys.argv[2]))
"""


class Peer:
    """A process at the other end of a connection, which lives so many seconds longer than that."""

    def __init__(self, listening: socket.socket, lives: float) -> None:
        command = [sys.executable, "-S", "-c", PEER, listening.getsockname(), str(lives)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        accepted, _ = listening.accept()
        self.connection = wire.Connection(accepted)

    def waited_for(self) -> float:
        began = time.monotonic()
        serve_dump._wait_for_end(self.connection, "what is wrong")
        return time.monotonic() - began


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(tmp_path / "socket"))
        made.listen()
        yield made


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "no descriptor left"])
def test_it_is_told_why_and_waited_for(listening: socket.socket, monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    if not pidfd:
        monkeypatch.setattr(wire.Connection, "peer_pidfd", lambda _connection: -1)
    peer = Peer(listening, 0.5)
    before = len(os.listdir("/proc/self/fd"))
    assert 0.4 < peer.waited_for() < 10
    assert len(os.listdir("/proc/self/fd")) == before
    output, _ = peer.process.communicate(timeout=10)
    assert "what is wrong" in output
    assert peer.process.returncode == 0
    peer.connection.close()


def test_one_that_does_not_end_is_left_alone(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be anybody who has connected."""
    monkeypatch.setattr(serve_dump, "CRIU_END_SECONDS", 0.3)
    peer = Peer(listening, 60)
    assert 0.2 < peer.waited_for() < 10
    assert peer.process.poll() is None
    peer.process.kill()
    peer.process.communicate()
    peer.connection.close()


@pytest.mark.parametrize("number", ["another's", "not seen"])
def test_nobody_else_of_its_number_is_waited_for(listening: socket.socket, number: str) -> None:
    peer = Peer(listening, 0)
    if number == "not seen":  # it is in a pid namespace that is not below ours
        peer.connection.pid = 0
    else:
        pidfd = peer.connection.peer_pidfd()
        if pidfd < 0:
            pytest.skip("Linux before 6.5: no SO_PEERPIDFD")
        os.close(pidfd)
        peer.connection.pid = os.getpid()
    assert peer.waited_for() < 10
    peer.process.communicate(timeout=10)
    peer.connection.close()
