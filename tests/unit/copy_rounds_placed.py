"""Rounds of copy_rounds.py that copy GPU memory into memory of an image's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from phos.gpu_engine import driver, save_plan
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copy_placed import PlacedSave
from phos.gpu_engine.copy_work import Cancelled, Piece
from phos.gpu_engine.cow.chunk_table import SAVED, ChunkTable
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.gpu_engine.save_plan import SavePlan
from phos.images.errors import ImageError
from phos.images.formats import HASH_SIZE
from phos.images.mapping import view_of
from phos.images.stripe import Room
from tests.unit.copy_machine import HALF, Blamed, Machine, fails, hashes_of, started, writer_in
from tests.unit.copy_rounds_saving import SHAPES
from tests.unit.cow_scene import Process
from tests.unit.waiting import eventually

SEGMENT = 5 * CHUNK


class Placing:
    """A sink with page-locked memory."""

    def __init__(self, buffer: driver.PinnedBuffer, limit: int) -> None:
        self._buffer = buffer
        self.placeable = buffer.size
        self.place_limit = limit
        self.end = 0
        self.taken: dict[tuple[BlockKey, int], tuple[bytes, Sequence[bytes] | None]] = {}

    def take_room(self) -> Room:
        return Room(self._buffer.address, self._buffer.size, SEGMENT, 0)

    def return_room(self, end: int) -> None:
        self.end = end

    def write_placed(
        self, block: BlockKey, offset: int, size: int, address: int, hashes: Sequence[bytes] | None
    ) -> None:
        assert (block, offset) not in self.taken
        if address:
            at = address - self._buffer.address
            assert 0 <= at <= self._buffer.size - size
            assert at // SEGMENT == (at + size - 1) // SEGMENT
        self.taken[block, offset] = bytes(view_of(address, size)) if address else bytes(size), hashes

    def block(self, key: BlockKey) -> bytes:
        """One that is there as a whole, each part of it once."""
        parts = sorted((offset, data) for (of, offset), (data, _) in self.taken.items() if of == key)
        end = 0
        for offset, data in parts:
            assert offset == end
            end += len(data)
        return b"".join(data for _, data in parts)


@contextmanager
def placing(room: int, limit: int = 2 * CHUNK) -> Iterator[Placing]:
    driver.context(0).use()
    buffer = driver.PinnedBuffer(room)
    try:
        yield Placing(buffer, limit)
    finally:
        buffer.free()


def all_hashes(machine: Machine, blocks: Sequence[Block]) -> list[bytes]:
    return [hash_ for block in blocks for hash_ in hashes_of(machine.content[block.key])]


def right(machine: Machine, sink: Placing, blocks: Sequence[Block]) -> None:
    for block in blocks:
        assert sink.block(block.key) == machine.content[block.key], f"block {block.key[1]} differs"


def placed_blocks(folder: Path, known: bool) -> None:
    """Whole blocks of both GPUs; zeros that are known need no room."""
    machine = Machine(2)
    blocks = machine.blocks([*SHAPES, "xx" * 9])
    hashes = all_hashes(machine, blocks) if known else None
    total = sum(block.size for block in blocks)
    with placing(2 * total) as sink:
        machine.save(blocks, sink, hashes)
        right(machine, sink, blocks)
        given = [hash_ for key in sorted(sink.taken) for hash_ in sink.taken[key][1] or ()]
        assert given == (hashes or [])
        stored = [data for data, _ in sink.taken.values() if any(data)]
        assert max(map(len, stored)) == sink.place_limit
        assert (sink.end < total) == known, "zeros are somewhere only if nobody knew"
    machine.saves_still(folder / "next")


def placed_table(folder: Path) -> None:
    """What is said to have been saved has been, and nothing that others have is."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 4, "xx" * 4])
    table = ChunkTable(CHUNK, 8)
    table.claim(5)
    with placing(16 * CHUNK) as sink:
        plan = SavePlan(machine.places(blocks), range(8), None, join_bytes=2 * CHUNK, table=table)
        placed = PlacedSave(plan, sink, None)  # type: ignore[arg-type]
        cancelled = threading.Event()
        thread, failures = started(
            lambda: machine.copier.save_placed(placed, sink, machine.progress(), cancelled)  # type: ignore[arg-type]
        )
        eventually(lambda: [table.state(i) == SAVED for i in range(8)] == [i != 5 for i in range(8)])
        assert thread.is_alive(), "one is owed"
        eventually(lambda: plan.owes)
        assert plan.owed() == 5
        plan.left(5)
        thread.join(30)
        assert not failures
        assert table.state(5) == SAVED
        machine.copier.settle_placed(placed, machine.progress(), cancelled)
        right(machine, sink, blocks)
    table.close()


def placed_wanted(folder: Path) -> None:
    """What a process waits for comes as soon as what is under way has landed."""
    machine = Machine(2)
    (block,) = machine.blocks(["xx" * 24])
    save_plan.UNDER_WAY_BYTES = CHUNK
    table = ChunkTable(CHUNK, 24)
    process = Process(0, table, (0,))
    with placing(48 * CHUNK, CHUNK) as sink:
        plan = SavePlan(
            machine.places([block]), range(24), None, join_bytes=CHUNK, table=table, windows=[process.table]
        )
        thread, failures = started(lambda: machine.save_placed(plan, sink))
        eventually(lambda: table.state(1) == SAVED)
        process.want(20)
        eventually(lambda: table.state(20) == SAVED)
        others = sum(table.state(i) == SAVED for i in range(20))
        assert others < 12, f"{others} of 20 came before it"
        thread.join(30)
        assert not failures, failures
        right(machine, sink, [block])
    process.table.close()
    table.close()


def placed_in_parts(folder: Path) -> None:
    """What is copied by parts is all there, also when that begins and ends meanwhile."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 12] * 2)
    for switching in (False, True):
        with placing(48 * CHUNK) as sink:
            plan = SavePlan(machine.places(blocks), range(24), all_hashes(machine, blocks), join_bytes=2 * CHUNK)
            plan.in_parts(HALF)
            thread, failures = started(lambda plan=plan, sink=sink: machine.save_placed(plan, sink))  # type: ignore[misc]
            while switching and thread.is_alive():
                in_turns = plan.in_turns
                while thread.is_alive() and plan.in_turns == in_turns:
                    time.sleep(0)
                plan.in_parts(0)
                landed = plan.landed
                while thread.is_alive() and plan.landed == landed:
                    time.sleep(0)
                plan.in_parts(HALF)
            thread.join(30)
            assert not failures, failures
            right(machine, sink, blocks)
            assert 0 < plan.in_turns <= 24
            assert switching or plan.in_turns == 12
    machine.saves_still(folder / "next")


def placed_changed(folder: Path, bad: int, changing: bool) -> None:
    """A chunk that is not what its hash says ends the job, once memory may change; and is free all the same."""
    machine = Machine(2)
    (block,) = machine.blocks(["xx" * 8])
    hashes = all_hashes(machine, [block])
    table = ChunkTable(CHUNK, 8)
    machine.memory(block)[(bad + 1) * CHUNK - 1] ^= 1
    blamed: list[tuple[int, bytes]] = []

    def changed(piece: Piece, number: int, data: memoryview) -> Exception:
        blamed.append((piece.chunk + number, bytes(data)))
        return Blamed(piece.chunk + number)

    with placing(16 * CHUNK) as sink:
        plan = SavePlan(machine.places([block]), range(8), hashes, join_bytes=2 * CHUNK, table=table)
        if changing:
            plan.may_change()
            assert fails(Blamed, lambda: machine.save_placed(plan, sink, changed)).args == (bad,)
            start = bad // 2 * 2
            assert blamed == [(bad, bytes(machine.memory(block)[start * CHUNK : (start + 2) * CHUNK]))]
            assert table.state(bad) == SAVED
        else:
            machine.save_placed(plan, sink, changed)
            assert not blamed
    table.close()
    machine.memory(block)[:] = machine.content[block.key]
    machine.saves_still(folder / "next")


def placed_not_compared(folder: Path, why: str) -> None:
    """Nothing is compared that has no hash, or is known to have been zeros, nor where nobody wants it."""
    machine = Machine(1)
    (block,) = machine.blocks(["00" * 6])
    hashes = all_hashes(machine, [block])
    machine.memory(block)[:] = b"1" * block.size
    wrong = {"unknown": None, "zeros": hashes, "nobody": [bytes(HASH_SIZE)] * 6}[why]
    with placing(12 * CHUNK) as sink:
        plan = SavePlan(machine.places([block]), range(6), wrong, join_bytes=CHUNK)
        plan.may_change()
        machine.save_placed(plan, sink, None if why == "nobody" else lambda *_: Blamed())
        assert sink.block(block.key) == (bytes(block.size) if why == "zeros" else b"1" * block.size)


def placed_failing(folder: Path, how: str) -> None:
    """A copy that fails, or has no room, ends the job; the next one is right."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 12] * 2)
    places = machine.places(blocks)
    if how == "driver":
        places[15] = places[15]._replace(address=1 << 60)
    with placing(48 * CHUNK if how == "driver" else 20 * CHUNK) as sink:
        plan = SavePlan(places, range(24), None, join_bytes=CHUNK)
        kind, text = (DriverError, "cuMemcpyDtoHAsync") if how == "driver" else (ImageError, "more data than room")
        fails(kind, lambda: machine.save_placed(plan, sink), text)
    machine.saves_still(folder / "next")


def placed_cancelled(folder: Path) -> None:
    """A job that is given up ends so, and nothing of it goes on."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 24] * 2)
    cancelled = threading.Event()
    with placing(48 * CHUNK) as sink:
        plan = SavePlan(machine.places(blocks), range(48), None, join_bytes=CHUNK)
        placed = PlacedSave(plan, sink, None)  # type: ignore[arg-type]
        thread, failures = started(
            lambda: machine.copier.save_placed(placed, sink, machine.progress(), cancelled)  # type: ignore[arg-type]
        )
        eventually(lambda: plan.landed)
        cancelled.set()
        thread.join(30)
        assert [type(failure) for failure in failures] == [Cancelled]
        landed = plan.landed
        assert landed < 48 * CHUNK
    machine.saves_still(folder / "next")
    assert plan.landed == landed


def placed_settled_beside_others(folder: Path) -> None:
    """Workers that another job takes away while a job is settled leave the rest of it to the others."""
    machine = Machine(4)
    blocks = machine.blocks(["xx" * 20] * 2)
    others = machine.blocks(["xx" * 6])
    with placing(80 * CHUNK) as sink:
        plan = SavePlan(machine.places(blocks), range(40), None, join_bytes=CHUNK)
        settling, never = threading.Event(), threading.Event()
        placed = PlacedSave(plan, sink, None, settling=settling)  # type: ignore[arg-type]
        one = placed.one
        machine.copier.save_placed(placed, sink, machine.progress(), never)  # type: ignore[arg-type]
        assert not sink.taken, "nobody was to see to anything yet"
        settling.set()
        begun = threading.Event()

        def slowly(worker: int) -> int:
            begun.set()
            time.sleep(0.02)
            return one(worker)

        placed.one = slowly  # type: ignore[method-assign]
        thread, failures = started(lambda: machine.copier.settle_placed(placed, machine.progress(), never))
        assert begun.wait(30)
        with writer_in(folder / "other", 4) as writer:
            machine.save(others, writer)
            machine.compare(writer, others)
        thread.join(30)
        assert not failures, failures
        right(machine, sink, blocks)


def placed_resting(folder: Path, ends: bool) -> None:
    """Who is to rest while a job is settled leaves nothing out, and goes on, or is given up."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 20] * 2)
    with placing(80 * CHUNK) as sink:
        plan = SavePlan(machine.places(blocks), range(40), None, join_bytes=CHUNK)
        settling, cancelled = threading.Event(), threading.Event()
        placed = PlacedSave(plan, sink, None, settling=settling)  # type: ignore[arg-type]
        machine.copier.save_placed(placed, sink, machine.progress(), cancelled)  # type: ignore[arg-type]
        one = placed.one

        def slowly(worker: int) -> int:
            time.sleep(0.02)
            return one(worker)

        placed.one = slowly  # type: ignore[method-assign]
        settling.set()
        thread, failures = started(lambda: machine.copier.settle_placed(placed, machine.progress(), cancelled))
        eventually(lambda: len(sink.taken) > 4)
        settling.clear()
        before = -1
        while len(sink.taken) != before:  # what is under way ends
            before = len(sink.taken)
            time.sleep(0.3)
        assert thread.is_alive()
        assert before < len(plan.places)
        (cancelled if ends else settling).set()
        thread.join(30)
        assert [type(failure) for failure in failures] == ([Cancelled] if ends else [])
        if not ends:
            right(machine, sink, blocks)
    machine.saves_still(folder / "next")


def placed_failing_for_good(folder: Path) -> None:
    """If nothing can be put away after a failure either, the first failure is what is said."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 4] * 2)
    places = machine.places(blocks)
    places[2] = places[2]._replace(address=1 << 60)

    def lost(*_: object) -> None:
        raise DriverError("cuEventDestroy", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    destroy, driver.destroy_event = driver.destroy_event, lost  # type: ignore[assignment]
    with placing(16 * CHUNK) as sink:
        plan = SavePlan(places, range(8), None, join_bytes=CHUNK)
        fails(DriverError, lambda: machine.save_placed(plan, sink), "cuMemcpyDtoHAsync")
    driver.destroy_event = destroy  # type: ignore[assignment]
    machine.saves_still(folder / "next")
