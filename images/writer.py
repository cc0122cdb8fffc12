"""Writing an image set: GPU data in stripes, then inventory, chunk tables and, last, the commit record.

Lock order: `Stripe.lock` before `ImageWriter._failure_lock`. A stripe's lock is held for the whole of a write(), so
that abort() and commit() never close a descriptor under a thread that writes to it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import final

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.commit import Written, commit
from phos.images.errors import ImageError
from phos.images.files import copy_segment, lives_in_memory, run_in_threads, segments
from phos.images.formats import ALIGNMENT, HASH_SIZE, BlockKey, align_up
from phos.images.new_files import NewFiles
from phos.images.stripe import MappedStripe, Room, Stripe

COPY_THREADS = 8  # of add_file(): the copies of GPU data and CRIU want processors too
_RESERVE_STEP = 16 << 20


@final
class ImageWriter:
    """Writes one image set into a directory that CRIU may be writing its own files to.

    A context manager: leaving it without a commit() that succeeded removes every file it made, never one of CRIU's.
    The files it makes carry no commit record until the very end, so a crash at any moment leaves no image that opens.

    directory   an open descriptor of the directory; it is duplicated, the caller keeps its own.
    stripes     how many data files, at most one write() at a time in each. A file's inode lock serialises its writers,
                so this is the number of threads that can write at once.
    chunk_size  bytes, a multiple of 4096.
    direct      O_DIRECT: True demands it, False avoids it, None uses it where the file system takes it and has a disk
                behind it (in tmpfs there is no page cache to bypass).

    Raises ImageError if the directory holds another image, whole or not, or cannot be written to.
    """

    def __init__(self, directory: int, *, stripes: int, chunk_size: int = 4 << 20, direct: bool | None = None) -> None:
        if stripes < 1:
            raise ValueError("an image needs at least one stripe")
        if chunk_size < ALIGNMENT or chunk_size % ALIGNMENT:
            raise ValueError(f"chunk_size must be a multiple of {ALIGNMENT}, not {chunk_size}")
        self._chunk_size = chunk_size
        self._started_ns = time.time_ns()
        self._sequence = itertools.count()  # next() is one step under the GIL
        self._stripes: list[Stripe] = []
        self._added: list[tuple[int, pb.File]] = []  # descriptor, record
        self._failure_lock = threading.Lock()
        self._failure: ImageError | None = None
        self._state = "writing"  # then "committed" or "aborted"
        self._finishing = False  # set once, before the stripes are locked: reserve() is to end
        self._mapped: MappedStripe | None = None
        self.placeable = self.place_limit = 0  # how much there is room for in memory, in all and at once
        self._inventory_fd = -1
        # A cycle of references would keep all of a finished image's tables until Python looks for garbage.
        writer = weakref.proxy(self)
        self._files = NewFiles(directory, lambda: writer.bytes_written)
        try:
            self._files.refuse_used()
            self._direct = not lives_in_memory(self._files.directory) if direct is None else direct
            self._inventory_fd = self._files.create(formats.INVENTORY_FILE)  # empty: it claims the directory
            for index in range(stripes):
                stripe = Stripe(index, self._files, chunk_size, self._sequence)
                self._stripes.append(stripe)
                stripe.create()
                if self._direct and not stripe.set_direct(True) and direct:
                    raise ImageError(f"{self._files.path}: this file system does not take O_DIRECT; write without it")
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == "writing":
            self.abort()

    @property
    def bytes_written(self) -> int:
        """GPU data stored so far, zero chunks and padding not counted. May be read by any thread while others write."""
        return sum(s.written for s in self._stripes)

    @property
    def bytes_zero(self) -> int:
        """GPU data that turned out to be zero so far."""
        return sum(s.zero for s in self._stripes)

    # ------------------------------------------------------------------------------------------------------ data

    def reserve(self, total: int) -> bool:
        """Allocate room for `total` bytes of GPU data, spread evenly over the stripes, before the data is there.

        Optional. In tmpfs finding a page costs as much as filling it, and this can be done while the processes still
        run. May go on in a thread of its own beside write(): it steps aside for it every few milliseconds, and ends
        early when the writer ends. What is not used is freed by commit(). False if there is not room for so much: then
        nothing more is reserved, and it may still be enough if some of the data turns out to be zero.
        """
        each = align_up(-(-total // len(self._stripes)))
        enough = run_in_threads([partial(self._reserve_stripe, s, each) for s in self._stripes], len(self._stripes))
        return all(enough)

    def _reserve_stripe(self, s: Stripe, size: int) -> bool:
        for at in range(0, size, _RESERVE_STEP):
            with s.lock:
                if s.fd < 0 or self._failure is not None or self._finishing:
                    return True
                if not s.allocate(at, min(_RESERVE_STEP, size - at)):
                    return False
        return True

    def map_data(self, total: int, segment: int, most: int) -> int:
        """Make a data file that is written through memory, in a file system that keeps its data there.

        total    so many bytes can be put there, however they are cut.
        segment  no piece lies across a multiple of this many bytes; a multiple of the size of a huge page.
        most     bytes of one piece.

        Returns the address of `mapped_bytes` bytes, which have no pages yet (populate_data() finds them); 0: it is not
        to be had. The caller unmaps them when nothing is written there any more, before commit() or after it.
        """
        if self._direct or not lives_in_memory(self._files.directory):
            return 0
        s = MappedStripe(len(self._stripes), self._files, self._chunk_size, self._sequence)
        try:
            s.map(total, segment, most)
        except OSError:
            s.forget()
            return 0
        self.placeable, self.place_limit = total, most
        self._mapped = s
        self._stripes = [*self._stripes, s]  # others may be going through the old list
        return s.address

    @property
    def mapped_bytes(self) -> int:
        """How much memory :meth:`map_data` has mapped."""
        return 0 if self._mapped is None else self._mapped.size

    def populate_data(self, offset: int, size: int) -> None:
        """Find huge pages for a part of what :meth:`map_data` has mapped; see :meth:`MappedStripe.populate`.

        Several threads may, each for another part. Raises OSError.
        """
        assert self._mapped is not None
        self._mapped.populate(offset, size)

    def unmap_data(self) -> None:
        """No room in memory, because the memory cannot be used after all; nothing has been written there."""
        if self._mapped is not None:
            self._stripes = [s for s in self._stripes if s is not self._mapped]
            self._mapped.forget()
            self._mapped = None
            self.placeable = self.place_limit = 0

    def take_room(self) -> Room:
        """All of what :meth:`map_data` has mapped, for one who fills it from its ``end`` on.

        What lies there is told by :meth:`write_placed`; :meth:`return_room` follows.
        """
        assert self._mapped is not None
        return self._mapped.room

    def return_room(self, end: int) -> None:
        """So much of it is in use now; a multiple of ALIGNMENT."""
        assert self._mapped is not None
        with self._mapped.lock:
            self._mapped.state.end = end

    def write(
        self,
        stripe: int,
        block: BlockKey,
        offset: int,
        data: memoryview,
        hashes: Sequence[bytes] | None = None,
    ) -> None:
        """Append part of a block to a stripe's data file; returns when the kernel has taken the bytes.

        stripe  which data file; one thread at a time in each (others would wait).
        block   the owner's session and block number.
        offset  in the block, a multiple of the chunk size.
        data    a whole number of chunks, or fewer bytes at the block's end; page-aligned for O_DIRECT to work.
        hashes  chunk_hash() of each chunk, if the caller knows them.

        Each chunk is hashed if it has to be; chunks of zeros take no space. Writing a chunk again replaces it in the
        image (the old bytes stay in the file, unused). Raises ImageError with file and reason; the writer then takes no
        more.
        """
        if offset < 0 or offset % self._chunk_size:
            raise ValueError(f"offset {offset} is not a multiple of the chunk size {self._chunk_size}")
        if len(block[0]) != HASH_SIZE:
            raise ValueError(f"a session has 16 bytes, not {len(block[0])}")
        view = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        with self.appending(stripe) as s:
            s.append(block, offset, view, hashes)

    @contextmanager
    def appending(self, stripe: int) -> Iterator[Stripe]:
        """A data file for native code, which appends to it (append.h) and has that recorded (:meth:`Stripe.record`).

        Nobody else uses it meanwhile. Raises ImageError as write(); one that is raised in it ends the writer as well.
        """
        s = self._stripes[stripe]
        with s.lock:
            self._check_usable()
            try:
                yield s
            except ImageError as error:
                self._fail(error)
                raise

    def write_placed(
        self, block: BlockKey, offset: int, size: int, address: int, hashes: Sequence[bytes] | None
    ) -> None:
        """As write(), for what lies in a room already, at an address. What its hashes say is zeros need be nowhere."""
        assert self._mapped is not None
        self._check_usable()
        self._mapped.note(block, offset, size, address, hashes)

    def add_file(self, name: str, source: int, size: int) -> list[bytes]:
        """Copy the first `size` bytes of the file `source` into the image, under a name that formats.is_ours() knows.

        Several threads copy at once; zeros take no space. Must have ended before commit() or abort() is called. Returns
        the hashes of its segments. Raises ImageError with file and reason.
        """
        self._check_usable()
        fd = self._files.create(name)
        record = pb.File(name=name, size=size, origin=pb.File.PHOS, segment_size=formats.SEGMENT_SIZE)
        self._added.append((fd, record))
        try:
            with self._files.saying(name, size):
                os.ftruncate(fd, size)
                jobs = [partial(copy_segment, source, fd, offset, length) for offset, length in segments(size)]
                record.hashes.extend(run_in_threads(jobs, COPY_THREADS))
        except EOFError as error:
            where = os.path.join(self._files.path, name)
            raise ImageError(f"{where}: what it is copied from was cut off: {error}") from error
        return list(record.hashes)

    # ------------------------------------------------------------------------------------------------------ commit

    def commit(self, inventory: pb.Inventory) -> None:
        """Make the image whole: everything on stable storage, then the commit record, on stable storage too.

        No write() may be running or follow. CRIU must have finished its files. `inventory` is not changed: what the
        writer fills in goes into a copy. Raises ImageError if the blocks of the inventory and the data written do not
        match, or a file cannot be written, read or synced; then there is no commit record, and abort() is what is left.
        """
        self._finishing = True
        for s in self._stripes:
            with s.lock:
                self._check_usable()
        try:
            commit(
                Written(
                    self._files, self._stripes, self._added, self._inventory_fd, self._chunk_size, self._started_ns
                ),
                inventory,
            )
        except OSError as error:
            failure = self._files.failure(error.filename if isinstance(error.filename, str) else "", error, 0)
            self._fail(failure)
            raise failure from error
        except ImageError as error:
            self._fail(error)
            raise
        self._state = "committed"
        self._close()

    # ------------------------------------------------------------------------------------------------------- abort

    def abort(self) -> None:
        """Remove every file made here; waits for writes in progress. Does nothing after commit() or a first abort()."""
        if self._state != "writing":
            return
        self._fail(ImageError("the image was given up"))
        for s in self._stripes:
            with s.lock:
                pass  # a write that had begun has ended; later ones see the failure
        self._state = "aborted"
        self._files.remove_all()  # the commit record, made last, goes first
        self._close()

    def _close(self) -> None:
        for fd in [*(s.fd for s in self._stripes), *(fd for fd, _ in self._added), self._inventory_fd]:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        self._files.close()
        for s in self._stripes:
            s.fd = -1
        self._added = []
        self._inventory_fd = -1

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise ImageError(f"the image in {self._files.path} takes no more data: {self._failure}") from self._failure
        if self._state != "writing":
            raise ImageError(f"the image in {self._files.path} is {self._state} already")

    def _fail(self, error: ImageError) -> None:
        with self._failure_lock:
            if self._failure is None:
                self._failure = error
