"""Copies between files and the software GPU's memory: `copy_rounds NAME FOLDER CASE...`, with arguments in JSON.

The software GPU's memory is plain memory of the process, so what is there can be compared byte by byte. What is wrong
ends the process with a traceback. test_copy_loop.py runs the rounds.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.content_hash import SPAN_BYTES, THREADS, chunk_count
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import UNDER_WAY, Cancelled, HashRoom, Load, NothingYet, Piece, Progress, Reading
from phos.gpu_engine.cow.chunk_table import SAVED, UNSAVED, ChunkTable, Flag
from phos.gpu_engine.installation import load_driver
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.images.chunk_hash import chunk_hash, zero_hash
from phos.images.errors import ImageError
from phos.images.formats import HASH_SIZE, align_up
from phos.images.mapping import view_of
from phos.images.stripe import Stripe
from phos.images.writer import ImageWriter, Place

HALF = CHUNK // 2
SESSION = bytes(range(16))
PATIENCE = 30.0
NOISE = random.Random(7).randbytes(2 * CHUNK)


def noise(seed: int, size: int) -> bytes:
    """Bytes that differ with the seed, and from chunk to chunk."""
    starts = ((seed * 7919 + i) * 10007 % CHUNK for i in range(chunk_count(size)))
    return b"".join(NOISE[start : start + CHUNK] for start in starts)[:size]


def shaped(shape: str, seed: int) -> bytes:
    """Half a chunk for each letter: zeros for "0", else noise."""
    whole = bytearray(noise(seed, len(shape) * HALF))
    for i, letter in enumerate(shape):
        if letter == "0":
            whole[i * HALF : (i + 1) * HALF] = bytes(HALF)
    return bytes(whole)


def hashes_of(data: bytes) -> list[bytes]:
    return [chunk_hash(memoryview(data[at : at + CHUNK])) for at in range(0, len(data), CHUNK)]


class Machine:
    """A copier, and blocks with known contents on the GPUs there are."""

    def __init__(self, threads: int = 3, slot_chunks: int = 1) -> None:
        load_driver("software")
        driver.initialise()
        self.gpus = len(driver.gpus())
        self.copier = Copier(threads, threads * 2 * slot_chunks * CHUNK)
        assert (self.copier.threads, self.copier.slot_bytes) == (threads, slot_chunks * CHUNK)
        self.mapped = MappedBlocks()
        self.content: dict[BlockKey, bytes] = {}

    def block(self, content: bytes) -> Block:
        """A block with that in its memory; each on another GPU than the one before."""
        number = len(self.content)
        device = number % self.gpus
        made = Block((SESSION, number), len(content), device, driver.context(device).create_block(len(content)))
        self.mapped.add([made])
        self.content[made.key] = content
        self.memory(made)[:] = content
        return made

    def blocks(self, shapes: Sequence[str]) -> list[Block]:
        return [self.block(shaped(shape, seed)) for seed, shape in enumerate(shapes)]

    def address(self, block: Block) -> int:
        return self.mapped[block.key].address

    def memory(self, block: Block) -> memoryview:
        return view_of(self.address(block), block.size)

    def piece(self, block: Block, offset: int = 0, size: int = CHUNK, **more: Any) -> Piece:
        return Piece(block.key, offset, size, self.address(block) + offset, block.device, **more)

    def progress(self) -> Progress:
        return Progress(0, [0] * self.copier.threads)

    def save(self, blocks: Sequence[Block], sink: Any, hashes: Sequence[bytes] | None = None) -> None:
        """A job that saves whole blocks, and is to report all of their bytes."""
        progress = self.progress()
        self.copier.save(blocks, sink, progress, threading.Event(), self.mapped, hashes)
        assert progress.done == sum(block.size for block in blocks)

    def drain(self, source: Given, sink: Any) -> None:
        self.copier.drain(source, 0, sink, self.progress(), threading.Event())

    def saves_still(self, folder: Path) -> None:
        """Another job of the same copier is right, whatever became of the last one."""
        blocks = self.blocks(["xx0xxx", "x", "xx00xx"])
        with writer_in(folder) as writer:
            self.save(blocks, writer)
            self.compare(writer, blocks)

    def compare(self, writer: ImageWriter, blocks: Sequence[Block]) -> None:
        """What the stripes' files hold is what is in memory, and nothing else."""
        found = Stored(writer)
        for block in blocks:
            assert found.block(block.key, block.size) == self.content[block.key], f"block {block.key[1]} differs"
            assert self.memory(block) == self.content[block.key]
        found.nothing_else([block.key for block in blocks])


@contextmanager
def writer_in(folder: Path, stripes: int = 3, direct: bool | None = False) -> Iterator[ImageWriter]:
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with ImageWriter(descriptor, stripes=stripes, chunk_size=CHUNK, direct=direct) as writer:
            yield writer
    finally:
        os.close(descriptor)


def stripes_of(writer: ImageWriter) -> list[Stripe]:
    return writer._stripes


class Stored:
    """What a writer's runs say is in its files."""

    def __init__(self, writer: ImageWriter) -> None:
        self._writer = writer
        self._runs = sorted((run for s in stripes_of(writer) for run in s.runs), key=lambda run: run.sequence)
        for s in stripes_of(writer):
            s.finish()
        self._files = [Path(f"/proc/self/fd/{s.fd}").read_bytes() for s in stripes_of(writer)]

    def block(self, key: BlockKey, size: int, believed: Sequence[int] = ()) -> bytes:
        """A block put together; each part of it must be there once. ``believed``: offsets whose hashes are wrong."""
        parts: dict[int, bytes] = {}
        for run in (run for run in self._runs if run.block == key):
            assert run.offset not in parts
            if run.kind == pb.Run.ZERO:
                assert not run.hashes
                parts[run.offset] = bytes(run.length)
                continue
            raw = self._files[run.stripe][run.file_offset : run.file_offset + run.length]
            assert len(raw) == run.length, "the file ends before the run"
            assert len(run.hashes) == chunk_count(run.length) * HASH_SIZE
            for i, right in enumerate(hashes_of(raw)):
                same = run.hashes[i * HASH_SIZE : (i + 1) * HASH_SIZE] == right
                assert same != (run.offset + i * CHUNK in believed), f"hash at {run.offset + i * CHUNK} of {key[1]}"
                assert any(raw[i * CHUNK : (i + 1) * CHUNK]) or not same, "zeros were stored"
            parts[run.offset] = raw
        end = 0
        for offset in sorted(parts):
            assert offset == end, f"block {key[1]} has a hole or an overlap at {end}"
            end += len(parts[offset])
        assert end == size, f"block {key[1]} ends at {end}"
        return b"".join(parts[offset] for offset in sorted(parts))

    def nothing_else(self, keys: Sequence[BlockKey]) -> None:
        """No other blocks, and no bytes in the files that are in no run; none twice."""
        assert {run.block for run in self._runs} == set(keys)
        data = [run for run in self._runs if run.kind == pb.Run.DATA]
        assert self._writer.bytes_written == sum(run.length for run in data)
        assert self._writer.bytes_zero == sum(run.length for run in self._runs) - self._writer.bytes_written
        for s, file in zip(stripes_of(self._writer), self._files, strict=True):
            end = 0
            for run in sorted((run for run in data if run.stripe == s.index), key=lambda run: run.file_offset):
                assert run.file_offset == end, f"hole or overlap in stripe {s.index}"
                end = align_up(run.file_offset + run.length)
            assert end == s.end == len(file)


class Given:
    """A source of pieces (and, with ``None``, moments when there is none) that writes down what happens."""

    def __init__(
        self, pieces: Sequence[Piece | None], table: ChunkTable | None = None, flag: Flag | None = None
    ) -> None:
        self._left = list(pieces)
        self._table = table
        self._lock = threading.Lock()
        self.table = table.address if table else 0
        self.changing = flag.address if flag else 0
        self.saved: list[Piece] = []
        self.blamed: list[tuple[Piece, int, bytes]] = []

    def take(self) -> Piece | None:
        with self._lock:
            if not self._left:
                return None
            piece = self._left.pop(0)
        if piece is None:
            raise NothingYet(0.001)
        return piece

    def landed(self, piece: Piece) -> None:
        if self._table is not None:
            for i in range(chunk_count(piece.size)):
                assert self._table.state(piece.chunk + i) == SAVED
        self.saved.append(piece)

    def changed(self, piece: Piece, number: int, data: memoryview) -> Exception:
        self.blamed.append((piece, number, bytes(data[: piece.size])))
        return Blamed(piece.chunk + number)


class Blamed(Exception):
    """What a source or a check says of data that is not what it should be."""


def fails(kind: type[BaseException], action: Callable[[], object], *texts: str) -> BaseException:
    """The failure of something that must fail so."""
    caught: BaseException | None = None
    try:
        action()
    except kind as error:
        caught = error
    assert caught is not None, f"{kind.__name__} was to be raised"
    for text in texts:
        assert text in str(caught), f"{text!r} is not in {caught!r}"
    return caught


# ------------------------------------------------------------------------------------------------------------- saving

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
            assert not sink.taken
        assert error.args == (bad,)
        assert source.blamed == [(pieces[number], number % 2, bytes(memory[number * size : (number + 1) * size]))]
        assert not source.saved
        assert not any(s.runs for s in stripes_of(writer))
        assert table.state(bad) == SAVED
        memory[:] = machine.content[block.key]
        machine.drain(Given(pieces, table, flag), writer)
        assert Stored(writer).block(block.key, block.size) == machine.content[block.key]
    table.close()
    machine.saves_still(folder / "next")


def save_not_compared(folder: Path, why: str) -> None:
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


# ------------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Item:
    """Where a load's data comes from, and what it is."""

    kind: str
    """file, host or read."""
    at: int
    """The offset in the file, or the address."""
    data: bytes
    hashes: Sequence[bytes]


class Store:
    """Contents in a file and in page-locked memory."""

    def __init__(self, folder: Path, room: int) -> None:
        self.descriptor = os.open(folder / "contents", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._end = 4096
        driver.context(0).use()
        self._pinned = driver.PinnedBuffer(room)
        self._used = 0
        self.reads = 0
        self.descriptors: dict[int, int] = {}
        """By offset in the file: another descriptor than the file's."""
        self.raised: tuple[Item, Exception] | None = None
        """What cannot be read, and what reading it fails with."""

    def put(self, kind: str, data: bytes) -> Item:
        hashes = hashes_of(data)
        if kind == "host":
            at, self._used = self._pinned.address + self._used, self._used + len(data)
            assert self._used <= self._pinned.size
            ctypes.memmove(at, data, len(data))
            return Item(kind, at, data, hashes)
        at, self._end = self._end, self._end + len(data) + 4096
        os.pwrite(self.descriptor, data, at)
        return Item(kind, at, data, hashes)

    def read(self, item: Item, view: memoryview) -> None:
        self.reads += 1
        assert len(view) == len(item.data)
        if self.raised is not None and self.raised[0] is item:
            raise self.raised[1]
        view[:] = item.data

    def lies_at(self, item: Item) -> int | None:
        return item.at if item.kind == "host" else None

    def file_of(self, item: Item) -> tuple[int, int] | None:
        return (self.descriptors.get(item.at, self.descriptor), item.at) if item.kind == "file" else None


class Check:
    """Hashes what has arrived, in GPU memory, and compares."""

    def __init__(self, machine: Machine, undo: ExitStack, chunks: int = 4) -> None:
        self._room_bytes = chunks * HASH_SIZE
        size = driver.GRANULARITY
        assert UNDER_WAY * machine.copier.threads * self._room_bytes <= size
        self._kernels = [machine.copier.hasher.kernel(device) for device in range(machine.gpus)]
        self._sums = []
        for device in range(machine.gpus):
            driver.context(device).use()
            self._sums.append(undo.enter_context(driver.scratch(driver.context(device), size)).address)
        self._host = driver.PinnedBuffer(size)
        undo.callback(self._host.free)
        self._lock = threading.Lock()
        self._rooms: dict[int, Load[Item]] = {}
        self.ended = 0

    def room(self, number: int, load: Load[Item]) -> HashRoom:
        assert load.content is not None
        with self._lock:
            assert number not in self._rooms, "the room is another load's still"
            self._rooms[number] = load
        at, size = number * self._room_bytes, len(load.content.hashes) * HASH_SIZE
        assert size <= self._room_bytes
        grid = load.size // SPAN_BYTES
        kernel = self._kernels[load.device].handle
        return HashRoom(kernel, grid, THREADS, CHUNK, self._sums[load.device] + at, self._host.address + at, size)

    def end(self, number: int, load: Load[Item]) -> None:
        assert load.content is not None
        with self._lock:
            assert self._rooms.pop(number) is load
            self.ended += 1
        at = number * self._room_bytes
        wanted = b"".join(load.content.hashes)
        if self._host.view[at : at + len(wanted)] != wanted:
            raise Blamed(load.address)

    def forget(self) -> None:
        """What a job that failed had under way."""
        self._rooms.clear()


@contextmanager
def reading_of(machine: Machine, store: Store, check: bool) -> Iterator[Reading[Item]]:
    with ExitStack() as undo:
        yield Reading(store.read, store.lies_at, store.file_of, Check(machine, undo) if check else None)


class Loads:
    """A source of loads that looks at the memory when one is said to have arrived."""

    def __init__(self, loads: Sequence[Load[Item] | None], held: Path | None = None) -> None:
        self._left = list(loads)
        self._held = held
        self._lock = threading.Lock()
        self.taken: dict[int, list[int]] = {}
        self.arrivals: dict[int, list[int]] = {}
        """Numbers of loads, by thread."""
        self._numbers = {id(load): number for number, load in enumerate(loads)}

    def take(self) -> Load[Item] | None:
        with self._lock:
            if not self._left:
                return None
            load = self._left.pop(0)
            if load is not None:
                self.taken.setdefault(threading.get_ident(), []).append(self._numbers[id(load)])
        if load is None:
            raise NothingYet
        return load

    def arrived(self, load: Load[Item]) -> None:
        assert self._held is None or not self._held.exists(), "it cannot have landed"
        data = bytes(load.size) if load.content is None else load.content.data
        assert ctypes.string_at(load.address, load.size) == data, f"load {self._numbers[id(load)]} is not there"
        with self._lock:
            self.arrivals.setdefault(threading.get_ident(), []).append(self._numbers[id(load)])

    def count(self) -> int:
        with self._lock:
            return sum(map(len, self.arrivals.values()))


def fill(machine: Machine, loads: Loads, reading: Reading[Item]) -> Progress:
    progress = machine.progress()
    machine.copier.fill(loads, 0, reading, progress, threading.Event())
    return progress


def loads_of(machine: Machine, store: Store, kinds: Sequence[str], seed: int = 100) -> list[Load[Item]]:
    """A load for each kind, into memory that holds something else; "zeros" has no content. Sizes differ."""
    loads = []
    for i, kind in enumerate(kinds):
        size = (CHUNK, HALF, CHUNK - SPAN_BYTES, CHUNK)[i % 4]
        if kind == "host" and i % 3 == 0:
            size = 3 * CHUNK + HALF  # needs no slot
        block = machine.block(noise(seed + 1000 + i, -(-size // HALF) * HALF))
        item = None if kind == "zeros" else store.put(kind, noise(seed + i, size))
        loads.append(Load(machine.address(block), size, block.device, item))
    return loads


def loads_still(machine: Machine, store: Store, reading: Reading[Item]) -> None:
    """Another job of the same copier is right, whatever became of the last one."""
    if isinstance(reading.check, Check):
        reading.check.forget()
    store.descriptors, store.raised = {}, None
    loads = Loads(loads_of(machine, store, ["file", "zeros", "read", "file", "host", "file"], seed=300))
    fill(machine, loads, reading)
    assert loads.count() == 6


MIXED = [
    "file",
    "file",
    "zeros",
    "host",
    "file",
    "read",
    "file",
    "read",
    "read",
    "host",
    "zeros",
    "file",
    "file",
    "host",
]


def load_all(folder: Path, kinds: str, check: bool, threads: int) -> None:
    """Everything gets where it belongs, and is said to have arrived once, then, in the order of each worker."""
    machine = Machine(threads)
    store = Store(folder, 40 * CHUNK)
    with reading_of(machine, store, check) as reading:
        which = MIXED if kinds == "mixed" else [kinds] * 9
        for turn in range(2):  # the second finds the lanes as the first has left them
            made = loads_of(machine, store, which, seed=turn * 100)
            loads = Loads(made)
            progress = fill(machine, loads, reading)
            assert progress.done == sum(load.size for load in made)
            assert loads.arrivals == loads.taken
            assert sorted(n for each in loads.arrivals.values() for n in each) == list(range(len(which)))
            for load in made:  # nothing behind it has been touched
                address = load.address + load.size
                spare = -load.size % HALF
                block = next(b for b in machine.content if machine.mapped[b].address == load.address)
                assert ctypes.string_at(address, spare) == machine.content[block][load.size : load.size + spare]
        if check:
            assert isinstance(reading.check, Check)
            assert reading.check.ended == 2 * sum(kind != "zeros" for kind in which)
        through = ["read"] if check else ["read", "file"]
        assert store.reads == 2 * sum(kind in through for kind in which)


def load_blocks(folder: Path) -> None:
    """Extents of blocks."""
    machine = Machine(2)
    store = Store(folder, 8 * CHUNK)
    blocks = machine.blocks(["xx" * 3, "x", "xxxx"])
    extents: list[tuple[Block, int, int, Item | None]] = []
    expected: dict[BlockKey, bytes] = {}
    for number, block in enumerate(blocks):
        data = b""
        for offset in range(0, block.size, CHUNK):
            size = min(CHUNK, block.size - offset)
            zeros = (number + offset // CHUNK) % 3 == 1
            part = bytes(size) if zeros else noise(500 + number * 10 + offset // CHUNK, size)
            extents.append((block, offset, size, None if zeros else store.put("file" if offset else "read", part)))
            data += part
        expected[block.key] = data
    with reading_of(machine, store, True) as reading:
        mapped, progress = MappedBlocks(), machine.progress()
        machine.copier.load(blocks, iter(extents), reading, progress, threading.Event(), mapped)
        assert progress.done == sum(block.size for block in blocks)
        assert all(block.key in mapped for block in blocks)
        mapped.close()
    for block in blocks:
        assert machine.memory(block) == expected[block.key]


def load_wrong(folder: Path, kind: str) -> None:
    """What has arrived other than it should be ends the job, and does not count as arrived."""
    machine = Machine(1)
    store = Store(folder, 16 * CHUNK)
    with reading_of(machine, store, True) as reading:
        made = loads_of(machine, store, ["file", "zeros", kind, "file", "file"])
        item = made[2].content
        assert item is not None
        wrong = Item(
            kind, item.at, item.data, [bytes([*item.hashes[0][:15], item.hashes[0][15] ^ 1]), *item.hashes[1:]]
        )
        made[2] = Load(made[2].address, made[2].size, made[2].device, wrong)
        loads = Loads(made)
        error = fails(Blamed, lambda: fill(machine, loads, reading))
        assert error.args == (made[2].address,)
        assert list(loads.arrivals.values()) == [[0, 1]]
        loads_still(machine, store, reading)


def load_urgent(folder: Path) -> None:
    """What somebody waits for arrives before what had been taken already and was held back for it."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, 8 * CHUNK)
    made: list[Load[Item] | None] = []
    for i, load in enumerate(loads_of(machine, store, ["file", "read", "file", "zeros", "host"] * 2)):
        made.append(Load(load.address, load.size, load.device, load.content, urgent=i in (2, 3, 6, 9)))
    made.insert(5, None)  # nothing yet; numbers from here on are one higher
    with reading_of(machine, store, True) as reading:
        loads = Loads(made)
        fill(machine, loads, reading)
        assert list(loads.arrivals.values()) == [[2, 3, 0, 1, 4, 7, 10, 6, 8, 9]], loads.arrivals


def load_held(folder: Path, urgent: bool) -> None:
    """Nothing has arrived as long as no copy to the GPU ends."""
    machine = Machine(2)
    held = Path(os.environ["SOFTGPU_COPY_HOLD"])
    store = Store(folder, 16 * CHUNK)
    made = loads_of(machine, store, ["file", "read", "host", "file", "file", "host", "file", "zeros"])
    if urgent:
        made = [Load(m.address, m.size, m.device, m.content, urgent=True) for m in made]
    with reading_of(machine, store, True) as reading:
        loads = Loads(made, held)
        held.touch()
        thread, failures = started(lambda: fill(machine, loads, reading))
        time.sleep(0.3)
        assert thread.is_alive()
        assert loads.count() == 0
        assert 0 < sum(map(len, loads.taken.values())) <= 2 * UNDER_WAY
        held.unlink()
        thread.join(PATIENCE)
        assert not failures, failures
        assert loads.count() == len(made)


def load_slowly(folder: Path, check: bool) -> None:
    """Nothing has arrived before the GPU has had the time for it and all before it."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, 24 * CHUNK)
    kinds = ["file", "file", "host", "file", "file", "read", "file", "host", "file", "file"]
    bandwidth = float(os.environ["SOFTGPU_COPY_BANDWIDTH"])

    class Timed(Loads):
        copied = 0

        def arrived(self, load: Load[Item]) -> None:
            self.copied += load.size
            assert time.monotonic() - began >= self.copied / bandwidth, "it cannot have landed"
            super().arrived(load)

    with reading_of(machine, store, check) as reading:
        made = loads_of(machine, store, kinds)
        began = time.monotonic()
        loads = Timed(made)
        fill(machine, loads, reading)
        assert loads.count() == len(kinds)


def load_failing(folder: Path, why: str, behind: int) -> None:
    """What cannot be read ends the job with the reason; what came before it has landed and counts for nobody later."""
    machine = Machine(1)
    machine.gpus = 1  # so that loads are given to the library together
    store = Store(folder, 16 * CHUNK)
    text = {"short": "a file has ended early", "closed": os.strerror(errno.EBADF)}.get(why, "it is on fire")
    with reading_of(machine, store, why != "unchecked") as reading:
        made = loads_of(machine, store, ["file"] * behind + ["zeros", "file", "file"])
        bad = made[behind + 1].content
        assert bad is not None
        if why == "short":
            store.descriptors[bad.at] = os.open(folder / "short", os.O_RDWR | os.O_CREAT)
            os.ftruncate(store.descriptors[bad.at], bad.at + len(bad.data) - 1)
        else:
            store.descriptors[bad.at] = 9999
        if why in ("reader", "unchecked"):
            store.raised = bad, ImageError(text)
        loads = Loads(made)
        error = fails(ImageError if store.raised else OSError, lambda: fill(machine, loads, reading), text)
        assert isinstance(error, ImageError) or error.args[0] == (0 if why == "short" else errno.EBADF)
        assert loads.count() <= behind + 1
        loads_still(machine, store, reading)
    machine.saves_still(folder / "next")


def load_between_slots(folder: Path) -> None:
    """What is read by Python into a slot stays there until the GPU has it, whatever comes from files next."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, CHUNK)
    kinds = ["zeros", "read", "file", "file"]
    made = loads_of(machine, store, kinds)
    with reading_of(machine, store, True) as reading:
        for _ in range(6):
            for load in made:
                ctypes.memset(load.address, 0x5A, load.size)
            loads = Loads(made)
            fill(machine, loads, reading)
            assert list(loads.arrivals.values()) == [[0, 1, 2, 3]]


# -------------------------------------------------------------------------------------------------------------- both


def started(action: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread, and what it fails with."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures


def cancelled(folder: Path) -> None:
    """A job that is given up ends so; the next one is right."""
    machine = Machine(2)
    store = Store(folder, 16 * CHUNK)
    blocks = machine.blocks(["xx" * 8] * 2)
    event = threading.Event()

    class Stopping(Given):
        def landed(self, piece: Piece) -> None:
            super().landed(piece)
            event.set()

    class StoppingLoads(Loads):
        def arrived(self, load: Load[Item]) -> None:
            super().arrived(load)
            event.set()

    pieces = [machine.piece(block, at * CHUNK) for block in blocks for at in range(8)]
    with writer_in(folder / "image", 2) as writer:
        source = Stopping(pieces)
        fails(Cancelled, lambda: machine.copier.drain(source, 0, writer, machine.progress(), event))
        assert 0 < len(source.saved) < len(pieces)
        fails(Cancelled, lambda: machine.copier.save(blocks, writer, machine.progress(), event, machine.mapped))
    machine.saves_still(folder / "next")
    event.clear()
    with reading_of(machine, store, True) as reading:
        loads = StoppingLoads(loads_of(machine, store, ["file"] * 24))
        fails(Cancelled, lambda: machine.copier.fill(loads, 0, reading, machine.progress(), event))
        assert 0 < loads.count() < 24
        loads_still(machine, store, reading)
    event.clear()
    waiting = Given([None] * 1_000_000)
    with writer_in(folder / "more", 2) as writer:
        thread, failures = started(lambda: machine.copier.drain(waiting, 0, writer, machine.progress(), event))
        time.sleep(0.05)
        assert thread.is_alive()
        event.set()
        thread.join(PATIENCE)
        assert [type(failure) for failure in failures] == [Cancelled]
    machine.saves_still(folder / "last")


def both_ways(folder: Path) -> None:
    """One saves while the other loads, with the same workers."""
    machine = Machine(3)
    store = Store(folder, 16 * CHUNK)
    blocks = machine.blocks(["xx" * 5, "xx00xxx", "x"] * 2)
    with reading_of(machine, store, True) as reading, writer_in(folder / "image") as writer:
        made = loads_of(machine, store, MIXED)
        loads = Loads(made)
        both = threading.Barrier(2)

        def save() -> None:
            both.wait(PATIENCE)
            machine.save(blocks, writer)

        def load() -> None:
            both.wait(PATIENCE)
            fill(machine, loads, reading)

        (saving, failures), (loading, more) = started(save), started(load)
        for thread in (saving, loading):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert not failures + more, failures + more
        machine.compare(writer, blocks)
        assert loads.count() == len(made)


def first_use(folder: Path, slow: bool) -> None:
    """All workers begin at once, in a process that has copied nothing yet."""
    workers = 6
    machine = Machine(workers)
    blocks = machine.blocks(["xx"] * workers * 2)
    if slow:  # so that every worker asks for the entry points before the first has them
        entry_points = driver.entry_points

        def slowly(symbols: Sequence[str]) -> list[int]:
            time.sleep(0.1)
            return entry_points(symbols)

        driver.entry_points = slowly
    together = threading.Barrier(workers)
    local = threading.local()

    class Together(Given):
        def take(self) -> Piece | None:
            if not hasattr(local, "met"):
                local.met = True
                together.wait(PATIENCE)
            return super().take()

    with writer_in(folder / "image", workers) as writer:
        machine.drain(Together([machine.piece(block, urgent=True) for block in blocks]), writer)
        machine.compare(writer, blocks)
        # Memory that was given back by mistake is used again.
        kept = [(ctypes.c_uint64 * size)(*[1] * size) for size in (6, 7, 8) for _ in range(1000)]
        again = machine.blocks(["xx"] * workers)
        machine.save(again, writer)
        machine.compare(writer, blocks + again)
        assert len(kept) == 3000


def main() -> None:
    name, folder, *cases = sys.argv[1:]
    play: Callable[..., None] = globals()[name]
    for number, case in enumerate(cases):
        place = Path(folder) / str(number)
        place.mkdir()
        try:
            play(place, *json.loads(case))
        except BaseException:
            print(f"{name}, {case}:", file=sys.stderr)
            raise
    print("RIGHT")


if __name__ == "__main__":
    main()
