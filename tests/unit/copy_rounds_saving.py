"""Rounds of copy_rounds.py that copy GPU memory into an image."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phos.gpu_engine.copy_work import Piece
from phos.gpu_engine.cow.chunk_table import SAVED, UNSAVED, ChunkTable
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.images.chunk_hash import zero_hash
from phos.images.errors import ImageError
from phos.images.formats import HASH_SIZE
from phos.images.stripe import Stripe
from phos.images.writer import ImageWriter
from tests.unit.copy_machine import (
    HALF,
    Blamed,
    Flag,
    Given,
    Machine,
    Stored,
    fails,
    hashes_of,
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

    def __init__(self, writer: ImageWriter, events: list[Any]) -> None:
        self._writer = writer
        self._events = events

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


def save_changed(folder: Path, number: int) -> None:
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
        error = fails(Blamed, lambda: machine.drain(source, writer))
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


def save_too_large(folder: Path) -> None:
    """A piece that is larger than a slot, or has not as many hashes as chunks."""
    machine = Machine(1)
    (block,) = machine.blocks(["xx" * 3])
    with writer_in(folder / "image", 1) as writer:
        text = f"a piece of {3 * CHUNK} bytes"
        fails(ValueError, lambda: machine.drain(Given([machine.piece(block, 0, 3 * CHUNK)]), writer), text)
        short = machine.piece(block, hashes=[bytes(16)] * 2)
        fails(ValueError, lambda: machine.drain(Given([short]), writer), "1 chunks has 2 hashes")
    machine.saves_still(folder / "next")
