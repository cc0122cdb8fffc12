"""Blocks mapped where phosd copies and hashes them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.errors import DriverError


class MappedBlocks:
    """Blocks in phosd's own address space. A mapping keeps its memory alive, whatever becomes of the descriptor.

    Mapping takes the driver's lock, which the driver's checkpoint of another process holds for long: what can be mapped
    before it should be.
    """

    def __init__(self) -> None:
        self._mappings: dict[BlockKey, driver.Mapping] = {}

    def add(self, blocks: Iterable[Block]) -> None:
        """Map those that are not mapped yet; a failure leaves the others mapped."""
        for block in blocks:
            if block.key not in self._mappings:
                self._mappings[block.key] = driver.context(block.device).map_block(block.descriptor, block.size)

    def __getitem__(self, key: BlockKey) -> driver.Mapping:
        return self._mappings[key]

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._mappings

    def remove(self, key: BlockKey) -> None:
        """Unmap one, if it is mapped."""
        if (mapping := self._mappings.pop(key, None)) is not None:
            mapping.unmap()

    def close(self) -> None:
        """Unmap all, whatever fails; where something has failed already, that is what is raised."""
        failing = sys.exc_info()[1]
        try:
            with ExitStack() as undo:
                for mapping in self._mappings.values():
                    undo.callback(mapping.unmap)
                self._mappings = {}
        except DriverError:
            if failing is None:
                raise
