"""What is loaded next in a lazy restore: first what a process waits for, then what it will want, then the rest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.copy_work import MAPPING_SECONDS, Load, NothingYet
from phos.gpu_engine.cow.chunk_table import SAVED, ChunkTable, WindowTable
from phos.images.extents import Extent

ZEROS_AT_ONCE = 64
"""Chunks of zeros that are written by one call: the GPU does that a hundred times as fast as it takes data."""


class LoadPlace(NamedTuple):
    """A chunk: ``size`` bytes at ``offset`` of a block, at a device address of phosd's, and what comes there.

    ``extent`` None: zeros.
    """

    key: BlockKey
    offset: int
    size: int
    address: int
    device: int
    extent: Extent | None


class LoadFeed:
    """A :class:`~phos.gpu_engine.copy_work.LoadSource` over the chunks of a restore."""

    def __init__(
        self,
        table: ChunkTable,
        places: Sequence[LoadPlace],
        order: Sequence[int],
        windows: Sequence[WindowTable],
        slot_bytes: int,
        workers: int,
        mapped: Callable[[BlockKey], bool] = lambda _: True,
    ) -> None:
        """``order`` has every chunk once: how they come if nobody waits.

        ``slot_bytes``: most that is read at once; ``workers``: so many take. ``mapped``: whether a block is where its
        places are; one of which it is asked is mapped soon.
        """
        self._table = table
        self.places = places
        self._order = order
        self._windows = windows
        self._slot_bytes = slot_bytes
        self._workers = workers
        self._mapped = mapped
        self._lock = threading.Lock()  # guards all below
        self._given = bytearray(len(places))
        self._left = len(places)
        self._next = 0
        self._turn = 0
        self._asked: deque[int] = deque()
        self._unmapped: deque[int] = deque()
        """Chunks that somebody waits for, of blocks that were not mapped when it was their turn."""
        self.on_demand = 0
        """Chunks that went before others because a process waited for them."""
        self.on_demand_bytes = 0

    def take(self) -> Load[Extent] | None:
        """See :class:`~phos.gpu_engine.copy_work.LoadSource`.

        Raises: NothingYet, and what ``mapped`` raises.
        """
        with self._lock:
            load = self._wanted()
            if load is None:
                if not self._left:
                    return None
                load = self._following()
            return load

    def urgent_at_once(self) -> int:
        """See :class:`~phos.gpu_engine.copy_work.LoadSource`.

        One, as long as there is a worker for each that is wanted. With more of them, who waits for all is better served
        by workers that take several: alone, each costs as much of the interpreter as four together, and half of what
        the bus can carry came (an H100, 16 workers: 25 GB/s).
        """
        wanted = len(self._asked) + len(self._unmapped) + sum(window.wanted() for window in self._windows)
        return 1 + wanted // self._workers

    def arrived(self, load: Load[Extent]) -> None:
        """See :class:`~phos.gpu_engine.copy_work.LoadSource`."""
        for chunk in load.chunks:
            self._table.saved(chunk)

    def blocks(self) -> list[BlockKey]:
        """The blocks, in the order in which something of them is given first."""
        return list(dict.fromkeys(self.places[chunk].key for chunk in self._order))

    def want(self, key: BlockKey) -> bool:
        """Load a block before others, for somebody who has no window; whether all of it is there."""
        with self._lock:
            chunks = [chunk for chunk, place in enumerate(self.places) if place.key == key]
            self._asked.extend(chunk for chunk in chunks if not self._given[chunk])
        return all(self._table.state(chunk) == SAVED for chunk in chunks)

    def _wanted(self) -> Load[Extent] | None:
        """From the processes' queues, in turns."""
        for _ in range(len(self._unmapped)):
            if (load := self._give_urgent(self._unmapped.popleft())) is not None:
                return load
        while self._asked:
            if (load := self._give_urgent(self._asked.popleft())) is not None:
                return load
        for _ in range(len(self._windows)):
            window = self._windows[self._turn % len(self._windows)]
            self._turn += 1
            while (chunk := window.next_wanted()) is not None:
                if not 0 <= chunk < len(self.places):
                    continue
                if not self._given[chunk]:
                    self.on_demand += 1
                    self.on_demand_bytes += self.places[chunk].size
                    if (load := self._give_urgent(chunk)) is not None:
                        return load
        return None

    def _give_urgent(self, chunk: int) -> Load[Extent] | None:
        """None: somebody has it, or its block is not mapped yet."""
        if self._given[chunk]:
            return None
        if not self._mapped(self.places[chunk].key):
            self._unmapped.append(chunk)
            return None
        return self._give(chunk, chunk + 1, urgent=True)

    def _following(self) -> Load[Extent]:
        while self._next < len(self._order):
            chunk = self._order[self._next]
            if self._given[chunk]:
                self._next += 1
                continue
            if not self._mapped(self.places[chunk].key):
                raise NothingYet(MAPPING_SECONDS)
            self._next += 1
            end = chunk + 1
            while self._next < len(self._order) and self._order[self._next] == end and self._joins(chunk, end):
                end += 1
                self._next += 1
            return self._give(chunk, end)
        raise NothingYet  # cannot be: what is left is in the order

    def _joins(self, first: int, chunk: int) -> bool:
        """Whether a chunk can be loaded in one with those from ``first`` up to it."""
        if self._given[chunk]:
            return False
        a, b = self.places[first], self.places[chunk]
        if a.key != b.key or (a.extent is None) != (b.extent is None):
            return False
        if a.extent is None or b.extent is None:
            return chunk - first < ZEROS_AT_ONCE
        length = b.offset - a.offset
        return (
            a.extent.stripe == b.extent.stripe
            and a.extent.file_offset + length == b.extent.file_offset
            and length + b.size <= self._slot_bytes
        )

    def _give(self, first: int, end: int, *, urgent: bool = False) -> Load[Extent]:
        for chunk in range(first, end):
            self._given[chunk] = 1
            self._table.claim(chunk)
        self._left -= end - first
        places = self.places[first:end]
        a = places[0]
        size = sum(place.size for place in places)
        extent = a.extent
        if extent is not None and len(places) > 1:
            hashes = tuple(h for place in places if place.extent is not None for h in place.extent.hashes)
            extent = extent._replace(length=size, hashes=hashes)
        return Load(a.address, size, a.device, extent, range(first, end), urgent)
