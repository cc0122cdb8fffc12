"""Small image sets for the tests of phos.images, and the switch that turns skips into failures."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from phos.gen import phos_image_pb2 as pb
from phos.images.formats import BlockKey, align_up
from phos.images.reader import Image
from phos.images.writer import ImageWriter

SESSION = bytes(range(1, 17))
PEER = bytes(range(17, 33))
CHUNK = 4096
ADDRESS = 0x7F0000000000


def forbids_skips() -> bool:
    return os.environ.get("PHOS_NO_SKIP", "") not in ("", "0")


def skip(reason: str) -> NoReturn:
    """Skip the test, or fail it where PHOS_NO_SKIP is set: there everything a test needs is supposed to be present."""
    if forbids_skips():
        pytest.fail(f"skipped, which PHOS_NO_SKIP forbids: {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def aligned(data: bytes) -> Iterator[memoryview]:
    """A page-aligned, writable copy. Not unmapped at the end: an exception's traceback may still refer to it."""
    memory = mmap.mmap(-1, align_up(len(data)) or CHUNK)
    memory[: len(data)] = data
    yield memoryview(memory)[: len(data)]


def inventory_of(sizes: Mapping[BlockKey, int]) -> pb.Inventory:
    """A process per session, a buffer per block."""
    inventory = pb.Inventory(protocol="stop", phos_version="0.1.0", criu_version="4.1.1", driver_version=13000)
    processes: dict[bytes, pb.Process] = {}
    for (session, number), size in sizes.items():
        process = processes.get(session)
        if process is None:
            process = inventory.processes.add(pid=100 + len(processes), session=session, under_frontend=True)
            process.executable = f"/usr/bin/program-{len(processes)}"
            processes[session] = process
        process.blocks.add(block=number, size=size, owner=pb.Block.FRONTEND)
        address = ADDRESS + (number << 32)
        process.allocations.add(address=address, size=size, block=number, entry_point="cuMemAlloc_v2")
    return inventory


def page(seed: int) -> bytes:
    return random.Random(seed).randbytes(CHUNK)


# Two data files, chunks of data and of zeros, two sessions: each kind of thing an image can hold.
CONTENT: dict[BlockKey, Sequence[bytes]] = {
    (SESSION, 1): [page(1), page(2), bytes(CHUNK), page(3)],
    (SESSION, 2): [bytes(CHUNK)] * 3,
    (PEER, 1): [page(4), page(5)],
}
CRIU_FILES = {
    "inventory.img": b"\x19\x43\x56\x54" + page(6)[:60],
    "core-100.img": page(7)[:500],
    "pages-1.img": page(8) + page(9),
    "empty.img": b"",
}
OTHER_FILES = {"dump.log": b"a log\n", "stats-dump": b"", "criu.pid": b"1"}


def write_small(
    directory: Path,
    *,
    direct: bool | None = None,
    content: Mapping[BlockKey, Sequence[bytes]] = CONTENT,
    others: Mapping[str, bytes] = OTHER_FILES,
) -> None:
    """The image of some blocks, with CRIU's files beside it, and others."""
    directory.mkdir(exist_ok=True)
    fd = os.open(directory, os.O_RDONLY)
    try:
        with ImageWriter(fd, stripes=3, chunk_size=CHUNK, direct=direct) as writer:
            for stripe, (key, chunks) in enumerate(content.items()):
                with aligned(b"".join(chunks)) as view:
                    writer.write(stripe, key, 0, view)
            for name, text in {**CRIU_FILES, **others}.items():
                (directory / name).write_bytes(text)
            writer.commit(inventory_of({key: len(chunks) * CHUNK for key, chunks in content.items()}))
    finally:
        os.close(fd)


def read_block(image: Image, key: BlockKey) -> bytes:
    """A block's bytes, read extent by extent into memory that held something else before."""
    size = image.blocks[key].size
    with aligned(b"\xa5" * size) as view:
        end = 0
        for extent in image.extents(key):
            assert extent.offset == end
            end += extent.length
            image.read_into(extent, view[extent.offset : extent.offset + extent.length])
        assert end == size
        return bytes(view)


def ours(directory: Path) -> list[str]:
    """The names of PhOS's files in a directory."""
    return sorted(p.name for p in directory.iterdir() if p.name.startswith("phos-"))
