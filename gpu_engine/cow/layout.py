"""Which chunks there are to save, and in which order: worked out while the processes still compute, if it can be.

Numbering and ordering the chunks of 60 GB takes longer than hashing them, and until it is done nothing is copied, while
the processes stand still already. What they allocate or free in between makes it worthless; training rarely does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.content_hash import chunk_count
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.save_places import SavePlaces, places_of
from phos.gpu_engine.touch_order import Touched


class Layout:
    """The chunks of some blocks by number, and the order in which to save them, as far as content does not matter."""

    def __init__(
        self, blocks: Sequence[Block], mapped: MappedBlocks, devices: Iterable[int], written_before: Sequence[Touched]
    ) -> None:
        """``devices``: GPUs that shadows may lie on; ``written_before``: what was seen written, in order."""
        self._blocks = _identities(blocks, mapped)
        self._devices = set(devices)
        self.chunks: dict[BlockKey, range] = {}
        first = 0
        for block in blocks:
            self.chunks[block.key] = range(first, first + chunk_count(block.size))
            first += chunk_count(block.size)
        self.places = SavePlaces(places_of(blocks, mapped), self._devices)
        self._order = first_written_first(self.chunks, written_before)

    def fits(self, blocks: Sequence[Block], mapped: MappedBlocks, devices: Iterable[int]) -> bool:
        """Whether it is that of these blocks, where they are mapped now."""
        return self._devices == set(devices) and self._blocks == _identities(blocks, mapped)

    def order(self, zeros: Iterable[int]) -> list[int]:
        """Zeros first: they need no copying, so nobody has to copy them aside."""
        first = dict.fromkeys(zeros)
        return [*first, *(chunk for chunk in self._order if chunk not in first)] if first else self._order


def _identities(blocks: Sequence[Block], mapped: MappedBlocks) -> list[tuple[BlockKey, int, int, int]]:
    return [(block.key, block.size, block.device, mapped[block.key].address) for block in blocks]


def first_written_first(chunks: Mapping[BlockKey, range], before: Sequence[Touched]) -> list[int]:
    """An order in which to save chunks: those first that earlier windows saw written first, then the others.

    ``chunks``: the numbers of each block's.
    """
    known = dict.fromkeys(chunks[key][n] for key, n in before if key in chunks and n < len(chunks[key]))
    return [*known, *(chunk for numbers in chunks.values() for chunk in numbers if chunk not in known)]
