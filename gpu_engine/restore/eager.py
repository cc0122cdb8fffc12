"""Eager restore: every byte of GPU data is back before the processes compute again."""

from __future__ import annotations

from collections.abc import Iterator

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copy_trace import tracing
from phos.gpu_engine.restore.arrival import checked
from phos.gpu_engine.restore.base import Restore
from phos.gpu_engine.restore.sources import manner
from phos.images.extents import Extent


class EagerRestore(Restore):
    """One restore of an image."""

    mode = "eager"

    def _prepare(self, blocks: list[Block]) -> None:
        """Nothing comes before it."""

    def _fill(self, blocks: list[Block]) -> None:
        addresses = {block.key: self._memory.reserve(block) for block in blocks}
        self._memory.map(blocks)

        def address(key: BlockKey) -> int:
            return addresses[key] if self._memory.mapped(key) else 0

        image, devices = self._image, {block.device for block in blocks}
        how = manner(image, self._copier, len(devices))
        chunks = {image.blocks[block.key].chunk_size for block in blocks}
        with (
            checked(image, self._copier, devices, chunks, how.at_once) as reading,
            tracing(self.path) as trace,
        ):
            loads = self._loads(blocks, how.at_once)
            self._copier.load(blocks, loads, reading, self.progress, self._cancelled, address, how.workers, trace)

    def _loads(self, blocks: list[Block], at_once: int) -> Iterator[tuple[Block, int, int, Extent | None]]:
        for block in blocks:
            for extent in self._image.blocks[block.key].extents(at_once):
                yield block, extent.offset, extent.length, None if extent.stripe is None else extent

    def _may_attach(self) -> bool:
        return self.state in ("loaded", "attached")
