"""Reading an image set: what is in it, where the data lies, and whether all of it is as it was written."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, final

from phos.gen import phos_image_pb2 as pb
from phos.images import formats
from phos.images.chunk_hash import chunk_hash
from phos.images.errors import ImageError, ImageUnreadable
from phos.images.extents import EXTENT_LIMIT, BlockTable, DataFile, Extent, read_fully
from phos.images.files import (
    address_of,
    copy_segment,
    hash_segment,
    lives_in_memory,
    open_regular,
    run_in_threads,
    segments,
)
from phos.images.formats import BlockKey, digest
from phos.images.table import block_key, complaint_about, inventory_blocks, name_of

_VERIFY_LIMIT = 8 << 20  # what verify reads at once: less, so that a core's cache holds some of it

_FILE_MOST = (1 << 63) - 1  # off_t: no call of the kernel's takes an offset past it

METADATA_MOST = 1 << 30
"""More than any of PhOS's files without data has; one is read whole."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), from one thread at a time."""


def read_record(raw: bytes, where: Path) -> pb.CommitRecord:
    """Return the commit record in the bytes of a commit file; the files that it names lie in the image's directory.

    Raises:
        ImageError: it is damaged, or names what cannot be a file of an image.
        ImageUnreadable: it is whole, and of another version of the format.
    """
    entries = formats.parse_file(raw, str(where), formats.COMMIT)
    seal_at = [at for at, _ in formats.split_frames(raw, str(where))][1]
    if entries[1].seal != digest(memoryview(raw)[:seal_at]) or len(raw) != seal_at + 4 + entries[1].ByteSize():
        raise ImageError(f"{where} is damaged: its seal does not match its content")
    record: pb.CommitRecord = entries[0].record
    if record.format_version != formats.FORMAT_VERSION:
        raise ImageUnreadable(
            f"{where.parent} holds an image of format version {record.format_version}; this PhOS reads version "
            f"{formats.FORMAT_VERSION}: use the release that made it"
        )
    for file in record.files:
        if "/" in file.name or "\0" in file.name or file.name in ("", ".", ".."):
            raise ImageError(f"{where} names a file outside the image: {file.name!r}")
        if file.size > _FILE_MOST:
            raise ImageError(f"{where} gives {file.name} more bytes than a file can have: {file.size}")
    return record


@final
class Image:
    """An image that may be trusted as far as `open` can tell without reading the data.

    inventory  what is in it.
    record     the commit record.
    blocks     the chunk tables by block key.
    path       the directory, for messages.
    problems   what `open_damaged` found wrong; empty after `open`.
    unreadable whether that is, or may be, because files could not be read.

    May be used by several threads at once. A context manager; close() must not be called while another thread reads.
    """

    def __init__(self, directory: int, *, direct: bool | None) -> None:
        """Use `open` or `open_damaged`."""
        self._directory = directory
        self._direct = direct
        self._lock = threading.Lock()  # guards _data
        self._data: dict[int, DataFile] = {}
        self.path = Path(os.readlink(f"/proc/self/fd/{directory}"))
        self.problems: list[str] = []
        self.unreadable = False
        self.inventory = pb.Inventory()
        self.record = pb.CommitRecord()
        self.blocks: dict[BlockKey, BlockTable] = {}

    # -------------------------------------------------------------------------------------------------------- open

    @classmethod
    def open(cls, directory: int | str | os.PathLike[str], *, direct: bool | None = None) -> Image:
        """Open an image set, by path or by a directory's descriptor (duplicated; the caller keeps its own).

        direct: read past the page cache: True, False, or None for where it pays.
        Raises ImageError, with a sentence, if there is no image, or it is not complete, not of this version, or any of
        its files is missing, of another size than was committed or, for inventory and chunk tables, of other content;
        ImageUnreadable if that cannot be told.
        """
        image = cls.open_damaged(directory, direct=direct)
        if image.problems:
            problems = image.problems
            image.close()
            more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
            raise (ImageUnreadable if image.unreadable else ImageError)(problems[0] + more, problems)
        return image

    @classmethod
    def open_damaged(cls, directory: int | str | os.PathLike[str], *, direct: bool | None = None) -> Image:
        """Like `open`, but files that are missing, cut off or altered only become `problems`.

        Still raises ImageError if the commit record cannot be trusted: then nothing can be said about the rest.
        """
        image = cls(_open_directory(directory), direct=direct)
        try:
            image._load_record()
            image._check_sizes()
            image._load_metadata()
        except OSError as error:
            image.close()
            raise ImageUnreadable(f"{image.path} cannot be read: {error.strerror}") from error
        except BaseException:
            image.close()
            raise
        return image

    def __enter__(self) -> Image:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def directory(self) -> int:
        """A descriptor of its directory, the caller's: `path` may lead to another one by now."""
        return fcntl.fcntl(self._directory, fcntl.F_DUPFD_CLOEXEC, 0)

    def close(self) -> None:
        for data in self._data.values():
            data.close()
        self._data.clear()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _load_record(self) -> None:
        name = formats.COMMIT_FILE
        try:
            raw = self.read_file(name)
        except FileNotFoundError:
            raise ImageError(self._why_no_record()) from None
        except OSError as error:
            raise ImageUnreadable(f"{self.path / name} cannot be read: {error.strerror}") from error
        self.record = read_record(raw, self.path / name)

    def _why_no_record(self) -> str:
        names = set(os.listdir(self._directory))
        if any(formats.is_ours(n) for n in names):
            return (
                f"the image in {self.path} is incomplete: it has no commit record ({formats.COMMIT_FILE}), so the "
                "checkpoint is still being written, or failed or was cut off; it cannot be used"
            )
        if formats.CRIU_INVENTORY_FILE in names:
            return (
                f"{self.path} holds a CRIU image and nothing of PhOS's: it was made without PhOS, then restore it with "
                "`criu restore` and without `--lib phos`; or its checkpoint failed, then it cannot be used"
            )
        return f"{self.path} holds no image" + ("" if names else " (it is empty)")

    def _check_sizes(self) -> None:
        for file in self.record.files:
            where = self.path / file.name
            try:
                status = os.stat(file.name, dir_fd=self._directory)
            except FileNotFoundError:
                self.problems.append(f"{where} is missing")
                continue
            except OSError as error:
                self._cannot_read(where, error)
                continue
            if status.st_size < file.size:
                self.problems.append(f"{where} is cut off: it has {status.st_size} bytes instead of {file.size}")
            elif status.st_size > file.size:
                self.problems.append(f"{where} has {status.st_size} bytes instead of {file.size}: it was changed")

    def _cannot_read(self, where: Path | str, error: OSError) -> None:
        self.problems.append(f"{where} cannot be read: {error.strerror}")
        self.unreadable = True

    def _load_metadata(self) -> None:
        inventory = self._load_checked(formats.INVENTORY)
        tables = self._load_checked(formats.CHUNKS)
        if inventory is None or tables is None:
            return
        self.inventory = inventory[0]
        where = self.path / formats.INVENTORY_FILE
        if self.inventory.format_version != self.record.format_version:
            self.problems.append(f"{where} is of format version {self.inventory.format_version}")
        if self.inventory.image_id != self.record.image_id:
            self.problems.append(f"{where} belongs to another image")
        if self.inventory.HasField("parent"):
            self.problems.append(f"{self.path} builds on a parent image, which this version of PhOS cannot read")
        self._check_tables(tables)

    def _load_checked(self, format_: formats.Format) -> list[Any] | None:
        """A metadata file's messages, or None and a problem noted."""
        where = str(self.path / format_.file)
        file = next((f for f in self.record.files if f.name == format_.file), None)
        if file is None:
            self.problems.append(f"{self.path / formats.COMMIT_FILE} does not name {format_.file}")
            return None
        try:
            raw = self.read_file(format_.file)
        except FileNotFoundError:
            return None  # _check_sizes has said so
        except OSError as error:
            self._cannot_read(where, error)
            return None
        view = memoryview(raw)
        step = file.segment_size or formats.SEGMENT_SIZE
        # The count first: a record that is not ours may ask for a hash of every byte.
        if (
            len(raw) != file.size
            or len(file.hashes) != -(-len(raw) // step)
            or [digest(view[i : i + step]) for i in range(0, len(raw), step)] != list(file.hashes)
        ):
            if len(raw) == file.size:
                self.problems.append(f"{where} is damaged: its hash is not the committed one")
            return None
        try:
            return formats.parse_file(raw, where, format_)
        except ImageError as error:
            self.problems.append(str(error))
            return None

    def _check_tables(self, tables: list[pb.BlockTable]) -> None:
        where = self.path / formats.CHUNKS_FILE
        sizes = {f.name: f.size for f in self.record.files if f.origin == pb.File.PHOS_DATA}
        for table in tables:
            key = (table.session, table.block)
            complaint = complaint_about(table)
            for run in table.runs:
                if run.kind == pb.Run.PARENT:
                    complaint = complaint or "lies in a parent image, which this version of PhOS cannot read"
                elif run.kind == pb.Run.DATA:
                    name = formats.data_file(run.stripe)
                    if run.file_offset + run.length > sizes.get(name, 0):
                        complaint = complaint or f"reaches past the end of {name}"
            if key in self.blocks:
                complaint = complaint or "is there twice"
            if complaint:
                self.problems.append(f"{where}: {name_of(key)} {complaint}")
            else:
                self.blocks[key] = BlockTable(table)
        try:
            wanted = inventory_blocks(self.inventory)
        except ImageError as error:
            self.problems.append(f"{self.path / formats.INVENTORY_FILE}: {error}")
            return
        tabled = {(t.session, t.block): t.size for t in tables}
        for key in sorted(wanted.keys() | tabled.keys()):
            here, there = tabled.get(key, "no"), wanted.get(key, "none")
            if here != there:
                self.problems.append(f"{where}: {name_of(key)} has {here} bytes here and {there} in the inventory")

    def read_file(self, name: str, most: int = METADATA_MOST) -> bytes:
        """One of its small files, whole.

        Raises:
            OSError: it cannot be read, is no regular file, or has more than ``most`` bytes.
        """
        with open(open_regular(self._directory, name), "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise OSError(errno.EFBIG, f"it has more than {most} bytes, which none of its kind has", name)
            return file.readall()

    # -------------------------------------------------------------------------------------------------------- data

    def extents(self, key: BlockKey) -> Iterator[Extent]:
        """A block's extents in offset order; KeyError if the image has no such block."""
        return self.blocks[key].extents()

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """Fill the first `extent.length` bytes of a writable buffer and check every chunk against its hash.

        A page-aligned buffer lets the disk write into it directly. Raises ImageError naming file, offset, process and
        buffer if the data cannot be read or is not what was written; the buffer's content is then undefined.
        """
        bad = self._read(extent, buffer, check=True)
        if bad:
            raise ImageError(bad[0] + (f" (and {len(bad) - 1} more chunks)" if len(bad) > 1 else ""), bad)

    def read_unchecked(self, extent: Extent, buffer: memoryview) -> None:
        """As `read_into`, but the caller compares the hashes: a GPU does that in a hundredth of the time."""
        self._read(extent, buffer, check=False)

    @property
    def in_memory(self) -> bool:
        """Whether its files lie in a file system without a disk."""
        return lives_in_memory(self._directory)

    def lies_at(self, extent: Extent) -> None:
        """Nowhere: see :class:`~phos.images.source.ImageSource`."""

    def file_of(self, extent: Extent) -> tuple[int, int] | None:
        """See :class:`~phos.images.source.ImageSource`."""
        if extent.stripe is None:
            return None
        data = self._data_file(extent.stripe)
        return None if data.direct >= 0 else (data.buffered, extent.file_offset)

    def _read(self, extent: Extent, buffer: memoryview, *, check: bool) -> list[str]:
        view = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        view = view[: extent.length]
        if len(view) < extent.length:
            raise ValueError(f"the buffer has {len(view)} bytes, the extent {extent.length}")
        if extent.stripe is None:
            ctypes.memset(address_of(view), 0, extent.length)
            return []
        return self._read_data(extent, view, check=check)

    def _read_data(self, extent: Extent, view: memoryview, *, check: bool = True) -> list[str]:
        """Reads; returns one problem per chunk that is not as it was written (ImageError if it cannot be read)."""
        assert extent.stripe is not None
        data = self._data_file(extent.stripe)
        chunk = extent.chunk_size
        bad: list[str] = []
        # From memory a chunk at a time, so that it is hashed while it is in the cache; from a disk all at once.
        whole = data.direct >= 0 or not check
        try:
            if data.direct >= 0:
                data.read_direct(view, extent.file_offset)
            elif whole:
                read_fully(data.buffered, view, extent.file_offset)
            for i, hash_ in enumerate(extent.hashes if check else ()):
                piece = view[i * chunk : (i + 1) * chunk]
                if not whole:
                    read_fully(data.buffered, piece, extent.file_offset + i * chunk)
                if chunk_hash(piece) != hash_:
                    bad.append(
                        self._describe(extent, i * chunk, len(piece), "is damaged: its hash is not the one written")
                    )
        except (OSError, EOFError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ImageError(self._describe(extent, 0, extent.length, f"cannot be read: {reason}")) from error
        return bad

    def _data_file(self, stripe: int) -> DataFile:
        with self._lock:
            data = self._data.get(stripe)
            if data is None:
                try:
                    data = DataFile(self._directory, stripe, self._direct)
                except OSError as error:
                    where = self.path / formats.data_file(stripe)
                    raise ImageError(f"{where} cannot be read: {error.strerror}") from error
                self._data[stripe] = data
            return data

    def _describe(self, extent: Extent, at: int, length: int, what: str) -> str:
        where = self.path / formats.data_file(extent.stripe or 0)
        owner = self.owner_of(extent.block, extent.offset + at, length)
        return (
            f"{where}, byte {extent.file_offset + at}: {length} bytes of {owner}"
            f" (byte {extent.offset + at} of {name_of(extent.block)}) {what}"
        )

    def owner_of(self, key: BlockKey, offset: int, length: int) -> str:
        """Whose buffer a part of a block belongs to, for messages: 'the buffer at 0x… of process 12 (python)'."""
        for process in self.inventory.processes:
            numbers = {b.block for b in process.blocks if block_key(process, b) == key}
            if not numbers:
                continue
            who = f"process {process.pid} ({os.path.basename(process.executable)})"
            hit = [
                a
                for a in process.allocations
                if a.block in numbers and a.offset < offset + length and offset < a.offset + a.size
            ]
            if hit:
                first = min(hit, key=lambda a: a.offset)
                more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
                return f"the buffer at {first.address:#x}{more} of {who}"
            return f"memory of {who}"
        return "memory of no process"

    # ------------------------------------------------------------------------------------------------------ verify

    def verify(self, progress: Progress | None = None, threads: int | None = None) -> list[str]:
        """Check every hash of every file, CRIU's too, with as many threads as there are cores (or `threads`).

        Returns all problems, in the order of the files, and never stops at the first; an empty list means that every
        byte of the image is the one that was written. `progress` is called with (bytes done, bytes in all).
        Raises ImageUnreadable if the directory cannot be listed.
        """
        try:
            present = {e.name for e in os.scandir(self._directory)}
        except OSError as error:
            raise ImageUnreadable(f"{self.path} cannot be read: {error.strerror}") from error
        known = {f.name for f in self.record.files}
        known |= {formats.COMMIT_FILE, formats.ORDER_FILE, formats.ORDER_TEMPORARY}
        problems = list(self.problems)
        problems += [
            f"{self.path / name} does not belong to the image: it was put there after the checkpoint"
            for name in sorted(present - known)
            if name.endswith(".img") or name.startswith("phos-")
        ]
        missing = (f"{self.path / file.name} is missing" for file in self.record.files if file.name not in present)
        problems += [problem for problem in missing if problem not in self.problems]
        jobs: list[tuple[int, Callable[[], list[str]]]] = []
        memory = threading.local()  # each thread's buffer, kept: fresh pages cost more than the hashing
        for table in self.blocks.values():
            for extent in table.extents(_VERIFY_LIMIT, zeros=False):
                if extent.stripe is not None and formats.data_file(extent.stripe) in present:
                    jobs.append((extent.length, partial(self._verify_extent, extent, memory)))
        for file in self.record.files:
            if (file.origin == pb.File.CRIU or formats.is_added(file.name)) and file.name in present:
                step = file.segment_size or formats.SEGMENT_SIZE
                if len(file.hashes) != -(-file.size // step):
                    problems.append(f"{self.path / formats.COMMIT_FILE} lacks hashes of {file.name}")
                    continue
                for i, hash_ in enumerate(file.hashes):
                    length = min(step, file.size - i * step)
                    jobs.append((length, partial(self._verify_segment, file.name, i * step, length, hash_)))
        total = sum(size for size, _ in jobs)
        done = 0
        lock = threading.Lock()  # guards done, and lets one thread at a time report

        def run(size: int, job: Callable[[], list[str]]) -> list[str]:
            nonlocal done
            found = job()
            with lock:
                done += size
                if progress:
                    progress(done, total)
            return found

        if progress:
            progress(0, total)
        found = run_in_threads([partial(run, s, j) for s, j in jobs], threads)
        for part in found:
            problems += part
        return problems

    @cached_property
    def added(self) -> dict[str, pb.File]:
        """What ImageWriter.add_file() has put into the image, by name."""
        return {file.name: file for file in self.record.files if formats.is_added(file.name)}

    def copy_file(self, name: str, target: int) -> None:
        """Copy a file that ImageWriter.add_file() has put into the image to one of its size that holds zeros.

        Several threads do it. Every hash is checked. Raises ImageError with the file and the place in it; OSError if
        `target` takes it not.
        """
        where = self.path / name
        file = self.added.get(name)
        step = file.segment_size if file else 0
        if file is None or step <= 0 or len(file.hashes) != -(-file.size // step):
            raise ImageError(f"{self.path / formats.COMMIT_FILE} lacks {name} or its hashes")
        try:
            fd = open_regular(self._directory, name)
        except OSError as error:
            raise ImageError(f"{where} cannot be read: {error.strerror}") from error
        try:
            places = segments(file.size, step)
            found = run_in_threads([partial(copy_segment, fd, target, at, length) for at, length in places])
        except EOFError as error:
            raise ImageError(f"{where} is cut off: {error}") from error
        finally:
            os.close(fd)
        for (at, length), hash_, expected in zip(places, found, file.hashes, strict=True):
            if hash_ != expected:
                raise ImageError(
                    f"{where} is damaged: bytes {at} to {at + length} have another hash than the committed one"
                )

    def _verify_extent(self, extent: Extent, memory: threading.local) -> list[str]:
        view = getattr(memory, "view", None)
        if view is None or len(view) < extent.length:
            view = memory.view = memoryview(mmap.mmap(-1, formats.align_up(extent.length)))
        try:
            return self._read_data(extent, view[: extent.length])
        except ImageError as error:
            return error.problems

    def _verify_segment(self, name: str, offset: int, length: int, expected: bytes) -> list[str]:
        where = self.path / name
        try:
            fd = open_regular(self._directory, name)
            try:
                actual = hash_segment(fd, offset, length)
            finally:
                os.close(fd)
        except OSError as error:
            return [f"{where} cannot be read: {error.strerror}"]
        except EOFError:
            return []  # its size has been complained about
        if actual == expected:
            return []
        return [f"{where} is damaged: bytes {offset} to {offset + length} have another hash than the committed one"]


def _open_directory(directory: int | str | os.PathLike[str]) -> int:
    try:
        if isinstance(directory, int):
            fd = fcntl.fcntl(directory, fcntl.F_DUPFD_CLOEXEC, 0)
            os.listdir(fd)
            return fd
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ImageError(f"there is no directory {os.fspath(directory)!s}") from None  # type: ignore[arg-type]
    except NotADirectoryError:
        raise ImageError(f"{directory} is not a directory; an image is a directory") from None
    except OSError as error:
        raise ImageUnreadable(f"{directory} cannot be opened: {error.strerror}") from error


__all__ = ["EXTENT_LIMIT", "BlockTable", "Extent", "Image", "ImageError", "ImageUnreadable"]
