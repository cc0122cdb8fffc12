"""Where the chunks are that are saved, for Python and (struct phos_save_place of save_plan.h) for native code.

There are fifteen thousand in a full GPU, and while they are numbered nothing is copied: it is done before the processes
stand still, if they change nothing until then (cow/layout.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash


class SavePlace(NamedTuple):
    """Where a chunk is: ``size`` bytes at ``offset`` of a block, at a device address of phosd's."""

    key: BlockKey
    offset: int
    size: int
    address: int
    device: int


class Place(ctypes.Structure):
    """struct phos_save_place."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("queue", ctypes.c_uint32),
        ("zero", ctypes.c_uint32),
    )


class SavePlaces(list[SavePlace]):
    """Chunks by their numbers; not to be changed. Those of one block follow each other."""

    def __init__(self, places: Iterable[SavePlace], devices: Iterable[int] = ()) -> None:
        """``devices``: GPUs that have a queue although no chunk may be on them."""
        super().__init__(places)
        self.devices = sorted({place.device for place in self}.union(devices))
        """The GPUs; their numbers in this list are those of the queues."""
        self._sizes = {place.size for place in self}
        self._packed = (Place * max(1, len(self)))()
        queue_of = {device: queue for queue, device in enumerate(self.devices)}
        block, last = -1, None
        for number, (key, _, size, address, device) in enumerate(self):
            if key != last:
                block, last = block + 1, key
            self._packed[number] = Place(address, size, block, queue_of[device])

    def packed(self, zeros: Iterable[int]) -> ctypes.Array[Place]:
        """A copy for native code, which need not copy ``zeros``: what those are is known, whatever they become."""
        copy = type(self._packed).from_buffer_copy(self._packed)
        for number in zeros:
            copy[number].address = 0
        return copy

    def zeros(self, hashes: Sequence[bytes]) -> list[int]:
        """The chunks that are zeros, by the hash of each."""
        known = {zero_hash(size) for size in self._sizes}
        return [number for number, each in enumerate(hashes) if each in known]


def places_of(blocks: Iterable[Block], mapped: MappedBlocks) -> Iterator[SavePlace]:
    """Every chunk of every block, in order."""
    for block in blocks:
        address = mapped[block.key].address
        for offset in range(0, block.size, CHUNK_BYTES):
            size = min(CHUNK_BYTES, block.size - offset)
            yield SavePlace(block.key, offset, size, address + offset, block.device)
