"""Rounds of copy_rounds.py that copy GPU memory into an image."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver
from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.copy_loop import Permits, Turns, give_permit, take_permit, try_permit
from phos.gpu_engine.copy_work import Cancelled, Piece
from phos.gpu_engine.cow.chunk_table import SAVED, UNSAVED, ChunkTable, Flag
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.images.chunk_hash import zero_hash
from phos.images.errors import ImageError
from phos.images.formats import HASH_SIZE
from phos.images.mapping import view_of
from phos.images.stripe import Stripe
from phos.images.writer import ImageWriter, Place
from tests.unit.copy_machine import (
    HALF,
    PATIENCE,
    Blamed,
    Given,
    Machine,
    Stored,
    fails,
    hashes_of,
    started,
    stripes_of,
    writer_in,
)

SHAPES = ["x", "xxx0", "xx00xx", "0", "00000", "00xx0", "xxxxxxx", "0x0x00x", "x", "x", "xxx"]


def save_blocks(folder: Path, threads: int, slot_chunks: int, how: str, direct: bool) -> None:
    machine = Machine(threads, slot_chunks)
    blocks = machine.blocks(SHAPES)
    hashes = None
    if how == "gpu":
        hashes = machine.copier.hasher.hash(blocks, machine.mapped)
        assert hashes == [hash_ for block in blocks for hash_ in hashes_of(machine.content[block.key])]
    with writer_in(folder / "image", threads, None if direct else False) as writer:
        direct_before = [s.direct for s in stripes_of(writer)]
        machine.save(blocks, writer, hashes)
        assert [s.direct for s in stripes_of(writer)] == direct_before, "slots are fit for O_DIRECT"
        machine.compare(writer, blocks)
    machine.copier.release()  # it makes all anew
    machine.saves_still(folder / "next")


def save_given(folder: Path) -> None:
    """What a source says has been saved, is; a source may have nothing for a while."""
    machine = Machine(2, 3)
    blocks = machine.blocks(["xx" * 6, "xx00xx", "xxx"])
    table = ChunkTable(CHUNK, 20)
    pieces = [
        machine.piece(blocks[0], 0, 3 * CHUNK, chunk=1),
        None,
        machine.piece(blocks[0], 3 * CHUNK, 2 * CHUNK, chunk=4),
        machine.piece(blocks[0], 5 * CHUNK, CHUNK, chunk=6),
        machine.piece(blocks[1], 0, 3 * CHUNK, chunk=8, hashes=hashes_of(machine.content[blocks[1].key])),
        None,
        None,
        None,
        machine.piece(blocks[2], 0, 3 * HALF, chunk=12, hashes=hashes_of(machine.content[blocks[2].key])),
        None,
    ]
    flag = Flag()
    flag.set()
    with writer_in(folder / "image", 2) as writer:
        source = Given(pieces, table, flag)
        machine.drain(source, writer)
        machine.compare(writer, blocks)
        assert sorted(piece.chunk for piece in source.saved) == [1, 4, 6, 8, 12]
    saved = {*range(1, 7), *range(8, 11), 12, 13}
    assert [table.state(i) for i in range(20)] == [SAVED if i in saved else UNSAVED for i in range(20)]
    table.close()


class Watched:
    """A sink that writes down, into what a source says was saved, where each use of a stripe begins."""

    placeable = place_limit = 0

    def __init__(self, writer: ImageWriter, events: list[Any]) -> None:
        self._writer = writer
        self._events = events

    def place(self, size: int) -> Place | None:
        return None

    def write_placed(self, block: BlockKey, offset: int, place: Place, hashes: Sequence[bytes] | None) -> None:
        raise AssertionError("nothing has a place")

    @contextmanager
    def appending(self, stripe: int) -> Iterator[Stripe]:
        self._events.append("|")
        with self._writer.appending(stripe) as s:
            yield s


def save_urgent(folder: Path) -> None:
    """What somebody waits for is saved alone, before what had been taken already; all else in its order."""
    machine = Machine(1)
    (block,) = machine.blocks(["xx" * 10])

    def piece(number: int, urgent: bool = False) -> Piece:
        return machine.piece(block, number * CHUNK, chunk=number, urgent=urgent)

    pieces = [
        *(piece(0), piece(1), piece(2, True), piece(3, True), piece(4), None),
        *(piece(5, True), piece(6), piece(7), piece(8), piece(9, True)),
    ]
    with writer_in(folder / "image", 1) as writer:
        source = Given(pieces)
        machine.drain(source, Watched(writer, source.saved))
        seen = "".join("|" if isinstance(event, str) else str(event.chunk) for event in source.saved)
        assert seen == "|2|3|014|5|9|678", seen
        machine.compare(writer, [block])


def save_permitted(folder: Path) -> None:
    """As many pieces as there are permits are taken and have not come; afterwards all permits are there again."""
    machine = Machine(6)
    blocks = machine.blocks(["xx" * 12] * 2)
    assert {block.device for block in blocks} == {0, 1}

    def piece(number: int, **more: Any) -> Piece:
        return machine.piece(blocks[number // 12], number % 12 * CHUNK, chunk=number, **more)

    table = ChunkTable(CHUNK, 24)
    permits = Permits(2)

    class Counted(Given):
        taken = most = 0
        counting = threading.Lock()

        def take(self) -> Piece | None:
            with self.counting:
                piece = super().take()
                self.taken += piece is not None
                self.most = max(self.most, self.taken - sum(table.state(i) == SAVED for i in range(24)))
                return piece

    pieces: list[Piece | None] = [piece(i, urgent=i % 5 == 3) for i in range(24)]
    pieces[7:7] = [None, None]
    source = Counted(pieces, table, None, permits)
    with writer_in(folder / "image", 6) as writer:
        machine.drain(source, writer)
        machine.compare(writer, blocks)
    assert source.most == 2, source.most
    table.close()
    table = ChunkTable(CHUNK, 24)
    flag = Flag()
    flag.set()
    wrong = [piece(i, hashes=[bytes(HASH_SIZE)]) for i in range(24)]
    with writer_in(folder / "wrong", 6) as writer:
        fails(Blamed, lambda: machine.drain(Counted(wrong, table, flag, permits), writer))
    cancelled = threading.Event()

    class Ending(Given):
        def landed(self, piece: Piece) -> None:
            super().landed(piece)
            cancelled.set()

    with writer_in(folder / "cancelled", 6) as writer:
        ending = Ending([piece(i) for i in range(24)], None, None, permits)
        fails(Cancelled, lambda: machine.copier.drain(ending, 0, writer, machine.progress(), cancelled))
        assert 0 < len(ending.saved) < 24
    back, _ = started(lambda: [take_permit(permits.address) for _ in range(2)])
    back.join(PATIENCE)
    assert not back.is_alive()
    table.close()


def save_in_turns(folder: Path, placed: bool) -> None:
    """What is copied in turns is all there, also when they begin and end meanwhile; a copy that fails ends its turn."""
    machine = Machine(6)
    blocks = machine.blocks(["xx" * 12] * 2)
    turns = [Turns(), Turns()]

    class Switching(Given):
        def take(self) -> Piece | None:
            left = len(self._left)
            for each in turns:
                if left % 5 == 0:
                    each.begin(HALF) if left % 10 else each.end()
            return super().take()

    def pieces() -> list[Piece]:
        return [machine.piece(blocks[i % 2], i // 2 * CHUNK, chunk=i) for i in range(24)]

    for number, kind in enumerate((Given, Switching)):
        for each in turns:
            each.begin(HALF)
        permits = Permits(6)
        source = kind(pieces(), permits=permits, turns=turns)
        with writer_in(folder / f"image-{number}", 6) as writer:
            if not placed:
                machine.drain(source, writer)
                machine.compare(writer, blocks)
                continue
            with placing(writer, 24 * CHUNK, CHUNK) as sink:
                machine.drain(source, sink)
                assert len(sink.taken) == 24
                for (key, offset), (data, _) in sink.taken.items():
                    assert data == machine.content[key][offset : offset + CHUNK]
    for each in turns:
        each.begin(HALF)
    wrong: list[Piece | None] = [replace(p, address=1 << 60) if i == 15 else p for i, p in enumerate(pieces())]
    with writer_in(folder / "wrong", 6) as writer:
        fails(DriverError, lambda: machine.drain(Given(wrong, turns=turns), writer), "cuMemcpyDtoHAsync")
    for each in turns:
        _, taken, served = each._words
        assert taken == served > 12, "whoever waits for the next turn gets it"


def save_small_with_one_permit(folder: Path) -> None:
    """With a permit pieces are taken up to so many bytes, and it comes back once, when the last of them is there."""
    machine = Machine(1)
    (block,) = machine.blocks(["xx" * 12])

    def piece(number: int, size: int = CHUNK, **more: Any) -> Piece:
        return machine.piece(block, number * CHUNK, size, chunk=number, **more)

    pieces = [
        piece(0),
        piece(1),
        piece(2),
        piece(3),
        piece(4),
        piece(5, urgent=True),
        piece(6),
        None,
        piece(7),
        piece(8),
    ]
    table = ChunkTable(CHUNK, 12)
    permits = Permits(1)
    with writer_in(folder / "image", 1) as writer:
        source = Given([*pieces, piece(9), piece(10), piece(11)], table, None, permits, permitted=3 * CHUNK)
        machine.drain(source, Watched(writer, source.saved))
        seen = "".join("|" if isinstance(event, str) else f"{event.chunk:x}" for event in source.saved)
        assert seen == "|012|534|6|789|ab", seen
        machine.compare(writer, [block])
    one_is_left(permits)
    table.close()
    hashes = hashes_of(machine.content[block.key])
    for bad in range(3):
        table, flag = ChunkTable(CHUNK, 12), Flag()
        flag.set()
        wrong = [piece(i, hashes=[bytes(HASH_SIZE) if i == bad else hashes[i]]) for i in range(3)]
        with writer_in(folder / f"wrong {bad}", 1) as writer:
            source = Given(wrong, table, flag, permits, permitted=3 * CHUNK)
            assert fails(Blamed, partial(machine.drain, source, writer)).args == (bad,)
        one_is_left(permits)
        table.close()


def one_is_left(permits: Permits) -> None:
    """Of one permit."""
    assert try_permit(permits.address)
    assert not try_permit(permits.address), "it is there twice"
    give_permit(permits.address)


def save_changed(folder: Path, number: int, placed: bool) -> None:
    """A chunk that is not what its hash says ends the job, once memory may change; the next job knows nothing of it."""
    machine = Machine(1, 2)
    size = 2 * CHUNK
    (block,) = machine.blocks(["xxxx" * 4])
    hashes = hashes_of(machine.content[block.key])
    pieces = [machine.piece(block, i * CHUNK, size, chunk=i, hashes=hashes[i : i + 2]) for i in range(0, 8, 2)]
    bad = number * 2 + number % 2
    memory = machine.memory(block)
    memory[(bad + 1) * CHUNK - 1] ^= 1
    table, flag = ChunkTable(CHUNK, 8), Flag()
    flag.set()
    source = Given(pieces, table, flag)
    with writer_in(folder / "image", 1) as writer:
        with placing(writer, block.size if placed else 0, size) as sink:
            error = fails(Blamed, lambda: machine.drain(source, sink))
            assert len(sink.taken) == (4 if placed else 0)
        assert error.args == (bad,)
        assert source.blamed == [(pieces[number], number % 2, bytes(memory[number * size : (number + 1) * size]))]
        assert source.saved == (pieces if placed else []), "what has a place is compared when all has been saved"
        assert not any(s.runs for s in stripes_of(writer))
        assert table.state(bad) == SAVED
        memory[:] = machine.content[block.key]
        machine.drain(Given(pieces, table, flag), writer)
        assert Stored(writer).block(block.key, block.size) == machine.content[block.key]
    table.close()
    machine.saves_still(folder / "next")


def save_not_compared(folder: Path, why: str, placed: bool) -> None:
    """Nothing is compared while memory cannot change, nor what has no hash, nor what is known to have been zeros."""
    machine = Machine(1)
    (block,) = machine.blocks(["xx" * 6])
    data = machine.content[block.key]
    wrong = [bytes(HASH_SIZE) if i % 2 else hash_ for i, hash_ in enumerate(hashes_of(data))]
    flag = Flag()
    if why != "flag":
        flag.set()
    pieces = [
        machine.piece(block, i * CHUNK, chunk=i, hashes=None if why == "unknown" else [hash_])
        for i, hash_ in enumerate(wrong)
    ]
    if why == "zeros":
        pieces[1] = machine.piece(block, CHUNK, chunk=1)
        for i in (2, 3, 5):  # the first of them in a slot that held something else
            pieces[i] = Piece(block.key, i * CHUNK, CHUNK, 0, block.device, i, hashes=[zero_hash(CHUNK)])
            data = data[: i * CHUNK] + bytes(CHUNK) + data[(i + 1) * CHUNK :]
    source = Given(pieces, None, None if why == "no word" else flag)
    with writer_in(folder / "image", 1) as writer:
        if placed:
            with placing(writer, block.size, CHUNK) as sink:
                machine.drain(source, sink)
                zeros = sum(piece.address == 0 for piece in pieces)
                assert len(sink.taken) == len(pieces) - zeros
                assert not source.blamed
                return
        machine.drain(source, writer)
        believed = [CHUNK, 3 * CHUNK, 5 * CHUNK] if why in ("flag", "no word") else []
        assert Stored(writer).block(block.key, block.size, believed) == data
    assert not source.blamed


def save_failing(folder: Path, disk: str | None) -> None:
    """A writer whose file takes no more says why, and takes no more itself; another one is not concerned."""
    machine = Machine(2, 2)
    place = Path(disk) if disk else None
    blocks = machine.blocks(["xx" * 6] * 3)
    with writer_in(place or folder / "bad", 2) as writer:
        kept = [s.fd for s in stripes_of(writer)]
        for s in stripes_of(writer) if place is None else []:
            s.fd = os.open(f"/proc/self/fd/{s.fd}", os.O_RDONLY)
        reason = os.strerror(errno.EBADF) if place is None else "the file system is full"
        name = f"{place or folder / 'bad'}/phos-data-"
        fails(ImageError, lambda: machine.save(blocks, writer), name, reason)
        assert sum(s.end for s in stripes_of(writer)) == sum(run.length for s in stripes_of(writer) for run in s.runs)
        fails(ImageError, lambda: machine.save(blocks[:1], writer), "takes no more data", reason)
        if place is None:
            for s, descriptor in zip(stripes_of(writer), kept, strict=True):
                os.close(s.fd)
                s.fd = descriptor
    machine.saves_still(folder / "next")


class Placing:
    """A sink with places in page-locked memory."""

    def __init__(self, writer: ImageWriter, buffer: driver.PinnedBuffer | None, limit: int) -> None:
        self._writer = writer
        self._buffer = buffer
        self._lock = threading.Lock()
        self._end = 0
        self.placeable = buffer.size if buffer else 0
        self.place_limit = limit
        self.refused = 0
        self.taken: dict[tuple[BlockKey, int], tuple[bytes, Sequence[bytes] | None]] = {}

    def place(self, size: int) -> Place | None:
        with self._lock:
            if self._buffer is None or self._end + size > self._buffer.size:
                self.refused += 1
                return None
            at, self._end = self._end, self._end + size
        return Place(self._buffer.address + at, view_of(self._buffer.address + at, size), at)

    def write_placed(self, block: BlockKey, offset: int, place: Place, hashes: Sequence[bytes] | None) -> None:
        assert (block, offset) not in self.taken
        self.taken[block, offset] = bytes(place.view), hashes

    def appending(self, stripe: int) -> Any:
        return self._writer.appending(stripe)


@contextmanager
def placing(writer: ImageWriter, room: int, limit: int) -> Iterator[Placing]:
    with ExitStack() as undo:
        buffer = None
        if room:
            driver.context(0).use()
            buffer = driver.PinnedBuffer(room)
            undo.callback(buffer.free)
        yield Placing(writer, buffer, limit)


def save_placed(folder: Path, known: bool, enough: bool) -> None:
    """What has a place is put there and not appended, what has none is appended; together it is all."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 4 + "x", "xx00" + "xx" * 4, "x"])
    total = sum(block.size for block in blocks)
    hashes = [hash_ for block in blocks for hash_ in hashes_of(machine.content[block.key])] if known else None
    room = total if enough else 5 * CHUNK
    with writer_in(folder / "image", 2) as writer, placing(writer, room, 3 * CHUNK) as sink:
        machine.save(blocks, sink, hashes)
        assert bool(sink.refused) != enough
        assert writer.bytes_written == sum(s.end for s in stripes_of(writer))
        parts: dict[tuple[BlockKey, int], bytes] = {}
        for (key, offset), (data, given) in sink.taken.items():
            parts[key, offset] = data
            assert given == (hashes_of(data) if known else None)
        # Zeros that are known need no place.
        largest = max(len(data) for data in parts.values())
        assert largest == (3 * CHUNK if known and enough else CHUNK), "larger than a slot only if all have places"
        appended = [run for s in stripes_of(writer) for run in s.runs]
        assert writer.bytes_written == sum(run.length for run in appended if run.kind == pb.Run.DATA)
        assert sum(run.length for run in appended) == total - sum(map(len, parts.values()))
        assert (
            [run.kind for run in appended] == [pb.Run.ZERO] * known
            if enough
            else pb.Run.DATA in {run.kind for run in appended}
        )
        for run in appended:
            data = bytes(run.length)
            if run.kind == pb.Run.DATA:
                data = os.pread(stripes_of(writer)[run.stripe].fd, run.length, run.file_offset)
                assert run.hashes == b"".join(hashes_of(data))
            assert (run.block, run.offset) not in parts
            parts[run.block, run.offset] = data
        for block in blocks:
            found = b"".join(parts[each] for each in sorted(parts) if each[0] == block.key)
            assert found == machine.content[block.key]
    machine.saves_still(folder / "next")


def save_too_large(folder: Path) -> None:
    """A piece that is larger than a slot must have a place."""
    machine = Machine(1)
    (block,) = machine.blocks(["xx" * 3])
    with writer_in(folder / "image", 1) as writer:
        text = f"{3 * CHUNK} bytes has no place"
        fails(ValueError, lambda: machine.drain(Given([machine.piece(block, 0, 3 * CHUNK)]), writer), text)
        short = machine.piece(block, hashes=[bytes(16)] * 2)
        fails(ValueError, lambda: machine.drain(Given([short]), writer), "1 chunks has 2 hashes")
    machine.saves_still(folder / "next")
