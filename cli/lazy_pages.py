"""``criu lazy-pages`` beside a restore: it brings the CPU's memory on demand while phosd brings the GPU's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from phos.cli.restore_first import PAGES_LOG, PAGES_SOCKET, Begun

HUNG_UP = "PID recv: short read"
"""What the server says of a CRIU that ended before it had told of any process (uffd.c of CRIU 4.1): CRIU says why."""


class LazyPages:
    """Watches the server for the block under it; after the block it goes on until all pages are there.

    If it ends before, whenever that is, the restored processes cannot go on: they would read zeros.
    """

    def __init__(self, begun: Begun, end: Callable[[], None]) -> None:
        """``begun``: what has started the server; ``end``: ends what was restored."""
        self._end_restored = end
        self.error = ""
        self.seconds: float | None = None
        """When it was done, since it was started."""
        self._socket = Path(begun.work, PAGES_SOCKET)
        self._log = Path(begun.work, PAGES_LOG)
        self._began = begun.began
        self._pid = begun.pages
        self._begun = begun
        self._pidfd = os.pidfd_open(begun.pages)  # our child, which nobody has waited for: still that process
        self._wanted = True
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="lazy-pages")
        self._watcher.start()

    def __enter__(self) -> LazyPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begun.when_late = self._end
        if kind is not None or self._begun.interrupted:
            self._end()
        self._watcher.join()
        self._begun.when_late = None
        os.close(self._pidfd)
        self._socket.unlink(missing_ok=True)

    def _end(self) -> None:
        """What it serves is not to go on."""
        self._wanted = False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _watch(self) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self.seconds = time.perf_counter() - self._began
        if status == 0:
            return
        how = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
        self.error = f"criu lazy-pages {how} before all of the CPU's memory was there. {self._last_error()}".rstrip()
        if self._wanted:
            with suppress(Exception):  # phosd may have gone as well
                self._end_restored()

    def _last_error(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        errors = [line for line in lines if "Error" in line and "RLIMIT" not in line]
        return errors[-1] if errors else ""
