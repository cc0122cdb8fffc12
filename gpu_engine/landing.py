"""The data file of an image that is being written, page-locked: GPUs write into it, and no processor copies.

Only in a tmpfs, and with huge pages (images/stripe.py): to find, map and lock small ones costs more than to copy.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from contextlib import suppress
from functools import partial

from phos.gpu_engine import driver
from phos.gpu_engine.errors import DriverError
from phos.images.files import run_in_threads
from phos.images.mapping import unmap_memory
from phos.images.writer import ImageWriter

log = logging.getLogger(__name__)

SEGMENT_BYTES = 512 << 20
"""What is locked by one call."""

STEP_BYTES = 64 << 20
"""What is populated by one."""

PLACE_BYTES = 8 << 20
"""What is copied at once: more is hardly faster (54 and 55 GB/s on an H100), and whoever waits for a copy waits for all
that is under way."""

THREADS = 8
"""The processes still compute meanwhile."""

SLOWEST = 2e9
"""Bytes per second. Where memory is so fragmented that huge pages are found more slowly, small ones have to do."""


_releasing: list[threading.Thread] = []  # process-wide; guarded by _lock
_lock = threading.Lock()


def wait_released() -> None:
    """Return when no committed image is still mapped to be written to: only then can it be pinned where it is."""
    with _lock:
        threads = list(_releasing)
    for thread in threads:
        thread.join()


class Landing:
    """The locked memory behind :meth:`phos.images.writer.ImageWriter.place`."""

    def __init__(self, writer: ImageWriter, address: int) -> None:
        self._writer = writer
        self._address = address
        self._size = writer.mapped_bytes
        self._deadline = time.monotonic() + 1 + self._size / SLOWEST
        self._failed = threading.Event()
        self._locked: list[int] = []  # list.append is one step under the GIL

    @staticmethod
    def prepare(writer: ImageWriter, total: int, room: int) -> Landing | None:
        """Memory for ``total`` bytes of data, and at most ``room`` for them and what is left free between places.

        None: there is none of this kind, and what was tried is undone.
        """
        address = writer.map_data(total, SEGMENT_BYTES, PLACE_BYTES)
        if not address:
            return None
        landing = Landing(writer, address)
        try:
            if landing._size > room:
                raise OSError(errno.ENOSPC, f"there is no room for {landing._size} bytes beside what CRIU needs")
            pieces = [
                partial(landing._lock_segment, at, min(SEGMENT_BYTES, landing._size - at))
                for at in range(0, landing._size, SEGMENT_BYTES)
            ]
            run_in_threads(pieces, THREADS)
        except BaseException as error:
            landing.release()
            writer.unmap_data()
            if not isinstance(error, (DriverError, OSError)):
                raise
            log.info("The image's pages cannot be used by the GPU directly: %s", error)
            return None
        log.info("GPUs write into the image's own pages: %d bytes of them.", landing._size)
        return landing

    def _lock_segment(self, offset: int, size: int) -> None:
        try:
            for at in range(offset, offset + size, STEP_BYTES):
                if self._failed.is_set():
                    return  # another thread has raised
                if time.monotonic() > self._deadline:
                    raise TimeoutError(f"finding huge pages for {self._size} bytes takes too long")
                self._writer.populate_data(at, min(STEP_BYTES, offset + size - at))
            driver.context(0).use()
            driver.register_host(self._address + offset, size)
            self._locked.append(self._address + offset)
        except BaseException:
            self._failed.set()
            raise

    def give_up(self) -> None:
        """It is not used after all: the writer goes on without, and gets the room back soon."""
        self._writer.unmap_data()
        self.release_later()

    def release_later(self) -> None:
        """:meth:`release` it in a thread of its own, if there can be one."""

        def work() -> None:
            self.release()
            with _lock:
                _releasing.remove(thread)

        thread = threading.Thread(target=work, name="release")
        try:
            with _lock:
                thread.start()
                _releasing.append(thread)
        except RuntimeError:  # there can be no thread
            self.release()

    def release(self) -> None:
        """Unlock and unmap it; no copy to it may be under way."""
        if self._locked:
            with suppress(DriverError):  # the context may be lost
                driver.context(0).use()
                while self._locked:
                    driver.unregister_host(self._locked.pop())
        if self._size:
            unmap_memory(self._address, self._size)
            self._size = 0
