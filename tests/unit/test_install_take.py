"""`phos-gpu pool take`, asked before anything is imported: the same request as the command line's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

from phos.cli import pool
from phos.gen import wire_pb2
from phos.gpu_engine.daemon import paths, reach, wire
from tests.unit.packaging_script import FOLDER, packaging_script


@pytest.fixture
def take() -> ModuleType:
    return packaging_script("take")


def by_click(words: list[str], monkeypatch: pytest.MonkeyPatch) -> wire_pb2.PoolTake:
    """What the command line asks for."""
    sent: list[wire_pb2.Envelope] = []
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(pool.reach, "connect", lambda: its)
    monkeypatch.setattr(wire, "send", lambda _, envelope: sent.append(envelope))
    answer = wire_pb2.Envelope(id=1, pool_taken=wire_pb2.PoolTaken(pids=[1], final=True))
    mine.send(answer.SerializeToString())
    done = CliRunner().invoke(pool.take, words)
    mine.close()
    assert done.exit_code == 0, done.output
    return sent[0].pool_take


@pytest.mark.parametrize(
    "words",
    [
        ["p"],
        ["a name with blanks, and ü"],
        ["--eager", "p", "--json"],
        ["p", "--no-wait", "--quick"],
        ["p", "--timeout", "0.25"],
        ["--timeout=7", "p"],
        ["p", "--timeout", "3", "--timeout", "4"],
        ["p", "--timeout", "0"],
        ["x" * 300],
        ["./p"],
        ["images/../p/"],
        ["/somewhere/p"],
    ],
)
def test_it_asks_for_what_the_command_line_asks_for(
    take: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    parsed = take.parse(words)
    assert parsed is not None
    envelope = wire_pb2.Envelope.FromString(take.packet(*parsed))
    assert envelope.id == 1
    assert envelope.WhichOneof("body") == "pool_take"
    assert envelope.pool_take == by_click(words, monkeypatch)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["p", "q"],
        ["p", "--timeout"],
        ["p", "--timeout", "soon"],
        ["p", "--timeout", "nan"],
        ["p", "--timeout", "-1"],
        ["x" * 5000],
        ["p", "--eage"],
        ["--", "p"],
        ["\udc80"],
    ],
)
def test_what_it_does_not_understand_it_leaves_to_the_command_line(take: ModuleType, words: list[str]) -> None:
    assert take.parse(words) is None
    assert take.ask(words) is None


@pytest.mark.parametrize("named", ["/somewhere/else.sock", "", None])
@pytest.mark.parametrize("user", [0, 1000])
def test_it_finds_the_same_phosd(
    take: ModuleType, monkeypatch: pytest.MonkeyPatch, named: str | None, user: int
) -> None:
    for name, value in (("PHOS_SOCKET", named), ("XDG_RUNTIME_DIR", "/run/user/1000" if user else None)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert take.socket_path() == str(paths.socket_path())


def test_the_connection_is_handed_on(take: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_SOCKET", str(tmp_path / "phosd.sock"))
    assert take.ask(["p"]) is None, "nobody listens: the command line says so"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "phosd.sock"))
        listener.listen()
        asked = take.ask(["p", "--quick"])
        assert asked is not None
        connection, _ = listener.accept()
    with connection:
        assert wire_pb2.Envelope.FromString(connection.recv(4096)).pool_take.name == "p"
        answer: Any = wire_pb2.PoolTaken(pids=[4711], attached=0.25)
        connection.send(wire_pb2.Envelope(id=1, pool_taken=answer).SerializeToString())
        done = CliRunner().invoke(click.Group(commands={"take": pool.take}), ["take", "p", "--quick"], obj=asked)
        assert done.output == "Process 4711 computes (250.0 ms).\n"
        connection.settimeout(0.1)
        assert connection.recv(4096) == b"", "it has not asked again"


def test_a_phosd_that_takes_nobody_is_waited_for_no_longer_than_by_the_command_line(
    take: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, and as many as may have come already; the command line says so then."""
    assert getattr(take, "ANSWER_SECONDS", None) == reach.ANSWER_SECONDS
    assert take.ANSWER_SECONDS == reach.ANSWER_SECONDS
    monkeypatch.setattr(take, "ANSWER_SECONDS", 1)
    monkeypatch.setenv("PHOS_SOCKET", str(tmp_path / "phosd.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "phosd.sock"))
        listener.listen(0)
        first = take.ask(["p"])
        answers: list[int | None] = []
        asking = threading.Thread(target=lambda: answers.append(take.ask(["p"])), daemon=True)
        asking.start()
        asking.join(10)
        assert answers == [None]
        os.close(first)


def test_an_interruption_before_the_command_is_loaded_is_one(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PHOS_")}
    environment = inherited | {"PYTHONPATH": f"{tmp_path}:{FOLDER.parent}", "PHOS_SOCKET": str(tmp_path / "phosd.sock")}
    command = [sys.executable, "-S", str(FOLDER / "take.py"), "pool", "take", "p"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
