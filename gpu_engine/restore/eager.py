"""Eager restore: every byte of GPU data is back before the processes compute again."""

from __future__ import annotations

from phos.gpu_engine.blocks import Block
from phos.gpu_engine.fill_plan import FillPlan
from phos.gpu_engine.restore.base import Restore
from phos.gpu_engine.restore.filling import Filling
from phos.gpu_engine.restore.plan import places_of
from phos.gpu_engine.restore.sources import manner
from phos.images.errors import ImageError


class EagerRestore(Restore):
    """One restore of an image."""

    mode = "eager"

    def _prepare(self, blocks: list[Block]) -> Filling:
        image, devices = self._image, {block.device for block in blocks}
        sizes = {image.blocks[self._in_image(block.key)].chunk_size for block in blocks}
        if max(sizes, default=0) > self._copier.slot_bytes:
            raise ImageError(
                f"it has chunks of {max(sizes)} bytes, and a slot of phosd's ring {self._copier.slot_bytes}; "
                f"give phosd a larger one: PHOS_RING_BYTES={2 * self._copier.threads * max(sizes)}"
            )
        how = manner(image, self._copier, len(devices))
        addresses = {block.key: self._memory.reserve(block) for block in blocks}
        places = places_of(image, blocks, addresses, self._image_names)
        plan = FillPlan(places, range(len(places)), how.at_once)
        return Filling(image, self._copier, plan, how, self._memory, blocks, sizes)

    def _may_attach(self) -> bool:
        return self.state in ("loaded", "attached")
