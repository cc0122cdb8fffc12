"""An image whose GPU data lies at another host: its description is copied here, chunks come when they are asked for.

The directory that stands for it has CRIU's files and our tables as they are there, all checked against the commit
record; files of the right size and without content in place of the data; and MARKER, which says where the data is.
Whoever took it for an image of its own would find no chunk to be what its hash says.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import xxhash

from phos.gen import phos_image_pb2 as pb
from phos.gen import remote_pb2
from phos.images import formats
from phos.images.chunk_hash import chunk_hash
from phos.images.errors import ImageError
from phos.images.extents import BlockTable, Extent
from phos.images.files import free_bytes, put, run_in_threads, segments
from phos.images.formats import BlockKey, digest
from phos.images.reader import Image, read_record
from phos.images.remote_wire import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    DATA_LIMIT,
    REPLY_LIMIT,
    Address,
    greet,
    read_key,
    receive_into,
    receive_message,
    send_message,
)

MARKER = "phos-remote.json"

COPY_THREADS = 8
"""That fetch files, each over a connection of its own."""

PIECE = 4 << 20
"""What is asked for at once of a file."""

_DESCRIPTION_LIMIT = 1 << 30
"""Largest commit record that is believed; bytes."""


class Refused(ImageError):
    """The other host has said no; the connection is good."""


class Link:
    """One connection about one image; of one thread at a time."""

    def __init__(self, address: Address, key: bytes) -> None:
        """Connect, prove, ask for the image.

        Raises:
            Refused: the other phosd does not share it, or says what is wrong with it. OSError: there is no connection.
        """
        self._socket = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            greet(self._socket, key)
            request = remote_pb2.Request(open=remote_pb2.Open(image=address.image))
            self.opened = self._ask(request).opened
        except BaseException:
            self._socket.close()
            raise

    def _ask(self, request: remote_pb2.Request) -> remote_pb2.Reply:
        send_message(self._socket, request)
        reply = receive_message(self._socket, remote_pb2.Reply, REPLY_LIMIT)
        if reply.error:
            raise Refused(reply.error)
        return reply

    def read_into(self, file: str, offset: int, view: memoryview) -> None:
        """Fill a buffer from a file of the image.

        Raises:
            Refused: it cannot be read there. OSError: the connection is lost.
        """
        for at in range(0, len(view), DATA_LIMIT):
            part = view[at : at + DATA_LIMIT]
            read = remote_pb2.Read(file=file, offset=offset + at, length=len(part))
            reply = self._ask(remote_pb2.Request(read=read))
            if reply.length != len(part):
                raise OSError(f"{reply.length} bytes came where {len(part)} were asked for")
            receive_into(self._socket, part)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


class Links:
    """Connections about one image, as many as threads ask at once. Methods may be called from any thread."""

    def __init__(self, address: Address, key: bytes) -> None:
        self.address = address
        self._key = key
        self._lock = threading.Lock()  # guards _idle, _record, _closed
        self._idle: list[Link] = []
        self._record = b""
        self._closed = False

    def connect(self) -> Link:
        """A new one.

        Raises:
            ImageError: there is none to be had, or the image there is another one by now.
        """
        try:
            link = Link(self.address, self._key)
        except Refused as error:
            raise ImageError(f"{self.address} cannot be had: {error}") from error
        except OSError as error:
            raise ImageError(f"{self.address} cannot be reached: {error.strerror or error}") from error
        with self._lock:
            self._record = self._record or link.opened.record_hash
            same = self._record == link.opened.record_hash
        if not same:
            link.close()
            raise ImageError(f"{self.address} is another image by now: its directory was written anew")
        return link

    def expect(self, record_hash: bytes) -> None:
        """From now on only the image with that commit record will do."""
        with self._lock:
            self._record = record_hash

    def read_into(self, file: str, offset: int, view: memoryview) -> None:
        """Fill a buffer from a file of the image.

        Raises:
            ImageError: it cannot be had.
        """
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is not None:
            try:
                self._read(link, file, offset, view)
                return
            except OSError:
                pass  # it may just have been idle for too long: once more, over a new one
        self._read_anew(file, offset, view)

    def _read_anew(self, file: str, offset: int, view: memoryview) -> None:
        try:
            self._read(self.connect(), file, offset, view)
        except OSError as error:
            why = f"no answer for {ANSWER_SECONDS:.0f} s" if isinstance(error, TimeoutError) else error
            raise ImageError(f"{self.address}: the connection was lost while {file} was read: {why}") from error

    def _read(self, link: Link, file: str, offset: int, view: memoryview) -> None:
        try:
            link.read_into(file, offset, view)
        except Refused as error:
            self._give_back(link)
            raise ImageError(f"{self.address}: {error}") from error
        except BaseException:
            link.close()
            raise
        self._give_back(link)

    def _give_back(self, link: Link) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def close(self) -> None:
        """Hang up, all of them."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for link in idle:
            link.close()


class RemoteImage:
    """An image at another host. An :class:`~phos.images.source.ImageSource`."""

    def __init__(self, local: Image, links: Links, *, only_data: bool) -> None:
        """Of the directory ``local`` that stands for it. Both become this object's. ``only_data``: all else is here."""
        self._local = local
        self._only_data = only_data
        self._links = links

    @staticmethod
    def open(directory: int) -> RemoteImage | None:
        """The image that a directory stands for; None if it has no MARKER.

        Raises:
            ImageError: its description is damaged, or the key file cannot be read.
        """
        # The directory may be a user's: neither is a link followed, nor a pipe waited for.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(MARKER, flags, dir_fd=directory), "rb") as file:
                regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                raw = file.read(1 << 16) if regular else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ImageError(f"{MARKER} in the image directory cannot be read: {error.strerror}") from error
        try:
            said = json.loads(raw)
            address, key_file = Address.parse(said["address"]), Path(said["key_file"])
            only_data = bool(said["only_data"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ImageError(f"{MARKER} in the image directory is damaged") from error
        links = Links(address, read_key(key_file))
        local = Image.open(directory)
        try:
            links.expect(digest(local.read_file(formats.COMMIT_FILE)))
        except OSError as error:
            local.close()
            raise ImageError(f"{local.path / formats.COMMIT_FILE} cannot be read: {error.strerror}") from error
        return RemoteImage(local, links, only_data=only_data)

    @property
    def inventory(self) -> pb.Inventory:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._local.inventory

    @property
    def blocks(self) -> Mapping[BlockKey, BlockTable]:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._local.blocks

    @property
    def path(self) -> Path:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._local.path

    def directory(self) -> int:
        """See :meth:`Image.directory`."""
        return self._local.directory()

    @property
    def record(self) -> pb.CommitRecord:
        """The commit record."""
        return self._local.record

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """See :class:`~phos.images.source.ImageSource`."""
        self.read_unchecked(extent, buffer)
        view = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        name, chunk = formats.data_file(extent.stripe or 0), extent.chunk_size
        for i, hash_ in enumerate(extent.hashes):
            piece = view[i * chunk : min((i + 1) * chunk, extent.length)]
            if chunk_hash(piece) != hash_:
                owner = self._local.owner_of(extent.block, extent.offset + i * chunk, len(piece))
                where = f"{self._links.address}, {name}, byte {extent.file_offset + i * chunk}"
                raise ImageError(
                    f"{where}: {len(piece)} bytes of {owner} are damaged: their hash is not the one written"
                )

    def read_unchecked(self, extent: Extent, buffer: memoryview) -> None:
        """See :class:`~phos.images.source.ImageSource`."""
        view = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        view = view[: extent.length]
        if extent.stripe is None:
            self._local.read_into(extent, view)
        else:
            self._links.read_into(formats.data_file(extent.stripe), extent.file_offset, view)

    def lies_at(self, extent: Extent) -> None:
        """Nowhere here: see :class:`~phos.images.source.ImageSource`."""

    def file_of(self, extent: Extent) -> None:
        """In none of this host's: see :class:`~phos.images.source.ImageSource`."""

    def copy_file(self, name: str, target: int) -> None:
        """See :class:`~phos.images.source.ImageSource`."""
        if self._only_data:
            self._local.copy_file(name, target)
            return
        file = self._local.added.get(name)
        if file is None:
            raise ImageError(f"{self.path / formats.COMMIT_FILE} lacks {name}")
        _copy_all([partial(copy, target) for copy in _copies(self._links, file)])

    def close(self) -> None:
        """See :class:`~phos.images.source.ImageSource`."""
        self._local.close()
        self._links.close()


def stands_for_another(directory: int) -> bool:
    """Whether an open directory has MARKER."""
    try:
        os.stat(MARKER, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _copy_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Do all of them, or until one fails: a host that has fallen silent would be waited for in each of the others."""
    failed = threading.Event()

    def unless_failed(job: Callable[[], None]) -> None:
        if failed.is_set():
            return
        try:
            job()
        except BaseException:
            failed.set()
            raise

    run_in_threads([partial(unless_failed, job) for job in jobs], COPY_THREADS)


def _copies(links: Links, file: pb.File) -> list[Callable[[int], None]]:
    """What has to be done to copy a file to an open one, in parts that threads may do."""
    step = file.segment_size or formats.SEGMENT_SIZE
    if step <= 0 or len(file.hashes) != -(-file.size // step):
        raise ImageError(f"{links.address}: its commit record lacks hashes of {file.name}")
    return [
        partial(_copy_segment, links, file.name, at, length, hash_)
        for (at, length), hash_ in zip(segments(file.size, step), file.hashes, strict=True)
    ]


def _copy_segment(links: Links, name: str, offset: int, length: int, expected: bytes, target: int) -> None:
    state = xxhash.xxh3_128()
    memory = memoryview(bytearray(min(length, PIECE)))
    for at in range(offset, offset + length, PIECE):
        view = memory[: min(PIECE, offset + length - at)]
        links.read_into(name, at, view)
        state.update(view)
        put(target, view, at)
    if state.digest() != expected:
        raise ImageError(
            f"{links.address}, {name}: bytes {offset} to {offset + length} are damaged: they have another hash than "
            "the committed one"
        )


def fetch_description(
    address: Address, key_file: Path, directory: Path, *, lasting: bool = False, made: list[Path] | None = None
) -> int:
    """Make an empty directory stand for the image at an address. Returns the bytes that were copied.

    ``lasting``: for many restores, so only the GPU data stays there, and the rest is on stable storage before this
    passes for an image: a host that crashed would have zeros else. Without it what the driver saved, which every
    restore needs once, stays there as well. ``made`` gets the files that are made: another image may come to be in the
    directory meanwhile, and is not this one's to remove.

    Raises:
        ImageError: the image cannot be had, is not whole, or what came is damaged. OSError: the directory takes it not.
    """
    made = [] if made is None else made
    commit, temporary = directory / formats.COMMIT_FILE, directory / formats.COMMIT_TEMPORARY
    with closing(Links(address, read_key(key_file))) as links:
        first = links.connect()
        try:
            opened = first.opened
            if not 0 < opened.commit_size <= _DESCRIPTION_LIMIT:
                raise ImageError(f"{address}: its commit record has {opened.commit_size} bytes")
            record = bytearray(opened.commit_size)
            first.read_into(formats.COMMIT_FILE, 0, memoryview(record))
            order = bytearray(min(opened.order_size, _DESCRIPTION_LIMIT))
            first.read_into(formats.ORDER_FILE, 0, memoryview(order))
        except OSError as error:
            raise ImageError(f"{address}: the connection was lost: {error}") from error
        finally:
            first.close()
        if digest(record) != opened.record_hash:
            raise ImageError(f"{address}: its commit record did not arrive as it is there")
        files = list(read_record(bytes(record), commit).files)
        _write_new(temporary, record, made)  # from here on no other image is begun there
        if order:
            _write_new(directory / formats.ORDER_FILE, order, made)  # only advice: whoever reads it checks it
        size = _fetch_files(links, files, directory, made, only_data=lasting)
    marker = {"address": str(address), "key_file": str(key_file.absolute()), "only_data": lasting}
    _write_new(directory / MARKER, json.dumps(marker).encode(), made)
    if lasting:
        for path in (*made, directory):
            _sync(path)
    os.link(temporary, commit)  # unlike a rename it replaces nothing
    made.append(commit)
    temporary.unlink()
    if lasting:
        _sync(directory)
    Image.open(directory).close()  # sizes, tables, inventory: all that can be known without the data
    return size


def _write_new(path: Path, data: bytes | bytearray, made: list[Path]) -> None:
    with path.open("xb") as file:
        made.append(path)
        file.write(data)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fetch_files(links: Links, files: list[pb.File], directory: Path, made: list[Path], *, only_data: bool) -> int:
    """No more of them are open at once than there are threads: each thread of each task has one."""
    here = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def copied(file: pb.File) -> bool:
        return file.origin != pb.File.PHOS_DATA and (only_data or not formats.is_added(file.name))

    def into(name: str, copy: Callable[[int], None]) -> None:
        target = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=here)
        try:
            copy(target)
        finally:
            os.close(target)

    try:
        size = sum(file.size for file in files if copied(file))
        if size > (free := free_bytes(here)):
            raise ImageError(
                f"{links.address} has {size / 1e9:.2f} GB beside its GPU data, {directory} has room for "
                f"{free / 1e9:.2f} GB: name another folder in TMPDIR"
            )
        jobs: list[Callable[[], None]] = []
        for file in files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(file.name, flags, 0o600, dir_fd=here)
            try:
                made.append(directory / file.name)
                os.ftruncate(descriptor, file.size)
            finally:
                os.close(descriptor)
            if copied(file):
                jobs += [partial(into, file.name, copy) for copy in _copies(links, file)]
        _copy_all(jobs)
        return size
    finally:
        os.close(here)
