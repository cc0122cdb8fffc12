"""Where a restore's data comes from: the image's own files, memory that phosd holds pinned, or another host's phosd."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from phos.gpu_engine.copier import Copier
from phos.gpu_engine.pinned import PinnedImage
from phos.images.reader import Image
from phos.images.remote import RemoteImage
from phos.images.source import ImageSource

PINNED_LOAD = 16 << 20
"""Most that is copied at once from pinned memory; bytes. The cost of the call counts for little then, and who waits for
a chunk waits a third of a millisecond for each copy that goes before it."""

PINNED_WORKERS = 2
"""For each GPU. They keep a copy engine busy: nothing is read or hashed."""


READING_SHARE = 5 / 8
"""Of the processors read an image that lies in memory, for each GPU. They fill the bus (an H100, 16 processors: ten
workers load 50 GB/s), and CRIU and the driver, which bring the processes back meanwhile, need the others: with fifteen
workers data came at 45 GB/s, and the first kernel of a lazy restore a tenth later."""


class Pinned(Protocol):
    """What phosd knows of pinned images."""

    def find(self, directory: int) -> PinnedImage | None:
        """The image in an open directory, if it is pinned and as it was; the caller closes it.

        Raises:
            ImageError: its directory is damaged in what is not pinned.
        """


_pinned: list[Pinned] = []  # process-wide, at most one: set once while phosd starts


def use_pinned(pinned: Pinned) -> None:
    """From now on restores look there first."""
    _pinned[:] = [pinned]


def open_source(directory: int) -> ImageSource:
    """The image in an open directory; the descriptor stays the caller's.

    Raises:
        ImageError: there is no whole image.
    """
    for pinned in _pinned:
        if (image := pinned.find(directory)) is not None:
            return image
    return RemoteImage.open(directory) or Image.open(directory)


@dataclass(frozen=True)
class Manner:
    """How an image's data is loaded: at most ``at_once`` bytes by one copy, with so many workers (None: all)."""

    at_once: int
    workers: int | None = None


def manner(image: ImageSource, copier: Copier, gpus: int) -> Manner:
    """How to load that image into so many GPUs."""
    if isinstance(image, PinnedImage):
        return Manner(PINNED_LOAD, PINNED_WORKERS * max(1, gpus))
    if isinstance(image, Image) and image.in_memory:
        fill = int((os.cpu_count() or 2) * READING_SHARE) * max(1, gpus)
        return Manner(copier.slot_bytes, min(copier.threads, max(2, fill)))
    return Manner(copier.slot_bytes)


def reads_files(image: ImageSource) -> bool:
    """Whether loading is reading: neither copying from pinned memory nor waiting for a network."""
    return isinstance(image, Image)


def confirm(image: ImageSource) -> None:
    """After all has been loaded: raise ImageError if it need not be what was checked before."""
    if isinstance(image, PinnedImage):
        image.confirm()
