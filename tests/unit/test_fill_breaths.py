"""Copies to a GPU leave the copy engine to others now and then, while processes are brought back beside them."""

from __future__ import annotations

import pytest

from phos.gpu_engine.fill_plan import NOTHING_LEFT
from tests.unit.fill_scene import FillScene

MiB = 1 << 20


@pytest.mark.parametrize(
    ("block", "join", "after"), [("m" * 9, 1, [4, 8]), ("m0m" * 5, 1, [6, 12]), ("m" * 12, 4, [1, 2, 3])]
)
def test_copies_wait_for_a_hash_after_each_16_mib(block: str, join: int, after: list[int]) -> None:
    scene = FillScene([block], join=join, size=4 * MiB, hashed=True)
    scene.plan.breathe(True)
    assert scene.run() == NOTHING_LEFT
    # It is that of what was queued last, so nothing that comes later can be under way when the engine is free.
    events = [1000 + (count - 1) % 2 for count in after]
    assert scene.engine.breaths == list(zip(events, after, strict=True))


def test_nothing_waits_where_nothing_is_hashed() -> None:
    scene = FillScene(["m" * 8], size=4 * MiB)
    scene.plan.breathe(True)
    assert scene.run() == NOTHING_LEFT
    assert scene.engine.breaths == []


def test_copies_follow_each_other_before_and_after() -> None:
    scene = FillScene(["m" * 16], size=4 * MiB, hashed=True)
    for wanted in (False, True, False):
        scene.plan.breathe(wanted)
        for _ in range(5):
            scene.step()
    assert scene.run() == NOTHING_LEFT
    assert [count for _, count in scene.engine.breaths] == [8]


def test_each_gpu_breathes_by_itself() -> None:
    scene = FillScene(["m" * 3, "m" * 5], size=4 * MiB, devices=[0, 1], hashed=True)
    scene.plan.breathe(True)
    for queue in (0, 1):
        assert scene.run(queue) == NOTHING_LEFT
    assert [(event // 1000, count) for event, count in scene.engine.breaths] == [(2, 7)]
