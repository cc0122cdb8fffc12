"""Eager restore: every byte of GPU data is back before the processes compute again."""

from __future__ import annotations

from phos.gpu_engine.blocks import Block
from phos.gpu_engine.restore.base import Restore
from phos.gpu_engine.restore.sources import manner
from phos.images.reader import Extent


class EagerRestore(Restore):
    """One restore of an image."""

    mode = "eager"

    def _prepare(self, blocks: list[Block]) -> None:
        """Nothing but loading is to be done."""

    def _fill(self, blocks: list[Block]) -> None:
        how = manner(self._image, self._copier, len({block.device for block in blocks}))
        extents: list[tuple[Block, int, int, Extent | None]] = []
        for block in blocks:
            for extent in self._image.blocks[block.key].extents(how.at_once):
                source = None if extent.stripe is None else extent
                extents.append((block, extent.offset, extent.length, source))
        self._copier.load(extents, self._image.read_into, self.progress, self._cancelled, how.workers)

    def _may_attach(self) -> bool:
        return self._loaded.is_set() and self.state in ("loaded", "attached")
