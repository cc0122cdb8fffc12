"""Several things to copy at once, for one GPU: what native code is given by one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from phos.gpu_engine.copy_work import NothingYet


class Copied(Protocol):
    """A piece or a load."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def device(self) -> int:
        """Its GPU."""

    @property
    def urgent(self) -> bool:
        """Somebody waits for it."""


Taken = TypeVar("Taken", bound=Copied)


class Batches(Generic[Taken]):
    """What a worker takes from a source, in batches of at most ``most``; of one thread."""

    def __init__(
        self,
        take: Callable[[], Taken | None],
        most: int,
        most_bytes: float = math.inf,
        *,
        urgent_alone: bool = True,
    ) -> None:
        """``take`` gives one after the other, then None for ever. No further one follows ``most_bytes`` in a batch.

        ``urgent_alone``: who waits for the first of a batch waits for all of it.
        """
        self._take = take
        self._most = most
        self._most_bytes = most_bytes
        self._urgent_alone = urgent_alone
        self._held: list[Taken] = []
        self._ended = False

    @property
    def over(self) -> bool:
        """Whether there will be no further batch."""
        return self._ended and not self._held

    @property
    def holds(self) -> bool:
        """Whether something has been taken that is in no batch yet."""
        return bool(self._held)

    def following(self) -> list[Taken]:
        """The next batch, all for one GPU; empty: it is over.

        One that somebody waits for ends a batch, and comes before those that were taken already.

        Raises:
            NothingYet: there is nothing now.
        """
        batch, self._held = self._held, []
        size = sum(taken.size for taken in batch)
        while len(batch) < self._most and (not batch or size < self._most_bytes) and not self._ended:
            try:
                taken = self._take()
            except NothingYet:
                if not batch:
                    raise
                break
            if taken is None:
                self._ended = True
            elif taken.urgent:
                if self._urgent_alone or (batch and taken.device != batch[0].device):
                    self._held, batch = batch, []
                return [taken, *batch]
            elif batch and taken.device != batch[0].device:
                self._held = [taken]
                break
            else:
                batch.append(taken)
                size += taken.size
        return batch
