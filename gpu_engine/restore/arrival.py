"""Checks data where it has arrived: GPUs hash what was copied to them, and only then somebody may use it.

A GPU hashes 3 TB/s (content_hash.py). A processor that does it beforehand reads the data once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from phos.gpu_engine import driver
from phos.gpu_engine.content_hash import ROOM_HEAD, SPAN_BYTES
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import SLOTS, HashRooms, Reading
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

    def rooms(self, worker: int, device: int) -> HashRooms:
        """See :class:`~phos.gpu_engine.copy_work.LoadCheck`."""
        at = [(worker * SLOTS + slot) * self._room_bytes for slot in range(SLOTS)]
        rooms, hosts = [self._rooms[device] + offset for offset in at], [self._host.address + offset for offset in at]
        return HashRooms(self._kernels[device].handle, rooms, hosts)

    def wrong(self, content: Extent, device: int) -> Exception:
        """See :class:`~phos.gpu_engine.copy_work.LoadCheck`."""
        try:
            confirm(self._image)
            # The reader knows whose memory it is and says so; what it finds good was changed on its way.
            if self._image.lies_at(content) is None:
                self._image.read_into(content, memoryview(bytearray(content.length)))
        except ImageError as error:
            return error
        return ImageError(
            f"{content.length} bytes at {content.offset} of block {content.block[1]} arrived on GPU {device} other "
            f"than they are in {self._image.path}. Restore again; if it happens again, that GPU or this host's memory "
            "is not to be trusted."
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
        yield Reading(image.read_into)
        return
    with ExitStack() as undo:
        check: ArrivalCheck | None = None
        try:
            check = undo.enter_context(_check(image, copier, devices, max(1, most_bytes // min(chunks))))
        except DriverError as error:
            log.info("%s: the GPU does not hash its memory, so processors do: %s", image.path, error)
        try:
            read = image.read_into if check is None else image.read_unchecked
            yield Reading(read, check)
        except BaseException:
            with suppress(DriverError):  # a context that is lost: what has failed first says so
                undo.close()
            raise


@contextmanager
def _check(image: ImageSource, copier: Copier, devices: Iterable[int], chunks: int) -> Iterator[ArrivalCheck]:
    """``chunks``: most in one load. Raises DriverError: a GPU has no 2 MiB left, for example."""
    wanted = SLOTS * copier.threads * room_bytes(chunks)
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
