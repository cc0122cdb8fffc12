"""Where a block's chunks lie, and the files they are read from."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.chunk_hash import zero_hash
from phos.images.files import address_of, lives_in_memory, open_regular
from phos.images.formats import ALIGNMENT, HASH_SIZE, BlockKey

EXTENT_LIMIT = 32 << 20


class Extent(NamedTuple):
    """Neighbouring chunks of one block that can be read at once: at most EXTENT_LIMIT bytes, or one chunk."""

    block: BlockKey
    offset: int  # in the block
    length: int
    stripe: int | None  # which data file; None: zeros, stored nowhere
    file_offset: int
    hashes: tuple[bytes, ...]  # one per chunk; none for zeros
    chunk_size: int


class BlockTable:
    """Where one block's chunks lie."""

    __slots__ = ("_message", "key")

    def __init__(self, message: pb.BlockTable) -> None:
        self._message = message
        self.key: BlockKey = (message.session, message.block)

    @property
    def size(self) -> int:
        return self._message.size

    @property
    def chunk_size(self) -> int:
        return self._message.chunk_size

    @property
    def runs(self) -> list[pb.Run]:
        return list(self._message.runs)

    def hashes(self) -> list[bytes]:
        """The hash of each chunk, those of zeros too."""
        found: list[bytes] = []
        for run in self._message.runs:
            if run.kind == pb.Run.ZERO:
                whole, rest = divmod(run.length, self.chunk_size)
                found += [zero_hash(self.chunk_size)] * whole + ([zero_hash(rest)] if rest else [])
            else:
                found += [run.hashes[i : i + HASH_SIZE] for i in range(0, len(run.hashes), HASH_SIZE)]
        return found

    def extents(self, limit: int = EXTENT_LIMIT, *, zeros: bool = True) -> Iterator[Extent]:
        """The block from its beginning to its end; without ``zeros`` what is stored of it: they may have no end."""
        chunk = self.chunk_size
        step = max(1, limit // chunk) * chunk
        key = self.key
        for run in self._message.runs:
            offset, whole, hashes = run.offset, run.length, run.hashes
            zero = run.kind == pb.Run.ZERO
            if zero and not zeros:
                continue
            stripe, file_offset = (None, 0) if zero else (run.stripe, run.file_offset)
            for at in range(0, whole, step):
                length = min(step, whole - at)
                first = at // chunk * HASH_SIZE
                last = first + -(-length // chunk) * HASH_SIZE
                found = tuple(hashes[i : i + HASH_SIZE] for i in range(first, last, HASH_SIZE)) if hashes else ()
                yield Extent(key, offset + at, length, stripe, 0 if zero else file_offset + at, found, chunk)


class DataFile:
    """The descriptors of one data file: through the page cache and, where it pays, past it."""

    __slots__ = ("buffered", "direct", "name")

    def __init__(self, directory: int, stripe: int, direct: bool | None) -> None:
        self.name = formats.data_file(stripe)
        self.direct = -1
        self.buffered = open_regular(directory, self.name)
        if direct is None:
            direct = not lives_in_memory(self.buffered)
        if direct:
            with suppress(OSError):  # a file system that does not take O_DIRECT
                # The same file, whatever has the name by now.
                self.direct = os.open(f"/proc/self/fd/{self.buffered}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read_direct(self, view: memoryview, offset: int) -> None:
        """Read past the page cache.

        Asking the page cache first (RWF_NOWAIT) would start the kernel's read-ahead, and the disk would read twice.
        """
        done = 0
        # Whole pages only; a block's odd tail, and memory that is not page-aligned, go through the page cache.
        end = len(view) & ~(ALIGNMENT - 1)
        if address_of(view) % ALIGNMENT == 0:
            while done < end:
                try:
                    n = os.preadv(self.direct, [view[done:end]], offset + done)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        break
                    raise
                if n == 0:
                    raise EOFError("the file ends before it")
                done += n & ~(ALIGNMENT - 1)
                if n & (ALIGNMENT - 1):
                    break  # the last page of the file, cut off; the buffered read says what is missing
        if done < len(view):
            read_fully(self.buffered, view[done:], offset + done)

    def close(self) -> None:
        for fd in (self.buffered, self.direct):
            if fd >= 0:
                os.close(fd)
        self.buffered = self.direct = -1


def read_fully(fd: int, view: memoryview, offset: int) -> None:
    """Fill a buffer from a file; EOFError if the file ends before."""
    done = 0
    while done < len(view):
        n = os.preadv(fd, [view[done:]], offset + done)
        if n == 0:
            raise EOFError("the file ends before it")
        done += n
