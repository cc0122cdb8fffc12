"""What the rounds of copy_rounds.py have in common: a copier on the software GPU, and what it is to copy."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.content_hash import chunk_count
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_placed import PlacedSave
from phos.gpu_engine.copy_work import NothingYet, Piece, Progress
from phos.gpu_engine.cow.chunk_table import SAVED, ChunkTable
from phos.gpu_engine.installation import load_driver
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.gpu_engine.save_places import SavePlace, places_of
from phos.gpu_engine.save_plan import SavePlan
from phos.images.chunk_hash import chunk_hash
from phos.images.formats import HASH_SIZE, align_up
from phos.images.mapping import view_of
from phos.images.stripe import Stripe
from phos.images.writer import ImageWriter

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

    def places(self, blocks: Sequence[Block]) -> list[SavePlace]:
        """Every chunk of some blocks."""
        return list(places_of(blocks, self.mapped))

    def save_placed(self, plan: SavePlan, sink: Any, changed: Any = None) -> None:
        """A job that copies all of a plan into a sink's memory."""
        placed, progress = PlacedSave(plan, sink, changed), self.progress()
        self.copier.save_placed(placed, sink, progress, threading.Event())
        assert plan.landed == sum(place.size for place in plan.places)
        self.copier.settle_placed(placed, progress, threading.Event())
        assert progress.done == plan.landed

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


class Flag:
    """A 32-bit word that native code looks at."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._word)

    def set(self) -> None:
        self._word.value = 1


class Given:
    """A source of pieces (and, with ``None``, moments when there is none) that writes down what happens."""

    def __init__(
        self,
        pieces: Sequence[Piece | None],
        table: ChunkTable | None = None,
        flag: Flag | None = None,
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
