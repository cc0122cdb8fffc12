"""phosd for tests of the window: keeps the memory of *t1* beside each image, and can be made to guess wrong.

Started as phosd is, ``python -m tests.windows.watched_phosd --socket PATH``, with two more variables in its
environment: WATCH_TRUTH, a folder: each block as it is while its process stands still goes there, taken by another way
than images are (the software GPU's memory is host memory); WATCH_LIES, a path: while it exists, no kernel is said to
write to anything.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phos.gpu_engine.copy_work import Piece
from phos.gpu_engine.cow import dump, feed
from phos.gpu_engine.daemon import command_line, kernels, serve_dump
from phos.gpu_engine.errors import Mispredicted
from phos.gpu_engine.spec.table import FIELD, HEADER, KERNEL, PARAMETER

READS, WRITES = 1, 2


def truth_file(folder: Path, session_: bytes, block: int) -> Path:
    """Where the content of a block is kept."""
    return folder / f"{session_.hex()}-{block}"


def keep_truth(job: dump.CowDump, folder: Path) -> None:
    """What the blocks hold now."""
    job._mapped.add(job._borrowed)
    for block in job._borrowed:
        memory = (ctypes.c_char * block.size).from_address(job._mapped[block.key].address)
        # Into the file of the last time, if there is one: its pages are there already.
        file = os.open(truth_file(folder, *block.key), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, memory, 0)
        finally:
            os.close(file)


def without_writes(packed: bytes) -> bytes:
    """A table of access descriptors in which nothing is written."""
    table = bytearray(packed)
    _, kernels, parameters, fields = HEADER.unpack_from(table)
    at = HEADER.size
    for _ in range(kernels):
        record = list(KERNEL.unpack_from(table, at))
        record[7] &= ~WRITES
        KERNEL.pack_into(table, at, *record)
        at += KERNEL.size
    at += parameters * PARAMETER.size
    for _ in range(fields):
        offset, size, access, kind = FIELD.unpack_from(table, at)
        FIELD.pack_into(table, at, offset, size, READS if access else 0, kind)
        at += FIELD.size
    return bytes(table)


def difference(truth: Path, piece: Piece, data: memoryview) -> str:
    """Where what was saved differs from what was kept."""
    kept = truth_file(truth, *piece.key).read_bytes()[piece.offset : piece.offset + piece.size]
    found = [i for i in range(0, piece.size, 4) if kept[i : i + 4] != data[i : i + 4]]
    if not found:
        return "it is the memory of t1: the content hash is wrong"
    at = found[0]
    return (
        f"{len(found)} words, from {piece.offset + at} to {piece.offset + found[-1]}: {data[at : at + 4].hex()} "
        f"instead of {kept[at : at + 4].hex()}, saved from {'a shadow' if piece.slot >= 0 else 'its place'}"
    )


def watch(truth: Path, lies: Path) -> None:
    """Change phosd's parts."""
    copy: Callable[[Any], None] = dump.CowDump._copy
    table_file = kernels.table_file

    def copy_and_keep(job: dump.CowDump) -> None:
        try:
            keep_truth(job, truth)
        finally:
            copy(job)

    def perhaps_lie(*arguments: Any) -> int:
        descriptor = table_file(*arguments)
        if lies.exists():
            with open(descriptor, "r+b", closefd=False) as file:
                file.seek(0)
                packed = file.read()
                file.seek(0)
                file.write(without_writes(packed))
        return descriptor

    changed = feed.ChunkFeed.changed

    def changed_and_told(source: feed.ChunkFeed, piece: Piece, number: int, data: memoryview) -> Mispredicted:
        error = changed(source, piece, number, data)
        return Mispredicted(f"{error} ({difference(truth, piece, data)})")

    feed.ChunkFeed.changed = changed_and_told  # type: ignore[method-assign]
    dump.CowDump._copy = copy_and_keep  # type: ignore[method-assign,assignment]
    kernels.table_file = perhaps_lie  # type: ignore[assignment]
    serve_dump._leaves_alive = lambda criu, request: True  # who asks is no CRIU


if __name__ == "__main__":
    watch(Path(os.environ["WATCH_TRUTH"]), Path(os.environ["WATCH_LIES"]))
    command_line.main(prog_name="phosd")
