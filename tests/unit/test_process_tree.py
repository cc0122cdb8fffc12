"""Processes that wait for each other are brought to rest (gpu_engine/stop/tree.py)."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.process import GatedProcess, QuiesceTimes
from phos.gpu_engine.stop.settings import Settings
from phos.gpu_engine.stop.tree import ProcessTree
from phos.gpu_engine.timeline import Timeline
from tests.unit.waiting import eventually


class Rank:
    """A process with a gate, whose work ends when the other one has gone on ``behind`` times while this one waited."""

    executable = "rank"

    def __init__(self, number: int, behind: int) -> None:
        self.pid = number
        self.session = bytes([number])
        self.other: Rank = self
        self.closed = False
        self.opened = 0
        self._behind = behind
        self._goes_on = threading.Condition()

    def quiesce(self, timeout: float, patience: float) -> QuiesceTimes:
        self.closed = True
        with self._goes_on:
            if not self._goes_on.wait_for(lambda: self._behind <= 0, timeout):
                self.closed = False
                raise CheckpointFailed("its work did not end in time")
        return QuiesceTimes(0.0, 0.0)

    def open(self) -> None:
        self.closed = False
        self.opened += 1
        with self.other._goes_on:
            if self.other.closed:
                self.other._behind -= 1
            self.other._goes_on.notify_all()

    def alive(self) -> bool:
        return True


def tree(ranks: list[Rank], seconds: float) -> ProcessTree:
    settings = replace(Settings.from_environment(), quiesce_timeout=seconds)
    return ProcessTree(cast("list[GatedProcess]", ranks), [], settings, Timeline())


def pair(first: int, second: int) -> list[Rank]:
    ranks = [Rank(0, first), Rank(1, second)]
    ranks[0].other, ranks[1].other = ranks[1], ranks[0]
    return ranks


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_who_rests_goes_on_until_the_other_has_come_to_rest(behind: int) -> None:
    """With all gates closed at once the second would wait for ever: it is always ahead."""
    ranks = pair(0, behind)
    tree(ranks, 5).quiesce()
    assert [rank.closed for rank in ranks] == [True, True]
    assert ranks[1].opened == 0, "it was to stand still as soon as it could"


def test_all_gates_are_open_again_after_the_last_try() -> None:
    ranks = pair(0, 1000)
    quiesced = tree(ranks, 2)
    with pytest.raises(CheckpointFailed, match="did not end in time"):
        quiesced.quiesce()
    assert quiesced.open_gates(but=())() == []
    assert not any(rank.closed for rank in ranks)


def test_a_gate_that_cannot_be_opened_meanwhile_ends_the_try() -> None:
    ranks = pair(0, 1)

    def refuses(**_: Any) -> None:
        raise CheckpointFailed("it does not answer")

    ranks[0].open = refuses  # type: ignore[method-assign]
    quiesced = tree(ranks, 5)
    with pytest.raises(CheckpointFailed, match="does not answer"):
        quiesced.quiesce()
    assert quiesced.open_gates(but=())() == ["it does not answer"]
    assert not ranks[1].closed


def test_who_does_not_answer_keeps_no_other_gate_closed() -> None:
    ranks = pair(0, 0)
    quiesced = tree(ranks, 5)
    quiesced.quiesce()
    answers = threading.Event()
    ranks[0].open = answers.wait  # type: ignore[method-assign,assignment]
    opened = quiesced.open_gates(but=())
    try:
        eventually(lambda: not ranks[1].closed)
    finally:
        answers.set()
    assert opened() == []
