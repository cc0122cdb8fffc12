"""Noticing the end of processes."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress

from phos.gpu_engine.daemon.session import Session

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""When to try again to watch a process for which no descriptor was left."""


class Reaper:
    """Notices the end of processes by their pidfds."""

    def __init__(self, ended: Callable[[Session], None]) -> None:
        self._ended = ended
        self._lock = threading.Lock()  # guards _watched
        self._watched: dict[int, tuple[int, Session]] = {}  # pidfd → (pid, session)
        self._unwanted: set[int] = set()  # of those; closed by the thread that polls them. Guarded by _lock
        self._unwatched: list[tuple[int, Session]] = []  # for want of a descriptor. Guarded by _lock
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        threading.Thread(target=self._run, daemon=True, name="reaper").start()

    def watch(self, pid: int, session: Session) -> None:
        """Report the end of ``pid``; at once if it is gone."""
        with self._lock:
            if any(known == (pid, session) for known in (*self._watched.values(), *self._unwatched)):
                return
        if self._is_gone(pid, session):
            self._ended(session)
        self._wake()

    def _is_gone(self, pid: int, session: Session, *, again: bool = False) -> bool:
        """Whether there is no such process; else it is watched from now on, or as soon as there is a descriptor for it.

        One that lives must not lose its memory because phosd can open no more files.
        """
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        except OSError as error:
            if not again:
                log.warning("Process %d cannot be watched now: %s", pid, error)
            with self._lock:
                self._unwatched.append((pid, session))
        else:
            with self._lock:
                self._watched[descriptor] = (pid, session)
        return False

    def forget(self, session: Session) -> None:
        """Nobody wants to know of this session's end any more."""
        with self._lock:
            self._unwanted |= {fd for fd, (_, watched) in self._watched.items() if watched is session}
            self._unwatched = [(pid, other) for pid, other in self._unwatched if other is not session]
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full: it will wake
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            with self._lock:
                for descriptor in self._unwanted:
                    self._watched.pop(descriptor)
                    os.close(descriptor)
                self._unwanted = set()
                for descriptor in self._watched:
                    poll.register(descriptor, select.POLLIN)
                again = AGAIN_SECONDS * 1000 if self._unwatched else None
            for descriptor, _ in poll.poll(again):
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    continue
                self._report(descriptor)
            self._watch_again()

    def _watch_again(self) -> None:
        with self._lock:
            unwatched, self._unwatched = self._unwatched, []
        for pid, session in unwatched:
            if self._is_gone(pid, session, again=True):
                self._say(session)

    def _report(self, descriptor: int) -> None:
        """Who waits for the next end must not keep the session of the last one."""
        with self._lock:
            _, session = self._watched.pop(descriptor)
            self._unwanted.discard(descriptor)
        os.close(descriptor)
        self._say(session)

    def _say(self, session: Session) -> None:
        try:
            self._ended(session)
        except Exception:
            log.exception("The end of process %d", session.pid)
