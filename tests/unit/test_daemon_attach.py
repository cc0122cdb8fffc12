"""A process cannot map its memory when it is given it back: who tries again, when, and who gives up."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import attach_failures, server
from phos.gpu_engine.daemon.attach_failures import AttachFailures
from phos.gpu_engine.daemon.states import SessionState, StateMachine
from phos.gpu_engine.errors import AttachRefused, MemoryLost, PhosError, Unresponsive

FULL = PhosError("the GPU is full.")
DIFFER = AttachRefused("phosd did not send block 7")


class Returning:
    """A session whose process has the driver's part back, and maps its memory when nothing is left to fail."""

    pid = 1
    session = b"s" * 16

    def __init__(self, *failures: Exception) -> None:
        self.machine = StateMachine(SessionState.RETURNING)
        self.attach_failures = AttachFailures()
        self.lost = ""
        self._failures = list(failures)

    def attach(self) -> None:
        if self._failures:
            raise self._failures.pop(0)

    def hang_up(self) -> None:
        """It asks again."""

    def lose(self, reason: str) -> None:
        self.lost = reason
        self.machine.to(SessionState.LOST)


def bring_back(session: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """As the connections of its frontend do. Returns how long it was told to wait before each try, in seconds."""
    clock = [0.0]
    monkeypatch.setattr(attach_failures, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    daemon = server.Daemon.__new__(server.Daemon)  # no GPU is needed for this
    registry: Any = SimpleNamespace(lock=threading.Lock(), restores={})
    daemon._registry = registry
    connection: Any = SimpleNamespace(pid=1)
    waited = [0.0]
    while session.machine.state is SessionState.RETURNING:
        answer = daemon._answer_detached(session, connection)
        if answer.action == wire_pb2.Welcome.RETRY:
            waited[-1] += answer.retry_ms / 1000
            clock[0] += answer.retry_ms / 1000
            continue
        session.machine.to(SessionState.ATTACHING)
        daemon._attach(session)
        waited.append(0.0)
    return waited[:-1]


def test_what_may_pass_is_waited_for_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Returning(*[FULL] * 500)
    waited = bring_back(session, monkeypatch)
    assert session.machine.state is SessionState.RUNNING
    assert not session.attach_failures.last
    assert waited[0] == 0, "the first try is at once"
    assert waited[1] < 0.1, "a failure may be of a moment"
    assert all(later >= earlier - 0.002 for earlier, later in itertools.pairwise(waited))
    assert waited[-1] == pytest.approx(1.0, abs=0.01)


def test_memory_that_nobody_has_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Returning(FULL, MemoryLost("phosd holds it no more."))
    bring_back(session, monkeypatch)
    assert session.lost == "phosd holds it no more."


def test_what_is_not_known_to_pass_is_tried_some_times(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Returning(FULL, DIFFER, FULL, DIFFER)
    bring_back(session, monkeypatch)
    assert session.machine.state is SessionState.RUNNING
    session = Returning(*[FULL] * 9, DIFFER, ValueError("a mistake"), DIFFER)
    assert len(bring_back(session, monkeypatch)) == 12
    assert session.machine.state is SessionState.LOST


def test_each_reason_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    bring_back(Returning(FULL, FULL, Unresponsive("it is slow."), FULL, FULL), monkeypatch)
    assert [record.getMessage().split(".")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "the GPU is full",
        "it is slow",
        "the GPU is full",
    ]
