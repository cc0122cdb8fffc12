"""What a worker takes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.gpu_engine.batches import Batches
from phos.gpu_engine.copy_work import NothingYet

MOST = 4


@dataclass(frozen=True)
class Thing:
    """A piece."""

    number: int
    urgent: bool = False
    device: int = 0


def batches_of(things: Sequence[Thing | None]) -> list[list[Thing]]:
    """All batches; a None among the things is a moment when there is nothing."""
    left = list(things)

    def take() -> Thing | None:
        if not left:
            return None
        if (thing := left.pop(0)) is None:
            raise NothingYet
        return thing

    batches = Batches(take, MOST)
    found: list[list[Thing]] = []
    while not batches.over:
        try:
            found.append(batches.following())
        except NothingYet:
            found.append([])
    return [batch for batch in found if batch]


def numbers(batches: Sequence[Sequence[Thing]]) -> list[list[int]]:
    """Those of the things."""
    return [[thing.number for thing in batch] for batch in batches]


def things(urgent: str) -> list[Thing]:
    """One for each character; those that are `u` are urgent."""
    return [Thing(i, each == "u") for i, each in enumerate(urgent)]


@pytest.mark.parametrize(
    ("urgent", "expected"),
    [
        ("......", [[0, 1, 2, 3], [4, 5]]),
        ("..u...", [[2], [0, 1, 3, 4], [5]]),
        ("..uuu.", [[2], [3], [4], [0, 1, 5]]),
    ],
)
def test_who_is_waited_for_goes_first(urgent: str, expected: list[list[int]]) -> None:
    assert numbers(batches_of(things(urgent))) == expected


def test_what_was_held_for_another_gpu_is_no_part_of_what_somebody_waits_for() -> None:
    things_ = [Thing(0, False, 1), Thing(1, False, 1), Thing(2, True, 0), Thing(3, True, 0), Thing(4, False, 1)]
    assert numbers(batches_of(things_)) == [[2], [3], [0, 1, 4]]


@given(st.lists(st.one_of(st.none(), st.tuples(st.booleans(), st.integers(0, 1))), max_size=40))
def test_all_come_once_for_one_gpu_at_a_time_and_as_many_as_may(made: list[tuple[bool, int] | None]) -> None:
    given_out = [None if one is None else Thing(i, *one) for i, one in enumerate(made)]
    found = batches_of(given_out)
    assert sorted(thing.number for batch in found for thing in batch) == [
        thing.number for thing in given_out if thing is not None
    ]
    for batch in found:
        assert len({thing.device for thing in batch}) == 1
        assert len(batch) <= MOST
        assert len(batch) == 1 or not any(thing.urgent for thing in batch)
    waited_for = [thing.number for batch in found for thing in batch if thing.urgent]
    assert waited_for == sorted(waited_for)
