"""The data file of an image that is being written, page-locked: GPUs write into it, and no processor copies.

Only where the file system has huge pages for it (tmpfs mounted with huge=always or within_size): to find, map and lock
small pages costs more than to copy.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial

from phos.gpu_engine import driver
from phos.gpu_engine.errors import DriverError
from phos.images.files import run_in_threads
from phos.images.mapping import MADV_POPULATE_WRITE, advise, unmap_memory
from phos.images.writer import ImageWriter

log = logging.getLogger(__name__)

SEGMENT_BYTES = 512 << 20
"""What is populated and locked by one call."""

PLACE_BYTES = 16 << 20
"""What is copied at once: the cost of the calls counts for little then."""

THREADS = 8
"""The processes still compute meanwhile."""


class Landing:
    """The locked memory behind :meth:`phos.images.writer.ImageWriter.place`."""

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size
        self._locked: list[int] = []  # list.append is one step under the GIL

    @staticmethod
    def prepare(writer: ImageWriter, total: int) -> Landing | None:
        """Room for ``total`` bytes; None: there is none of this kind, and what was tried is undone."""
        address = writer.map_data(total, SEGMENT_BYTES, PLACE_BYTES)
        if not address:
            return None
        landing = Landing(address, writer.mapped_bytes)
        try:
            pieces = [
                partial(landing._lock, address + at, min(SEGMENT_BYTES, landing._size - at))
                for at in range(0, landing._size, SEGMENT_BYTES)
            ]
            run_in_threads(pieces, THREADS)
        except (DriverError, OSError) as error:
            log.info("The image's pages cannot be used by the GPU directly: %s", error)
            landing.release()
            writer.unmap_data()
            return None
        log.info("GPUs write into the image's own pages: %d bytes of them.", landing._size)
        return landing

    def _lock(self, address: int, size: int) -> None:
        if not advise(address, size, MADV_POPULATE_WRITE):
            raise OSError("the file system is full, or the kernel cannot populate a mapping")
        driver.context(0).use()
        driver.register_host(address, size)
        self._locked.append(address)

    def release(self) -> None:
        """Unlock and unmap it; no copy to it may be under way."""
        with suppress(DriverError):  # the context may be lost
            driver.context(0).use()
            while self._locked:
                driver.unregister_host(self._locked.pop())
        if self._size:
            unmap_memory(self._address, self._size)
            self._size = 0
