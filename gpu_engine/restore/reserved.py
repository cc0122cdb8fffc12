"""Addresses of phosd's own for the memory of a parked process, which are mapped when it is taken."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey


@dataclass(frozen=True)
class _Range:
    device: int
    address: int
    size: int


class ReservedMemory:
    """Of one process, or tree of processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below; held while something is mapped
        self._reserved: dict[BlockKey, _Range] = {}
        self._mapped: list[driver.Mapping] = []

    def reserve(self, block: Block) -> int:
        """An address for a block that has no memory yet.

        Raises:
            DriverError: there is none left.
        """
        context = driver.context(block.device)
        with self._lock:
            address = context.reserve(block.size)
            self._reserved[block.key] = _Range(block.device, address, block.size)
        return address

    def map(self, blocks: Iterable[Block]) -> None:
        """The blocks have memory now; their descriptors stay the caller's.

        All of them, before the first copy: mapping takes longer while others are copied to, and when the process does
        what needs the driver's lock; whoever has a load for a block that is not mapped yet waits for that.

        Raises:
            DriverError: one cannot be mapped.
        """
        with self._lock:
            for block in blocks:
                range_ = self._reserved.pop(block.key)
                context = driver.context(range_.device)
                self._mapped.append(context.map_block(block.descriptor, range_.size, range_.address))

    def free(self) -> None:
        """Let everything go, mapped or not. It may be called twice.

        Raises:
            DriverError: something could not be let go; all was tried.
        """
        with self._lock, ExitStack() as undo:
            for mapping in self._mapped:
                undo.callback(mapping.unmap)
            for range_ in self._reserved.values():
                undo.callback(driver.context(range_.device).free_reserved, range_.address, range_.size)
            self._mapped, self._reserved = [], {}
