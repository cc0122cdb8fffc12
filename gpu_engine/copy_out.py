"""Copying GPU memory out: one worker's part of a job."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from phos.gpu_engine.batches import Batches
from phos.gpu_engine.content_hash import chunk_count
from phos.gpu_engine.copy_lane import APPENDING, CopyFailed, NativeLane
from phos.gpu_engine.copy_loop import SaveJob, give_permit, packed_save, save, take_permit, try_permit
from phos.gpu_engine.copy_trace import PLACE, SHADOW, ZEROS, CopyTrace
from phos.gpu_engine.copy_work import Checks, NothingYet, Piece, Sink, Source
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash
from phos.images.formats import HASH_SIZE
from phos.images.writer import Place

PIECES_AT_ONCE = 4
"""How many pieces are given to the library by one call. A process that is about to write to one waits for those before
it."""


class Batch:
    """Pieces as the library wants them, and the memory where it finds and puts their hashes and places."""

    def __init__(self, pieces: Sequence[Piece], rooms: Sequence[Place | None]) -> None:
        """``rooms``: where the pieces are to go, in the order of the pieces; None: they are appended."""
        self._counts = [chunk_count(piece.size) for piece in pieces]
        raw = bytearray()
        starts: list[int] = []
        for piece, count in zip(pieces, self._counts, strict=True):
            starts.append(len(raw))
            raw += b"".join(piece.hashes) if piece.hashes is not None else bytes(count * HASH_SIZE)
            if len(raw) != starts[-1] + count * HASH_SIZE:
                raise ValueError(f"a piece of {count} chunks has {len(piece.hashes or ())} hashes")
            raw += zero_hash((piece.size - 1) % CHUNK_BYTES + 1)
        self._starts = starts
        self._hashes: Any = (ctypes.c_char * len(raw)).from_buffer(raw)
        self._places: Any = (ctypes.c_uint64 * sum(self._counts))()
        hashes, places = ctypes.addressof(self._hashes), ctypes.addressof(self._places)
        self.packed: list[bytes] = []
        first = 0
        for piece, count, start, room in zip(pieces, self._counts, starts, rooms, strict=True):
            self.packed.append(
                packed_save(
                    piece.address,
                    piece.size,
                    place=room.address if room else 0,
                    hashes=hashes + start,
                    places=places + first * ctypes.sizeof(ctypes.c_uint64),
                    zero_tail=hashes + start + count * HASH_SIZE,
                    known=piece.hashes is not None,
                    chunk=max(0, piece.chunk),
                )
            )
            first += count

    def appended(self, number: int) -> tuple[bytes, list[int]]:
        """The hashes of a piece's chunks, one behind the other, and their places."""
        start, count = self._starts[number], self._counts[number]
        first = sum(self._counts[:number])
        return bytes(self._hashes[start : start + count * HASH_SIZE]), list(self._places[first : first + count])


def check_one(checks: Checks, number: int, trace: CopyTrace | None) -> bool:
    """Have worker ``number`` compare a piece, and tell ``trace`` of it; whether there was one.

    Raises: what the checks raise.
    """
    began = time.perf_counter()
    size = checks.one()
    if size and trace is not None:
        trace.checked(number, began, size)
    return size > 0


def _kind(piece: Piece) -> str:
    return ZEROS if not piece.address else SHADOW if piece.slot >= 0 else PLACE


class Saver:
    """One worker's part of a job that copies GPU memory out."""

    def __init__(
        self,
        number: int,
        slots: Sequence[tuple[int, memoryview]],
        lane: Callable[[int], NativeLane],
        source: Source,
        sink: Sink,
        saved: Callable[[int], None],
        checking: threading.Semaphore,
        trace: CopyTrace | None = None,
    ) -> None:
        """``number``: the worker's; ``lane``: its lane on a GPU, which makes that GPU's context current.

        ``saved`` is told how many bytes are in the image, ``trace`` when. ``checking`` is had by who compares pieces
        while others are copied.
        """
        self._number = number
        self._slots = slots
        self._lane_on = lane
        self._source = source
        self._sink = sink
        self._saved = saved
        self._checking = checking
        self._trace = trace
        self._landed = 0.0
        """When all pieces of the last batch were in host memory, by time.perf_counter(); 0: they are not."""

    def run(self, take: Callable[[], Piece | None]) -> None:
        """Save what ``take`` gives, until it gives None.

        Raises: what ``take``, the source, the sink and the driver raise; a copy may be under way then.
        """
        # A piece that was taken and is in no batch would wait for another permit, and who wants it would wait for that.
        limit = self._source.permitted if self._source.permits else math.inf
        batches = Batches(take, PIECES_AT_ONCE, limit, urgent_alone=not self._source.permits)
        while not batches.over:
            later = self._step(batches)
            if later:
                time.sleep(later)

    def _step(self, batches: Batches[Piece]) -> float:
        """Save a batch, or check a piece meanwhile; if there is neither, the answer is for how many seconds to wait."""
        self._landed = 0.0
        asked = time.perf_counter()
        if not try_permit(self._source.permits):
            if not batches.holds and self._check():
                return 0.0
            take_permit(self._source.permits)
        allowed = time.perf_counter()
        try:
            if pieces := batches.following():
                taken = time.perf_counter()
                self._save(pieces)
                if self._trace is not None:
                    copied = [(p.size, _kind(p), p.urgent) for p in pieces]
                    self._trace.add(self._number, asked, allowed, taken, self._landed, copied)
            return 0.0
        except NothingYet as later:
            wait = later.seconds
        finally:
            if not self._landed:
                give_permit(self._source.permits)
        return 0.0 if self._check() else wait

    def _check(self) -> bool:
        """Whether there was a piece to check, and not enough workers at it."""
        checks = self._source.checks
        if checks is None or not self._checking.acquire(blocking=False):
            return False
        try:
            return check_one(checks, self._number, self._trace)
        finally:
            self._checking.release()

    def _save(self, pieces: Sequence[Piece]) -> None:
        rooms: list[Place | None] = []
        for piece in pieces:
            rooms.append(self._sink.place(piece.size) if piece.address else None)
            if piece.address and rooms[-1] is None and piece.size > len(self._slots[0][1]):
                raise ValueError(f"a piece of {piece.size} bytes has no place, and a slot has {len(self._slots[0][1])}")
        lane = self._lane_on(pieces[0].device)
        batch = Batch(pieces, rooms)
        with self._sink.appending(self._number) as stripe:
            job = SaveJob(
                ctypes.pointer(stripe.state),
                self._source.table,
                self._source.changing,
                zero_hash(CHUNK_BYTES),
                self._source.permits,
                self._source.turns(pieces[0].device),
            )
            try:
                save(lane, job, batch.packed)
            except CopyFailed as failed:
                if failed.call == APPENDING:
                    raise stripe.failure(failed.code) from None
                room = rooms[failed.number]
                data = self._slots[failed.number % len(self._slots)][1] if room is None else room.view
                raise self._source.changed(pieces[failed.number], failed.code, data) from None
            finally:
                self._landed = job.landed_ns * 1e-9
            for number, (piece, room) in enumerate(zip(pieces, rooms, strict=True)):
                if room is None:
                    stripe.record(piece.key, piece.offset, piece.size, *batch.appended(number))
        for piece, room in zip(pieces, rooms, strict=True):
            if room is not None:
                self._sink.write_placed(piece.key, piece.offset, room, piece.hashes)
                if self._may_have_changed() and piece.hashes is not None:
                    assert self._source.checks is not None
                    self._source.checks.add(piece, room.address)
            self._source.landed(piece)
            self._saved(piece.size)

    def _may_have_changed(self) -> bool:
        """Looked at when pieces have come: memory that may change from here on may have done so before."""
        changing = self._source.changing
        return changing != 0 and ctypes.c_uint32.from_address(changing).value != 0
