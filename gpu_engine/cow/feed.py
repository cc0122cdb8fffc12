"""What is saved next, during a window: first what an application waits for or has copied aside."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.content_hash import chunk_count
from phos.gpu_engine.copy_check import PlacedPieces
from phos.gpu_engine.copy_loop import Permits, Turns
from phos.gpu_engine.copy_work import NothingYet, Piece
from phos.gpu_engine.cow.chunk_table import SAVED, SHADOWED, UNSAVED, ChunkTable, ClaimOrder, Flag
from phos.gpu_engine.cow.shadows import Shadows, Window
from phos.gpu_engine.errors import Mispredicted
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash

STEP_ASIDE_SECONDS = 0.01
"""So long phosd's copies wait for the application's at a stretch."""

STEP_ASIDE_PAUSE = 0.1
"""So long they then go all the same: a transfer that is queued behind a long kernel is in nobody's way."""

STALL_WORKERS = 4
"""So many workers copy while the processes stand still. More of them save more by then, but CRIU and the driver, which
the processes wait for, go slower for it."""

PLACING_WORKERS = 6
"""And where the GPU writes into the image itself."""

BATCHES_UNDER_WAY = 6
"""So many batches of pieces each GPU is given at once where it writes into the image itself. What somebody waits for
comes behind them. Four keep its copy engine busy as long as no worker waits for anything; but when one wants the
interpreter lock and sleeps, a virtual machine takes half a millisecond to wake it."""


TURN_BYTES = 2 << 20
"""So much of them is copied at a time while processes are brought back."""


class Place(NamedTuple):
    """Where a chunk is: ``size`` bytes at ``offset`` of a block, at a device address of phosd's."""

    key: BlockKey
    offset: int
    size: int
    address: int
    device: int


def _changed(places: Sequence[Place], piece: Piece, number: int, _: memoryview) -> Mispredicted:
    place = places[piece.chunk + number]
    return Mispredicted(
        f"GPU memory changed before it was saved (block {place.key[1]}, {place.size} bytes at {place.offset}): "
        "a kernel wrote where no guess said it would."
    )


class ChunkFeed:
    """A :class:`~phos.gpu_engine.copy_work.Source` over the chunks of a checkpoint.

    A chunk comes from where its content of *t1* is: from the original, which nobody writes to before it is marked as
    saved, or from a shadow slot once the GPU has made that copy.
    """

    def __init__(
        self,
        table: ChunkTable,
        places: Sequence[Place],
        order: Sequence[int],
        windows: Sequence[Window],
        expected: Sequence[bytes] | None,
        *,
        prioritise: bool,
        at_once: int = CHUNK_BYTES,
        placed: bool = False,
    ) -> None:
        """``order`` has every chunk once; ``expected``: content hashes at *t1*, or None for no validation.

        ``at_once``: neighbours that nobody waits for may be taken together, up to so many bytes. ``placed``: the GPU
        writes into the image itself.
        """
        self._table = table
        self.places = places
        self._order = ClaimOrder(order)
        self._windows = windows
        self.shadows = Shadows(table, windows)
        """To be followed while pieces are taken."""
        self._expected = expected
        self._prioritise = prioritise and bool(windows)
        self._at_once = at_once
        self._placed = placed
        self._permits = Permits(BATCHES_UNDER_WAY * len({place.device for place in places})) if placed else None
        self.permits = self._permits.address if self._permits else 0
        self.permitted = at_once
        self._turns = {device: Turns() for device in {place.device for place in places}}
        self._may_change = Flag()
        self._runs_on = threading.Event()
        self.table = table.address
        self.changing = self._may_change.address if expected is not None else 0
        self.checks = PlacedPieces(partial(_changed, places)) if expected is not None else None
        self._lock = threading.Lock()  # guards all below
        self._given = bytearray(len(places))
        self._given_count = 0
        self._aside_since = 0.0
        self._aside_again = 0.0

    def workers(self) -> int | None:
        """How many may copy now; None: all."""
        if self._runs_on.is_set():
            return None
        return PLACING_WORKERS if self._placed else STALL_WORKERS

    def take(self) -> Piece | None:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        with self._lock:
            if self._given_count == len(self.places):
                return None
            if self._prioritise and self._step_aside():
                raise NothingYet
            piece = self._wanted() or self._shadowed() or self._any()
            if piece is None:
                raise NothingYet
            return piece

    def turns(self, device: int) -> int:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        turns = self._turns.get(device)
        return turns.address if turns is not None else 0

    def in_turns(self) -> int:
        """How many pieces were copied while processes were brought back."""
        return sum(turns.taken for turns in self._turns.values())

    def bringing_back(self) -> None:
        """Until all run on, copies take turns: the driver and those that map memory need the copy engines as well."""
        for turns in self._turns.values():
            turns.begin(TURN_BYTES)

    def may_change(self) -> None:
        """A process is about to get its memory. Until the first has, what is saved need not be compared."""
        self._may_change.set()

    def runs_on(self) -> None:
        """No process waits any more for what goes on beside the copies: they may take what they can get."""
        for turns in self._turns.values():
            turns.end()
        self._runs_on.set()

    def landed(self, piece: Piece) -> None:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        if piece.slot >= 0:
            process, slot = divmod(piece.slot, SHADOWED)
            self._windows[process].table.free_slot(slot)

    def changed(self, piece: Piece, number: int, data: memoryview) -> Mispredicted:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        return _changed(self.places, piece, number, data)

    def _give(self, chunk: int, address: int, slot: int = -1, device: int = -1) -> Piece:
        self._given[chunk] = 1
        self._given_count += 1
        place = self.places[chunk]
        if self._was_zeros(chunk):
            address = 0  # what it was is known, whatever it has become
        hashes = None if self._expected is None else self._expected[chunk : chunk + 1]
        device = device if slot >= 0 else place.device
        return Piece(place.key, place.offset, place.size, address, device, chunk, slot, hashes)

    def _was_zeros(self, chunk: int) -> bool:
        return self._expected is not None and self._expected[chunk] == zero_hash(self.places[chunk].size)

    def _joined(self, chunk: int) -> Piece:
        """A chunk of ours, with those behind it that nobody has taken yet."""
        piece = self._give(chunk, self.places[chunk].address)
        size = piece.size
        while piece.address and size + CHUNK_BYTES <= self._at_once:
            chunk += 1
            if (
                chunk == len(self.places)
                or self.places[chunk].key != piece.key
                or self.places[chunk].offset != piece.offset + size
                or self._given[chunk]
                or self._was_zeros(chunk)
                or self._table.claim(chunk) != UNSAVED
            ):
                break
            size += self._give(chunk, self.places[chunk].address).size
        if size == piece.size:
            return piece
        hashes = None if self._expected is None else self._expected[piece.chunk : piece.chunk + chunk_count(size)]
        return replace(piece, size=size, hashes=hashes)

    def _wanted(self) -> Piece | None:
        """From the processes' queues."""
        for window in self._windows:
            while (chunk := window.table.next_wanted()) is not None:
                if not 0 <= chunk < len(self.places):
                    continue
                if self._given[chunk]:
                    continue
                if self._table.claim(chunk) == UNSAVED:
                    return replace(self._joined(chunk), urgent=True)  # who writes to one soon writes to the next
                if not self._given[chunk]:
                    self.shadows.owe(chunk)
        return None

    def _shadowed(self) -> Piece | None:
        """A chunk that a process has taken, if one can be had now."""
        while (made := self.shadows.next_made()) is not None:
            if self._given[made.chunk]:
                continue
            if made.slot < 0:
                return self._give(made.chunk, self.places[made.chunk].address)
            return self._give(made.chunk, made.address, made.slot, made.device)
        return None

    def _any(self) -> Piece | None:
        chunk = self._table.claim_next(self._order)
        if chunk is not None:
            return self._joined(chunk)
        if not self.shadows.waiting:
            # What is left was taken by processes; a queue that was full says nothing of it.
            for chunk in range(len(self.places)):
                if not self._given[chunk]:
                    self.shadows.owe(chunk)
        return None

    def _step_aside(self) -> bool:
        """Whether the application's transfers go first now."""
        now = time.perf_counter()
        if now < self._aside_again:
            return False
        if not self.shadows.transferring():
            self._aside_since = 0.0
            return False
        if not self._aside_since:
            self._aside_since = now
        if now - self._aside_since > STEP_ASIDE_SECONDS:
            self._aside_since = 0.0
            self._aside_again = now + STEP_ASIDE_PAUSE
            return False
        return True

    def unsaved(self) -> int:
        """How many chunks are not saved."""
        return sum(self._table.state(chunk) != SAVED for chunk in range(len(self.places)))
