"""The performance event that phosd has while CRIU is at work: it is one, it goes, and nothing fails without it."""

from __future__ import annotations

import os
import threading

import pytest

from phos.gpu_engine import scheduler_hooks
from phos.gpu_engine.scheduler_hooks import SchedulerHooks
from tests.unit.waiting import eventually


def events(pid: int = os.getpid()) -> int:
    """How many performance events a process has open."""
    found = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += os.readlink(f"/proc/{pid}/fd/{descriptor}") == "anon_inode:[perf_event]"
        except OSError:  # the listing's own
            pass
    return found


def allowed() -> bool:
    hooks = SchedulerHooks()
    try:
        eventually(lambda: not hooks._opening or not hooks._opening.is_alive(), "the event")
        return hooks._event >= 0
    finally:
        hooks.close()


def test_there_is_an_event_until_it_is_closed() -> None:
    if not allowed():
        pytest.skip("this machine allows no performance events")
    before = events()
    several = [SchedulerHooks() for _ in range(3)]
    eventually(lambda: events() == before + 3, "the events")
    for hooks in several:
        hooks.close()
        hooks.close()
    assert events() == before


def test_closed_at_once_it_leaves_nothing() -> None:
    before = events()
    for _ in range(20):
        SchedulerHooks().close()
    assert events() == before


@pytest.mark.parametrize("lacking", ["the right", "the call", "a thread"])
def test_without_it_there_is_none(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    class Refusing:
        @staticmethod
        def syscall(*_: object) -> int:
            return -1

    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = events()
    if lacking == "the right":
        monkeypatch.setattr(scheduler_hooks, "_libc", Refusing)
    elif lacking == "the call":
        monkeypatch.setattr(scheduler_hooks, "_CALL", None)
    else:
        monkeypatch.setattr(threading.Thread, "start", none)
    hooks = SchedulerHooks()
    hooks.close()
    assert events() == before
