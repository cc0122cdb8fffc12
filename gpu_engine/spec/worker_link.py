"""phosd's end of the analysis worker: start it, hand it one module, take what it says, end it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from phos.gpu_engine.spec import frames
from phos.gpu_engine.spec.errors import SpecError

NICE = 19
HURRIED_NICE = 5
"""Processor priorities of the worker (nice(2)): usually, and when a checkpoint or a restore would like its answers."""

STRIPPED = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT")
"""The worker must load neither the frontend nor the software GPU."""


class WorkerLost(Exception):
    """The worker died, hung, or spoke nonsense; the message says which. It has been ended."""


class WorkerLink:
    """One worker process. Used by one thread at a time: the worker dies with the thread that made it."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in STRIPPED}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phos.gpu_engine.spec.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            close_fds=True,
            start_new_session=True,  # so that the disassembler it runs can be ended with it
            cwd="/",
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        os.set_blocking(self._from.fileno(), False)
        self._assembler = frames.Assembler()
        self._hurried = False

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def hurry(self, on: bool) -> None:
        """Whether somebody waits for it: else it and what it runs have the lowest priority. Cheap; to be called often.

        Who may not raise priorities (only root may) leaves it where it is.
        """
        if on or self._hurried:  # again, as what is just starting lowers its own
            self._hurried = on
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, self._process.pid, HURRIED_NICE if on else NICE)

    def exchange(
        self, request: dict[str, Any], body: bytes, limit: float, wanted: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """Send one request and yield its answers, of which the last has the stage "done".

        Arguments:
            limit: seconds for the whole of it.
            wanted: asked several times a second; when it says no the worker is ended, as it cannot be told to stop.

        Raises:
            WorkerLost: no further answer will come.
        """
        try:
            yield from self._exchange(request, body, limit, wanted)
        except WorkerLost:
            self.end()
            raise
        except (OSError, SpecError) as error:
            code = self.end()
            why = f"ended with signal {-code}" if code < 0 else f"cannot be spoken to ({error})"
            raise WorkerLost(f"the analysis process {why}") from None

    def _exchange(
        self, request: dict[str, Any], body: bytes, limit: float, wanted: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + limit
        unsent = [memoryview(part) for part in frames.pack(request, body) if part]
        with selectors.DefaultSelector() as selector:
            selector.register(self._from, selectors.EVENT_READ)
            selector.register(self._to, selectors.EVENT_WRITE)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WorkerLost(f"the analysis took longer than {limit:g} s")
                if not wanted():
                    raise WorkerLost("the analysis is not wanted any more")
                for key, _ in selector.select(min(left, 0.2)):
                    if key.fileobj is self._to:
                        unsent = self._send(unsent)
                        if not unsent:
                            selector.unregister(self._to)
                        continue
                    piece = self._from.read(1 << 20)
                    if piece is None:
                        continue
                    if not piece:
                        code = self.end()
                        how = f"signal {-code}" if code < 0 else f"status {code}"
                        raise WorkerLost(f"the analysis process ended with {how}")
                    for header, _ in self._assembler.feed(piece):
                        if header.get("id") != request["id"]:
                            raise WorkerLost("the analysis process answers a question that was not asked")
                        yield header
                        if header.get("stage") == "done":
                            return

    def _send(self, unsent: list[memoryview]) -> list[memoryview]:
        sent = self._to.write(unsent[0]) or 0
        rest = unsent[0][sent:]
        return [rest, *unsent[1:]] if rest else unsent[1:]

    def end(self) -> int:
        """End the worker, if it lives; its exit status as subprocess counts. Safe to call again."""
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):
                pipe.close()
        # Its own status, if it is about to have one: whoever reads the log wants to know what killed it.
        try:
            return self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()
