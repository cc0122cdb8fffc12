"""Several things to copy at once, for one GPU: what native code is given by one call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from phos.gpu_engine.copy_work import NothingYet


class Copied(Protocol):
    """A piece or a load."""

    @property
    def device(self) -> int:
        """Its GPU."""

    @property
    def urgent(self) -> bool:
        """Somebody waits for it."""


Taken = TypeVar("Taken", bound=Copied)


class Batches(Generic[Taken]):
    """What a worker takes from a source, in batches of at most ``most``; of one thread."""

    def __init__(self, take: Callable[[], Taken | None], most: int) -> None:
        """``take`` gives one after the other, then None for ever."""
        self._take = take
        self._most = most
        self._held: list[Taken] = []
        self._ended = False

    @property
    def over(self) -> bool:
        """Whether there will be no further batch."""
        return self._ended and not self._held

    def following(self) -> list[Taken]:
        """The next batch, all for one GPU; empty: it is over.

        What somebody waits for comes alone, and before what was taken already: who waits for the first of a batch
        waits for all of it.

        Raises:
            NothingYet: there is nothing now.
        """
        ready = sum(1 for _ in takewhile(lambda held: held.device == self._held[0].device, self._held[: self._most]))
        batch, self._held = self._held[:ready], self._held[ready:]
        while len(batch) < self._most and not (self._held or self._ended):
            try:
                taken = self._take()
            except NothingYet:
                if not batch:
                    raise
                break
            if taken is None:
                self._ended = True
            elif taken.urgent:
                self._held = batch
                return [taken]
            elif batch and taken.device != batch[0].device:
                self._held = [taken]
                break
            else:
                batch.append(taken)
        return batch
