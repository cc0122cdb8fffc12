"""One data file of an image that is being written, and what was put into it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.append import ZEROS, StripeState, append
from phos.images.chunk_hash import chunk_hash, zero_hash
from phos.images.errors import ImageError
from phos.images.files import allocate, allocate_huge
from phos.images.formats import HASH_SIZE, BlockKey
from phos.images.mapping import HUGE_PAGE, MADV_POPULATE_WRITE, advise, has_huge_pages, map_memory, view_of
from phos.images.new_files import NewFiles
from phos.images.table import WrittenRun


class Room(NamedTuple):
    """Memory of a data file that is mapped, of which the first ``end`` bytes are in use.

    What is put there lies across no multiple of ``segment`` bytes, and begins at one of ALIGNMENT.
    """

    address: int
    size: int
    segment: int
    end: int


class Stripe:
    """Appends chunks to a file. Everything in it is guarded by `lock`, which append() wants held."""

    def __init__(self, index: int, files: NewFiles, chunk_size: int, sequence: Iterator[int]) -> None:
        """``sequence`` numbers the writes of all stripes."""
        self.index = index
        self.name = formats.data_file(index)
        self.lock = threading.Lock()
        self.state = StripeState(descriptor=-1, chunk=chunk_size)  # native code may append too, holding the lock
        self.zero = 0
        self.runs: list[WrittenRun] = []
        self._files = files
        self._chunk_size = chunk_size
        self._sequence = sequence

    @property
    def fd(self) -> int:
        """The file's descriptor; -1: it is not open."""
        return int(self.state.descriptor)

    @fd.setter
    def fd(self, descriptor: int) -> None:
        self.state.descriptor = descriptor

    @property
    def end(self) -> int:
        """Where the next run goes: a multiple of ALIGNMENT."""
        return int(self.state.end)

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is on."""
        return bool(self.state.direct)

    @property
    def written(self) -> int:
        """Bytes of chunks that the file took, zeros and padding not counted. May be read without the lock."""
        return int(self.state.written)

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
        self.state.direct = on
        return True

    def allocate(self, offset: int, length: int) -> bool:
        """Room for a part of the file that is not written yet; False if there is none."""
        return self.end > offset or allocate(self.fd, offset, length)

    def append(self, block: BlockKey, offset: int, view: memoryview, known: Sequence[bytes] | None) -> None:
        """Write part of a block behind what is there. ``known``: the hashes of its chunks, if the caller knows them.

        Raises ImageError with file and reason; then nothing is recorded.
        """
        try:
            hashes, places = append(self.state, view, known)
        except OSError as error:
            raise self._failure(error) from error
        self.record(block, offset, len(view), hashes, places)

    def failure(self, code: int) -> ImageError:
        """What is to be raised when native code has failed to append, with an errno."""
        return self._failure(OSError(code, os.strerror(code)))

    def _failure(self, error: OSError) -> ImageError:
        return self._files.failure(self.name, error, self.state.missing)

    def record(self, block: BlockKey, offset: int, length: int, hashes: bytes, places: Sequence[int]) -> None:
        """Part of a block, in bytes, has been appended: ``hashes`` and ``places`` are of its chunks, as append() says.

        What wrote a chunk again must be recorded later than what wrote it first.
        """
        chunk = self._chunk_size
        runs: list[WrittenRun] = []
        begin = 0  # of the run, in chunks
        for i in range(1, len(places) + 1):
            first, before = places[begin], places[i - 1]
            if i < len(places) and places[i] == (ZEROS if before == ZEROS else before + chunk):
                continue
            start = begin * chunk
            size = min(i * chunk, length) - start
            if first == ZEROS:
                self.zero += size
                runs.append(self._run(block, pb.Run.ZERO, offset + start, size, 0, b""))
            else:
                part = hashes[begin * HASH_SIZE : i * HASH_SIZE]
                runs.append(self._run(block, pb.Run.DATA, offset + start, size, first, part))
            begin = i
        self.runs += runs

    def finish(self) -> None:
        """All that was written is on stable storage, and nothing else in the file."""
        with self._files.saying(self.name):
            os.ftruncate(self.fd, self.end)  # a tail that was not padded: up to the next multiple of 4096, with zeros
            os.fsync(self.fd)

    def _run(self, block: BlockKey, kind: int, offset: int, length: int, file_offset: int, hashes: bytes) -> WrittenRun:
        return WrittenRun(block, offset, length, kind, self.index, file_offset, hashes, next(self._sequence))


class MappedStripe(Stripe):
    """A data file that is written through memory: others fill it, and say what they have filled."""

    address = size = 0  # where it is mapped, once it is
    _segment = 0
    _mounted_huge = False

    def map(self, total: int, segment: int, most: int) -> None:
        """Make the file and map it, with room for ``total`` bytes in pieces of at most ``most``.

        No piece lies across a multiple of ``segment``.

        Raises:
            OSError, ImageError: it cannot be made, or cannot be mapped.
        """
        self.create()
        self._mounted_huge = has_huge_pages(self.fd)
        size = total + total // (segment - most) * most  # what pieces leave free before a boundary
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        self._segment = segment
        os.ftruncate(self.fd, self.size)
        self.address = map_memory(self.size, self.fd)

    def populate(self, offset: int, size: int) -> None:
        """Find the pages for a part of it, in bytes, both multiples of a huge page: huge ones, all of them zeros.

        A tmpfs that is not mounted with huge=always gives a file small pages, unless it is asked to collapse some.

        Raises:
            OSError: there are none.
        """
        if self._mounted_huge:
            code = advise(self.address + offset, size, MADV_POPULATE_WRITE)
        else:
            code = allocate_huge(self.fd, offset, self.address + offset, size)
        if code:
            raise OSError(code, f"{os.strerror(code)} (for huge pages)")

    @property
    def room(self) -> Room:
        """All of it."""
        return Room(self.address, self.size, self._segment, self.end)

    def note(self, block: BlockKey, offset: int, size: int, address: int, known: Sequence[bytes] | None) -> None:
        """What lies at an address of it: a run for each chunk."""
        chunk, zero, file_offset = self._chunk_size, 0, address - self.address
        runs: list[WrittenRun] = []
        for i in range(0, size, chunk):
            length = min(chunk, size - i)
            hash_ = chunk_hash(view_of(address + i, length)) if known is None else known[i // chunk]
            if hash_ == zero_hash(length):
                zero += length
                runs.append(self._run(block, pb.Run.ZERO, offset + i, length, 0, b""))
            else:
                runs.append(self._run(block, pb.Run.DATA, offset + i, length, file_offset + i, hash_))
        with self.lock:
            self.zero += zero
            self.state.written += size - zero
            self.runs += runs
