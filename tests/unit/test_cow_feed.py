"""What is saved next in a window: the feed over real tables, with processes and pools played by the test."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from phos.gpu_engine.copy_loop import CHANGED, CopyFailed, SaveJob, landed, take_permit
from phos.gpu_engine.copy_out import Batch
from phos.gpu_engine.copy_work import NothingYet, Piece
from phos.gpu_engine.cow import feed as feed_module
from phos.gpu_engine.cow import shadows as shadows_module
from phos.gpu_engine.cow.chunk_table import (
    NO_SLOT,
    POOL_FLAGS,
    SAVED,
    SHADOWED,
    TRANSFERS,
    ChunkTable,
    PoolShape,
    WindowTable,
)
from phos.gpu_engine.cow.feed import PIECES_UNDER_WAY, PLACING_WORKERS, STALL_WORKERS, ChunkFeed, Place
from phos.gpu_engine.cow.shadow_pool import LentPools
from phos.gpu_engine.cow.shadows import ALIVE_SECONDS, Window
from phos.gpu_engine.cow.window import first_written_first
from phos.gpu_engine.cow.write_order import WriteOrder
from phos.gpu_engine.errors import DriverError, Mispredicted
from phos.images.append import StripeState
from phos.images.chunk_hash import chunk_hash, zero_hash
from phos.images.files import address_of
from tests.unit.waiting import eventually

CHUNK = 4 << 20
BASE = 1 << 40
SESSION = bytes(16)
STATES = 64
TAIL, TRANSFERRING, SLOTS_AT, TRANSFERS_AT, QUEUE_AT = 40, 44, 64, 72, 80
"""Offsets in the tables: test_cow_tables.py compares them with window_table.h."""


class FakePool:
    """A shadow pool whose GPU is the test."""

    def __init__(self, slots: int, device: int = 0) -> None:
        self.slots, self.device = slots, device
        self.gpu: list[ctypes.c_uint32 | int] = [0] * (slots + TRANSFERS)
        self.read = (ctypes.c_uint32 * (slots + TRANSFERS))()
        self.refreshes = 0

    @property
    def flags(self) -> int:
        return ctypes.addressof(self.read)

    def begin_reading(self) -> None:
        self.refreshes += 1

    def end_reading(self) -> None:
        self.read[:] = self.gpu

    def flag(self, index: int) -> int:
        return int(self.read[index])

    def address(self, index: int) -> int:
        return 7_000_000_000 + index


class Process:
    """A process in a window, with the frontend's hands."""

    def __init__(self, number: int, chunks: ChunkTable, slots: tuple[int, ...], queue: int = 64) -> None:
        self.number = number
        self.chunks = chunks
        self.lives = True
        self.pools = [FakePool(count, device) for device, count in enumerate(slots)]
        shapes = [PoolShape(i, count, POOL_FLAGS + count * CHUNK) for i, count in enumerate(slots)]
        self.table = WindowTable(number, [], shapes, queue, prioritise=True)
        lent = LentPools(self.pools)  # type: ignore[arg-type]
        self.window = Window(self.table, lent, lambda: self.lives)
        self._tail = 0

    def _read(self, offset: int) -> int:
        return int(struct.unpack("<Q", os.pread(self.table.descriptor, 8, offset))[0])

    def _write(self, offset: int, value: int) -> None:
        os.pwrite(self.table.descriptor, struct.pack("<I", value), offset)

    def state(self, chunk: int, value: int) -> None:
        os.pwrite(self.chunks.descriptor, struct.pack("<I", value), STATES + 4 * chunk)

    def want(self, *chunks: int) -> None:
        for chunk in chunks:
            self._write(self._read(QUEUE_AT) + 4 * self._tail, chunk)
            self._tail += 1
        self._write(TAIL, self._tail)

    def take(self, chunk: int) -> None:
        """Claim a chunk; its copy is not queued yet."""
        self.state(chunk, SHADOWED + self.number * SHADOWED + NO_SLOT)

    def shadow(self, chunk: int, slot: int, ticket: int) -> None:
        """Queue the copy of a chunk."""
        self._write(self._read(SLOTS_AT) + 8 * slot, ticket)
        self.state(chunk, SHADOWED + self.number * SHADOWED + slot)
        self.want(chunk)

    def copied(self, slot: int, ticket: int) -> None:
        """The GPU has made the copy."""
        for pool in self.pools:
            if slot < pool.slots:
                pool.gpu[slot] = ticket
                return
            slot -= pool.slots

    def transferring(self, calls: int) -> None:
        self._write(TRANSFERRING, calls)

    def transfer(self, record: int, ticket: int, pool: int = 0) -> None:
        self._write(self._read(TRANSFERS_AT) + 8 * record + 4, pool)
        self._write(self._read(TRANSFERS_AT) + 8 * record, ticket)


class Scene:
    """A feed over some chunks and processes, and a clock that only the test moves."""

    made: ClassVar[list[Scene]] = []

    def __init__(self, chunks: int, *slots: tuple[int, ...], **more: Any) -> None:
        Scene.made.append(self)
        self.table = ChunkTable(CHUNK, chunks)
        queue = more.pop("queue", 64)
        self.processes = [Process(i, self.table, each, queue) for i, each in enumerate(slots)]
        self.places = [Place((SESSION, 1), i * CHUNK, CHUNK, BASE + i * CHUNK, 0) for i in range(chunks)]
        order = more.pop("order", range(chunks))
        expected = more.pop("expected", None)
        prioritise = more.pop("prioritise", False)
        at_once = more.pop("at_once", CHUNK)
        placed = more.pop("placed", False)
        windows = [process.window for process in self.processes]
        self.feed = ChunkFeed(
            self.table,
            self.places,
            list(order),
            windows,
            expected,
            prioritise=prioritise,
            at_once=at_once,
            placed=placed,
        )
        self.feed.may_change.set()
        self.feed.runs_on.set()

    def take(self) -> Piece | None:
        return self.feed.take()

    def read(self) -> None:
        """What its thread does again and again."""
        self.feed.shadows.read()

    def land(self, piece: Piece, data: bytearray | memoryview | None = None) -> Sequence[bytes] | None:
        """What is done with a piece that has come to host memory."""
        state = StripeState(descriptor=-1, chunk=CHUNK)
        job = SaveJob(ctypes.pointer(state), self.feed.table, self.feed.changing, zero_hash(CHUNK), self.feed.permits)
        batch = Batch([piece], [None])
        try:
            landed(job, batch.packed[0], address_of(memoryview(data or bytearray(8))))
        except CopyFailed as failed:
            if failed.call != CHANGED or data is None:
                raise
            raise self.feed.changed(piece, failed.code, memoryview(data)) from None
        self.feed.landed(piece)
        return piece.hashes

    def all(self) -> list[int]:
        """Take and save whatever there is now."""
        taken: list[int] = []
        while True:
            try:
                piece = self.take()
            except NothingYet:
                return taken
            if piece is None:
                return taken
            taken.append(piece.chunk)
            self.land(piece)

    def close(self) -> None:
        for process in self.processes:
            process.table.close()
        self.table.close()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Keep no descriptors of tables."""
    yield
    while Scene.made:
        Scene.made.pop().close()


class Clock:
    """Seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(feed_module, "time", made)
    monkeypatch.setattr(shadows_module, "time", made)
    return made


def test_chunks_come_in_the_order_given_and_once() -> None:
    scene = Scene(6, (2,), order=[3, 1, 5, 0, 2, 4])
    assert scene.all() == [3, 1, 5, 0, 2, 4]
    assert scene.take() is None
    assert scene.feed.unsaved() == 0


def test_a_chunk_comes_from_its_place_and_is_not_free_before_it_has_landed() -> None:
    scene = Scene(2, (2,))
    piece = scene.take()
    assert piece == Piece((SESSION, 1), 0, CHUNK, BASE, 0, 0, -1)
    assert scene.table.state(0) != SAVED
    scene.land(piece)
    assert scene.table.state(0) == SAVED


def test_what_a_process_waits_for_goes_first(clock: Clock) -> None:
    scene = Scene(6, (0,))
    scene.processes[0].want(4, 2)
    assert scene.all() == [4, 2, 0, 1, 3, 5]
    clock.now += 2
    scene.processes[0].want(2, 5)
    assert scene.take() is None
    assert scene.feed.first_wanted == {4: clock.now - 2, 2: clock.now - 2}, "and the window is over"


def test_chunks_wanted_twice_come_once() -> None:
    scene = Scene(3, (0,), (0,))
    scene.processes[0].want(2, 2)
    scene.processes[1].want(2)
    assert scene.all() == [2, 0, 1]


def test_numbers_that_mean_no_chunk_are_passed_over() -> None:
    scene = Scene(3, (1,))
    scene.processes[0].want(3, 0xFFFFFFFF, 1 << 31, 1)
    assert scene.all() == [1, 0, 2]


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
    process.transfer(0, ticket=8)
    assert scene.feed.shadows.transferring()
    scene.read()
    scene.read()
    assert pool.refreshes == 3


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
    assert not scene.feed.shadows.waiting
    assert scene.take() is None


@pytest.mark.parametrize("state", [SHADOWED + 3, SHADOWED + 2 * SHADOWED, 0xFFFFFFFF, 0xFFFF0000])
def test_places_that_do_not_exist_fail_the_checkpoint(state: int) -> None:
    scene = Scene(2, (3,), (3,))
    scene.processes[0].state(1, state)
    scene.processes[0].want(1)
    assert scene.all() == [0]
    with pytest.raises(Mispredicted, match="does not exist"):
        scene.read()


def test_content_that_is_not_that_of_t1_fails_the_checkpoint() -> None:
    data = bytearray(os.urandom(CHUNK))
    expected = chunk_hash(memoryview(data))
    scene = Scene(2, (0,), expected=[expected, expected])
    for good in (True, False):
        piece = scene.take()
        assert piece is not None
        if good:
            assert scene.land(piece, data) == [expected]
            data[CHUNK - 1] ^= 1
        else:
            with pytest.raises(Mispredicted, match="block 1"):
                scene.land(piece, data)
    assert scene.table.state(1) == SAVED, "nobody waits for what is not wanted any more"


# Stepping aside.


def test_a_transfer_of_the_application_goes_first_but_not_for_ever(clock: Clock) -> None:
    scene = Scene(400, (2,), prioritise=True)
    process = scene.processes[0]
    process.transferring(1)
    step = feed_module.STEP_ASIDE_SECONDS / 10
    waited = [0]  # looks in a row at which there was nothing to take
    given = 0
    for _ in range(300):
        try:
            assert scene.take() is not None
            given += 1
            waited.append(0)
        except NothingYet:
            waited[-1] += 1
        clock.now += step
    assert max(waited) * step <= 1.2 * feed_module.STEP_ASIDE_SECONDS
    assert given >= 0.8 * 300, "a transfer that does not end costs a tenth of the rate"
    assert sum(count > 0 for count in waited) >= 2, "the application's transfers have their turn again"
    process.transferring(0)
    clock.now += feed_module.STEP_ASIDE_PAUSE
    assert len(scene.all()) == 400 - given


def test_without_priorities_nothing_steps_aside() -> None:
    scene = Scene(3, (2,), prioritise=False)
    scene.processes[0].transferring(1)
    assert scene.all() == [0, 1, 2]


def test_a_queued_transfer_is_over_when_its_flag_is_set() -> None:
    scene = Scene(3, (2,), prioritise=True)
    process = scene.processes[0]
    process.transfer(5, ticket=17)
    assert scene.all() == []
    process.pools[0].gpu[2 + 5] = 17
    assert scene.all() == []
    scene.read()
    assert scene.all() == [0, 1, 2]


def test_nobody_steps_aside_for_a_process_that_has_ended(clock: Clock) -> None:
    scene = Scene(3, (2,), (2,), prioritise=True)
    scene.processes[1].transferring(1)
    scene.processes[1].transfer(0, ticket=9)
    assert scene.all() == []
    scene.processes[1].lives = False
    clock.now += ALIVE_SECONDS
    scene.read()
    assert scene.all() == [0, 1, 2]


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


def test_first_written_first() -> None:
    places = Scene(4, (0,)).places
    before = {(places[2].key, places[2].offset): 0.5, (places[0].key, places[0].offset): 1.5, ((SESSION, 9), 0): 2.0}
    assert first_written_first(places, before) == [2, 0, 1, 3]
    assert first_written_first(places, {}) == [0, 1, 2, 3]


def test_what_was_saved_too_early_to_be_seen_keeps_its_place() -> None:
    early, late, other = ((SESSION, 1), 0), ((SESSION, 1), CHUNK), ((bytes(15) + b"x", 1), 0)
    order = WriteOrder()
    order.learn({early: 0.1, other: 0.2}, [early[0], other[0]])
    order.learn({late: 0.7}, [late[0]])  # `early` had been saved before the program ran on
    assert order.of([SESSION]) == {early: 0.1, late: 0.7}
    order.learn({late: -0.05}, [late[0]])
    assert order.of([SESSION, other[0][0]]) == {early: 0.1, late: -0.05, other: 0.2}
    order.learn({}, [(SESSION, 2)])  # the block is not there any more
    assert order.of([SESSION, other[0][0]]) == {other: 0.2}
    order.learn({early: 0.1}, [early[0]])
    order.forget(SESSION)
    assert order.of([SESSION]) == {}


def test_while_the_processes_stand_still_few_workers_copy_and_nothing_is_compared() -> None:
    scene = Scene(8, range(8), expected=[bytes(16)] * 8)
    scene.feed.may_change.clear()
    scene.feed.runs_on.clear()
    data = bytearray(os.urandom(CHUNK))
    piece = scene.take()
    assert piece is not None
    scene.land(piece, data)  # not what it should be, but nobody can have changed it
    assert scene.feed.workers() == STALL_WORKERS
    scene.feed.runs_on.set()
    assert scene.feed.workers() is None


def test_where_the_gpu_writes_into_the_image_few_pieces_are_under_way_instead() -> None:
    scene = Scene(8, (1,), placed=True)
    scene.feed.runs_on.clear()
    assert scene.feed.workers() == PLACING_WORKERS
    scene.feed.runs_on.set()
    assert scene.feed.workers() is None
    for _ in range(PIECES_UNDER_WAY):
        take_permit(scene.feed.permits)
    late = threading.Thread(target=take_permit, args=(scene.feed.permits,), daemon=True)
    late.start()
    late.join(0.05)
    assert late.is_alive()
    piece = scene.take()
    assert piece is not None
    scene.land(piece)
    late.join(30)
    assert not late.is_alive(), "a piece that has landed makes room for another"


def test_a_chunk_that_was_zeros_is_not_copied_whatever_it_has_become() -> None:
    scene = Scene(3, (1,), expected=[zero_hash(CHUNK), bytes(16), zero_hash(CHUNK)])
    scene.processes[0].shadow(2, 0, 1)
    scene.processes[0].copied(0, 1)
    pieces = [scene.take(), scene.take()]
    scene.read()
    pieces.append(scene.take())
    by_chunk = {piece.chunk: piece for piece in pieces if piece is not None}
    assert {chunk: piece.address for chunk, piece in by_chunk.items()} == {0: 0, 1: BASE + CHUNK, 2: 0}
    anything = memoryview(bytearray(os.urandom(CHUNK)))
    assert scene.land(by_chunk[0], anything) == [zero_hash(CHUNK)]
    assert scene.land(by_chunk[2], anything) == [zero_hash(CHUNK)]
    assert scene.table.state(0) == scene.table.state(2) == SAVED


def test_neighbours_that_nobody_waits_for_are_taken_together() -> None:
    expected = [bytes([i]) * 16 for i in range(8)]
    expected[6] = zero_hash(CHUNK)
    scene = Scene(8, (1,), order=[2, 0, 1, 3, 4, 5, 6, 7], expected=expected, at_once=3 * CHUNK)
    scene.feed.may_change.clear()
    scene.processes[0].take(1)
    pieces: list[Piece] = []
    for _ in range(5):
        piece = scene.take()
        assert piece is not None
        pieces.append(piece)
    assert [(p.chunk, p.size // CHUNK, bool(p.address)) for p in pieces] == [
        (2, 3, True),
        (0, 1, True),
        (5, 1, True),
        (6, 1, False),
        (7, 1, True),
    ]
    assert scene.land(pieces[0], memoryview(bytearray(3 * CHUNK))) == expected[2:5]
    assert [scene.table.state(chunk) == SAVED for chunk in range(8)] == [False, False, True, True, True, *[False] * 3]


def test_what_a_process_waits_for_comes_with_what_it_will_wait_for_next() -> None:
    scene = Scene(8, (1,), at_once=4 * CHUNK)
    scene.processes[0].take(5)
    scene.processes[0].want(2, 3, 4, 6)
    pieces = [scene.take() for _ in range(3)]
    assert [(p.chunk, p.size // CHUNK, p.urgent) for p in pieces if p] == [(2, 3, True), (6, 2, True), (0, 2, False)]
    with pytest.raises(NothingYet):
        scene.take()


def test_each_of_the_neighbours_is_compared() -> None:
    data = bytearray(os.urandom(2 * CHUNK))
    expected = [chunk_hash(memoryview(data)[:CHUNK]), chunk_hash(memoryview(data)[CHUNK:])]
    for wrong in (None, 0, 1):
        scene = Scene(2, (0,), expected=expected, at_once=2 * CHUNK)
        piece = scene.take()
        assert piece is not None
        assert piece.size == 2 * CHUNK
        changed = bytearray(data)
        if wrong is None:
            assert scene.land(piece, changed) == expected
            continue
        changed[wrong * CHUNK + 7] ^= 1
        with pytest.raises(Mispredicted, match=f"at {wrong * CHUNK}"):
            scene.land(piece, changed)
