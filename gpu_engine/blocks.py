"""Blocks: physical GPU memory, one ``cuMemCreate`` each, named by whoever created it."""

from __future__ import annotations

from dataclasses import dataclass

BlockKey = tuple[bytes, int]
"""(session number, block number)."""


@dataclass(frozen=True)
class Block:
    """One physical allocation. ``size`` in bytes; ``device`` is the GPU's ordinal for phosd.

    Whoever holds the descriptor holds the memory.
    """

    key: BlockKey
    size: int
    device: int
    descriptor: int
    by_application: bool = False
