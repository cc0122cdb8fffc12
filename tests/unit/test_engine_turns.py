"""Copies to GPUs leave their engines to the driver exactly while it saves processes or brings them back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine import toggle
from phos.gpu_engine.copy_work import Progress
from phos.gpu_engine.engine_turns import EngineTurns, engine_turns
from phos.gpu_engine.errors import CheckpointFailed, DriverError
from phos.gpu_engine.restore.filling import Filling
from phos.gpu_engine.restore.sources import Manner


class Plan:
    """What it was told, in order."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def breathe(self, wanted: bool) -> None:
        self.told.append(wanted)


def test_whoever_copies_is_told_at_once_and_of_each_change() -> None:
    turns, first, second = EngineTurns(), Plan(), Plan()
    with turns.telling(first):
        assert first.told == [False]
        with turns.driver_at_work():
            assert first.told[-1]
            with turns.telling(second):
                assert second.told == [True], "the driver is at work already"
                with turns.driver_at_work():  # for another process
                    pass
                assert (first.told[-1], second.told[-1]) == (True, True), "it still is"
            after = list(second.told)
        assert first.told[-1] is False
    assert second.told == after, "it does not copy any more"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("call", ["checkpoint", "save", "revive", "put_back"])
def test_the_driver_is_at_work_while_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, call: str, fails: bool) -> None:
    plan, seen = Plan(), list[bool]()

    def work(*_: object) -> None:
        seen.append(plan.told[-1])
        if fails:
            raise DriverError("cuCheckpoint", 999, "CUDA_ERROR_UNKNOWN")

    states = iter(["checkpointed", "running", "running"])
    replaced: dict[str, Callable[..., object]] = {
        "checkpoint_lock": lambda *_: seen.append(plan.told[-1]),
        "checkpoint_unlock": lambda *_: seen.append(plan.told[-1]),
        "checkpoint_checkpoint": work,
        "checkpoint_restore": work,
        "checkpoint_state": lambda *_: next(states) if call == "revive" else "running",
    }
    for name, action in replaced.items():
        monkeypatch.setattr(toggle.driver, name, action)
    monkeypatch.setattr(toggle, "is_alive", lambda _: True)
    with engine_turns.telling(plan):
        try:
            getattr(toggle, call)(1)
            assert not fails
        except (DriverError, CheckpointFailed):
            assert fails
        assert seen.count(True) == 1, "while it saves or restores, and not while it locks or unlocks"
        assert plan.told[-1] is False


class Copying:
    """As much of a copier, an image and memory as a filling asks for."""

    path, rooms, most_chunks = Path("image"), property(lambda self: self), 0

    def __init__(self) -> None:
        self.done: list[str] = []
        self.seen: list[bool] = []

    def map(self, _blocks: object, _plan: object) -> None:
        self.done.append("map")

    def prepare_workers(self, device: int) -> None:
        self.done.append(f"workers for {device}")

    def read_into(self, _content: object, _view: object) -> None:
        """Never called."""

    def fill(self, plan: Any, _reading: object, *_: object) -> None:
        self.done.append("fill")
        with engine_turns.driver_at_work():
            self.seen.append(plan.told[-1])
        self.seen.append(plan.told[-1])


def test_a_restore_takes_turns_while_it_loads() -> None:
    """Blocks are mapped, and the workers there, before; afterwards its plan is told nothing any more."""
    plan: Any = Plan()
    plan.devices = [1]
    copying: Any = Copying()
    filling = Filling(copying, copying, plan, Manner(1 << 22), copying, [], {1 << 22})
    assert copying.done == ["map", "workers for 1"]
    filling.run(Progress(0, [0]), threading.Event())
    assert copying.done[2:] == ["fill"]
    assert copying.seen == [True, False]
    told = list(plan.told)
    with engine_turns.driver_at_work():
        assert plan.told == told
