"""The window of one session: the time in which its memory is saved, or loaded, while the process runs on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.conversation import ANSWER_SECONDS, Conversation, Request
from phos.gpu_engine.daemon.identity import Identity
from phos.gpu_engine.daemon.session_kernels import SessionKernels
from phos.gpu_engine.daemon.twins import Twins
from phos.gpu_engine.daemon.twins import wanted as twins_wanted
from phos.gpu_engine.errors import Mispredicted, PhosError, Unresponsive
from phos.gpu_engine.process import TracingWindow
from phos.gpu_engine.ptx_instrument.twin_table import Report
from phos.gpu_engine.spec.speculator import Speculator

log = logging.getLogger(__name__)


class SessionWindow:
    """Opens and ends the windows of one process, one at a time."""

    def __init__(
        self, traced: Identity, conversation: Conversation, kernels: SessionKernels, speculator: Speculator
    ) -> None:
        self._traced = traced
        self._conversation = conversation
        self._kernels = kernels
        self._speculator = speculator
        self._lock = threading.Lock()  # guards _window, _opening, _tracing
        self._window: TracingWindow | None = None
        self._opening = False  # it has been asked to begin its window, and has not answered: its gate is closed
        self._tracing = False
        # Not guarded: whoever connects does not wait for the lock (connected()), with which packets are sent.
        self._safe = False  # nothing of what the process does need be known any more
        self._broken = False
        self._adrift = False  # it may compute with nobody watching, or be detached still: it has not connected again
        self._twins: Twins | None = None  # those of the last window

    def connected(self, *, detached: bool) -> None:
        """The process has connected anew: it ended its window with the connection, and has not traced since.

        Unless it is ``detached`` it computes, perhaps before its window was opened.
        """
        if self._tracing or (self._window is not None and not self._safe and not detached):
            self._broken = True
        self._adrift = False  # last: the window may end between the two, and must find one of them

    def cut_off(self) -> None:
        """The connection broke after the process was asked to attach, and before its window was open."""
        if self._window is not None and not self._safe:
            self._adrift = True

    def attaching(self) -> TracingWindow | None:
        """The process is about to get its memory back; returns the window that is opened then."""
        with self._lock:
            window = self._window
        if window is not None:
            window.attaching()
        return window

    def open(self) -> None:
        """Between attach and open: from here on the process's calls are traced, if somebody saves its memory."""
        with self._lock:
            window = self._window
            carried = window.descriptors() if window is not None else []
            if window is None or not carried:
                self._safe = True
                return
            if window.loads:
                self._kernels.describe_restored()
            request = self._conversation.post(carried=carried, window_begin=wire_pb2.WindowBegin())
            self._opening = True
        try:  # not with the lock: it may be stopped, and its window is over before it goes on
            answer, extra = self._conversation.answer_to(request, ANSWER_SECONDS, patient=True)
        except PhosError:
            with self._lock:
                self._opening = False
            raise
        wire.close_all(extra)
        with self._lock:
            self._opening = False
            if self._window is not window:
                return  # untrace() has ended it
            self._tracing = not answer.done.error
            self._adrift = False  # when the connection broke before it was detached still
            lacks_twins = self._tracing and twins_wanted(window) and not self._start_twins(window)
            # Nothing else would find a wrong guess: no hash of what is loaded tells what a kernel has read before.
            unguarded = lacks_twins and window.loads
        if unguarded:
            window.wait_saved()
        if self._tracing and window.loads and self._kernels.pending():
            going = (lambda: self._tracing,)
            threading.Thread(target=self._kernels.describe_later, args=going, daemon=True, name="describe").start()
        if answer.done.error:
            log.warning(
                "Process %d (%s) cannot run while its memory is saved: %s",
                self._traced.pid,
                self._traced.executable,
                answer.done.error,
            )
            window.wait_saved()
            with self._lock:
                self._safe = self._safe or self._window is window

    def _start_twins(self, window: TracingWindow) -> bool:
        """Whether its kernels will have twins."""
        self._twins = None
        twins = Twins(self._traced.session, self._speculator, window, partial(_send, self._conversation))
        try:
            twins.start()
        except RuntimeError as error:  # a limit on processes
            log.warning("Process %d: its kernels have no twins: %s", self._traced.pid, error)
            return False
        self._twins = twins
        return True

    def watch(self, descriptors: Sequence[int]) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`. Should the connection break, the process ends it."""
        try:
            answer = self._conversation.ask(ANSWER_SECONDS, carried=descriptors, window_begin=wire_pb2.WindowBegin())
        except Unresponsive:
            with suppress(PhosError):  # it will read the request some day, and this one after it
                self._conversation.tell([], window_end=wire_pb2.WindowEnd())
            raise
        if answer.done.error:
            raise PhosError(
                f"Process {self._traced.pid} ({self._traced.executable}) cannot be watched: {answer.done.error}"
            )

    def unwatch(self) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        with suppress(PhosError):  # it ended its window with the connection
            self._conversation.tell([], window_end=wire_pb2.WindowEnd())

    def trace(self, window: TracingWindow) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        self._take(window)

    def _take(self, window: TracingWindow | None) -> tuple[bool, bool, bool]:
        """Have another window, or none. Returns whether the former was open, was about to be, and was no good."""
        with self._lock:
            self._window = window
            self._safe = False
            broken, self._broken = self._broken or self._adrift, False
            self._adrift = False
            tracing, self._tracing = self._tracing, False
            return tracing, self._opening, broken

    def untrace(self) -> Callable[[float], None]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        tracing, opening, broken = self._take(None)
        twins = self._twins if tracing else None
        if twins is not None:
            twins.join()
        request = None
        with suppress(PhosError):  # it has ended its window with the connection, or has ended
            if tracing and not broken:
                request = self._conversation.post(window_end=wire_pb2.WindowEnd())
            elif opening:
                self._conversation.tell([], window_end=wire_pb2.WindowEnd())

        def wait(seconds: float) -> None:
            if broken:
                raise Mispredicted(
                    f"The connection to process {self._traced.pid} ({self._traced.executable}) broke while its memory "
                    "was saved: what it wrote since is not known."
                )
            self._wait_ended(request, seconds)
            if twins is not None and not twins.loads and (report := twins.report()).violations:
                raise Mispredicted(
                    f"Process {self._traced.pid} ({self._traced.executable}) touched GPU memory that was not saved yet "
                    f"and that no guess named: {report.named()}."
                )

        return wait

    def _wait_ended(self, request: Request | None, seconds: float) -> None:
        """Nothing depends on its answer: its calls neither wait nor trace since the tables say that the window is over.

        What it has of the window it maps itself, and so keeps: the tables, and the memory of the shadow pools, to which
        its GPU may still be copying. It puts that away when it reads the request.
        """
        if request is None:
            return
        try:
            _, extra = self._conversation.answer_to(request, seconds, stopped=0.0)
            wire.close_all(extra)
        except Unresponsive as error:
            log.info("%s Its window is put away when it does.", error)
        except PhosError as error:
            log.info("%s", error)  # it has ended

    def twin_counts(self) -> dict[str, int]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return {} if self._twins is None else self._twins.counts()

    def twin_report(self) -> Report | None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return None if self._twins is None else self._twins.report()


def _send(conversation: Conversation, descriptors: Sequence[int], twins: wire_pb2.Twins) -> None:
    conversation.tell(list(descriptors), twins=twins)
