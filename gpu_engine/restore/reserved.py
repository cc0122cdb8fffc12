"""Addresses of phosd's own for memory that is loaded: known before it exists, and mapped while other data comes.

Mapping a hundred blocks takes a GPU's driver as long as loading a gigabyte, so copies begin when the first is mapped.
"""

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
    """Of one process, or tree of processes. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below but _thread
        self._reserved: dict[BlockKey, _Range] = {}
        self._mapped: dict[BlockKey, driver.Mapping] = {}
        self._left: dict[BlockKey, Block] = {}
        self._first: dict[BlockKey, None] = {}  # asked for, in that order, each once
        self._failure: BaseException | None = None
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

    def map(self, blocks: Iterable[Block]) -> None:
        """The blocks have memory now: map them in this order, in a thread of its own. Once.

        Their descriptors stay the caller's, and open until :meth:`free`.
        """
        with self._lock:
            self._left = {block.key: block for block in blocks}
        thread = threading.Thread(target=self._map, name="map-blocks")
        thread.start()
        self._thread = thread

    def mapped(self, key: BlockKey) -> bool:
        """Whether a block is mapped; else it is one of the next. The calling thread's current context stays as it is.

        Raises:
            DriverError: it could not be mapped, or another before it.
        """
        if key in self._mapped:  # looked at without the lock: it stays there as long as anybody copies
            return True
        with self._lock:
            if key not in self._mapped and self._failure is not None:
                raise self._failure
            if key in self._left:
                self._first.setdefault(key)
            return key in self._mapped

    def _map(self) -> None:
        try:
            while (following := self._following()) is not None:
                block, range_ = following
                mapping = driver.context(range_.device).map_block(block.descriptor, range_.size, range_.address)
                with self._lock:
                    self._mapped[block.key] = mapping
        except BaseException as error:  # whoever asks for a block fails with it
            with self._lock:
                self._failure = error

    def _following(self) -> tuple[Block, _Range] | None:
        with self._lock:
            if not self._left:
                return None
            key = next(iter(self._first), None) or next(iter(self._left))
            self._first.pop(key, None)
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
            for mapping in self._mapped.values():
                undo.callback(mapping.unmap)
            for range_ in self._reserved.values():
                undo.callback(driver.context(range_.device).free_reserved, range_.address, range_.size)
            self._mapped, self._reserved = {}, {}
