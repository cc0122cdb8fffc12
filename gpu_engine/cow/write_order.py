"""When processes come to write to their chunks once they run on: in that order the next checkpoint saves them.

Training repeats itself: what one window's first iteration wrote early, the next one's writes early.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from phos.gpu_engine.blocks import BlockKey

ChunkKey = tuple[BlockKey, int]
"""A chunk that outlives a checkpoint: its block, and its offset there."""


class WriteOrder:
    """What phosd knows of the processes it serves. Any thread.

    It keeps seconds since they ran on, not ranks. Of chunks that were saved before, a window sees nothing; what an
    earlier one saw of them still holds. With the ranks of the last window alone, what is written first would be saved
    first in every other checkpoint only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _sessions
        self._sessions: dict[bytes, dict[ChunkKey, float]] = {}

    def learn(self, written: Mapping[ChunkKey, float], blocks: Collection[BlockKey]) -> None:
        """What a window has seen: for each chunk that was still to be saved, when it was about to be written to.

        ``blocks``: all that its processes had. What was known of others of theirs is forgotten, as those were freed.
        """
        with self._lock:
            for session in {key[0] for key in blocks}:
                known = self._sessions.pop(session, {})
                left = {chunk: at for chunk, at in known.items() if chunk[0] in blocks}
                if left:
                    self._sessions[session] = left
            for chunk, seconds in written.items():
                self._sessions.setdefault(chunk[0][0], {})[chunk] = seconds

    def of(self, sessions: Iterable[bytes]) -> dict[ChunkKey, float]:
        """Of several processes, which run on at the same moment."""
        with self._lock:
            return {chunk: at for session in sessions for chunk, at in self._sessions.get(session, {}).items()}

    def forget(self, session: bytes) -> None:
        """Its process has ended."""
        with self._lock:
            self._sessions.pop(session, None)
