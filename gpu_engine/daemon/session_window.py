"""The window of one session: the time in which its memory is saved, or loaded, while the process runs on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from phos.gen import wire_pb2
from phos.gpu_engine.daemon.conversation import ANSWER_SECONDS, Conversation
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
        self._lock = threading.Lock()  # guards _window, _tracing; held while the window is opened
        self._window: TracingWindow | None = None
        self._tracing = False
        # Not guarded: whoever connects cannot wait for the lock (connected()).
        self._safe = False  # nothing of what the process does need be known any more
        self._broken = False
        self._adrift = False  # it may compute with nobody watching, or be detached still: it has not connected again
        self._twins: Twins | None = None  # those of the last window

    def connected(self, *, detached: bool) -> None:
        """The process has connected anew: it ended its window with the connection, and has not traced since.

        Unless it is ``detached`` it computes, perhaps before its window was opened.
        """
        # Without the lock: whoever opens the window has it, and may wait for an answer over the connection that broke.
        self._adrift = False
        if self._tracing or (self._window is not None and not self._safe and not detached):
            self._broken = True

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
            answer = self._conversation.ask(
                ANSWER_SECONDS, patient=True, carried=carried, window_begin=wire_pb2.WindowBegin()
            )
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
            self._safe = True

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

    def trace(self, window: TracingWindow | None) -> None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        with self._lock:
            self._window = window
            self._safe = False
            broken, self._broken = self._broken or self._adrift, False
            self._adrift = False
            traced, self._tracing = self._tracing, False
            twins = self._twins if traced else None
        if window is not None:
            return
        if twins is not None:
            twins.join()
        if broken:
            raise Mispredicted(
                f"The connection to process {self._traced.pid} ({self._traced.executable}) broke while its memory was "
                "saved: what it wrote since is not known."
            )
        if traced and self._conversation.is_connected:  # otherwise it has ended its window by itself, or ended
            self._conversation.ask(ANSWER_SECONDS, patient=True, window_end=wire_pb2.WindowEnd())
        if twins is not None and not twins.loads and (report := twins.report()).violations:
            raise Mispredicted(
                f"Process {self._traced.pid} ({self._traced.executable}) touched GPU memory that was not saved yet and "
                f"that no guess named: {report.named()}."
            )

    def twin_counts(self) -> dict[str, int]:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return {} if self._twins is None else self._twins.counts()

    def twin_report(self) -> Report | None:
        """See :class:`~phos.gpu_engine.process.GatedProcess`."""
        return None if self._twins is None else self._twins.report()


def _send(conversation: Conversation, descriptors: Sequence[int], twins: wire_pb2.Twins) -> None:
    conversation.tell(list(descriptors), twins=twins)
