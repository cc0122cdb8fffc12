"""A feed over real tables, with processes, pools and time played by the test."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Any, ClassVar

from phos.gpu_engine.copy_loop import first_changed
from phos.gpu_engine.copy_work import NothingYet, Piece
from phos.gpu_engine.cow.chunk_table import (
    NO_SLOT,
    POOL_FLAGS,
    SHADOWED,
    TOUCH_WRITES,
    TRANSFERS,
    ChunkTable,
    PoolShape,
    WindowTable,
)
from phos.gpu_engine.cow.feed import ChunkFeed
from phos.gpu_engine.cow.shadow_pool import LentPools
from phos.gpu_engine.cow.shadows import Window
from phos.gpu_engine.save_places import SavePlace
from phos.images.files import address_of

CHUNK = 4 << 20
BASE = 1 << 40
SESSION = bytes(16)
STATES = 64
TAIL, TRANSFERRING, SLOTS_AT, TRANSFERS_AT, QUEUE_AT, ORDER, TOUCHED, ORDER_AT = 40, 44, 64, 72, 80, 156, 160, 168
FAULTED = 1168
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
        self.table = WindowTable(number, [], shapes, queue, prioritise=True, order=queue)
        lent = LentPools(self.pools)  # type: ignore[arg-type]
        self.window = Window(self.table, lent, lambda: self.lives)
        self._tail = self._touched = 0

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

    def touch(self, chunk: int, *, writes: bool) -> None:
        """Say that a chunk is touched for the first time, or written to."""
        self._write(self._read(ORDER_AT) + 4 * self._touched, chunk | (TOUCH_WRITES if writes else 0))
        self._touched += 1
        self._write(TOUCHED, self._touched)

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

    def faulted(self, pool: int) -> None:
        """Its context that copies to the pool has an error, and does nothing more."""
        self._write(FAULTED, 1 << pool)

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
        self.places = [SavePlace((SESSION, 1), i * CHUNK, CHUNK, BASE + i * CHUNK, 0) for i in range(chunks)]
        order = more.pop("order", range(chunks))
        expected = more.pop("expected", None)
        prioritise = more.pop("prioritise", False)
        join_bytes = more.pop("join_bytes", CHUNK)
        windows = [process.window for process in self.processes]
        self.feed = ChunkFeed(
            self.table,
            self.places,
            list(order),
            windows,
            expected,
            prioritise=prioritise,
            join_bytes=join_bytes,
        )
        if not more.pop("still", False):
            self.feed.attaching()
            self.feed.runs_on()

    def take(self) -> Piece | None:
        return self.feed.take()

    def read(self) -> None:
        """What its thread does again and again."""
        self.feed.shadows.read()

    def land(self, piece: Piece, data: bytearray | memoryview | None = None) -> Sequence[bytes] | None:
        """What is done with a piece that has come to host memory."""
        changing = ctypes.c_uint32.from_address(self.feed.changing).value if self.feed.changing else 0
        self.feed.landed(piece)
        if data is not None and piece.address and piece.hashes is not None and changing:
            number = first_changed(address_of(memoryview(data)), piece.size, CHUNK, b"".join(piece.hashes))
            if number >= 0:
                raise self.feed.changed(piece, number, memoryview(data))
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


class Clock:
    """Seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now
