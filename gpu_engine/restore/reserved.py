"""Addresses of phosd's own for memory that is loaded: known before it exists, and mapped while other data comes.

Mapping a hundred blocks takes a GPU's driver as long as loading a gigabyte, so copies begin when the first is mapped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey


@dataclass(frozen=True)
class _Range:
    device: int
    address: int
    size: int


class Mapped(Protocol):
    """Who waits for blocks to be mapped: a :class:`~phos.gpu_engine.fill_plan.FillPlan`. Called from another thread."""

    def due(self) -> BlockKey | None:
        """A block that is needed now."""

    def map(self, key: BlockKey) -> None:
        """It is mapped."""

    def break_(self, error: BaseException) -> None:
        """One cannot be mapped, and nor are those that were to follow."""


class ReservedMemory:
    """Of one process, or tree of processes. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below but _thread
        self._reserved: dict[BlockKey, _Range] = {}
        self._mapped: list[driver.Mapping] = []
        self._left: dict[BlockKey, Block] = {}
        self._thread: threading.Thread | None = None

    def reserve(self, block: Block) -> int:
        """An address for a block that may have no memory yet.

        Raises:
            DriverError: there is none left.
        """
        context = driver.context(block.device)
        with self._lock:
            address = context.reserve(block.size)
            self._reserved[block.key] = _Range(block.device, address, block.size)
        return address

    def map(self, blocks: Iterable[Block], plan: Mapped) -> None:
        """The blocks have memory now: map them in this order, in a thread of its own. Once.

        Those that the ``plan`` needs at once go first, and it is told of each. Their descriptors stay the caller's, and
        open until :meth:`free`.
        """
        with self._lock:
            self._left = {block.key: block for block in blocks}
        thread = threading.Thread(target=self._map, args=(plan,), name="map-blocks")
        thread.start()
        self._thread = thread

    def _map(self, plan: Mapped) -> None:
        try:
            while (following := self._following(plan.due())) is not None:
                block, range_ = following
                mapping = driver.context(range_.device).map_block(block.descriptor, range_.size, range_.address)
                with self._lock:
                    self._mapped.append(mapping)
                plan.map(block.key)
        except BaseException as error:  # whoever fills fails with it
            plan.break_(error)

    def _following(self, due: BlockKey | None) -> tuple[Block, _Range] | None:
        with self._lock:
            if not self._left:
                return None
            key = due if due in self._left else next(iter(self._left))
            return self._left.pop(key), self._reserved.pop(key)

    def free(self) -> None:
        """Let everything go, mapped or not, when nobody copies any more. It may be called twice.

        Raises:
            DriverError: something could not be let go; all was tried.
        """
        with self._lock:
            self._left = {}
        if self._thread is not None:
            self._thread.join()
        with self._lock, ExitStack() as undo:
            for mapping in self._mapped:
                undo.callback(mapping.unmap)
            for range_ in self._reserved.values():
                undo.callback(driver.context(range_.device).free_reserved, range_.address, range_.size)
            self._mapped, self._reserved = [], {}
