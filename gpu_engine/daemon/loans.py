"""What a checkpoint has of the memory of processes that run on: they may run out of memory meanwhile, and free some.

What is freed while the checkpoint is being prepared is let go of at once. What is freed in its window has to be saved
first; the process, which waits for what it gave back, waits for that too. Without the checkpoint it would have had it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from phos.gpu_engine.blocks import BlockKey


class Borrower(Protocol):
    """A checkpoint. Called from any thread."""

    returned: threading.Event
    """Set when it has nothing any more."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether it needs what it has: the processes' memory is being saved."""

    def let_go(self, key: BlockKey) -> None:
        """A block was freed: unmap it, unless it is needed."""


class Loans:
    """Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _borrowers
        self._borrowers: dict[bytes, Borrower] = {}  # by session

    @contextmanager
    def lent(self, sessions: Iterable[bytes], borrower: Borrower) -> Iterator[None]:
        """These sessions' blocks are lent to a checkpoint for the time of the block, or until it returns them."""
        wanted = dict.fromkeys(sessions, borrower)
        with self._lock:
            self._borrowers |= wanted
        try:
            yield
        finally:
            with self._lock:
                for session in wanted:
                    del self._borrowers[session]
            borrower.returned.set()

    def freed(self, key: BlockKey) -> None:
        """Its owner has freed a block."""
        if (borrower := self._of(key[0])) is not None:
            borrower.let_go(key)

    def keeps(self, session: bytes) -> bool:
        """Whether somebody needs what this session has freed."""
        borrower = self._of(session)
        return borrower is not None and borrower.keeps_blocks

    def wait(self, session: bytes) -> None:
        """Return when nobody does."""
        if (borrower := self._of(session)) is not None and borrower.keeps_blocks:
            borrower.returned.wait()

    def _of(self, session: bytes) -> Borrower | None:
        with self._lock:
            return self._borrowers.get(session)
