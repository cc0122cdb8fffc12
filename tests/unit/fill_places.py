"""Places of a plan, one at a time: for tests that say of each what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.fill_plan import Places

Item = TypeVar("Item")


@dataclass(frozen=True)  # Python 3.10 has no named tuples that are generic
class FillPlace(Generic[Item]):
    """A chunk: ``size`` bytes at a device address, and what comes there."""

    key: BlockKey
    size: int
    address: int
    device: int
    chunk_bytes: int
    descriptor: int
    source: int
    hash: bytes
    content: Item | None


def packed(wanted: Sequence[FillPlace[Item]]) -> Places[Item]:
    """All of them; those of one block follow each other."""
    of_block: dict[BlockKey, list[FillPlace[Item]]] = {}
    for place in wanted:
        of_block.setdefault(place.key, []).append(place)

    def content(key: BlockKey, number: int) -> Item:
        found = of_block[key][number].content
        assert found is not None
        return found

    places = Places(content)
    for key, chunks in of_block.items():
        rows = [(c.address, c.source, c.size, c.chunk_bytes, c.descriptor, c.hash) for c in chunks]
        places.add(key, chunks[0].device, rows)
    return places
