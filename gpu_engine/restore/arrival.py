"""Checks data where it has arrived: GPUs hash what was copied to them, and only then somebody may use it.

A GPU hashes 3 TB/s (content_hash.py). A processor that does it beforehand reads the data once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from phos.gpu_engine import driver
from phos.gpu_engine.content_hash import SPAN_BYTES, THREADS
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import Load
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.restore.sources import confirm
from phos.images.errors import ImageError
from phos.images.extents import Extent
from phos.images.formats import HASH_SIZE
from phos.images.source import ImageSource

log = logging.getLogger(__name__)

Read = Callable[[Extent, memoryview], int | None]


class ArrivalCheck:
    """Scratch memory on each GPU for every slot of a copier. A :class:`~phos.gpu_engine.copy_work.LoadCheck`."""

    def __init__(
        self,
        image: ImageSource,
        kernels: dict[int, driver.Kernel],
        sums: dict[int, int],
        host: driver.PinnedBuffer,
        slot_bytes: int,
    ) -> None:
        """``sums``: the scratch memory's address, by GPU; ``host``: as much. ``slot_bytes`` of them are a slot's."""
        self._image = image
        self._kernels = kernels
        self._sums = sums
        self._host = host
        self._slot_bytes = slot_bytes

    def begin(self, slot: int, lane: driver.Lane, load: Load[Extent]) -> None:
        """See :class:`~phos.gpu_engine.copy_work.LoadCheck`."""
        assert load.content is not None
        at, wanted = slot * self._slot_bytes, len(load.content.hashes) * HASH_SIZE
        if wanted > self._slot_bytes:
            raise ValueError(f"{len(load.content.hashes)} chunks at once, and room for {self._slot_bytes // HASH_SIZE}")
        sums, kernel = self._sums[load.device] + at, self._kernels[load.device]
        lane.fill_zero(sums, wanted)
        lane.launch(kernel, load.size // SPAN_BYTES, THREADS, load.address, load.content.chunk_size, sums)
        lane.copy_to_host(self._host.address + at, sums, wanted)

    def end(self, slot: int, load: Load[Extent]) -> None:
        """See :class:`~phos.gpu_engine.copy_work.LoadCheck`.

        Raises:
            ImageError: it is not what the image's writer wrote.
        """
        assert load.content is not None
        at = slot * self._slot_bytes
        for number, expected in enumerate(load.content.hashes):
            if self._host.view[at + number * HASH_SIZE : at + (number + 1) * HASH_SIZE] != expected:
                self._blame(load.content, number, load.device)

    def _blame(self, extent: Extent, number: int, device: int) -> None:
        confirm(self._image)
        # The reader knows whose memory it is and says so; what it finds good was changed on its way.
        self._image.read_into(extent, memoryview(bytearray(extent.length)))
        raise ImageError(
            f"{extent.chunk_size} bytes at {extent.offset + number * extent.chunk_size} of block {extent.block[1]} "
            f"arrived on GPU {device} other than they are in {self._image.path}. Restore again; if it happens again, "
            "that GPU or this host's memory is not to be trusted."
        )


@contextmanager
def checked(
    image: ImageSource, copier: Copier, devices: Iterable[int], chunks: set[int], most_bytes: int
) -> Iterator[tuple[Read, ArrivalCheck | None]]:
    """How to read an image's data for loads of at most ``most_bytes``, and what checks them where they have arrived.

    None: processors check them as they are read. ``chunks``: the sizes that chunks have.
    """
    if any(size % SPAN_BYTES for size in chunks) or not chunks:
        yield image.read_into, None
        return
    with ExitStack() as undo:
        check: ArrivalCheck | None = None
        try:
            check = undo.enter_context(_check(image, copier, devices, max(1, most_bytes // min(chunks))))
        except DriverError as error:
            log.info("%s: the GPU does not hash its memory, so processors do: %s", image.path, error)
        try:
            yield (image.read_into if check is None else image.read_unchecked), check
        except BaseException:
            with suppress(DriverError):  # a context that is lost: what has failed first says so
                undo.close()
            raise


@contextmanager
def _check(image: ImageSource, copier: Copier, devices: Iterable[int], chunks: int) -> Iterator[ArrivalCheck]:
    """``chunks``: most in one load. Raises DriverError: a GPU has no 2 MiB left, for example."""
    wanted = 2 * copier.threads * chunks * HASH_SIZE
    size = -(-wanted // driver.GRANULARITY) * driver.GRANULARITY
    with ExitStack() as undo:
        kernels: dict[int, driver.Kernel] = {}
        sums: dict[int, int] = {}
        for device in sorted(set(devices)):
            kernels[device] = copier.hasher.kernel(device)
            driver.context(device).use()
            sums[device] = undo.enter_context(driver.scratch(driver.context(device), size)).address
        host = driver.PinnedBuffer(size)
        undo.callback(host.free)
        yield ArrivalCheck(image, kernels, sums, host, chunks * HASH_SIZE)
