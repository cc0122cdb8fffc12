"""Eager restore: every byte of GPU data is back before the processes compute again."""

from __future__ import annotations

import logging
import threading
from contextlib import closing

from phos.gpu_engine.blocks import Block
from phos.gpu_engine.content_hash import SPAN_BYTES
from phos.gpu_engine.copier import MappedBlocks
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.pinned import PinnedImage, PinnedMemory
from phos.gpu_engine.restore.base import Restore
from phos.gpu_engine.restore.sources import confirm, manner
from phos.images.errors import ImageError
from phos.images.reader import Extent, Image
from phos.images.source import ImageSource

log = logging.getLogger(__name__)


class EagerRestore(Restore):
    """One restore of an image."""

    mode = "eager"

    def _prepare(self, blocks: list[Block]) -> None:
        """Nothing but loading is to be done."""

    def _fill(self, blocks: list[Block]) -> None:
        files = self._image
        self._map_in_place()
        image = self._image
        how = manner(image, self._copier, len({block.device for block in blocks}))
        extents: list[tuple[Block, int, int, Extent | None]] = []
        for block in blocks:
            for extent in image.blocks[block.key].extents(how.at_once):
                source = None if extent.stripe is None else extent
                extents.append((block, extent.offset, extent.length, source))
        sizes = {image.blocks[block.key].chunk_size for block in blocks}
        with closing(MappedBlocks()) as mapped:
            # Nobody uses the data before all of it is there, so the GPU can check it there.
            if len(sizes) == 1 and min(sizes) % SPAN_BYTES == 0:
                read = image.read_unchecked
                self._copier.load(extents, read, self.progress, self._cancelled, mapped, how.workers)
                with self.timeline.phase("check GPU data", concurrent=True):
                    self._check(files, blocks, mapped, min(sizes))
            else:
                self._copier.load(extents, image.read_into, self.progress, self._cancelled, mapped, how.workers)

    def _map_in_place(self) -> None:
        """Where the data lies in huge pages the GPU may fetch it from there: it is checked when it has arrived."""
        if not isinstance(self._image, Image):
            return
        memory = PinnedMemory()
        try:
            if memory.map_in_place(self._image):
                memory.use()
                log.info("%s: GPUs read from the image's own pages.", self.path)
                self._image = PinnedImage(self._image, memory)
                threading.Thread(target=self._unlock, args=(memory,), name="unlock").start()
                return
        except (DriverError, OSError) as error:
            log.info("%s: its pages cannot be used by the GPU directly: %s", self.path, error)
        memory.release()

    def _unlock(self, memory: PinnedMemory) -> None:
        """It takes time, so no process waits for it."""
        self._loaded.wait()
        memory.release()

    def _check(self, image: ImageSource, blocks: list[Block], mapped: MappedBlocks, chunk_bytes: int) -> None:
        """Compare what has arrived with the image's hashes.

        Raises:
            ImageError: they differ.
        """
        try:
            found = self._copier.hasher.hash(blocks, mapped, chunk_bytes)
        except DriverError as error:
            log.info("%s: the GPU does not hash its memory, so the image is read once more: %s", self.path, error)
            found = []
        expected = [hash_ for block in blocks for hash_ in image.blocks[block.key].hashes()]
        if found == expected:
            return
        confirm(image)
        # The reader knows whose memory it is and says so; what it finds good was changed on its way.
        buffer = memoryview(bytearray(chunk_bytes))
        chunks = [(block, extent) for block in blocks for extent in image.blocks[block.key].extents(chunk_bytes)]
        for number, (block, extent) in enumerate(chunks):
            if found and found[number] == expected[number]:
                continue
            image.read_into(extent, buffer)
            if found:
                raise ImageError(
                    f"{extent.length} bytes at {extent.offset} of block {block.key[1]} arrived on GPU {block.device} "
                    f"other than they are in {self.path}. Restore again; if it happens again, that GPU or this host's "
                    "memory is not to be trusted."
                )

    def _may_attach(self) -> bool:
        return self._loaded.is_set() and self.state in ("loaded", "attached")
