"""Requests to a process's frontend and their answers, over all the connections that the process makes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.identity import Identity
from phos.gpu_engine.errors import CheckpointFailed, PhosError, Unresponsive

ANSWERS = ("done", "quiesce_done", "detach_done", "attach_done")

ANSWER_SECONDS = 60.0
"""How long a frontend may take for a request that involves no waiting for the GPU."""

STOPPED_SECONDS = 1.0
"""A process that was stopped for so long will not answer before somebody continues it."""


class Request:
    """A request on its way: filled by the receiving thread."""

    def __init__(self, number: int, step: str) -> None:
        self.number = number
        self.step = step
        self.done = threading.Event()
        self.answer: wire_pb2.Envelope | None = None
        self.descriptors: list[int] = []


class Conversation:
    """What is asked of one frontend. Methods may be called from any thread."""

    def __init__(self, peer: Identity) -> None:
        self._peer = peer
        self._hung_up = threading.Event()  # the last connection has ended
        self._lock = threading.Lock()  # guards what follows
        self._connection: wire.Connection | None = None
        self._requests: dict[int, Request] = {}
        self._next_id = 1

    def begin(self, connection: wire.Connection) -> None:
        """The frontend has connected. What was asked over the former connection is not going to be answered."""
        with self._lock:
            former, self._connection = self._connection, connection
            self._hung_up.clear()
            waiting, self._requests = list(self._requests.values()), {}
        for request in waiting:
            request.done.set()
        if former:
            former.shutdown()

    def end(self, connection: wire.Connection) -> None:
        """The connection ended: on purpose (detached), by a fault, or with the process."""
        with self._lock:
            if self._connection is not connection:
                return
            self._connection = None
            waiting, self._requests = list(self._requests.values()), {}
            self._hung_up.set()
        for request in waiting:
            request.done.set()

    @property
    def is_connected(self) -> bool:
        """Whether the frontend is connected now."""
        with self._lock:
            return self._connection is not None

    def hang_up(self) -> None:
        """End the connection; the frontend will make another."""
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.shutdown()

    def wait_hung_up(self, timeout: float) -> bool:
        """Whether the connection has ended within so many seconds."""
        return self._hung_up.wait(timeout)

    def take_answer(self, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """One of :data:`ANSWERS`. Its descriptors go to whoever asked, or are closed."""
        with self._lock:
            request = self._requests.pop(envelope.id, None)
            if request is not None:  # under the lock: who gives up looks once more, and all of it is there or none
                request.answer, request.descriptors = envelope, descriptors
                request.done.set()
        if request is None:
            wire.close_all(descriptors)

    def tell(self, descriptors: list[int], number: int = 0, /, **body: object) -> None:
        """A packet that wants no answer (``number``: it is one). The descriptors stay the caller's.

        Raises:
            PhosError: the frontend is not connected, or has gone away.
        """
        with self._lock:
            connection = self._connection
        if connection is None:
            raise PhosError(f"{self._named()} closed its connection while it was attached.")
        try:
            connection.send(wire_pb2.Envelope(id=number, **body), descriptors)  # type: ignore[arg-type]
        except OSError as error:
            raise PhosError(f"{self._named()} has gone away ({error}).") from error

    def post(self, *, carried: Sequence[int] = (), **body: object) -> Request:
        """Send a request, whose answer is to be waited for (:meth:`answer_to`).

        ``carried``: descriptors that go with it; they stay the caller's.

        Raises:
            CheckpointFailed: the connection ended, or there is none.
        """
        with self._lock:
            connection = self._connection
            request = Request(self._next_id, next(iter(body)))
            self._next_id += 1
            if connection is not None:
                self._requests[request.number] = request
        if connection is None:
            raise CheckpointFailed(f"{self._named()} is not connected to phosd.")
        try:
            connection.send(wire_pb2.Envelope(id=request.number, **body), list(carried))  # type: ignore[arg-type]
        except OSError as error:
            self._forget(request)
            raise CheckpointFailed(f"{self._named()} has gone away ({error}).") from error
        return request

    def answer_to(
        self, request: Request, timeout: float, *, patient: bool = False, stopped: float = STOPPED_SECONDS
    ) -> tuple[wire_pb2.Envelope, list[int]]:
        """Wait for an answer; its descriptors become the caller's.

        ``patient``: the time that the process is stopped does not count. Otherwise it is waited for only if it has not
        been stopped for ``stopped`` seconds.

        Raises:
            Unresponsive: no answer in time, or (unless ``patient``) the process is stopped.
            CheckpointFailed: the connection ended.
        """
        self._wait(request, timeout, stopped, patient=patient)
        if request.answer is None:
            raise CheckpointFailed(f"{self._named()} ended, or closed its connection, at '{request.step}'.")
        return request.answer, request.descriptors

    def call(
        self, timeout: float, *, patient: bool = False, carried: Sequence[int] = (), **body: object
    ) -> tuple[wire_pb2.Envelope, list[int]]:
        """Send a request and wait for its answer, as :meth:`post` and :meth:`answer_to` do.

        Raises: as these.
        """
        return self.answer_to(self.post(carried=carried, **body), timeout, patient=patient)

    def ask(
        self, timeout: float, *, patient: bool = False, carried: Sequence[int] = (), **body: object
    ) -> wire_pb2.Envelope:
        """As :meth:`call`, where no descriptor is expected beside the answer."""
        answer, extra = self.call(timeout, patient=patient, carried=carried, **body)
        wire.close_all(extra)
        return answer

    def _wait(self, request: Request, timeout: float, most_stopped: float, *, patient: bool) -> None:
        spent = stopped = 0.0
        while not request.done.wait(slice_ := min(0.1, max(0.001, timeout))):
            is_stopped = procfs.is_stopped(self._peer.pid)
            stopped = stopped + slice_ if is_stopped else 0.0
            if not (patient and is_stopped):
                spent += slice_
            if spent < timeout and (patient or stopped < most_stopped or not is_stopped):
                continue
            self._forget(request)
            if request.done.is_set():
                return  # at the last moment
            if is_stopped:
                raise Unresponsive(
                    f"{self._named()} is stopped, by a signal or a debugger, and cannot answer '{request.step}'. "
                    "Continue it, then try again."
                )
            raise Unresponsive(
                f"{self._named()} did not answer '{request.step}' within {timeout:.0f} s. Does its GPU work ever end?"
            )

    def _forget(self, request: Request) -> None:
        with self._lock:
            self._requests.pop(request.number, None)

    def _named(self) -> str:
        return f"Process {self._peer.pid} ({self._peer.executable})"
