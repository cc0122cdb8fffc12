"""phosd's own log file, where it was started on demand: the newest part of it stays."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TextIO

LIMIT = 4 << 20
"""Bytes; a log that has grown beyond that is cut to its newest half."""


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 does not take any
    """Logs, and cuts the file that it logs to, if that is phosd's own: any other is its owner's to rotate."""

    def __init__(self, stream: TextIO, own: Path) -> None:
        """``own``: where phosd's own log is, if it writes one."""
        super().__init__(stream)
        self._own = own

    def emit(self, record: logging.LogRecord) -> None:
        """With the handler's lock held, as always."""
        super().emit(record)
        try:
            self._cut()
        except (OSError, ValueError):
            self.handleError(record)

    def _cut(self) -> None:
        descriptor = self.stream.fileno()
        status = os.fstat(descriptor)
        if status.st_size <= LIMIT:
            return
        try:
            reading = os.open(self._own, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # there is none
        try:
            if not os.path.samestat(os.fstat(reading), status):
                return
            newest = os.pread(reading, LIMIT // 2, status.st_size - LIMIT // 2)
        finally:
            os.close(reading)
        os.ftruncate(descriptor, 0)  # in its place: whoever else writes to it appends
        os.write(descriptor, b"(cut here)\n" + newest.partition(b"\n")[2])
