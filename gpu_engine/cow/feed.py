"""What is saved next, during a window: first what an application waits for or has copied aside."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.content_hash import chunk_count
from phos.gpu_engine.copy_work import NothingYet, Piece
from phos.gpu_engine.cow.chunk_table import (
    NO_SLOT,
    SAVED,
    SHADOWED,
    UNSAVED,
    ChunkTable,
    ClaimOrder,
    Flag,
    WindowTable,
)
from phos.gpu_engine.cow.shadow_pool import LentPools
from phos.gpu_engine.errors import Mispredicted
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash

REFRESH_SECONDS = 1e-4
"""The flags of a pool are read at most so often: each time is a copy from the GPU."""

STEP_ASIDE_SECONDS = 0.01
"""So long phosd's copies wait for the application's at a stretch."""

STEP_ASIDE_PAUSE = 0.1
"""So long they then go all the same: a transfer that is queued behind a long kernel is in nobody's way."""

STALL_WORKERS = 4
"""So many workers copy while the processes stand still. More of them save more by then, but CRIU and the driver, which
the processes wait for, go slower for it."""

PLACING_LITTLE = 40_000_000_000
PLACING_WORKERS = (1, 6)
"""And where the GPU writes into the image itself: for up to so many bytes of GPU memory, and for more.

CRIU and the driver wait for the same memory: on an H100 with 29 GB the stall is 0.55 s with one worker and 0.70 s with
six. With 60 GB it is 0.73 s with two and 0.79 s with six, but what is left for the window costs an iteration of 2.0 s
0.46 s then, instead of 0.20 s."""

ALIVE_SECONDS = 0.1
"""How often to look whether a process still runs that owes a copy, or transfers something."""

OWED_AT_ONCE = 32
"""How many chunks that are owed are looked at before another is taken: with one lock for all workers, time is short."""


@dataclass(frozen=True)
class Place:
    """Where a chunk is: ``size`` bytes at ``offset`` of a block, at a device address of phosd's."""

    key: BlockKey
    offset: int
    size: int
    address: int
    device: int


@dataclass
class Window:
    """One process's window, as the feed sees it."""

    table: WindowTable
    pools: LentPools
    alive: Callable[[], bool]


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
        stall_workers: int = STALL_WORKERS,
    ) -> None:
        """``order`` has every chunk once; ``expected``: content hashes at *t1*, or None for no validation.

        ``at_once``: neighbours that nobody waits for may be taken together, up to so many bytes.
        """
        self._table = table
        self.places = places
        self._order = ClaimOrder(order)
        self._windows = windows
        self._expected = expected
        self._prioritise = prioritise and bool(windows)
        self._at_once = at_once
        self._stall_workers = stall_workers
        self.may_change = Flag()
        """Set before the first process may write to its memory again."""
        self.runs_on = threading.Event()
        """Set when no process waits any more for what goes on beside the copies."""
        self.table = table.address
        self.changing = self.may_change.address if expected is not None else 0
        self._lock = threading.Lock()  # guards all below
        self._given = bytearray(len(places))
        self._given_count = 0
        self._owed: deque[int] = deque()  # chunks that a process has taken, whose copy may not have been made yet
        self._refreshed = 0.0
        self._looked = 0.0
        self._dead: set[int] = set()  # numbers of processes that were found to have ended; their last flags are read
        self._aside_since = 0.0
        self._aside_again = 0.0
        self.first_wanted: list[int] = []
        """Chunks in the order in which the processes came to write to them."""

    def workers(self) -> int | None:
        """How many may copy now; None: all."""
        return None if self.runs_on.is_set() else self._stall_workers

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

    def landed(self, piece: Piece) -> None:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        if piece.slot >= 0:
            process, slot = divmod(piece.slot, SHADOWED)
            self._windows[process].table.free_slot(slot)

    def changed(self, piece: Piece, number: int, data: memoryview) -> Mispredicted:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        place = self.places[piece.chunk + number]
        return Mispredicted(
            f"GPU memory changed before it was saved (block {place.key[1]}, {place.size} bytes at {place.offset}): "
            "a kernel wrote where no guess said it would."
        )

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
        """A chunk of ours, with neighbours that nobody has taken yet."""
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
                self.first_wanted.append(chunk)
                if self._given[chunk]:
                    continue
                if self._table.claim(chunk) == UNSAVED:
                    return replace(self._give(chunk, self.places[chunk].address), urgent=True)
                if not self._given[chunk]:
                    self._owed.append(chunk)
        return None

    def _shadowed(self) -> Piece | None:
        """A chunk that a process has taken, if it can be had now; some of them are looked at, in turns."""
        if not self._owed:
            return None
        now = time.perf_counter()
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refresh()
        self._look_who_lives(now)
        for _ in range(min(len(self._owed), OWED_AT_ONCE)):
            chunk = self._owed.popleft()
            if self._given[chunk]:
                continue
            piece = self._owed_now(chunk)
            if piece is not None:
                return piece
            self._owed.append(chunk)
        return None

    def _owed_now(self, chunk: int) -> Piece | None:
        state = self._table.state(chunk)
        if state == UNSAVED and self._table.claim(chunk) == UNSAVED:  # the driver refused the copy
            return self._give(chunk, self.places[chunk].address)
        if state < SHADOWED:
            return None
        process, slot = divmod(state - SHADOWED, SHADOWED)
        if process >= len(self._windows):
            raise Mispredicted(f"Chunk {chunk} is in the hands of a process that does not exist.")
        window = self._windows[process]
        if slot != NO_SLOT:
            found = window.pools.find(slot)
            if found is None:
                raise Mispredicted(f"A process said that it copied chunk {chunk} to a place that does not exist.")
            pool, index = found
            if pool.flag(index) == window.table.ticket(slot):
                return self._give(chunk, pool.address(index), process * SHADOWED + slot, pool.device)
        if process in self._dead:
            # Its copy has not been made, so what comes behind it in its stream was not run either.
            return self._give(chunk, self.places[chunk].address)
        return None

    def _look_who_lives(self, now: float) -> None:
        if now - self._looked < ALIVE_SECONDS:
            return
        self._looked = now
        dead = {number for number, window in enumerate(self._windows) if not window.alive()}
        if dead - self._dead:
            self._refresh()  # its last flags, before it counts as dead
        self._dead = dead

    def _any(self) -> Piece | None:
        chunk = self._table.claim_next(self._order)
        if chunk is not None:
            return self._joined(chunk)
        if not self._owed:
            # What is left was taken by processes; a queue that was full says nothing of it.
            self._owed.extend(c for c in range(len(self.places)) if not self._given[c])
        return None

    def _refresh(self) -> None:
        for window in self._windows:
            for pool in window.pools.pools:
                pool.refresh()
        self._refreshed = time.perf_counter()

    def _step_aside(self) -> bool:
        """Whether the application's transfers go first now."""
        now = time.perf_counter()
        self._look_who_lives(now)  # whoever ended in the middle of a transfer has no more
        if now < self._aside_again:
            return False
        if not self._transferring(now):
            self._aside_since = 0.0
            return False
        if not self._aside_since:
            self._aside_since = now
        if now - self._aside_since > STEP_ASIDE_SECONDS:
            self._aside_since = 0.0
            self._aside_again = now + STEP_ASIDE_PAUSE
            return False
        return True

    def _transferring(self, now: float) -> bool:
        queued = False
        living = [window for number, window in enumerate(self._windows) if number not in self._dead]
        for window in living:
            for number, pool in enumerate(window.pools.pools):
                answer = window.table.transferring(number, pool.flags)
                if answer & 1:
                    return True
                queued = queued or bool(answer & 2)
        if not queued:
            return False
        if now - self._refreshed < REFRESH_SECONDS:
            return True
        self._refresh()
        return any(
            window.table.transferring(number, pool.flags)
            for window in living
            for number, pool in enumerate(window.pools.pools)
        )

    def unsaved(self) -> int:
        """How many chunks are not saved."""
        return sum(self._table.state(chunk) != SAVED for chunk in range(len(self.places)))
