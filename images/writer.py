"""Writing an image set: GPU data in stripes, then inventory, chunk tables and, last, the commit record.

Lock order: `_Stripe.lock` before `ImageWriter._failure_lock`. A stripe's lock is held for the whole of a write(), so
that abort() and commit() never close a descriptor under a thread that writes to it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, final

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.chunk_hash import chunk_hash, zero_hash
from phos.images.errors import ImageError
from phos.images.files import (
    allocate,
    copy_segment,
    describe_path,
    free_bytes,
    hash_files,
    lives_in_memory,
    run_in_threads,
    segments,
)
from phos.images.formats import ALIGNMENT, HASH_SIZE, BlockKey, align_up, digest
from phos.images.mapping import HUGE_PAGE, has_huge_pages, map_memory, view_of
from phos.images.table import WrittenRun, build_tables

COPY_THREADS = 8  # of add_file(): the copies of GPU data and CRIU want processors too
_IOV_MAX = 1024  # Linux's UIO_MAXIOV
_RESERVE_STEP = 16 << 20


class _Stripe:
    """One data file and what was appended to it; everything in it is guarded by `lock`."""

    __slots__ = ("direct", "end", "fd", "index", "lock", "name", "runs", "written", "zero")

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = formats.data_file(index)
        self.lock = threading.Lock()
        self.fd = -1
        self.end = 0  # where the next run goes: a multiple of ALIGNMENT
        self.direct = False
        self.written = 0
        self.zero = 0
        self.runs: list[WrittenRun] = []


class Place(NamedTuple):
    """Room in a data file that is mapped: its address, its bytes, and where it lies in the file."""

    address: int
    view: memoryview
    file_offset: int


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
        self._stripes = [_Stripe(i) for i in range(stripes)]
        self._made: list[str] = []  # in the order of creation; abort() removes them backwards
        self._added: list[tuple[int, pb.File]] = []  # descriptor, record
        self._failure_lock = threading.Lock()
        self._failure: ImageError | None = None
        self._state = "writing"  # then "committed" or "aborted"
        self._finishing = False  # set once, before the stripes are locked: reserve() is to end
        self._mapped: _Stripe | None = None
        self._address = self._segment = self.mapped_bytes = 0
        self.placeable = self.place_limit = 0  # how much place() can give in all, and at once
        self._directory = os.dup(directory)
        self._path = describe_path(self._directory)
        try:
            self._refuse_used_directory()
            self._direct = not lives_in_memory(self._directory) if direct is None else direct
            self._inventory_fd = self._create(formats.INVENTORY_FILE)  # empty: it claims the directory
            for stripe in self._stripes:
                stripe.fd = self._create(stripe.name)
                stripe.direct = self._direct and self._set_direct(stripe, True)
                if direct and not stripe.direct:
                    raise ImageError(f"{self._path}: this file system does not take O_DIRECT; write without it")
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

    def _reserve_stripe(self, s: _Stripe, size: int) -> bool:
        for at in range(0, size, _RESERVE_STEP):
            with s.lock:
                if s.fd < 0 or self._failure is not None or self._finishing:
                    return True
                if s.end <= at and not allocate(s.fd, at, min(_RESERVE_STEP, size - at)):
                    return False
        return True

    def map_data(self, total: int, segment: int, most: int) -> int:
        """Make a data file that is written through memory, where the file system has huge pages for it.

        total    so many bytes can be placed there, however they are cut.
        segment  no place lies across a multiple of this many bytes; a multiple of the size of a huge page.
        most     bytes of one place.

        Returns the address of `mapped_bytes` bytes, which have no pages yet; 0: it is not to be had. The caller unmaps
        them when nothing is written there any more, before commit() or after it.
        """
        if self._direct or not lives_in_memory(self._directory):
            return 0
        s = _Stripe(len(self._stripes))
        try:
            s.fd = self._create(s.name)
            if not has_huge_pages(s.fd):
                raise OSError(errno.ENOTSUP, "small pages")
            size = total + total // (segment - most) * most  # what places leave free before a boundary
            self.mapped_bytes = -(-size // HUGE_PAGE) * HUGE_PAGE
            os.ftruncate(s.fd, self.mapped_bytes)
            self._address = map_memory(self.mapped_bytes, s.fd)
        except OSError:
            self._forget(s)
            return 0
        self._segment = segment
        self.placeable, self.place_limit = total, most
        self._mapped = s
        self._stripes = [*self._stripes, s]  # others may be going through the old list
        return self._address

    def unmap_data(self) -> None:
        """No more places, because the memory cannot be used after all; nothing has been written there."""
        if self._mapped is not None:
            self._stripes = [s for s in self._stripes if s is not self._mapped]
            self._forget(self._mapped)
            self._mapped = None
            self.placeable = self.place_limit = 0

    def _forget(self, s: _Stripe) -> None:
        if s.fd >= 0:
            os.close(s.fd)
            s.fd = -1
            self._remove(s.name)

    def place(self, size: int) -> Place | None:
        """Room for whole chunks, or a block's end, to be filled and then named to write(); None: no more."""
        s = self._mapped
        if s is None:
            return None
        with s.lock:
            at = s.end
            if at // self._segment != (at + size - 1) // self._segment:
                at = -(-at // self._segment) * self._segment
            if at + size > self.mapped_bytes:
                return None
            s.end = align_up(at + size)
        return Place(self._address + at, view_of(self._address + at, size), at)

    def write(
        self,
        stripe: int,
        block: BlockKey,
        offset: int,
        data: memoryview,
        hashes: Sequence[bytes] | None = None,
        place: Place | None = None,
    ) -> None:
        """Append part of a block to a stripe's data file; returns when the kernel has taken the bytes.

        stripe  which data file; one thread at a time in each (others would wait).
        block   the owner's session and block number.
        offset  in the block, a multiple of the chunk size.
        data    a whole number of chunks, or fewer bytes at the block's end; page-aligned for O_DIRECT to work.
        hashes  chunk_hash() of each chunk, if the caller knows them.
        place   where the data lies already; `stripe` has no meaning then.

        Each chunk is hashed if it has to be; chunks of zeros take no space. Writing a chunk again replaces it in the
        image (the old bytes stay in the file, unused). Raises ImageError with file and reason; the writer then takes no
        more.
        """
        if offset < 0 or offset % self._chunk_size:
            raise ValueError(f"offset {offset} is not a multiple of the chunk size {self._chunk_size}")
        if len(block[0]) != HASH_SIZE:
            raise ValueError(f"a session has 16 bytes, not {len(block[0])}")
        view = data if data.format == "B" and data.ndim == 1 else data.cast("B")
        if place is not None and self._mapped is not None:
            self._check_usable()
            self._note(self._mapped, block, offset, view, hashes, place)
            return
        s = self._stripes[stripe]
        with s.lock:
            self._check_usable()
            try:
                self._append(s, block, offset, view, hashes)
            except ImageError as error:
                self._fail(error)
                raise

    def _append(
        self, s: _Stripe, block: BlockKey, offset: int, view: memoryview, known: Sequence[bytes] | None
    ) -> None:
        # On O_DIRECT the whole call goes out in one pwritev, so that the disk sees one large request. Through memory
        # each chunk is written right after it was hashed, while it is still in the processor's cache.
        chunk, length, direct = self._chunk_size, len(view), s.direct
        pending: list[memoryview] = []
        hashes: list[bytes] = []
        kind = pb.Run.KIND_UNSPECIFIED
        begin = file_offset = 0
        start, at = s.end, s.end  # file offsets: where `pending` begins, where the next chunk goes
        runs: list[WrittenRun] = []
        for i in range(0, length, chunk):
            piece = view[i : i + chunk]
            size = len(piece)
            hash_ = chunk_hash(piece) if known is None else known[i // chunk]
            if hash_ == zero_hash(size):
                s.zero += size
                if kind != pb.Run.ZERO:
                    if kind:
                        runs.append(self._run(s, block, kind, offset + begin, i - begin, file_offset, hashes))
                    kind, begin, hashes = pb.Run.ZERO, i, []
                continue
            if kind != pb.Run.DATA:
                if kind:
                    runs.append(self._run(s, block, kind, offset + begin, i - begin, file_offset, hashes))
                kind, begin, file_offset, hashes = pb.Run.DATA, i, at, []
            hashes.append(hash_)
            at += size
            if not direct:
                self._write_out(s, [piece], start, size)
                start = at
            elif pending and len(hashes) > 1:
                # the neighbour of the last piece, in memory and in the file: one larger piece
                pending[-1] = view[begin : i + size]
            else:
                pending.append(piece)
        if kind:
            runs.append(self._run(s, block, kind, offset + begin, length - begin, file_offset, hashes))
        if pending:
            self._write_out(s, pending, start, at - start)
        s.end = align_up(at)
        s.runs += runs  # only now: a failed write leaves no run behind

    def _note(
        self, s: _Stripe, block: BlockKey, offset: int, view: memoryview, known: Sequence[bytes] | None, place: Place
    ) -> None:
        """What lies in its place: a run for each chunk."""
        chunk, zero = self._chunk_size, 0
        runs: list[WrittenRun] = []
        for i in range(0, len(view), chunk):
            piece = view[i : i + chunk]
            hash_ = chunk_hash(piece) if known is None else known[i // chunk]
            if hash_ == zero_hash(len(piece)):
                zero += len(piece)
                runs.append(self._run(s, block, pb.Run.ZERO, offset + i, len(piece), 0, []))
            else:
                runs.append(self._run(s, block, pb.Run.DATA, offset + i, len(piece), place.file_offset + i, [hash_]))
        with s.lock:
            s.zero += zero
            s.written += len(view) - zero
            s.runs += runs

    def _run(
        self, s: _Stripe, block: BlockKey, kind: int, offset: int, length: int, file_offset: int, hashes: list[bytes]
    ) -> WrittenRun:
        return WrittenRun(block, offset, length, kind, s.index, file_offset, b"".join(hashes), next(self._sequence))

    def _write_out(self, s: _Stripe, pieces: list[memoryview], offset: int, size: int) -> None:
        """Write pieces one behind the other at a file offset, whole, however often the kernel stops short."""
        if s.direct and size % ALIGNMENT:
            # Only a block's tail has such a size, so only the last piece: O_DIRECT gets it padded with zeros.
            tail = pieces[-1]
            whole = len(tail) & ~(ALIGNMENT - 1)
            if whole:
                pieces[-1] = tail[:whole]
            else:
                pieces.pop()
            if pieces:
                self._write_pieces(s, pieces, offset, size)
            self._write_padded(s, tail[whole:], offset + size - (len(tail) - whole))
        else:
            self._write_pieces(s, pieces, offset, size)
        s.written += size

    def _write_pieces(self, s: _Stripe, pieces: list[memoryview], offset: int, size: int) -> None:
        done = 0
        while pieces:
            try:
                n = os.pwritev(s.fd, pieces[:_IOV_MAX], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and s.direct and self._set_direct(s, False):
                    continue  # memory or file system not fit for O_DIRECT after all: through the page cache from now on
                raise self._write_error(s.name, error, size - done) from error
            if n == 0:
                raise self._write_error(s.name, OSError(errno.EIO, "the file took no bytes"), size - done)
            done += n
            while pieces and n >= len(pieces[0]):
                n -= len(pieces.pop(0))
            if n:
                pieces[0] = pieces[0][n:]

    def _write_padded(self, s: _Stripe, tail: memoryview, offset: int) -> None:
        page = mmap.mmap(-1, ALIGNMENT)
        page[: len(tail)] = tail
        self._write_pieces(s, [memoryview(page)], offset, ALIGNMENT)

    def _set_direct(self, s: _Stripe, on: bool) -> bool:
        flags = fcntl.fcntl(s.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(s.fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            return False
        s.direct = on
        return True

    def add_file(self, name: str, source: int, size: int) -> list[bytes]:
        """Copy the first `size` bytes of the file `source` into the image, under a name that formats.is_ours() knows.

        Several threads copy at once; zeros take no space. Must have ended before commit() or abort() is called. Returns
        the hashes of its segments. Raises ImageError with file and reason.
        """
        self._check_usable()
        fd = self._create(name)
        record = pb.File(name=name, size=size, origin=pb.File.PHOS, segment_size=formats.SEGMENT_SIZE)
        self._added.append((fd, record))
        try:
            with self._saying(name, size):
                os.ftruncate(fd, size)
                jobs = [partial(copy_segment, source, fd, offset, length) for offset, length in segments(size)]
                record.hashes.extend(run_in_threads(jobs, COPY_THREADS))
        except EOFError as error:
            where = os.path.join(self._path, name)
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
            self._commit(inventory)
        except OSError as error:
            failure = self._write_error(error.filename if isinstance(error.filename, str) else "", error, 0)
            self._fail(failure)
            raise failure from error
        except ImageError as error:
            self._fail(error)
            raise
        self._state = "committed"
        self._close()

    def _commit(self, inventory: pb.Inventory) -> None:
        timings: list[pb.Timing] = []

        def timed(phase: str, action: Callable[[], object]) -> None:
            began = time.monotonic()
            action()
            timings.append(pb.Timing(phase=phase, seconds=time.monotonic() - began))

        tables = build_tables([r for s in self._stripes for r in s.runs], inventory, self._chunk_size)
        used = [s for s in self._stripes if s.end]
        for s in self._stripes:
            if not s.end:
                self._remove(s.name)
        timed("sync GPU data", lambda: run_in_threads([partial(self._finish_stripe, s) for s in used]))

        copy = pb.Inventory()
        copy.CopyFrom(inventory)
        copy.format_version = formats.FORMAT_VERSION
        copy.image_id = secrets.token_bytes(16)
        copy.created_ns = inventory.created_ns or self._started_ns
        copy.data.CopyFrom(self._summarise(tables, used))
        written = [
            self._write_file(formats.INVENTORY, self._inventory_fd, [copy]),
            self._write_file(formats.CHUNKS, self._create(formats.CHUNKS_FILE), tables),
        ]
        record = pb.CommitRecord(format_version=formats.FORMAT_VERSION, image_id=copy.image_id)
        for fd, added in self._added:
            with self._saying(added.name):
                os.fsync(fd)
        files = [added for _, added in self._added]
        files += [pb.File(name=s.name, size=s.end, origin=pb.File.PHOS_DATA) for s in used]
        files += [
            pb.File(
                name=n, size=len(raw), origin=pb.File.PHOS, segment_size=formats.SEGMENT_SIZE, hashes=_segments(raw)
            )
            for n, raw in written
        ]
        timed("hash and sync CRIU's files", lambda: files.extend(self._record_criu_files()))
        timed("sync the directory", lambda: os.fsync(self._directory))
        record.files.extend(sorted(files, key=lambda f: f.name))
        record.timings.extend(timings)
        record.committed_ns = time.time_ns()
        self._write_commit_record(record)

    def _summarise(self, tables: list[pb.BlockTable], used: list[_Stripe]) -> pb.Data:
        by_kind: dict[int, int] = {}
        for table in tables:
            for run in table.runs:
                by_kind[run.kind] = by_kind.get(run.kind, 0) + run.length
        return pb.Data(
            chunk_size=self._chunk_size,
            stripes=len(used),
            total_bytes=sum(by_kind.values()),
            written_bytes=by_kind.get(pb.Run.DATA, 0),
            zero_bytes=by_kind.get(pb.Run.ZERO, 0),
            direct=bool(used) and all(s.direct for s in used),
        )

    def _finish_stripe(self, s: _Stripe) -> None:
        with self._saying(s.name):
            os.ftruncate(s.fd, s.end)  # a tail that was not padded: up to the next multiple of 4096, with zeros
            os.fsync(s.fd)

    def _write_file(
        self, format_: formats.Format, fd: int, messages: list[pb.Inventory] | list[pb.BlockTable]
    ) -> tuple[str, bytes]:
        raw = formats.frame_file(format_, messages)
        self._write_whole(format_.file, fd, raw)
        return format_.file, raw

    def _write_whole(self, name: str, fd: int, raw: bytes) -> None:
        view = memoryview(raw)
        done = 0
        try:
            with self._saying(name, len(raw)):
                while done < len(raw):
                    done += os.pwrite(fd, view[done : done + (64 << 20)], done)
                os.fsync(fd)
        finally:
            if fd != self._inventory_fd:
                os.close(fd)

    def _record_criu_files(self) -> list[pb.File]:
        with self._saying(""):
            names = sorted(
                e.name
                for e in os.scandir(self._directory)
                if formats.is_criu_image(e.name) and e.is_file(follow_symlinks=False)
            )

        def sync(name: str) -> None:
            with self._saying(name):
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

        hashed = hash_files(self._directory, names, formats.SEGMENT_SIZE)
        run_in_threads([partial(sync, n) for n in names])
        return [
            pb.File(name=n, size=size, origin=pb.File.CRIU, segment_size=formats.SEGMENT_SIZE, hashes=hashes)
            for n, (size, hashes) in zip(names, hashed, strict=True)
        ]

    def _write_commit_record(self, record: pb.CommitRecord) -> None:
        head = formats.frame_file(formats.COMMIT, [pb.CommitEntry(record=record)])
        raw = head + formats.frame(pb.CommitEntry(seal=digest(head)))
        self._write_whole(formats.COMMIT_FILE, self._create(formats.COMMIT_TEMPORARY), raw)
        with self._saying(formats.COMMIT_FILE):
            # Known to abort() before it exists. A commit record of another writer cannot be there: its
            # phos-inventory.img would have been in our way.
            self._made.append(formats.COMMIT_FILE)
            os.rename(
                formats.COMMIT_TEMPORARY, formats.COMMIT_FILE, src_dir_fd=self._directory, dst_dir_fd=self._directory
            )
            os.fsync(self._directory)

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
        for name in reversed(self._made):  # the commit record, made last, goes first
            self._unlink(name)
        with suppress(OSError):
            os.fsync(self._directory)
        self._close()

    def _close(self) -> None:
        added = [fd for fd, _ in self._added]
        self._added = []
        for fd in [*(s.fd for s in self._stripes), *added, getattr(self, "_inventory_fd", -1), self._directory]:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        for s in self._stripes:
            s.fd = -1
        self._inventory_fd = self._directory = -1

    # ------------------------------------------------------------------------------------------------------ helpers

    def _refuse_used_directory(self) -> None:
        with self._saying(""):
            names = set(os.listdir(self._directory))
        if formats.COMMIT_FILE in names:
            raise ImageError(f"{self._path} holds another image; choose a directory that is empty")
        ours = sorted(n for n in names if formats.is_ours(n))
        if ours:
            raise ImageError(
                f"{self._path} is not empty: it holds the remains of an image that was not finished, or one that is "
                f"being written now ({', '.join(ours[:3])}); choose another directory or remove them"
            )
        if formats.CRIU_INVENTORY_FILE in names:
            # CRIU writes it at the very end of a dump, so this one is of an earlier dump.
            raise ImageError(f"{self._path} holds another image, made by CRIU; choose a directory that is empty")

    def _create(self, name: str) -> int:
        with self._saying(name):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(name, flags, 0o600, dir_fd=self._directory)
        self._made.append(name)
        return fd

    def _remove(self, name: str) -> None:
        self._unlink(name)
        self._made.remove(name)

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError, OSError):
            os.unlink(name, dir_fd=self._directory)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise ImageError(f"the image in {self._path} takes no more data: {self._failure}") from self._failure
        if self._state != "writing":
            raise ImageError(f"the image in {self._path} is {self._state} already")

    def _fail(self, error: ImageError) -> None:
        with self._failure_lock:
            if self._failure is None:
                self._failure = error

    @contextmanager
    def _saying(self, name: str, needed: int = 0) -> Iterator[None]:
        """Turns an OSError inside it into an ImageError about the file `name` ('' for the directory)."""
        try:
            yield
        except OSError as error:
            raise self._write_error(name, error, needed) from error

    def _write_error(self, name: str, error: OSError, needed: int) -> ImageError:
        where = os.path.join(self._path, name) if name else self._path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk quota is used up" if error.errno == errno.EDQUOT else "the file system is full"
            return ImageError(
                f"{where}: {what}: {needed} more bytes were needed, {free_bytes(self._directory)} are free, "
                f"{self.bytes_written} of GPU data had been written; make room or choose another directory"
            )
        follow = f" ({needed} bytes were to follow)" if needed else ""
        return ImageError(f"{where} cannot be written, or read back: {error.strerror or error}{follow}")


def _segments(raw: bytes) -> list[bytes]:
    view = memoryview(raw)
    return [digest(view[i : i + formats.SEGMENT_SIZE]) for i in range(0, len(raw), formats.SEGMENT_SIZE)]
