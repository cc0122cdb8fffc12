"""Of a process that cannot map its memory when it is to have it back: whether, and when, it tries again."""

from __future__ import annotations

import time

from phos.gpu_engine.errors import AttachRefused, PhosError

REFUSALS = 3
"""So often a process may be unable to map its memory for a reason that is not known to pass."""

FIRST_PAUSE_SECONDS, PAUSE_SECONDS = 0.01, 1.0
"""How long a process that could not map its memory waits before the next try: each time twice as long, up to that."""


class AttachFailures:
    """What went wrong since a process was last given its memory back; it asks again and again. Of one thread at a time.

    What passes may take long: a GPU that is full, a process with no descriptors left. To give up would cost a healthy
    process all of its memory, which phosd holds.
    """

    def __init__(self) -> None:
        self.last = ""
        """What the last one said, without a full stop; empty: there was none."""
        self._refusals = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._until = 0.0

    def add(self, error: Exception) -> bool:
        """One more, after which there is a pause. Returns whether that says something new."""
        said = str(error).rstrip(".") or repr(error)
        new, self.last = said != self.last, said
        self._refusals += not isinstance(error, PhosError) or isinstance(error, AttachRefused)
        self._until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS)
        return new

    @property
    def hopeless(self) -> bool:
        """Whether nothing says any more that it could work some day."""
        return self._refusals >= REFUSALS

    def pause(self) -> float:
        """How long the process is to wait before it is given its memory; seconds."""
        return max(0.0, self._until - time.monotonic())
