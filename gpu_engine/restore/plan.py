"""An image's chunks as places of GPU memory that are to be filled: where each comes from, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.fill_plan import ALL_ZEROS, ELSEWHERE, IN_MEMORY, Places
from phos.images.extents import BlockTable, Extent
from phos.images.formats import HASH_SIZE
from phos.images.source import ImageSource


def in_image(names: Mapping[bytes, bytes], key: BlockKey) -> BlockKey:
    """What the image calls a block, given the sessions that it calls otherwise."""
    return names.get(key[0], key[0]), key[1]


def places_of(
    image: ImageSource,
    blocks: Iterable[Block],
    addresses: Mapping[BlockKey, int],
    names: Mapping[bytes, bytes],
) -> Places[Extent]:
    """All chunks of blocks. ``addresses``: where these are; ``names``: sessions that the image calls otherwise.

    Raises:
        ImageError: a file of the image cannot be opened.
    """
    extents: dict[BlockKey, list[Extent]] = {}

    def content(key: BlockKey, number: int) -> Extent:
        if key not in extents:
            table = image.blocks[in_image(names, key)]
            extents[key] = list(table.extents(table.chunk_size))
        return extents[key][number]

    places = Places(content)
    files = _Files(image)
    for block in blocks:
        places.add(
            block.key, block.device, files.chunks(image.blocks[in_image(names, block.key)], addresses[block.key])
        )
    return places


class _Files:
    """Where data files are. Each is asked for once: what is in it lies in its order, in memory as well."""

    def __init__(self, image: ImageSource) -> None:
        self._image = image
        self._known: dict[int, tuple[int, int]] = {}  # by stripe: descriptor, and what to add to the offset in the file

    def chunks(self, table: BlockTable, address: int) -> Iterator[tuple[int, int, int, int, int, bytes]]:
        """As :meth:`Places.add` wants them."""
        chunk = table.chunk_size
        for run in table.runs:
            at, length, hashes, source, step = address + run.offset, run.length, run.hashes, 0, 0
            descriptor = ALL_ZEROS
            if run.kind != pb.Run.ZERO:
                descriptor, base = self._known.get(run.stripe) or self._look(table, run)
                source, step = base + run.file_offset, chunk
            if length <= chunk:  # as most are: workers write one after the other, each to a file of its own
                yield at, source, length, chunk, descriptor, hashes
                continue
            for number in range(-(-length // chunk)):
                size = min(chunk, length - number * chunk)
                hash_ = hashes[number * HASH_SIZE : (number + 1) * HASH_SIZE]
                yield at + number * chunk, source + number * step, size, chunk, descriptor, hash_

    def _look(self, table: BlockTable, run: pb.Run) -> tuple[int, int]:
        size = min(run.length, table.chunk_size)
        first = Extent(
            table.key, run.offset, size, run.stripe, run.file_offset, (run.hashes[:HASH_SIZE],), table.chunk_size
        )
        found = ELSEWHERE, 0
        if (address := self._image.lies_at(first)) is not None:
            found = IN_MEMORY, address - first.file_offset
        elif (file := self._image.file_of(first)) is not None:
            found = file[0], file[1] - first.file_offset
        self._known[run.stripe] = found
        return found
