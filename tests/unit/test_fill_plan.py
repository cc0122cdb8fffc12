"""In which order GPU memory is filled, and what counts as arrived when: plans and workers, whose driver is the test."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from phos.gpu_engine import copy_lane
from phos.gpu_engine.content_hash import SPAN_BYTES, THREADS
from phos.gpu_engine.copy_lane import CHANGED, READING, CopyFailed
from phos.gpu_engine.copy_trace import FILE, HOST, ZEROS
from phos.gpu_engine.cow.chunk_table import SAVING, UNSAVED
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.fill_plan import (
    BROKEN,
    GET,
    NOTHING_LEFT,
    NOTHING_YET,
    OUT_OF_TIME,
    STEPS_KEPT,
    FillPlan,
)
from tests.unit.fill_places import packed
from tests.unit.fill_scene import KERNEL, SIZE, FillScene


@pytest.fixture(autouse=True)
def closed_scenes() -> Iterator[None]:
    """Keep no descriptors."""
    yield
    while FillScene.made:
        FillScene.made.pop().close()


# Pieces.


def test_every_place_comes_once_in_the_order_given() -> None:
    scene = FillScene(["aame", "0b."], [3, 1, 5, 0, 2, 4])
    assert scene.run() == NOTHING_LEFT
    assert scene.pieces() == [[3], [1], [5], [0], [2], [4]]
    assert scene.arrived == sum(place.size for place in scene.places) == 5 * SIZE + SIZE // 2
    assert scene.saved() == list(range(6))


@pytest.mark.parametrize(
    ("blocks", "join", "expected"),
    [
        (["aaaaaaa"], 3, [[0, 1, 2], [3, 4, 5], [6]]),
        (["mmmmm"], 2, [[0, 1], [2, 3], [4]]),
        (["aaa."], 3, [[0, 1, 2]]),
        (["aaaa."], 3, [[0, 1, 2], [3]]),
        (["aabbb"], 8, [[0, 1], [2, 3, 4]]),
        (["aaAaa"], 8, [[0, 1], [2, 3, 4]]),
        (["mmMm"], 8, [[0, 1], [2, 3]]),
        (["aa", "aa"], 8, [[0, 1], [2, 3]]),
        (["am0ae"], 8, [[0], [1], [2], [3], [4]]),
        (["eee"], 8, [[0], [1], [2]]),
        (["000a00"], 1, [[0, 1, 2], [3], [4, 5]]),
        (["00", "00"], 8, [[0, 1], [2, 3]]),
        (["0" * 131], 1, [list(range(64)), list(range(64, 128)), list(range(128, 131))]),
        (["m" * 70], 80, [list(range(70))]),
    ],
)
def test_neighbours_come_at_once(blocks: list[str], join: int, expected: list[list[int]]) -> None:
    scene = FillScene(blocks, join=join)
    assert scene.run() == NOTHING_LEFT
    assert scene.pieces() == expected
    assert scene.saved() == list(range(scene.count))


def test_neighbours_that_do_not_follow_each_other_in_the_order_come_apart() -> None:
    scene = FillScene(["aaaaa"], [4, 3, 0, 1, 2], join=8)
    scene.run()
    assert scene.pieces() == [[4], [3], [0, 1, 2]]


def test_each_gpu_gets_its_own() -> None:
    scene = FillScene(["aa", "aa", "00"], [2, 0, 3, 1, 4, 5], devices=[7, 3, 7])
    assert scene.plan.devices == [7, 3]
    assert [scene.plan.device_of(number) for number in range(6)] == [7, 7, 3, 3, 7, 7]
    assert scene.run(1) == NOTHING_LEFT
    assert scene.pieces() == [[2], [3]]
    assert scene.run(0) == NOTHING_LEFT
    assert scene.pieces()[2:] == [[0], [1], [4, 5]]


def test_a_plan_says_what_it_was_given() -> None:
    scene = FillScene(["a0", "e."], [2, 0, 1])
    places = scene.plan.places
    assert [places.content(number) for number in (0, 2)] == [0, 2]
    assert [places.size(number) for number in range(3)] == [SIZE, SIZE, SIZE // 2]
    assert [places.zeros(number) for number in range(3)] == [False, True, False]
    assert [places.key(number) for number in range(3)] == [(scene.keys[0], 0), (scene.keys[0], 1), (scene.keys[1], 0)]
    assert scene.plan.first_use == [scene.keys[1], scene.keys[0]]
    assert [scene.plan.enlist() for _ in range(3)] == [0, 1, 2]


def test_what_lies_in_files_is_elsewhere_for_who_checks_it_as_he_reads() -> None:
    scene = FillScene(["aamm0"], join=8)
    scene.plan.places.get_all()
    assert [scene.step() for _ in range(5)] == [GET, GET, OUT_OF_TIME, OUT_OF_TIME, NOTHING_LEFT]
    assert scene.pieces() == [[0], [1], [2, 3], [4]]


# What is waited for.


def test_a_block_that_is_wanted_goes_first() -> None:
    scene = FillScene(["aa", "bb", "00"], join=8)
    assert not scene.plan.want(scene.keys[1])
    assert scene.steps(2) == [[2], [3]], "chunk by chunk"
    assert scene.plan.want(scene.keys[1])
    assert not scene.plan.want(scene.keys[2])
    assert not scene.plan.want(scene.keys[2])
    assert scene.steps(3) == [[4], [5], [0, 1]]
    assert scene.plan.want(scene.keys[0]) == (scene.run() == NOTHING_LEFT)
    assert len(scene.engine.moves) == 5
    assert scene.plan.on_demand() == (0, 0), "no process has waited"


def test_nobody_knows_what_has_arrived_without_a_table() -> None:
    scene = FillScene(["aa"])
    plan = FillPlan(packed(scene.places), [0, 1], SIZE)
    plan.map(scene.keys[0])
    scene.plan = plan
    scene.workers = [scene.worker()]
    assert scene.run() == NOTHING_LEFT
    assert scene.pieces() == [[0], [1]]
    assert scene.arrived == 2 * SIZE
    assert not plan.want(scene.keys[0])


def test_a_block_that_the_plan_lacks_is_there() -> None:
    scene = FillScene(["aa"])
    assert scene.plan.want((b"x" * 16, 9))
    scene.plan.map((b"x" * 16, 9))
    assert scene.run() == NOTHING_LEFT


def test_what_a_process_waits_for_goes_first() -> None:
    scene = FillScene(["aaaaaaaa"], join=8)
    scene.processes[0].want(5, 2)
    assert scene.steps(2) == [[5], [2]]
    scene.processes[0].want(7)
    assert scene.steps(3) == [[7], [0, 1], [3, 4]], "neighbours of what was given come without it"
    scene.processes[0].want(4, 0)
    assert scene.steps(1) == [[6]]
    assert scene.run() == NOTHING_LEFT
    assert scene.plan.on_demand() == (3, 3 * SIZE)


def test_numbers_that_mean_no_chunk_are_passed_over() -> None:
    scene = FillScene(["aaa."])
    scene.processes[0].want(3, 0xFFFFFFFF, 1 << 31, 2, 4)
    assert scene.steps(3) == [[2], [0], [1]]
    assert scene.plan.on_demand() == (1, SIZE // 2)


def test_all_processes_are_heard() -> None:
    scene = FillScene(["aaaaaa"], processes=3)
    scene.processes[2].want(5)
    scene.processes[1].want(3)
    assert scene.steps(2) == [[3], [5]]
    scene.processes[0].want(4)
    assert scene.steps(4) == [[4], [0], [1], [2]]
    assert scene.plan.on_demand() == (3, 3 * SIZE)


def test_what_is_wanted_twice_comes_once() -> None:
    scene = FillScene(["aaaaa"], processes=2)
    scene.processes[0].want(3, 3)
    scene.processes[1].want(3, 4)
    scene.plan.want(scene.keys[0])
    assert scene.run() == NOTHING_LEFT
    assert scene.pieces() == [[0], [1], [2], [3], [4]], "the block was asked for first"
    assert scene.saved() == list(range(5))


def test_what_is_wanted_twice_counts_once() -> None:
    scene = FillScene(["aaaaa"], processes=2)
    scene.processes[0].want(3, 3)
    scene.processes[1].want(3)
    assert scene.steps(1) == [[3]]
    assert scene.plan.on_demand() == (1, SIZE)


def test_a_worker_hears_what_is_wanted_on_another_gpu() -> None:
    scene = FillScene(["aaa", "aaa"], devices=[0, 1])
    scene.processes[0].want(5, 1)
    assert scene.steps(1, queue=0) == [[1]]
    assert scene.plan.on_demand() == (2, 2 * SIZE)
    assert scene.steps(2, queue=1) == [[5], [3]]
    assert scene.steps(2, queue=0) == [[0], [2]]


# Blocks that are not mapped yet.


def test_nothing_comes_before_its_block_is_mapped() -> None:
    scene = FillScene(["aaa", "bb"], [3, 0, 1, 2, 4], mapped=False)
    assert scene.plan.due() is None, "nobody has asked"
    assert scene.step() == NOTHING_YET
    assert scene.plan.due() == scene.keys[1]
    scene.plan.map(scene.keys[1])
    assert scene.plan.due() is None
    assert scene.steps(2) == [[3]]
    assert scene.plan.due() == scene.keys[0]
    assert scene.step() == NOTHING_YET
    scene.plan.map(scene.keys[0])
    assert scene.plan.due() is None
    assert scene.run() == NOTHING_LEFT
    assert scene.pieces()[1:] == [[0], [1], [2], [4]]


def test_what_is_wanted_and_not_mapped_stays_wanted_and_holds_nothing_up() -> None:
    scene = FillScene(["aaa", "bb", "mm"], mapped=False, join=8)
    scene.plan.map(scene.keys[1])
    scene.processes[0].want(6, 3, 5)
    assert scene.steps(1) == [[3]]
    assert scene.plan.due() == scene.keys[2]
    assert scene.steps(1) == []
    assert scene.plan.due() == scene.keys[0], "the first of those that are needed"
    scene.plan.map(scene.keys[0])
    assert scene.plan.due() == scene.keys[2]
    assert scene.steps(2) == [[0, 1, 2], [4]], "what can be had does not wait"
    assert scene.step() == NOTHING_YET
    scene.plan.map(scene.keys[2])
    assert sorted(scene.steps(2)) == [[5], [6]], "each alone: somebody waits"
    assert scene.step() == NOTHING_LEFT
    assert scene.plan.on_demand() == (3, 3 * SIZE)


def test_gpus_do_not_wait_for_each_others_blocks() -> None:
    scene = FillScene(["a", "bb"], devices=[0, 1], mapped=False)
    scene.plan.map(scene.keys[1])
    assert scene.step(0) == NOTHING_YET
    assert scene.run(1) == NOTHING_LEFT
    assert scene.saved() == [1, 2]
    assert scene.step(0) == NOTHING_YET
    assert scene.plan.due() == scene.keys[0]


def test_with_nothing_mapped_what_was_taken_lands() -> None:
    scene = FillScene(["a", "b"], mapped=False)
    scene.engine.ready = False
    scene.plan.map(scene.keys[0])
    assert scene.step() == OUT_OF_TIME
    assert scene.saved() == []
    assert scene.step() == NOTHING_YET
    assert scene.saved() == [0]


def test_of_a_broken_plan_nothing_can_be_had() -> None:
    scene = FillScene(["aaa"])
    scene.engine.ready = False
    assert scene.step() == OUT_OF_TIME
    first, second = DriverError("cuMemMap", 2, "CUDA_ERROR_OUT_OF_MEMORY"), ValueError()
    scene.plan.break_(first)
    scene.plan.break_(second)
    assert scene.plan.error is first
    assert scene.step() == BROKEN
    assert scene.pieces() == [[0]]
    assert [scene.table.state(number) for number in range(3)] == [SAVING, UNSAVED, UNSAVED]


# What counts as arrived.


def events(scene: FillScene) -> list[tuple[str, int]]:
    """What the driver was asked since the last call, with the number of the slot."""
    found = [(what, event % 10) for what, event in scene.engine.log]
    scene.engine.log.clear()
    return found


def test_what_has_not_been_reached_does_not_count() -> None:
    scene = FillScene(["abmme"], join=1)
    scene.engine.ready = False
    scene.step()
    assert (events(scene), scene.saved(), scene.arrived) == ([("query", 0)], [], 0)
    scene.step()
    assert (events(scene), scene.saved()) == ([("query", 0)], []), "what was queued later cannot be there earlier"
    scene.step()
    assert (events(scene), scene.saved()) == ([("wait", 0), ("query", 1)], [0]), "its slot was needed"
    assert scene.arrived == SIZE
    assert [scene.table.state(number) for number in range(5)] == [2, SAVING, SAVING, UNSAVED, UNSAVED]
    scene.engine.ready = True
    assert scene.step() == OUT_OF_TIME
    assert (events(scene), scene.saved()) == ([("wait", 1), ("query", 0), ("query", 1)], [0, 1, 2, 3])
    scene.engine.ready = False
    assert scene.step() == GET
    assert (events(scene), scene.saved()) == ([("query", 0)], [0, 1, 2, 3])
    assert scene.step() == NOTHING_LEFT
    assert (events(scene), scene.saved()) == ([("wait", 0)], [0, 1, 2, 3, 4])
    assert scene.arrived == 5 * SIZE


def test_all_that_is_under_way_can_be_waited_for() -> None:
    scene = FillScene(["aabb"], join=2)
    scene.engine.ready = False
    scene.steps(2)
    events(scene)
    assert scene.saved() == []
    scene.land()
    assert (events(scene), scene.saved(), scene.arrived) == ([("wait", 0), ("wait", 1)], [0, 1, 2, 3], 4 * SIZE)
    scene.land()
    assert (events(scene), scene.arrived) == ([], 4 * SIZE)


@pytest.mark.parametrize("blocks", [["aaaaaa"], ["mmmmmm"], ["eeeeee"], ["0"] * 6])
def test_what_somebody_waits_for_is_not_left_under_way(blocks: list[str]) -> None:
    scene = FillScene(blocks)
    scene.engine.ready = False
    scene.step()
    first = scene.pieces()[0]
    events(scene)
    scene.processes[0].want(5)
    assert scene.steps(1) == [[5]]
    assert (events(scene), scene.saved()) == ([("wait", 0), ("wait", 1)], [*first, 5])


def test_what_somebody_waits_for_does_not_wait_for_what_cannot_be_had() -> None:
    scene = FillScene(["aaa", "b"], mapped=False)
    scene.plan.map(scene.keys[0])
    scene.engine.ready = False
    scene.processes[0].want(3, 2)
    assert scene.steps(1) == [[2]]
    assert scene.saved() == [2]


def test_what_is_also_waited_for_is_read_meanwhile() -> None:
    scene = FillScene(["aaaaaa"])
    scene.engine.ready = False
    scene.processes[0].want(5, 4)
    scene.processes[0].want(3)
    assert scene.steps(1) == [[5]]
    assert (events(scene), scene.saved()) == ([("query", 0)], [])
    assert scene.steps(1) == [[4]]
    assert (events(scene), scene.saved()) == ([("query", 0)], [])
    assert scene.steps(1) == [[3]]
    assert (events(scene), scene.saved()) == ([("wait", 0), ("wait", 1), ("wait", 0)], [3, 4, 5])


def test_time_is_kept() -> None:
    scene = FillScene(["m" * 3])
    assert scene.workers[0].fill(60) == NOTHING_LEFT, "one call is enough"
    assert scene.workers[0].arrived == 3 * SIZE
    assert scene.saved() == [0, 1, 2]


def test_two_workers_share_a_gpu() -> None:
    scene = FillScene(["a" * 9])
    scene.engine.ready = False
    scene.workers.append(scene.worker())
    for turn in range(9):
        scene.step(worker=scene.workers[turn % 2])
    assert scene.pieces() == [[number] for number in range(9)]
    assert scene.step(worker=scene.workers[1]) == NOTHING_LEFT
    assert scene.saved() == [0, 1, 2, 3, 4, 5, 7], "the other's are under way still"
    assert scene.step(worker=scene.workers[0]) == NOTHING_LEFT
    assert scene.saved() == list(range(9))
    assert scene.arrived == 9 * SIZE


# What is hashed where it has arrived.


def test_everything_but_zeros_is_hashed_where_it_has_arrived() -> None:
    scene = FillScene(["aaa", "0m", "e"], join=2, size=2 * SPAN_BYTES, hashed=True)
    assert scene.run() == NOTHING_LEFT
    assert scene.pieces() == [[0, 1], [2], [3], [4], [5]]
    found = [launch[:-1] for launch in scene.engine.launches]
    rest = (1, 1, THREADS, 1, 1, 0, 100)
    assert found == [
        (KERNEL, grid, *rest, scene.places[number].address, 2 * SPAN_BYTES, room)
        for grid, number, room in ((4, 0, 7000), (2, 2, 8000), (2, 4, 8000), (2, 5, 7000))
    ]
    sums = [launch[-1] for launch in scene.engine.launches]
    assert sums[0] == sums[3] != sums[1] == sums[2]
    assert scene.saved() == list(range(6))


@pytest.mark.parametrize("kind", ["a", "m"])
@pytest.mark.parametrize("which", range(6))
def test_what_has_arrived_wrong_is_named_and_does_not_count(kind: str, which: int) -> None:
    scene = FillScene([kind * 6], join=3, size=SPAN_BYTES, hashed=True)
    scene.engine.ready = False
    place = scene.places[which]
    if kind == "m":
        scene.memory[place.source - scene.places[0].source] = bytes([scene.data[which][0] ^ 1])
    else:
        os.pwrite(place.descriptor, bytes([scene.data[which][0] ^ 1]), place.source)
    with pytest.raises(CopyFailed) as caught:
        scene.run()
    assert (caught.value.call, caught.value.code, caught.value.number) == (CHANGED, 0, which)
    good = [0, 1, 2] if which >= 3 else []
    assert scene.saved() == good
    assert scene.arrived == len(good) * SPAN_BYTES


# Failures.


def refuse(call: str, code: int) -> None:
    """What driver.fail() does where there is a driver."""
    raise DriverError(call, code, "refused")


@pytest.mark.parametrize(
    ("call", "blocks", "ready"),
    [
        ("cuMemcpyHtoDAsync", ["0ae"], True),
        ("cuMemcpyHtoDAsync", ["0ea"], True),
        ("cuMemcpyHtoDAsync", ["0m"], True),
        ("cuMemsetD8Async", ["a0"], True),
        ("cuLaunchKernel", ["0a"], True),
        ("cuEventRecord", ["aa"], True),
        ("cuEventSynchronize", ["aaaa"], False),
        ("cuEventQuery", ["aa"], True),
        ("cuStreamWaitEvent", ["0a"], True),
    ],
)
def test_what_the_driver_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, call: str, blocks: list[str], ready: bool
) -> None:
    monkeypatch.setattr(copy_lane.driver, "fail", refuse)
    scene = FillScene(blocks, size=SPAN_BYTES, hashed=True)
    scene.engine.ready = ready
    scene.engine.refused, scene.engine.status = call, 719
    with pytest.raises(DriverError, match=call) as caught:
        scene.run()
    assert "719" in str(caught.value)
    if call in ("cuMemcpyHtoDAsync", "cuLaunchKernel", "cuStreamWaitEvent"):
        assert scene.saved() == [0], "what was there before counts"
    else:
        assert set(scene.saved()) <= {0}
    assert scene.arrived == len(scene.saved()) * SPAN_BYTES


def test_what_cannot_be_read_is_named() -> None:
    scene = FillScene(["aa", "bb"], join=2)
    scene.engine.ready = False
    os.ftruncate(scene.places[2].descriptor, 2 * SIZE - 1)
    assert scene.step() == OUT_OF_TIME
    with pytest.raises(CopyFailed) as caught:
        scene.step()
    assert (caught.value.call, caught.value.code) == (READING, 0)
    assert caught.value.number in (2, 3)
    assert scene.pieces() == [[0, 1]]
    scene.land()
    assert scene.saved() == [0, 1]


def test_of_what_is_read_at_once_the_one_that_cannot_be_is_named() -> None:
    scene = FillScene(["aaaa"], join=4)
    os.ftruncate(scene.places[0].descriptor, 2 * SIZE + 1)
    with pytest.raises(CopyFailed) as caught:
        scene.step()
    assert caught.value.number == 2


def test_an_errno_is_said() -> None:
    scene = FillScene(["a"])
    readable, writable = os.pipe()
    scene.places[0] = replace(scene.places[0], descriptor=readable)  # pread() takes no pipe
    scene.plan = FillPlan(packed(scene.places), [0], SIZE, scene.table)
    scene.plan.map(scene.keys[0])
    with pytest.raises(CopyFailed) as caught:
        scene.step(worker=scene.worker())
    os.close(readable)
    os.close(writable)
    assert (caught.value.call, caught.value.code, caught.value.number) == (READING, errno.ESPIPE, 0)


# What a trace is told.


def test_steps_say_what_was_queued() -> None:
    scene = FillScene(["aam0e"], join=2, steps=True)
    scene.processes[0].want(2)
    worker = scene.workers[0]
    kinds: list[tuple[int, str, bool]] = []
    last = 0.0
    for _ in range(4):
        assert worker.fill(0) in (OUT_OF_TIME, GET)
        if worker.wanted == 4:
            worker.got()
        for step in worker.steps():
            assert last <= step.asked <= step.taken <= step.queued
            last = step.queued
            kinds.append((step.size, step.kind, step.urgent))
    assert kinds == [(SIZE, HOST, True), (2 * SIZE, FILE, False), (SIZE, ZEROS, False), (SIZE, FILE, False)]


def test_no_more_steps_are_made_than_are_kept() -> None:
    scene = FillScene(["m" * (2 * STEPS_KEPT + 1)], steps=True)
    found = []
    worker = scene.workers[0]
    for expected in (OUT_OF_TIME, OUT_OF_TIME, NOTHING_LEFT):
        assert worker.fill(60) == expected
        found.append(len(worker.steps()))
    assert found == [STEPS_KEPT, STEPS_KEPT, 1]
    silent = FillScene(["m"])
    assert silent.run() == NOTHING_LEFT
    assert silent.workers[0].steps() == []
