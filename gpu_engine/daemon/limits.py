"""What one ordinary user may take of phosd, which serves everybody: threads, descriptors, memory.

None of it is met with by programs that mean well. Root and phosd's own user are not limited.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter

from phos.gpu_engine.daemon.permissions import sees_all
from phos.gpu_engine.errors import NotPermitted

CONNECTIONS = 1024
"""Each is served by a thread. A process under the frontend has one, and one more while it is audited."""

SESSIONS = 512
"""Processes under the frontend, and some that have just ended."""

REQUESTS = 64
"""Checkpoints that programs have asked for and that have not ended; each has a thread, and then a CRIU."""

RESOLVES = 64
"""Wishes of one process for exported memory that wait; each has a thread."""

TIMES_ALL_GPUS = 4
"""So many times what all GPUs have is more than one user's blocks can be, even where it was not told what is freed."""

MAP_BYTES = 256 << 20
"""Of a memory map, or another list that comes as a file: some million entries."""

LINKS = 1 << 20
"""That one CRIU was kept from making."""

MODULES = 1 << 16
"""Of one process."""

NUMBERS = 1 << 20
"""Blocks of one process that phosd knows by number alone: others' that it maps, and such as nobody holds."""

NAMES_BYTES = 64 << 20
"""Names of kernels, and of files of modules, that are kept of one process."""


def blocks() -> int:
    """Blocks of GPU memory: each keeps a descriptor open, and others need some too."""
    return max(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class PerUser:
    """Counts what each user has of one thing. Any thread."""

    def __init__(self, what: str, most: int) -> None:
        """``what``: in the plural, as a sentence names it."""
        self._what = what
        self._most = most
        self._lock = threading.Lock()  # guards _taken
        self._taken: Counter[int] = Counter()

    def take(self, uid: int) -> None:
        """One more, until :meth:`give_back`.

        Raises:
            NotPermitted: the user has too many.
        """
        with self._lock:
            refuse_more(self._taken[uid], uid, self._what, self._most)
            self._taken[uid] += 1

    def give_back(self, uid: int) -> None:
        """One less."""
        with self._lock:
            self._taken[uid] -= 1
            if not self._taken[uid]:
                del self._taken[uid]


def refuse_more(has: int, uid: int, what: str, most: int) -> None:
    """
    Raises:
        NotPermitted: a user who has so many may not have another.
    """
    if has >= most and not sees_all(uid):
        raise NotPermitted(f"User {uid} has {has} {what} at phosd already, and one user may have no more.")
