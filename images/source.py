"""What a restore needs of an image, wherever its data is: in files, in memory, or at another host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from phos.gen import phos_image_pb2 as pb
from phos.images.extents import BlockTable, Extent
from phos.images.formats import BlockKey

SCHEME = "tcp://"
"""How the name of an image at another host begins."""


class ImageSource(Protocol):
    """An image whose description is there and has been checked. May be used by several threads at once."""

    @property
    def inventory(self) -> pb.Inventory:
        """What is in it."""

    @property
    def blocks(self) -> Mapping[BlockKey, BlockTable]:
        """The chunk tables."""

    @property
    def path(self) -> Path:
        """Its directory, for messages."""

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """Get an extent's data into the first ``extent.length`` bytes of a buffer, every chunk of it checked.

        Raises:
            ImageError: it cannot be had, or is not what was written.
        """

    def read_unchecked(self, extent: Extent, buffer: memoryview) -> None:
        """As :meth:`read_into`, but the caller compares the hashes, or has to: a GPU does that in no time.

        Raises:
            ImageError: it cannot be had.
        """

    def lies_at(self, extent: Extent) -> int | None:
        """The address of page-locked memory where an extent's data lies, checked, until :meth:`close`; None: nowhere.

        Raises:
            ImageError: there is no such data.
        """

    def file_of(self, extent: Extent) -> tuple[int, int] | None:
        """A descriptor of this object's, and where in that file the data lies, unchecked; None: in no file.

        Not for files that are read past the page cache, which wants care.

        Raises:
            ImageError: the file cannot be opened.
        """

    def copy_file(self, name: str, target: int) -> None:
        """Copy a file that belongs to the image to one of its size that holds zeros, every hash checked.

        Raises:
            ImageError: it cannot be had, or is not what was written.
            OSError: ``target`` takes it not.
        """

    def close(self) -> None:
        """Nothing of it is used any more."""
