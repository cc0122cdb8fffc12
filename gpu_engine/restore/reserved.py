"""Addresses of phosd's own for the memory of a parked process, which are mapped when its data begins to come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copy_work import Load
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.restore.feed import LoadFeed
from phos.images.extents import Extent


@dataclass(frozen=True)
class _Range:
    device: int
    address: int
    size: int


class ReservedMemory:
    """Of one process, or tree of processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below; held while something is mapped
        self._reserved: dict[BlockKey, _Range] = {}
        self._blocks: dict[BlockKey, Block] = {}
        self._mapped: dict[BlockKey, driver.Mapping] = {}

    def reserve(self, block: Block) -> int:
        """An address for a block that has no memory yet.

        Raises:
            DriverError: there is none left.
        """
        context = driver.context(block.device)
        with self._lock:
            address = context.reserve(block.size)
            self._reserved[block.key] = _Range(block.device, address, block.size)
        return address

    def have(self, blocks: Sequence[Block]) -> None:
        """The blocks have memory now; their descriptors stay the caller's, and open until :meth:`free`."""
        with self._lock:
            self._blocks = {block.key: block for block in blocks}

    def need(self, key: BlockKey) -> None:
        """Return when a block is mapped.

        Raises:
            DriverError: it cannot be.
        """
        if key in self._mapped:  # nothing is taken out before the last was needed
            return
        with self._lock:
            if key not in self._mapped:
                range_ = self._reserved.pop(key)
                context = driver.context(range_.device)
                self._mapped[key] = context.map_block(self._blocks[key].descriptor, range_.size, range_.address)

    def free(self) -> None:
        """Let everything go, mapped or not. It may be called twice."""
        with self._lock:
            for mapping in self._mapped.values():
                with suppress(DriverError):
                    mapping.unmap()
            for range_ in self._reserved.values():
                with suppress(DriverError):
                    driver.context(range_.device).free_reserved(range_.address, range_.size)
            self._mapped, self._reserved, self._blocks = {}, {}, {}


class MappingFeed:
    """A feed whose loads find their memory mapped: the first need not wait until all of it is."""

    def __init__(self, feed: LoadFeed, memory: ReservedMemory) -> None:
        self._feed = feed
        self._memory = memory

    def take(self) -> Load[Extent] | None:
        """See :class:`~phos.gpu_engine.copy_work.LoadSource`."""
        load = self._feed.take()
        if load is not None:
            self._memory.need(self._feed.places[load.chunks.start].key)
        return load

    def arrived(self, load: Load[Extent]) -> None:
        """See :class:`~phos.gpu_engine.copy_work.LoadSource`."""
        self._feed.arrived(load)
