"""``criu lazy-pages`` beside a restore: it brings the CPU's memory on demand while phosd brings the GPU's."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from phos.gpu_engine.installation import launcher

SOCKET = "lazy-pages.socket"
LOG = "lazy-pages.log"


class LazyPages:
    """Starts the server for the block under it; after the block it goes on until all pages are there.

    If it ends before, the restored processes cannot go on: ``pids`` is asked for them, and they are killed.
    """

    def __init__(self, directory: Path, pids: Callable[[], list[int]]) -> None:
        """``directory``: of the image."""
        self._pids = pids
        self.error = ""
        self.seconds: float | None = None
        """When it was done, since it was started."""
        self._socket = directory / SOCKET
        self._log = directory / LOG
        self._began = time.perf_counter()
        self._socket.unlink(missing_ok=True)  # of one that was killed
        command = [str(launcher("criu")), "lazy-pages", "-D", str(directory), "-o", LOG, "-v2"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wanted = True
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="lazy-pages")
        self._watcher.start()

    @property
    def environment(self) -> dict[str, str]:
        """For CRIU, whose plugin waits until the server listens (criu_plugin/lazy_pages.c): both start side by side."""
        return {"PHOS_LAZY_PAGES": str(self._process.pid)}

    def __enter__(self) -> LazyPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wanted = False
        if kind is not None:
            self._process.kill()
        self._watcher.join()
        self._socket.unlink(missing_ok=True)

    def _watch(self) -> None:
        status = self._process.wait()
        self.seconds = time.perf_counter() - self._began
        if status == 0:
            return
        how = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
        self.error = f"criu lazy-pages {how} before all of the CPU's memory was there. {self._last_error()}".rstrip()
        if not self._wanted:
            return
        with suppress(Exception):  # phosd may have gone as well
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _last_error(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        errors = [line for line in lines if "Error" in line and "RLIMIT" not in line]
        return errors[-1] if errors else ""
