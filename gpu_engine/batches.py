"""Several things to copy at once, for one GPU: what native code is given by one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile
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
        urgent_alone: bool = False,
    ) -> None:
        """``take`` gives one after the other, then None for ever. No further one follows ``most_bytes`` in a batch.

        ``urgent_alone``: who waits for the first of a batch waits for all of it, so that what somebody waits for comes
        alone. Otherwise it comes with what was taken already.
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

        What somebody waits for comes before what was taken already.

        Raises:
            NothingYet: there is nothing now.
        """
        ready = sum(1 for _ in takewhile(lambda held: held.device == self._held[0].device, self._held[: self._most]))
        batch, self._held = self._held[:ready], self._held[ready:]
        size = sum(taken.size for taken in batch)
        while len(batch) < self._most and (not batch or size < self._most_bytes) and not (self._held or self._ended):
            try:
                taken = self._take()
            except NothingYet:
                if not batch:
                    raise
                break
            if taken is None:
                self._ended = True
            elif taken.urgent:
                if not self._urgent_alone and (not batch or taken.device == batch[0].device):
                    return [taken, *batch]
                self._held = batch
                return [taken]
            elif batch and taken.device != batch[0].device:
                self._held = [taken]
                break
            else:
                batch.append(taken)
                size += taken.size
        return batch
