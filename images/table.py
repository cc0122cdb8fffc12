"""From what was written to the chunk tables of the image."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from phos.gen import phos_image_pb2 as pb
from phos.images.errors import ImageError
from phos.images.formats import HASH_SIZE, BlockKey


class WrittenRun(NamedTuple):
    """Neighbouring chunks of one kind, as one write() left them."""

    block: BlockKey
    offset: int  # in the block
    length: int
    kind: int  # Run.Kind
    stripe: int
    file_offset: int
    hashes: bytes
    sequence: int  # a later write of the same chunk has a higher one


def block_key(process: pb.Process, block: pb.Block) -> BlockKey:
    """Under which key a process's block is stored: its owner's."""
    if block.owner_session:
        return block.owner_session, block.owner_block
    return process.session, block.block


def name_of(key: BlockKey) -> str:
    return f"block {key[1]} of session {key[0].hex()}"


def inventory_blocks(inventory: pb.Inventory) -> dict[BlockKey, int]:
    """Key and size of every block the processes refer to; ImageError if two disagree about a size."""
    sizes: dict[BlockKey, int] = {}
    for process in inventory.processes:
        for block in process.blocks:
            key = block_key(process, block)
            if sizes.setdefault(key, block.size) != block.size:
                raise ImageError(f"the inventory gives {name_of(key)} two sizes, {sizes[key]} and {block.size}")
    return sizes


def build_tables(runs: Iterable[WrittenRun], inventory: pb.Inventory, chunk_size: int) -> list[pb.BlockTable]:
    """One table per block of the inventory, sorted by key.

    Raises ImageError if a block lacks data, has data past its end or in a short chunk before it, or is not in the
    inventory.
    """
    sizes = inventory_blocks(inventory)
    by_block: dict[BlockKey, list[WrittenRun]] = {key: [] for key in sizes}
    for run in runs:
        if run.block not in by_block:
            raise ImageError(f"data was written for {name_of(run.block)}, which no process of the inventory has")
        by_block[run.block].append(run)
    tables = []
    for key in sorted(sizes):
        pieces = sorted(by_block[key], key=lambda r: r.offset)
        if any(a.offset + a.length > b.offset for a, b in itertools.pairwise(pieces)):
            pieces = _latest(pieces, chunk_size)
        table = pb.BlockTable(session=key[0], block=key[1], size=sizes[key], chunk_size=chunk_size)
        _fill(table, _merge(pieces, chunk_size))
        complaint = complaint_about(table)
        if complaint:
            raise ImageError(f"the data written for {name_of(key)} {complaint}")
        tables.append(table)
    return tables


def _latest(runs: list[WrittenRun], chunk_size: int) -> list[WrittenRun]:
    """The same as single chunks, of each the one that was written last."""
    chunks: dict[int, WrittenRun] = {}
    for run in runs:
        for i, at in enumerate(range(0, run.length, chunk_size)):
            known = chunks.get(run.offset + at)
            if known is None or known.sequence < run.sequence:
                chunks[run.offset + at] = run._replace(
                    offset=run.offset + at,
                    length=min(chunk_size, run.length - at),
                    file_offset=run.file_offset + at,
                    hashes=run.hashes[i * HASH_SIZE : (i + 1) * HASH_SIZE],
                )
    return [chunks[at] for at in sorted(chunks)]


def _merge(runs: list[WrittenRun], chunk_size: int) -> list[list[WrittenRun]]:
    """Neighbours that can be one run, in groups."""
    groups: list[list[WrittenRun]] = []
    for run in runs:
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and last.kind == run.kind
            and last.offset + last.length == run.offset
            and last.length % chunk_size == 0
            and (
                run.kind != pb.Run.DATA
                or (last.stripe == run.stripe and last.file_offset + last.length == run.file_offset)
            )
        ):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _fill(table: pb.BlockTable, groups: list[list[WrittenRun]]) -> None:
    for group in groups:
        first = group[0]
        data = first.kind == pb.Run.DATA
        table.runs.add(
            kind=first.kind,
            offset=first.offset,
            length=sum(r.length for r in group),
            stripe=first.stripe if data else 0,
            file_offset=first.file_offset if data else 0,
            hashes=b"".join(r.hashes for r in group),
        )


def complaint_about(table: pb.BlockTable) -> str:
    """What is wrong with a table ('' if nothing): the promises of phos_image.proto. Used by writer and reader alike."""
    if table.chunk_size == 0 or table.chunk_size % 4096:
        return f"has chunks of {table.chunk_size} bytes, not a multiple of 4096"
    if len(table.session) != HASH_SIZE:
        return f"has a session of {len(table.session)} bytes instead of 16"
    end = 0
    for run in table.runs:
        if run.offset != end:
            what = "overlaps" if run.offset < end else "is missing"
            return f"{what} at bytes {min(end, run.offset)} to {max(end, run.offset)}"
        if run.length == 0 or run.offset % table.chunk_size:
            return f"has a part at byte {run.offset} that is empty or does not begin at a chunk"
        end += run.length
        chunks = -(-run.length // table.chunk_size)
        if run.kind in (pb.Run.DATA, pb.Run.PARENT):
            if len(run.hashes) != chunks * HASH_SIZE:
                return f"has {len(run.hashes)} bytes of hashes for {chunks} chunks at byte {run.offset}"
            if run.file_offset % 4096:
                return f"lies at byte {run.file_offset} of a data file, not a multiple of 4096"
        elif run.kind != pb.Run.ZERO:
            return f"has a part of unknown kind {run.kind} at byte {run.offset}"
    if end != table.size:
        return f"{'ends' if end < table.size else 'goes on'} at byte {end}, the block has {table.size}"
    return ""
