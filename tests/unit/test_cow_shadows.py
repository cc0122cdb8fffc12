"""Which copies of processes have been made: the feed over real tables, with processes and pools played by the test."""

from __future__ import annotations

import threading

import pytest

from phos.gpu_engine.copy_work import NothingYet
from phos.gpu_engine.cow.chunk_table import (
    SHADOWED,
)
from phos.gpu_engine.cow.shadows import ALIVE_SECONDS
from phos.gpu_engine.errors import DriverError, Mispredicted
from tests.unit.cow_scene import BASE, CHUNK, TAIL, Clock, Scene
from tests.unit.waiting import eventually

pytestmark = pytest.mark.usefixtures("closed_scenes", "clock")


def test_a_shadow_is_read_when_its_copy_has_been_made() -> None:
    scene = Scene(3, (4,))
    process = scene.processes[0]
    process.shadow(1, 2, ticket=9)
    assert scene.all() == [0, 2]
    with pytest.raises(NothingYet):
        scene.take()
    process.copied(2, 8)  # another's
    scene.read()
    with pytest.raises(NothingYet):
        scene.take()
    process.copied(2, 9)
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.chunk, piece.address, piece.slot) == (1, 7_000_000_002, 2)
    assert process.table.ticket(2) == 9
    scene.land(piece)
    assert process.table.ticket(2) == 0, "the slot is free again"
    assert scene.take() is None


def test_flags_are_read_while_somebody_waits_for_one() -> None:
    scene = Scene(40, (4,), prioritise=True)
    process = scene.processes[0]
    pool = process.pools[0]
    scene.read()
    assert not pool.refreshes
    process.shadow(39, 0, ticket=1)
    scene.all()
    scene.read()
    assert pool.refreshes == 1
    process.copied(0, 1)
    scene.read()
    assert pool.refreshes == 2
    assert scene.all() == [39]
    scene.read()
    assert pool.refreshes == 2


def test_flags_are_read_when_a_transfer_may_be_over() -> None:
    scene = Scene(3, (4,), prioritise=True)
    process = scene.processes[0]
    process.transfer(0, ticket=8)
    scene.read()
    assert not process.pools[0].refreshes, "nobody wants to know"
    assert scene.all() == [], "it goes first"
    scene.read()
    scene.read()
    assert process.pools[0].refreshes == 1


def test_who_takes_pieces_does_not_wait_for_flags() -> None:
    """They come behind all that is queued: meanwhile nothing more would be."""
    scene = Scene(2, (4,))
    reading, proceed = threading.Event(), threading.Event()

    def end_reading() -> None:
        reading.set()
        assert proceed.wait(30)
        raise DriverError("cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    scene.processes[0].pools[0].end_reading = end_reading  # type: ignore[method-assign]
    scene.processes[0].shadow(0, 0, ticket=1)
    with scene.feed.shadows.followed():
        assert scene.all() == [1]
        assert reading.wait(30)
        with pytest.raises(NothingYet):
            scene.take()
        proceed.set()
        eventually(lambda: type(failure_of(scene)) is DriverError)


def failure_of(scene: Scene) -> BaseException | None:
    """Of an attempt to take a piece."""
    try:
        scene.take()
    except BaseException as error:
        return error
    return None


def test_in_a_context_with_an_error_nothing_is_copied_nor_overwritten() -> None:
    """What was not copied before is where it was; the other GPU's context goes on."""
    scene = Scene(3, (2, 2))
    process = scene.processes[0]
    for chunk, slot in enumerate((0, 1, 2)):
        process.shadow(chunk, slot, ticket=9)
    process.copied(1, 9)
    process.faulted(0)
    assert scene.all() == []
    scene.read()
    pieces = [scene.take(), scene.take()]
    assert sorted((p.chunk, p.slot) for p in pieces if p) == [(0, -1), (1, 1)]
    with pytest.raises(NothingYet):
        scene.take()
    process.copied(2, 9)
    scene.read()
    assert scene.all() == [2]


def test_a_slot_of_the_second_pool_is_found_there() -> None:
    scene = Scene(2, (3, 2))
    process = scene.processes[0]
    process.shadow(0, 4, ticket=5)
    process.copied(4, 5)
    assert scene.all() == [1]
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.address, piece.device, piece.slot) == (7_000_000_001, 1, 4)
    scene.land(piece)
    assert process.table.ticket(4) == 0


def test_the_second_process_has_slots_of_its_own() -> None:
    scene = Scene(2, (3,), (3,))
    first, second = scene.processes
    second.shadow(0, 1, ticket=5)
    first.shadow(1, 1, ticket=5)
    first.copied(1, 5)
    assert scene.all() == []
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.chunk, piece.slot) == (1, 1)
    second.copied(1, 5)
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.chunk, piece.slot) == (0, SHADOWED + 1)
    scene.land(piece)
    assert (first.table.ticket(1), second.table.ticket(1)) == (5, 0)


def test_a_chunk_whose_copy_the_driver_refused_comes_from_its_place() -> None:
    scene = Scene(2, (3,))
    process = scene.processes[0]
    process.take(0)
    process.want(0)
    assert scene.all() == [1]
    process.state(0, 0)
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.chunk, piece.address, piece.slot) == (0, BASE, -1)


def test_chunks_that_no_queue_says_anything_of_come_at_last() -> None:
    """The queue was full when the process took them."""
    scene = Scene(3, (3,))
    process = scene.processes[0]
    process.shadow(1, 0, ticket=3)
    process._write(TAIL, 0)  # as if it had not been put in
    assert scene.all() == [0, 2]
    process.copied(0, 3)
    scene.read()
    assert scene.all() == [1]


@pytest.mark.parametrize("queued", [False, True])
def test_what_an_ended_process_had_in_its_hands_comes_from_its_place(clock: Clock, queued: bool) -> None:
    scene = Scene(2, (3,), (3,))
    first, second = scene.processes
    if queued:
        second.shadow(1, 1, ticket=4)
    else:
        second.take(1)
        second.want(1)
    assert scene.all() == [0]
    scene.read()
    assert scene.all() == []
    second.lives = False
    scene.read()
    assert scene.all() == [], "nobody looks so often"
    clock.now += ALIVE_SECONDS
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.chunk, piece.address, piece.slot) == (1, BASE + CHUNK, -1)
    assert first.lives


def test_a_copy_that_was_made_before_the_process_ended_counts(clock: Clock) -> None:
    """What came behind it in its stream may have been run, too: the place does not hold the old content any more."""
    scene = Scene(2, (3,))
    process = scene.processes[0]
    process.shadow(1, 0, ticket=4)
    assert scene.all() == [0]
    process.copied(0, 4)
    process.lives = False
    clock.now += ALIVE_SECONDS
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert piece.slot == 0


def test_a_copy_counts_that_is_owed_while_its_process_is_found_dead(clock: Clock) -> None:
    """Its flag is known by then, though nobody had asked for one."""
    scene = Scene(2, (3,))
    process = scene.processes[0]
    process.shadow(1, 0, ticket=4)
    process.copied(0, 4)
    process.lives = False
    end_reading = process.pools[0].end_reading

    def owed_meanwhile() -> None:
        end_reading()
        assert scene.all() == [0]

    process.pools[0].end_reading = owed_meanwhile  # type: ignore[method-assign]
    clock.now += ALIVE_SECONDS
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.chunk, piece.slot) == (1, 0)


def test_a_copy_counts_that_is_owed_while_its_context_is_found_with_an_error() -> None:
    """Likewise: what came behind it was run before the error, and the place does not hold the old content any more."""
    scene = Scene(2, (3,))
    process, plan = scene.processes[0], scene.feed.plan
    process.shadow(1, 0, ticket=4)
    process.copied(0, 4)
    process.faulted(0)
    owed = plan.owed

    def owed_meanwhile() -> int | None:
        plan.owed = owed  # type: ignore[method-assign]
        assert scene.all() == [0]
        return owed()

    plan.owed = owed_meanwhile  # type: ignore[method-assign]
    scene.read()
    piece = scene.take()
    assert piece is not None
    assert (piece.chunk, piece.slot) == (1, 0)


def test_a_chunk_that_is_owed_twice_is_waited_for_once() -> None:
    """Else the second would wait for a flag that its slot, used again, never gets."""
    scene = Scene(2, (3,))
    process = scene.processes[0]
    process.shadow(1, 0, ticket=4)
    process.want(1)
    assert scene.all() == [0]
    process.copied(0, 4)
    scene.read()
    assert scene.all() == [1]
    assert not scene.feed.plan._plan.pending
    assert scene.take() is None


@pytest.mark.parametrize("state", [SHADOWED + 3, SHADOWED + 2 * SHADOWED, 0xFFFFFFFF, 0xFFFF0000])
def test_places_that_do_not_exist_fail_the_checkpoint(state: int) -> None:
    scene = Scene(2, (3,), (3,))
    scene.processes[0].state(1, state)
    scene.processes[0].want(1)
    assert scene.all() == [0]
    with pytest.raises(Mispredicted, match="does not exist"):
        scene.read()


def test_many_owed_chunks_do_not_hold_up_the_others() -> None:
    """However many copies are on their way: a chunk that nobody has taken comes at once."""
    count = 2000
    scene = Scene(count, (count,), queue=count)
    process = scene.processes[0]
    for chunk in range(count - 1):
        process.shadow(chunk, chunk, ticket=chunk + 1)
    assert scene.all() == [count - 1]
    process.copied(count - 2, count - 1)
    assert scene.all() == []
    scene.read()
    assert scene.all() == [count - 2]
