"""What is saved next in a window: the feed over real tables, with processes and pools played by the test."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.copy_work import NothingYet, Piece
from phos.gpu_engine.cow import feed as feed_module
from phos.gpu_engine.cow.chunk_table import SAVED
from phos.gpu_engine.cow.feed import STALL_WORKERS
from phos.gpu_engine.cow.layout import first_written_first
from phos.gpu_engine.cow.settings import CowSettings
from phos.gpu_engine.cow.shadow_pool import LentPools
from phos.gpu_engine.cow.shadows import ALIVE_SECONDS
from phos.gpu_engine.cow.window import ProcessWindow, Windows
from phos.gpu_engine.daemon.session_window import SessionWindow
from phos.gpu_engine.errors import Mispredicted
from phos.gpu_engine.save_places import SavePlace
from phos.gpu_engine.save_plan import TAKES_IN_A_ROW, SavePlan
from phos.gpu_engine.touch_order import TouchOrder
from phos.images.chunk_hash import chunk_hash, zero_hash
from tests.unit.cow_scene import BASE, CHUNK, ORDER, SESSION, Clock, Scene
from tests.unit.waiting import eventually

pytestmark = pytest.mark.usefixtures("closed_scenes", "clock")


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


def test_what_a_process_waits_for_goes_first() -> None:
    scene = Scene(6, (0,))
    scene.processes[0].want(4, 2)
    assert scene.all() == [4, 2, 0, 1, 3, 5]
    scene.processes[0].want(2, 5)
    assert scene.take() is None, "and the window is over"


def test_chunks_wanted_twice_come_once() -> None:
    scene = Scene(3, (0,), (0,))
    scene.processes[0].want(2, 2)
    scene.processes[1].want(2)
    assert scene.all() == [2, 0, 1]


def test_numbers_that_mean_no_chunk_are_passed_over() -> None:
    scene = Scene(3, (1,))
    scene.processes[0].want(3, 0xFFFFFFFF, 1 << 31, 1)
    assert scene.all() == [1, 0, 2]


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


def test_a_transfer_of_the_application_goes_first_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "STEP_ASIDE_SECONDS", 0.05)
    monkeypatch.setattr(feed_module, "STEP_ASIDE_PAUSE", 0.2)
    scene = Scene(4000, (2,), prioritise=True)
    process = scene.processes[0]
    process.transferring(1)
    looks: list[tuple[float, bool]] = []  # when, and whether there was something to take
    began = time.perf_counter()
    while time.perf_counter() - began < 0.8:
        looks.append((time.perf_counter() - began, taken(scene) is not None))
        time.sleep(0.001)
    # The last look before each change, and the first after it: a spell lasts no longer than from the one to the other.
    changes = [(last, now) for (now, got), (last, before) in zip(looks[1:], looks, strict=False) if got != before]
    assert not looks[0][1], "the transfer goes first"
    spells = [later - earlier for (earlier, _), (_, later) in zip([(0.0, 0.0), *changes], changes, strict=False)]
    aside, going = spells[0::2], spells[1::2]
    assert len(going) >= 2, "the application's transfers have their turn again"
    assert min(aside) >= 0.05
    assert min(going) >= 0.2, "a transfer that does not end costs a part of the rate only"
    process.transferring(0)
    time.sleep(0.2)
    assert scene.all()


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


def test_what_a_process_reads_first_and_writes_later_is_known_of_both() -> None:
    scene = Scene(4, (1,))
    process = scene.processes[0]
    for chunk, writes in ((3, False), (1, True), (3, True), (2, False), (9, True)):
        process.touch(chunk, writes=writes)
    windows = Windows(CowSettings(), driver.Lane)
    windows.feed = scene.feed
    windows._windows = {SESSION: ProcessWindow(process.table, scene.table, LentPools([]), scene.feed)}  # type: ignore[arg-type]
    key = scene.places[0].key
    (seen,) = windows.touched().values()
    order = TouchOrder()
    order.learn(SESSION, seen.touched, [key])
    assert order.of([SESSION]) == [(key, 3), (key, 1), (key, 2)]
    assert seen.written == [(key, 1), (key, 3)]
    assert first_written_first({key: range(4)}, seen.written) == [1, 3, 0, 2]
    (again,) = windows.touched().values()
    assert again == ([], [])


def test_while_the_processes_stand_still_few_workers_copy() -> None:
    scene = Scene(8, (1,), expected=[bytes(16)] * 8, still=True)
    assert scene.feed.workers() == STALL_WORKERS
    scene.feed.runs_on()
    assert scene.feed.workers() is None


def test_copies_take_turns_while_processes_are_brought_back() -> None:
    scene = Scene(8, (1,), still=True)
    assert not scene.feed.plan._plan.part
    scene.feed.bringing_back()
    assert scene.feed.plan._plan.part == feed_module.TURN_BYTES
    scene.feed.runs_on()
    assert not scene.feed.plan._plan.part


def test_copies_stand_back_while_a_process_maps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "ATTACH_SECONDS", 30.0)
    scene = Scene(4, (1,), still=True)
    assert taken(scene) == 0
    scene.feed.attaching()
    assert taken(scene) is None
    scene.processes[0].want(2)
    assert taken(scene) == 2, "who waits does not wait for that"
    scene.processes[0].shadow(3, 0, ticket=4)
    scene.processes[0].copied(0, 4)
    assert taken(scene) is None
    scene.read()
    assert taken(scene) == 3, "nor does who needs a slot"
    scene.feed.attaching()
    scene.feed.attached()
    assert taken(scene) is None, "another one is at it"
    scene.feed.attached()
    assert taken(scene) == 1


def test_copies_do_not_stand_back_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped maps nothing, and others compute on."""
    monkeypatch.setattr(feed_module, "ATTACH_SECONDS", 0.2)
    scene = Scene(4, (1,), still=True)
    scene.feed.attaching()
    assert taken(scene) is None
    eventually(lambda: taken(scene) == 0)


def test_memory_may_change_from_before_a_process_gets_it() -> None:
    windows = Windows(CowSettings(), driver.Lane)
    block = Block((SESSION, 1), 3 * CHUNK, 0, -1, True)
    process = SimpleNamespace(session=SESSION, pid=1, ordinals=dict, alive=lambda: True)
    detached = SimpleNamespace(blocks=[SimpleNamespace(number=1, size=block.size, key=block.key)])
    mapped, sink = {block.key: SimpleNamespace(address=BASE)}, SimpleNamespace(placeable=0, place_limit=0)
    feed = windows.lay_out([process], {SESSION: detached}, [block], mapped, [bytes(16)] * 3, sink)  # type: ignore[list-item,dict-item,arg-type]
    session = SimpleNamespace(session=SESSION, pid=1, executable="x")
    window = SessionWindow(session, None, None, None)  # type: ignore[arg-type]
    assert window.attaching() is None
    of_process = windows.of(process)  # type: ignore[arg-type]
    window.trace(of_process)
    windows.bringing_back()
    assert not ctypes.c_uint32.from_address(feed.changing).value, "nobody has it"
    assert window.attaching() is of_process
    assert ctypes.c_uint32.from_address(feed.changing).value, "from here on it may write"
    (room,) = struct.unpack("<I", os.pread(of_process.table.descriptor, 4, ORDER))
    assert room == 2 * 3, "each chunk may be read first and written to later"
    windows.close()


@pytest.mark.parametrize("back", ["never", "detached still", "computing"])
def test_a_connection_that_breaks_before_a_window_is_open(back: str) -> None:
    """Who has not come back since may have computed, with nobody watching, and ended."""
    window = SessionWindow(SimpleNamespace(session=SESSION, pid=1, executable="x"), None, None, None)  # type: ignore[arg-type]
    window.trace(SimpleNamespace())  # type: ignore[arg-type]
    window.cut_off()
    if back != "never":
        window.connected(detached=back == "detached still")
    with nullcontext() if back == "detached still" else pytest.raises(Mispredicted):
        window.untrace()(0.0)
    window.untrace()(0.0)  # said once


def taken(scene: Scene) -> int | None:
    """The number of the next chunk, None: there is nothing now."""
    try:
        piece = scene.take()
    except NothingYet:
        return None
    assert piece is not None
    return piece.chunk


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
    scene = Scene(8, (1,), order=[2, 0, 1, 3, 4, 5, 6, 7], expected=expected, join_bytes=3 * CHUNK)
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
    assert scene.land(pieces[0]) == expected[2:5]
    assert [scene.table.state(chunk) == SAVED for chunk in range(8)] == [False, False, True, True, True, *[False] * 3]


def test_what_a_process_waits_for_comes_with_what_it_will_wait_for_next() -> None:
    scene = Scene(8, (1,), join_bytes=4 * CHUNK)
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
        scene = Scene(2, (0,), expected=expected, join_bytes=2 * CHUNK)
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


def test_pieces_of_one_gpu_come_in_a_row_and_no_gpu_waits_for_all_of_another() -> None:
    count = 100
    places = [
        SavePlace((SESSION, n // count), n % count * CHUNK, CHUNK, BASE + n * CHUNK, n // count)
        for n in range(2 * count)
    ]
    plan = SavePlan(places, range(2 * count), None, join_bytes=CHUNK)
    devices = [piece.device for _ in range(2 * count) if (piece := plan.take()) is not None]
    assert plan.take() is None
    runs = [len(list(run)) for _, run in itertools.groupby(devices)]
    assert sum(runs) == 2 * count
    assert min(runs[:8]) >= TAKES_IN_A_ROW - 1
    assert max(runs) <= 2 * TAKES_IN_A_ROW


def test_flags_are_in_demand_as_long_as_copies_step_aside() -> None:
    scene = Scene(3, (2,), prioritise=True)
    scene.processes[0].transfer(5, ticket=17)
    assert not scene.feed.shadows._in_demand()
    assert scene.all() == []
    assert scene.feed.shadows._in_demand()
    scene.read()
    assert not scene.feed.shadows._in_demand(), "until somebody asks again"
