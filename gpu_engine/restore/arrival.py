"""Checks data where it has arrived: GPUs hash what was copied to them, and only then somebody may use it.

A GPU hashes 3 TB/s (content_hash.py). A processor that does it beforehand reads the data once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from phos.gpu_engine.arrival_rooms import ArrivalRooms
from phos.gpu_engine.content_hash import SPAN_BYTES
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import HashRooms, Reading
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.restore.sources import confirm
from phos.images.errors import ImageError
from phos.images.extents import Extent
from phos.images.source import ImageSource

log = logging.getLogger(__name__)


class ArrivalCheck:
    """Of one restore. A :class:`~phos.gpu_engine.copy_work.LoadCheck`."""

    def __init__(self, image: ImageSource, rooms: ArrivalRooms) -> None:
        self._image = image
        self._rooms = rooms

    def rooms(self, worker: int, device: int) -> HashRooms:
        """See :class:`~phos.gpu_engine.copy_work.LoadCheck`."""
        return self._rooms.of(worker, device)

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


def reading_of(
    image: ImageSource, copier: Copier, devices: Iterable[int], chunks: set[int], most_bytes: int
) -> Reading[Extent]:
    """How to read an image's data for loads of at most ``most_bytes``.

    Without a check of what has arrived, processors check it as they read. ``chunks``: the sizes that chunks have.
    """
    unhashable = any(size % SPAN_BYTES for size in chunks) or not chunks
    if unhashable or most_bytes // min(chunks) > copier.rooms.most_chunks:
        return Reading(image.read_into)
    try:
        for device in sorted(set(devices)):
            copier.rooms.prepare(device)
    except DriverError as error:
        log.info("%s: the GPU does not hash its memory, so processors do: %s", image.path, error)
        return Reading(image.read_into)
    return Reading(image.read_unchecked, ArrivalCheck(image, copier.rooms))
