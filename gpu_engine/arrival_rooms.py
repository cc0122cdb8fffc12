"""Memory for hashing what has arrived on a GPU: got once and kept, a room for each slot of each worker of a copier.

To get it anew for each restore takes calls of the driver before the first byte, and some after the last one, while the
driver brings processes back.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

from phos.gpu_engine import driver
from phos.gpu_engine.content_hash import ROOM_HEAD, ContentHasher
from phos.gpu_engine.copy_work import SLOTS, HashRooms
from phos.images.formats import HASH_SIZE

log = logging.getLogger(__name__)


class ArrivalRooms:
    """Of one copier. A worker is done with its rooms when what it had under way has landed. Any thread may ask."""

    def __init__(self, hasher: ContentHasher, workers: int) -> None:
        self._hasher = hasher
        self._room_bytes = driver.GRANULARITY // (SLOTS * workers) // HASH_SIZE * HASH_SIZE
        self.most_chunks = max(0, self._room_bytes - ROOM_HEAD) // HASH_SIZE
        """So many of one load can be hashed."""
        self._lock = threading.Lock()  # guards all below
        self._kept = ExitStack()
        self._kernels: dict[int, int] = {}
        self._rooms: dict[int, int] = {}  # by GPU: the address of its 2 MiB
        self._host: driver.PinnedBuffer | None = None  # as much, for all GPUs: a worker uses one at a time

    def prepare(self, device: int) -> None:
        """Get them on a GPU, unless they are there.

        Raises:
            DriverError: it has no 2 MiB left, for example.
        """
        with self._lock:
            if device in self._rooms:
                return
            kernel = self._hasher.arrival_kernel(device).handle
            context = driver.context(device)
            context.use()
            if self._host is None:
                self._host = driver.PinnedBuffer(driver.GRANULARITY)
                self._kept.callback(self._host.free)
            with ExitStack() as undo:
                address = undo.enter_context(driver.scratch(context, driver.GRANULARITY)).address
                self._hasher.clear(device, address, driver.GRANULARITY)
                self._kept.push(undo.pop_all())
            self._kernels[device], self._rooms[device] = kernel, address
            log.info("GPU %d: %d bytes for hashes, at %#x", device, driver.GRANULARITY, address)

    def of(self, worker: int, device: int) -> HashRooms:
        """Those of a worker, by its number, on a GPU that has been prepared."""
        at = [(worker * SLOTS + slot) * self._room_bytes for slot in range(SLOTS)]
        with self._lock:
            assert self._host is not None
            room, host = self._rooms[device], self._host.address
            return HashRooms(self._kernels[device], [room + each for each in at], [host + each for each in at])

    def release(self) -> None:
        """Give all of it back. Nobody may hash."""
        with self._lock:
            self._kernels, self._rooms, self._host = {}, {}, None
            self._kept.close()
