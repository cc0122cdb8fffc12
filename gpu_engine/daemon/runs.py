"""The runs of CRIU that phosd has a part in, so that whoever started one can ask for its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.errors import NotPermitted
from phos.gpu_engine.interruption import Interruption

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One dump or restore: CRIU's pid as CRIU sees it, in which pid namespace, of which user."""

    criu: int
    namespace: int
    uid: int
    interruption: Interruption = field(default_factory=Interruption)


class Runs:
    """Those under way: from the plugin's first packet until the image is whole, or the processes compute; or never.

    Two may have the same image directory (the second is refused): CRIU's pid tells them apart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _runs
        self._runs: list[Run] = []

    @contextmanager
    def entered(self, connection: wire.Connection, criu: int) -> Iterator[Interruption]:
        """A run of CRIU, whose plugin has connected and says that its pid is ``criu``."""
        run = Run(criu, procfs.pid_namespace(connection.pid), connection.uid)
        with self._lock:
            self._runs.append(run)
        try:
            yield run.interruption
        finally:
            with self._lock:
                self._runs.remove(run)

    def interrupt(self, connection: wire.Connection, criu: int) -> None:
        """End the run of that CRIU, if there is one and it is not too late; ``connection``: of who asks.

        Raises:
            NotPermitted: it is another user's.
        """
        namespace = procfs.pid_namespace(connection.pid)
        with self._lock:
            found = [run for run in self._runs if (run.criu, run.namespace) == (criu, namespace)]
        own = [run for run in found if connection.uid in (0, run.uid)]
        if found and not own:
            raise NotPermitted(f"User {connection.uid} may not end what user {found[0].uid} has begun.")
        for run in own:  # anybody may say of another's CRIU that it is his
            if run.interruption.ask():
                log.info("CRIU (process %d) is interrupted.", criu)
