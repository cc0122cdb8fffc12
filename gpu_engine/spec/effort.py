"""How much work a source of descriptors may be: in processor time, and by the time when it is another module's turn."""

from __future__ import annotations

import math
import time

from phos.gpu_engine.spec.errors import SpecError


class OutOfTime(SpecError):
    """The work is given up. ``hard``: it has taken its processor time, as it would again; else its turn is over."""

    def __init__(self, *, hard: bool) -> None:
        super().__init__("It takes too long." if hard else "There is no time left.")
        self.hard = hard


class Effort:
    """Begins now. Processor time is this thread's: how busy the machine is does not count."""

    def __init__(self, seconds: float = math.inf, deadline: float = math.inf) -> None:
        """Arguments: ``seconds`` of processor time; ``deadline`` as time.monotonic() tells it."""
        self._deadline = deadline
        self._until = time.thread_time() + seconds

    def check(self) -> None:
        """To be called every few thousand instructions.

        Raises:
            OutOfTime: it is time to stop.
        """
        if time.thread_time() > self._until:
            raise OutOfTime(hard=True)
        if time.monotonic() > self._deadline:
            raise OutOfTime(hard=False)
