"""What ``phos-gpu guard`` writes: what it says of the job, and the job's output.

A thread of its own writes, and nobody waits for it: a terminal that was stopped with Ctrl-S, or a pipe whose reader has
gone to sleep, must not keep a job from being checkpointed and brought back.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

TICK_SECONDS = 0.02
PIECE_BYTES = 1 << 16
FINISH_SECONDS = 5.0
"""How long the end waits for a reader who takes nothing."""

STDOUT, STDERR = 1, 2


class Speaker:
    """Methods may be called from one thread, and from its signal handlers."""

    def __init__(self, *, as_json: bool) -> None:
        """``as_json``: events are JSON objects on standard output, and the job's output does not go there."""
        self._as_json = as_json
        self._said: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._followed: BinaryIO | None = None
        self._leaving = threading.Event()
        self._written = 0  # bytes, in all
        self._deaf: set[int] = set()  # descriptors that nobody listens at
        self._thread = threading.Thread(target=self._run, daemon=True, name="speaker")
        self._thread.start()

    def say(self, event: str, text: str, **fields: object) -> None:
        """Say that something has happened."""
        if self._as_json:
            line = json.dumps({"event": event, "time": round(time.time(), 3), **fields, "text": text})
            self._said.put((STDOUT, f"{line}\n".encode()))
        else:
            self._said.put((STDERR, f"guard: {text}\n".encode(errors="replace")))

    def follow(self, path: Path) -> None:
        """From now on what is appended to a file, made if it is missing, goes to standard output as well."""
        file = open(path, "a+b")  # noqa: SIM115 - as long as the thread runs
        file.seek(0, os.SEEK_END)
        self._followed = None if self._as_json else file

    def finish(self) -> None:
        """Return when all is written, or nobody takes it."""
        self._leaving.set()
        before = -1
        while self._thread.is_alive() and before != self._written:
            before = self._written
            self._thread.join(FINISH_SECONDS)

    def _run(self) -> None:
        while True:
            leaving = self._leaving.is_set()  # asked first: what is said before is written
            if not (self._tell() or self._relay()):
                if leaving:
                    return
                self._leaving.wait(TICK_SECONDS)

    def _tell(self) -> bool:
        with suppress(Empty):
            self._write(*self._said.get_nowait())
            return True
        return False

    def _relay(self) -> bool:
        if self._followed is None:
            return False
        data = self._followed.read(PIECE_BYTES)
        if not data and os.fstat(self._followed.fileno()).st_size < self._followed.tell():
            self._followed.seek(0)  # it has been emptied, as by who rotates logs
            data = self._followed.read(PIECE_BYTES)
        self._write(STDOUT, data)
        return bool(data)

    def _write(self, descriptor: int, data: bytes) -> None:
        while data and descriptor not in self._deaf:
            try:
                count = os.write(descriptor, data)
            except BlockingIOError:  # somebody who has it too does not want to wait
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                poll.poll()
            except OSError:
                self._deaf.add(descriptor)  # the job is guarded all the same
            else:
                self._written += count
                data = data[count:]
