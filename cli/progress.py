"""A progress bar for a job of phosd, on a terminal and for long copies only."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import PhosError

APPEAR_SECONDS = 0.5
"""Shorter copies show no bar."""


class ImageProgress:
    """Follows the job on an image directory while the block under it runs."""

    def __init__(self, directory: Path, *, restore: bool, quiet: bool) -> None:
        self._directory = directory
        self._restore = restore
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        if not quiet and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> ImageProgress:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(2)

    def _follow(self) -> None:
        # Here, because importing it takes longer than many a restore's other preparations.
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from phos.cli.console import Console

        began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, transient=True, console=Console(stderr=True)) as bar:
            task = bar.add_task("GPU memory", total=None, visible=False)

            def show(state: wire_pb2.ImageState) -> None:
                if time.monotonic() - began > APPEAR_SECONDS and state.bytes_total:
                    bar.update(task, total=state.bytes_total, completed=state.bytes_done, visible=True)

            while not self._stop.is_set():
                try:
                    state = client.wait_image(self._directory, restore=self._restore, progress=show)
                except (PhosError, OSError):
                    return
                if state.state != "unknown":
                    return
                time.sleep(0.05)  # CRIU has not come to it yet
