"""What the GPU has written into an image's own memory is compared with its hashes apart from being copied.

A processor compares at a tenth of the rate at which the GPU writes (3 to 5 GB/s of 50 on an H100 machine), and who
waits to write to a chunk waits for its copy only. So the copies go on, and what has come is compared by workers that
have nothing to copy, and in the end by all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from phos.gpu_engine.copy_loop import first_changed
from phos.gpu_engine.copy_work import Piece
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.mapping import view_of


class PlacedPieces:
    """Implements :class:`~phos.gpu_engine.copy_work.Checks`."""

    def __init__(self, changed: Callable[[Piece, int, memoryview], Exception]) -> None:
        """``changed``: see :class:`~phos.gpu_engine.copy_work.Source`."""
        self._changed = changed
        self._pieces: deque[tuple[Piece, int]] = deque()  # append and popleft are one step each under the GIL

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, piece: Piece, address: int) -> None:
        """See :class:`~phos.gpu_engine.copy_work.Checks`."""
        self._pieces.append((piece, address))

    def one(self) -> int:
        """See :class:`~phos.gpu_engine.copy_work.Checks`."""
        try:
            piece, address = self._pieces.popleft()
        except IndexError:
            return 0
        assert piece.hashes is not None
        number = first_changed(address, piece.size, CHUNK_BYTES, b"".join(piece.hashes))
        if number >= 0:
            raise self._changed(piece, number, view_of(address, piece.size))
        return piece.size
