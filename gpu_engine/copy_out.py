"""Copying GPU memory out: one worker's part of a job."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

from phos.gpu_engine.batches import Batches
from phos.gpu_engine.content_hash import chunk_count
from phos.gpu_engine.copy_lane import APPENDING, CopyFailed, NativeLane
from phos.gpu_engine.copy_loop import SaveJob, packed_save, save
from phos.gpu_engine.copy_trace import PLACE, SHADOW, ZEROS, CopyTrace
from phos.gpu_engine.copy_work import NothingYet, Piece, Sink, Source
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash
from phos.images.formats import HASH_SIZE

PIECES_AT_ONCE = 4
"""How many pieces are given to the library by one call. A process that is about to write to one waits for those before
it."""


class Batch:
    """Pieces as the library wants them, and the memory where it finds and puts their hashes and places."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
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
        for piece, count, start in zip(pieces, self._counts, starts, strict=True):
            self.packed.append(
                packed_save(
                    piece.address,
                    piece.size,
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


def kind_of(piece: Piece) -> str:
    """As a trace calls it."""
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
        trace: CopyTrace | None = None,
    ) -> None:
        """``number``: the worker's; ``lane``: its lane on a GPU, which makes that GPU's context current.

        ``saved`` is told how many bytes are in the image, ``trace`` when.
        """
        self._number = number
        self._slots = slots
        self._lane_on = lane
        self._source = source
        self._sink = sink
        self._saved = saved
        self._trace = trace

    def run(self, take: Callable[[], Piece | None]) -> None:
        """Save what ``take`` gives, until it gives None.

        Raises: what ``take``, the source, the sink and the driver raise; a copy may be under way then.
        """
        batches = Batches(take, PIECES_AT_ONCE)
        while not batches.over:
            asked = time.perf_counter()
            try:
                pieces = batches.following()
            except NothingYet as later:
                time.sleep(later.seconds)
                continue
            if pieces:
                taken = time.perf_counter()
                landed = self._save(pieces)
                if self._trace is not None:
                    copied = [(p.size, kind_of(p), p.urgent) for p in pieces]
                    self._trace.add(self._number, asked, taken, landed, copied)

    def _save(self, pieces: Sequence[Piece]) -> float:
        """When the last of them was in host memory, by time.perf_counter()."""
        for piece in pieces:
            if piece.address and piece.size > len(self._slots[0][1]):
                raise ValueError(f"a piece of {piece.size} bytes, and a slot has {len(self._slots[0][1])}")
        lane = self._lane_on(pieces[0].device)
        batch = Batch(pieces)
        with self._sink.appending(self._number) as stripe:
            job = SaveJob(
                ctypes.pointer(stripe.state), self._source.table, self._source.changing, zero_hash(CHUNK_BYTES)
            )
            try:
                save(lane, job, batch.packed)
            except CopyFailed as failed:
                if failed.call == APPENDING:
                    raise stripe.failure(failed.code) from None
                data = self._slots[failed.number % len(self._slots)][1]
                raise self._source.changed(pieces[failed.number], failed.code, data) from None
            for number, piece in enumerate(pieces):
                stripe.record(piece.key, piece.offset, piece.size, *batch.appended(number))
        for piece in pieces:
            self._source.landed(piece)
            self._saved(piece.size)
        return float(job.landed_ns * 1e-9)
