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
    size: int = 1


def batches_of(things: Sequence[Thing | None], at_once: int | None, most_bytes: int = 1000) -> list[list[Thing]]:
    """All batches; a None among the things is a moment when there is nothing."""
    left = list(things)

    def take() -> Thing | None:
        if not left:
            return None
        if (thing := left.pop(0)) is None:
            raise NothingYet
        return thing

    urgent_at_once = None if at_once is None else lambda: at_once
    batches = Batches(take, MOST, most_bytes, urgent_at_once=urgent_at_once)
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
    ("urgent", "at_once", "expected"),
    [
        ("......", 1, [[0, 1, 2, 3], [4, 5]]),
        ("..u...", 1, [[2], [0, 1, 3, 4], [5]]),
        ("..uuu.", 1, [[2], [3], [4], [0, 1, 5]]),
        ("..uuu.", 2, [[2, 3], [4], [0, 1, 5]]),
        ("..uuu.", 9, [[2, 3, 4], [0, 1, 5]]),
        ("uuuuuu", 9, [[0, 1, 2, 3], [4, 5]]),
        ("...uu....", 3, [[3, 4], [0, 1, 2, 5], [6, 7, 8]]),
        ("..u...", None, [[2, 0, 1], [3, 4, 5]]),
    ],
)
def test_who_is_waited_for_goes_first_with_as_many_as_may(
    urgent: str, at_once: int | None, expected: list[list[int]]
) -> None:
    assert numbers(batches_of(things(urgent), at_once)) == expected


def test_nobody_who_waits_on_another_gpu_is_overtaken_again() -> None:
    things_ = [Thing(0, True, 0), Thing(1, True, 1), *(Thing(i, True, 0) for i in range(2, 9))]
    assert numbers(batches_of(things_, 2)) == [[0], [1], [2, 3], [4, 5], [6, 7], [8]]


def test_what_was_held_for_another_gpu_is_no_part_of_what_somebody_waits_for() -> None:
    things_ = [Thing(0, False, 1), Thing(1, False, 1), Thing(2, True, 0), Thing(3, True, 1), Thing(4, False, 1)]
    assert numbers(batches_of(things_, 9)) == [[2], [3], [0, 1, 4]]


@given(
    st.lists(st.one_of(st.none(), st.tuples(st.booleans(), st.integers(0, 1), st.integers(1, 5))), max_size=40),
    st.sampled_from([None, 1, 2, 3, 9]),
    st.integers(1, 12),
)
def test_all_come_once_for_one_gpu_at_a_time_and_as_many_as_may(
    made: list[tuple[bool, int, int] | None], at_once: int | None, most_bytes: int
) -> None:
    given_out = [None if one is None else Thing(i, *one) for i, one in enumerate(made)]
    found = batches_of(given_out, at_once, most_bytes)
    assert sorted(thing.number for batch in found for thing in batch) == [
        thing.number for thing in given_out if thing is not None
    ]
    for batch in found:
        assert len({thing.device for thing in batch}) == 1
        assert len(batch) <= MOST
        assert sum(thing.size for thing in batch[:-1]) < most_bytes or any(thing.urgent for thing in batch)
        if at_once is not None and any(thing.urgent for thing in batch):
            assert all(thing.urgent for thing in batch)
            assert len(batch) <= at_once
    waited_for = [thing.number for batch in found for thing in batch if thing.urgent]
    if at_once is not None:
        assert waited_for == sorted(waited_for)
