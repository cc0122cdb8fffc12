"""Making an image whole: everything on stable storage, and the commit record last.

The record has size and hash of every file of the set, CRIU's too, and a seal over itself.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.errors import ImageError
from phos.images.files import hash_files, open_regular, run_in_threads, segments
from phos.images.formats import digest
from phos.images.new_files import NewFiles
from phos.images.stripe import Stripe
from phos.images.table import build_tables


@dataclass(frozen=True)
class Written:
    """What is there when the last byte of GPU data has been written."""

    files: NewFiles
    stripes: Sequence[Stripe]
    added: Sequence[tuple[int, pb.File]]  # descriptor and record of each file that is neither GPU data nor CRIU's
    inventory_fd: int  # of the file that claimed the directory, empty so far
    chunk_size: int
    started_ns: int


def commit(written: Written, inventory: pb.Inventory) -> None:
    """Write inventory, chunk tables and commit record; `inventory` is not changed.

    Raises ImageError or OSError; then there is no commit record, or one that :meth:`NewFiles.remove_all` knows.
    """
    files = written.files
    timings: list[pb.Timing] = []

    def timed(phase: str, action: Callable[[], object]) -> None:
        began = time.monotonic()
        action()
        timings.append(pb.Timing(phase=phase, seconds=time.monotonic() - began))

    tables = build_tables([r for s in written.stripes for r in s.runs], inventory, written.chunk_size)
    used = [s for s in written.stripes if s.end]
    for s in written.stripes:
        if not s.end:
            files.remove(s.name)
    timed("sync GPU data", lambda: run_in_threads([s.finish for s in used]))

    copy = pb.Inventory()
    copy.CopyFrom(inventory)
    copy.format_version = formats.FORMAT_VERSION
    copy.image_id = secrets.token_bytes(16)
    copy.created_ns = inventory.created_ns or written.started_ns
    copy.data.CopyFrom(_summarise(tables, used, written.chunk_size))
    described = formats.frame_file(formats.INVENTORY, [copy])
    files.write_whole(formats.INVENTORY_FILE, written.inventory_fd, described)
    chunks = formats.frame_file(formats.CHUNKS, tables)
    files.write_new(formats.CHUNKS_FILE, chunks)

    record = pb.CommitRecord(format_version=formats.FORMAT_VERSION, image_id=copy.image_id)
    run_in_threads([partial(_sync, files, added.name, fd) for fd, added in written.added])
    listed = [added for _, added in written.added]
    listed += [pb.File(name=s.name, size=s.end, origin=pb.File.PHOS_DATA) for s in used]
    listed += [_ours(formats.INVENTORY_FILE, described), _ours(formats.CHUNKS_FILE, chunks)]
    timed("hash and sync CRIU's files", lambda: listed.extend(_criu_files(files)))
    timed("sync the directory", lambda: os.fsync(files.directory))
    record.files.extend(sorted(listed, key=lambda f: f.name))
    record.timings.extend(timings)
    record.committed_ns = time.time_ns()
    _write_record(files, record)


def _sync(files: NewFiles, name: str, fd: int) -> None:
    with files.saying(name):
        os.fsync(fd)


def _summarise(tables: list[pb.BlockTable], used: list[Stripe], chunk_size: int) -> pb.Data:
    by_kind: dict[int, int] = {}
    for table in tables:
        for run in table.runs:
            by_kind[run.kind] = by_kind.get(run.kind, 0) + run.length
    return pb.Data(
        chunk_size=chunk_size,
        stripes=len(used),
        total_bytes=sum(by_kind.values()),
        written_bytes=by_kind.get(pb.Run.DATA, 0),
        zero_bytes=by_kind.get(pb.Run.ZERO, 0),
        direct=bool(used) and all(s.direct for s in used),
    )


def _ours(name: str, raw: bytes) -> pb.File:
    view = memoryview(raw)
    hashes = [digest(view[at : at + length]) for at, length in segments(len(raw))]
    return pb.File(name=name, size=len(raw), origin=pb.File.PHOS, segment_size=formats.SEGMENT_SIZE, hashes=hashes)


def _criu_files(files: NewFiles) -> list[pb.File]:
    with files.saying(""):
        entries = [e for e in os.scandir(files.directory) if formats.is_criu_image(e.name)]
        names = sorted(e.name for e in entries)
        odd = [e.name for e in entries if not e.is_file(follow_symlinks=False)]
    if odd:
        raise ImageError(f"{files.path}/{odd[0]} is no regular file: somebody else writes to the image's directory")

    def sync(name: str) -> None:
        with files.saying(name):
            fd = open_regular(files.directory, name)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    hashed = hash_files(files.directory, names, formats.SEGMENT_SIZE)
    run_in_threads([partial(sync, n) for n in names])
    return [
        pb.File(name=n, size=size, origin=pb.File.CRIU, segment_size=formats.SEGMENT_SIZE, hashes=hashes)
        for n, (size, hashes) in zip(names, hashed, strict=True)
    ]


def _write_record(files: NewFiles, record: pb.CommitRecord) -> None:
    head = formats.frame_file(formats.COMMIT, [pb.CommitEntry(record=record)])
    files.write_new(formats.COMMIT_TEMPORARY, head + formats.frame(pb.CommitEntry(seal=digest(head))))
    with files.saying(formats.COMMIT_FILE):
        # A commit record of another writer cannot be there: its phos-inventory.img would have been in our way.
        files.rename(formats.COMMIT_TEMPORARY, formats.COMMIT_FILE)
        os.fsync(files.directory)
