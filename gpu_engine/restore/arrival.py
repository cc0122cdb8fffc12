"""Checks data where it has arrived: GPUs hash what was copied to them, and only then somebody may use it.

A GPU hashes 3 TB/s (content_hash.py). A processor that does it beforehand reads the data once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from phos.gpu_engine import driver
from phos.gpu_engine.content_hash import ROOM_HEAD, SPAN_BYTES, THREADS
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import UNDER_WAY, HashRoom, Load, Reading
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.restore.sources import confirm
from phos.images.errors import ImageError
from phos.images.extents import Extent
from phos.images.formats import HASH_SIZE
from phos.images.source import ImageSource

log = logging.getLogger(__name__)


class ArrivalCheck:
    """Scratch memory on each GPU for what a copier has under way. A :class:`~phos.gpu_engine.copy_work.LoadCheck`."""

    def __init__(
        self,
        image: ImageSource,
        kernels: dict[int, driver.Kernel],
        rooms: dict[int, int],
        host: driver.PinnedBuffer,
        room_bytes: int,
    ) -> None:
        """``rooms``: the scratch memory's address, by GPU; ``host``: as much. ``room_bytes`` of them are a load's."""
        self._image = image
        self._kernels = kernels
        self._rooms = rooms
        self._host = host
        self._room_bytes = room_bytes

    def room(self, number: int, load: Load[Extent]) -> HashRoom:
        """See :class:`~phos.gpu_engine.copy_work.LoadCheck`."""
        assert load.content is not None
        at, count = number * self._room_bytes, len(load.content.hashes)
        if room_bytes(count) > self._room_bytes:
            raise ValueError(f"{count} chunks at once, and {self._room_bytes} bytes of room")
        return HashRoom(
            kernel=self._kernels[load.device].handle,
            grid=load.size // SPAN_BYTES,
            block=THREADS,
            chunk_bytes=load.content.chunk_size,
            room=self._rooms[load.device] + at,
            host=self._host.address + at,
        )

    def end(self, number: int, load: Load[Extent]) -> None:
        """See :class:`~phos.gpu_engine.copy_work.LoadCheck`.

        Raises:
            ImageError: it is not what the image's writer wrote.
        """
        assert load.content is not None
        at = number * self._room_bytes
        found, wanted = self._host.view[at : at + len(load.content.hashes) * HASH_SIZE], b"".join(load.content.hashes)
        if found == wanted:
            return
        for chunk in range(len(load.content.hashes)):
            part = slice(chunk * HASH_SIZE, (chunk + 1) * HASH_SIZE)
            if found[part] != wanted[part]:
                self._blame(load.content, chunk, load.device)

    def _blame(self, extent: Extent, number: int, device: int) -> None:
        confirm(self._image)
        # The reader knows whose memory it is and says so; what it finds good was changed on its way.
        if self._image.lies_at(extent) is None:
            self._image.read_into(extent, memoryview(bytearray(extent.length)))
        raise ImageError(
            f"{extent.chunk_size} bytes at {extent.offset + number * extent.chunk_size} of block {extent.block[1]} "
            f"arrived on GPU {device} other than they are in {self._image.path}. Restore again; if it happens again, "
            "that GPU or this host's memory is not to be trusted."
        )


def room_bytes(chunks: int) -> int:
    """What hashing a load of so many chunks takes."""
    return ROOM_HEAD + chunks * HASH_SIZE


@contextmanager
def checked(
    image: ImageSource, copier: Copier, devices: Iterable[int], chunks: set[int], most_bytes: int
) -> Iterator[Reading[Extent]]:
    """How to read an image's data for loads of at most ``most_bytes``.

    Without a check of what has arrived, processors check it as they read. ``chunks``: the sizes that chunks have.
    """
    if any(size % SPAN_BYTES for size in chunks) or not chunks:
        yield Reading(image.read_into, image.lies_at, image.file_of)
        return
    with ExitStack() as undo:
        check: ArrivalCheck | None = None
        try:
            check = undo.enter_context(_check(image, copier, devices, max(1, most_bytes // min(chunks))))
        except DriverError as error:
            log.info("%s: the GPU does not hash its memory, so processors do: %s", image.path, error)
        try:
            read = image.read_into if check is None else image.read_unchecked
            yield Reading(read, image.lies_at, image.file_of, check)
        except BaseException:
            with suppress(DriverError):  # a context that is lost: what has failed first says so
                undo.close()
            raise


@contextmanager
def _check(image: ImageSource, copier: Copier, devices: Iterable[int], chunks: int) -> Iterator[ArrivalCheck]:
    """``chunks``: most in one load. Raises DriverError: a GPU has no 2 MiB left, for example."""
    wanted = UNDER_WAY * copier.threads * room_bytes(chunks)
    size = -(-wanted // driver.GRANULARITY) * driver.GRANULARITY
    with ExitStack() as undo:
        kernels: dict[int, driver.Kernel] = {}
        rooms: dict[int, int] = {}
        for device in sorted(set(devices)):
            kernels[device] = copier.hasher.arrival_kernel(device)
            driver.context(device).use()
            rooms[device] = undo.enter_context(driver.scratch(driver.context(device), size)).address
            copier.hasher.clear(device, rooms[device], size)
        host = driver.PinnedBuffer(size)
        undo.callback(host.free)
        yield ArrivalCheck(image, kernels, rooms, host, room_bytes(chunks))
