"""The wish that a checkpoint or restore under way be ended, and the moment from which on that comes too late."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phos.gpu_engine.errors import INTERRUPTED, CheckpointFailed


class Interruption:
    """Asked for by one thread, heeded by others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._asked = self._settled = False
        self._act: Callable[[], object] = lambda: None

    def ask(self) -> bool:
        """End it. False: it is settled already."""
        with self._lock:
            if self._settled:
                return False
            first, self._asked = not self._asked, True
            act = self._act
        if first:
            act()
        return True

    def on_asked(self, act: Callable[[], object]) -> None:
        """What is to be done as soon as somebody asks; now, if somebody has."""
        with self._lock:
            self._act = act
            asked = self._asked
        if asked:
            act()

    @property
    def asked(self) -> bool:
        """Whether somebody has asked, in time."""
        return self._asked

    def check(self) -> None:
        """
        Raises:
            CheckpointFailed: somebody has asked.
        """
        if self._asked:
            raise CheckpointFailed(INTERRUPTED)

    def settle(self) -> None:
        """From here on it is too late.

        Raises:
            CheckpointFailed: it is not, for somebody has asked.
        """
        with self._lock:
            self._settled = not self._asked
        self.check()
