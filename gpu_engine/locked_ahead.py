"""An image in huge pages that is page-locked piece by piece while it is being loaded.

To lock memory costs one processor's time, about as much for a byte as copying it costs all of them together, and hardly
any of the memory's bandwidth. So one thread locks what will be loaded last, going towards what is being loaded, which
goes through the ring; when the two meet, the GPU fetches the rest from where it lies.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable

from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.pinned import PinnedImage, PinnedMemory
from phos.images.extents import Extent
from phos.images.reader import Image

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
"""What is locked by one call, and most that one copy may fetch; no copy may lie across two."""

PAUSE_SECONDS = 0.002
"""How often to look whether locking is allowed again; a segment takes as long."""

Segment = tuple[int, int]
"""A data file, and the number of the piece in it."""


class LockedAhead(PinnedImage):
    """An :class:`~phos.images.source.ImageSource`. Its data is unchecked where :meth:`read_unchecked` names it."""

    def __init__(self, image: Image, memory: PinnedMemory, may_lock: Callable[[], bool]) -> None:
        """As :class:`~phos.gpu_engine.pinned.PinnedImage`; ``memory`` is mapped and not locked.

        Nothing is locked while ``may_lock`` says no: locking takes what the driver needs to bring a process back.
        """
        super().__init__(image, memory)
        self._may_lock = may_lock
        self._lock = threading.Lock()  # guards the following two
        self._locked: set[Segment] = set()
        self._read: Counter[Segment] = Counter()  # bytes that have gone through the ring
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, order: Iterable[Extent]) -> None:
        """Begin to lock; ``order`` is how the extents will be asked for, more or less, and is gone through later."""
        self._thread = threading.Thread(target=self._lock_all, args=(order,), name="lock-ahead", daemon=True)
        self._thread.start()

    def _lock_all(self, order: Iterable[Extent]) -> None:
        segments: dict[Segment, None] = {}
        for extent in reversed(list(order)):
            assert extent.stripe is not None
            for number in reversed(_pieces(extent)):
                segments.setdefault((extent.stripe, number))
        try:
            for segment in segments:
                while not self._may_lock() and not self._stop.wait(PAUSE_SECONDS):
                    pass
                if self._stop.is_set():
                    break
                with self._lock:
                    done = self._read[segment]
                if 2 * done >= SEGMENT_BYTES:  # a chunk that somebody waited for says nothing of its neighbours
                    continue
                self._memory.lock(segment[0], segment[1] * SEGMENT_BYTES, SEGMENT_BYTES)
                with self._lock:
                    self._locked.add(segment)
        except DriverError as error:
            log.info("%s: its pages cannot be used by the GPU directly: %s", self.path, error)
        log.info("%s: %d of %d segments were locked while it was loaded", self.path, len(self._locked), len(segments))

    def read_into(self, extent: Extent, buffer: memoryview) -> int | None:
        """See :class:`~phos.images.source.ImageSource`."""
        return self._image.read_into(extent, buffer)

    def read_unchecked(self, extent: Extent, buffer: memoryview) -> int | None:
        """See :class:`~phos.images.source.ImageSource`."""
        assert extent.stripe is not None
        pieces = _pieces(extent)
        with self._lock:
            # One copy reads from what one call has locked.
            there = len(pieces) == 1 and (extent.stripe, pieces[0]) in self._locked
            if not there:
                self._read[extent.stripe, pieces[0]] += extent.length
        return self._memory.address_of(extent) if there else self._image.read_unchecked(extent, buffer)

    def confirm(self) -> None:
        """Nothing: all of it is checked when it has arrived, and locking changes the files' times."""

    def close(self) -> None:
        """See :class:`~phos.images.source.ImageSource`; :meth:`join` follows before the memory's owner lets go."""
        self._stop.set()
        super().close()

    def join(self) -> None:
        """Return when nothing is being locked any more."""
        if self._thread is not None:
            self._thread.join()


def _pieces(extent: Extent) -> range:
    return range(extent.file_offset // SEGMENT_BYTES, (extent.file_offset + extent.length - 1) // SEGMENT_BYTES + 1)
