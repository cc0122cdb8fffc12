"""One data file of an image that is being written, and what was put into it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.chunk_hash import chunk_hash, zero_hash
from phos.images.files import allocate
from phos.images.formats import ALIGNMENT, BlockKey, align_up
from phos.images.mapping import HUGE_PAGE, has_huge_pages, map_memory
from phos.images.new_files import NewFiles
from phos.images.table import WrittenRun

_IOV_MAX = 1024  # Linux's UIO_MAXIOV


class Stripe:
    """Appends chunks to a file. Everything in it is guarded by `lock`, which append() wants held."""

    def __init__(self, index: int, files: NewFiles, chunk_size: int, sequence: Iterator[int]) -> None:
        """``sequence`` numbers the writes of all stripes."""
        self.index = index
        self.name = formats.data_file(index)
        self.lock = threading.Lock()
        self.fd = -1
        self.end = 0  # where the next run goes: a multiple of ALIGNMENT
        self.direct = False
        self.written = 0
        self.zero = 0
        self.runs: list[WrittenRun] = []
        self._files = files
        self._chunk_size = chunk_size
        self._sequence = sequence

    def create(self) -> None:
        """Make the file."""
        self.fd = self._files.create(self.name)

    def forget(self) -> None:
        """Remove the file again, if it was made."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._files.remove(self.name)

    def set_direct(self, on: bool) -> bool:
        """Turn O_DIRECT on or off; whether the file system takes that."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            return False
        self.direct = on
        return True

    def allocate(self, offset: int, length: int) -> bool:
        """Room for a part of the file that is not written yet; False if there is none."""
        return self.end > offset or allocate(self.fd, offset, length)

    def append(self, block: BlockKey, offset: int, view: memoryview, known: Sequence[bytes] | None) -> None:
        """Write part of a block behind what is there. ``known``: the hashes of its chunks, if the caller knows them.

        Raises ImageError with file and reason; then nothing is recorded.
        """
        # On O_DIRECT the whole call goes out in one pwritev, so that the disk sees one large request. Through memory
        # each chunk is written right after it was hashed, while it is still in the processor's cache.
        chunk, length, direct = self._chunk_size, len(view), self.direct
        pending: list[memoryview] = []
        hashes: list[bytes] = []
        kind = pb.Run.KIND_UNSPECIFIED
        begin = file_offset = 0
        start, at = self.end, self.end  # file offsets: where `pending` begins, where the next chunk goes
        runs: list[WrittenRun] = []
        for i in range(0, length, chunk):
            piece = view[i : i + chunk]
            size = len(piece)
            hash_ = chunk_hash(piece) if known is None else known[i // chunk]
            if hash_ == zero_hash(size):
                self.zero += size
                if kind != pb.Run.ZERO:
                    if kind:
                        runs.append(self._run(block, kind, offset + begin, i - begin, file_offset, hashes))
                    kind, begin, hashes = pb.Run.ZERO, i, []
                continue
            if kind != pb.Run.DATA:
                if kind:
                    runs.append(self._run(block, kind, offset + begin, i - begin, file_offset, hashes))
                kind, begin, file_offset, hashes = pb.Run.DATA, i, at, []
            hashes.append(hash_)
            at += size
            if not direct:
                self._write_out([piece], start, size)
                start = at
            elif pending and len(hashes) > 1:
                # the neighbour of the last piece, in memory and in the file: one larger piece
                pending[-1] = view[begin : i + size]
            else:
                pending.append(piece)
        if kind:
            runs.append(self._run(block, kind, offset + begin, length - begin, file_offset, hashes))
        if pending:
            self._write_out(pending, start, at - start)
        self.end = align_up(at)
        self.runs += runs  # only now: a failed write leaves no run behind

    def finish(self) -> None:
        """All that was written is on stable storage, and nothing else in the file."""
        with self._files.saying(self.name):
            os.ftruncate(self.fd, self.end)  # a tail that was not padded: up to the next multiple of 4096, with zeros
            os.fsync(self.fd)

    def _run(
        self, block: BlockKey, kind: int, offset: int, length: int, file_offset: int, hashes: list[bytes]
    ) -> WrittenRun:
        number = next(self._sequence)
        return WrittenRun(block, offset, length, kind, self.index, file_offset, b"".join(hashes), number)

    def _write_out(self, pieces: list[memoryview], offset: int, size: int) -> None:
        """Write pieces one behind the other at a file offset, whole, however often the kernel stops short."""
        if self.direct and size % ALIGNMENT:
            # Only a block's tail has such a size, so only the last piece: O_DIRECT gets it padded with zeros.
            tail = pieces[-1]
            whole = len(tail) & ~(ALIGNMENT - 1)
            if whole:
                pieces[-1] = tail[:whole]
            else:
                pieces.pop()
            if pieces:
                self._write_pieces(pieces, offset, size)
            self._write_padded(tail[whole:], offset + size - (len(tail) - whole))
        else:
            self._write_pieces(pieces, offset, size)
        self.written += size

    def _write_pieces(self, pieces: list[memoryview], offset: int, size: int) -> None:
        done = 0
        while pieces:
            try:
                n = os.pwritev(self.fd, pieces[:_IOV_MAX], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct and self.set_direct(False):
                    continue  # memory or file system not fit for O_DIRECT after all: through the page cache from now on
                raise self._files.failure(self.name, error, size - done) from error
            if n == 0:
                raise self._files.failure(self.name, OSError(errno.EIO, "the file took no bytes"), size - done)
            done += n
            while pieces and n >= len(pieces[0]):
                n -= len(pieces.pop(0))
            if n:
                pieces[0] = pieces[0][n:]

    def _write_padded(self, tail: memoryview, offset: int) -> None:
        page = mmap.mmap(-1, ALIGNMENT)
        page[: len(tail)] = tail
        self._write_pieces([memoryview(page)], offset, ALIGNMENT)


class MappedStripe(Stripe):
    """A data file that is written through memory: others fill places in it, and say what they filled."""

    address = size = 0  # where it is mapped, once it is
    _segment = 0

    def map(self, total: int, segment: int, most: int) -> None:
        """Make the file and map it, with room for ``total`` bytes in places of at most ``most``.

        No place lies across a multiple of ``segment``.

        Raises:
            OSError, ImageError: it cannot be made, has no huge pages, or cannot be mapped.
        """
        self.create()
        if not has_huge_pages(self.fd):
            raise OSError(errno.ENOTSUP, "small pages")
        size = total + total // (segment - most) * most  # what places leave free before a boundary
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        self._segment = segment
        os.ftruncate(self.fd, self.size)
        self.address = map_memory(self.size, self.fd)

    def place(self, size: int) -> int | None:
        """Where in the file so many bytes may be put; None: there is no more room."""
        with self.lock:
            at = self.end
            if at // self._segment != (at + size - 1) // self._segment:
                at = -(-at // self._segment) * self._segment
            if at + size > self.size:
                return None
            self.end = align_up(at + size)
        return at

    def note(
        self, block: BlockKey, offset: int, view: memoryview, known: Sequence[bytes] | None, file_offset: int
    ) -> None:
        """What lies in its place: a run for each chunk."""
        chunk, zero = self._chunk_size, 0
        runs: list[WrittenRun] = []
        for i in range(0, len(view), chunk):
            piece = view[i : i + chunk]
            hash_ = chunk_hash(piece) if known is None else known[i // chunk]
            if hash_ == zero_hash(len(piece)):
                zero += len(piece)
                runs.append(self._run(block, pb.Run.ZERO, offset + i, len(piece), 0, []))
            else:
                runs.append(self._run(block, pb.Run.DATA, offset + i, len(piece), file_offset + i, [hash_]))
        with self.lock:
            self.zero += zero
            self.written += len(view) - zero
            self.runs += runs
