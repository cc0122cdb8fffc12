"""The states of a session, and which may follow which."""

from __future__ import annotations

import threading
import time
from enum import Enum

from phos.gpu_engine.errors import ProtocolError


class SessionState(Enum):
    """Where a process under the frontend stands."""

    RUNNING = "running"  # connected, gate open
    QUIESCED = "quiesced"  # gate closed, GPU idle, memory mapped
    DETACHED = "detached"  # nothing mapped, no connection; its driver state may be checkpointed
    PARKED = "parked"  # in a pool, stopped, its memory not even created
    RETURNING = "returning"  # the driver's part is back; the frontend may attach
    ATTACHING = "attaching"  # connected again, mapping its memory
    LOST = "lost"  # its memory is gone: every CUDA call fails
    ENDED = "ended"  # the process is gone


_NEXT: dict[SessionState, frozenset[SessionState]] = {
    SessionState.RUNNING: frozenset({SessionState.QUIESCED, SessionState.ENDED}),
    SessionState.QUIESCED: frozenset({SessionState.RUNNING, SessionState.DETACHED, SessionState.ENDED}),
    SessionState.PARKED: frozenset({SessionState.DETACHED, SessionState.ENDED}),
    SessionState.DETACHED: frozenset({SessionState.RETURNING, SessionState.LOST, SessionState.ENDED}),
    SessionState.RETURNING: frozenset({SessionState.ATTACHING, SessionState.LOST, SessionState.ENDED}),
    SessionState.ATTACHING: frozenset(
        {SessionState.RUNNING, SessionState.RETURNING, SessionState.LOST, SessionState.ENDED}
    ),
    SessionState.LOST: frozenset({SessionState.ENDED}),
    SessionState.ENDED: frozenset(),
}


class StateMachine:
    """A session's state, changed by one thread and awaited by others."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._changed = threading.Condition()
        self.since = time.time()

    @property
    def state(self) -> SessionState:
        """The state now."""
        return self._state

    def to(self, state: SessionState) -> None:
        """Change state.

        Raises:
            ProtocolError: the change is not a legal one.
        """
        with self._changed:
            if state not in _NEXT[self._state]:
                raise ProtocolError(f"A session cannot go from {self._state.value} to {state.value}.")
            self._state = state
            self.since = time.time()
            self._changed.notify_all()

    def adopt(self, state: SessionState) -> None:
        """Take over a state that the process itself reports, or that an earlier phosd left it in. The end stays."""
        with self._changed:
            if self._state is not SessionState.ENDED:
                self._state = state
                self.since = time.time()
                self._changed.notify_all()

    def end(self) -> None:
        """The process is gone, whatever it was doing."""
        self.adopt(SessionState.ENDED)

    def wait_for(self, *states: SessionState, timeout: float) -> SessionState:
        """Wait until the state is one of ``states`` (or ENDED or LOST); returns it, whatever it is at the time-out."""
        final = {*states, SessionState.ENDED, SessionState.LOST}
        with self._changed:
            self._changed.wait_for(lambda: self._state in final, timeout)
            return self._state
