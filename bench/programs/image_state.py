#!/usr/bin/env python3
"""Write what an image holds at given addresses of a process's GPU memory to a file, one piece after the other.

image_state.py IMAGE LIST OUT      LIST has a line `<address> <bytes>` for each piece. Runs in PhOS's own Python; every
chunk that is read is compared with its hash.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from phos.images.extents import EXTENT_LIMIT
from phos.images.formats import BlockKey
from phos.images.reader import Image
from phos.images.table import block_key

Piece = tuple[int, int, int]
"""Bytes of a block: where they begin, how many, and where in the output they go."""


def pieces(image: Image, wanted: list[tuple[int, int]]) -> dict[BlockKey, list[Piece]]:
    """Return what is wanted of each block. SystemExit if something lies in no buffer of the image."""
    buffers = []
    for process in image.inventory.processes:
        keys = {block.block: block_key(process, block) for block in process.blocks}
        buffers += [(a.address, a.size, keys[a.block], a.offset) for a in process.allocations]
    found: dict[BlockKey, list[Piece]] = {}
    to = 0
    for address, length in wanted:
        for begin, size, key, offset in buffers:
            if begin <= address and address + length <= begin + size:
                found.setdefault(key, []).append((offset + address - begin, length, to))
                break
        else:
            raise SystemExit(f"The image has no buffer of {length} bytes at {address:#x}.")
        to += length
    return found


def main() -> None:
    """Run the program."""
    directory, listing, output = sys.argv[1:]
    wanted = [(int(line.split()[0], 0), int(line.split()[1])) for line in Path(listing).read_text().splitlines()]
    buffer = mmap.mmap(-1, EXTENT_LIMIT)
    view = memoryview(buffer)
    with Image.open(directory) as image, open(output, "wb", buffering=0) as file:
        for key, parts in pieces(image, wanted).items():
            for extent in image.extents(key):
                inside = [part for part in parts if part[0] < extent.offset + extent.length]
                inside = [part for part in inside if extent.offset < part[0] + part[1]]
                if not inside:
                    continue
                if extent.length > len(view):
                    view = memoryview(mmap.mmap(-1, extent.length))
                image.read_into(extent, view)
                for offset, length, to in inside:
                    first = max(offset, extent.offset)
                    last = min(offset + length, extent.offset + extent.length)
                    os.pwrite(file.fileno(), view[first - extent.offset : last - extent.offset], to + first - offset)


if __name__ == "__main__":
    main()
