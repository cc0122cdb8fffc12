"""Twin kernels for a process's window: made from its modules, sent to its frontend, and what they report."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from phos.gen import wire_pb2
from phos.gpu_engine import sealed
from phos.gpu_engine.errors import PhosError, UsageError
from phos.gpu_engine.process import TracingWindow
from phos.gpu_engine.ptx_instrument import twin_table
from phos.gpu_engine.spec.speculator import FileSource, ModuleSource, Speculator
from phos.gpu_engine.spec.worker_link import WorkerLink, WorkerLost

log = logging.getLogger(__name__)

MODULE_SECONDS = 30.0
"""Longest time for the twins of one module."""
LOOK_SECONDS = 0.1
"""How often to look whether the process has asked for further kernels."""
MAP_BYTES = 2 << 20
"""Room for what the frontend writes behind the table: where the window's memory is mapped."""

Send = Callable[[Sequence[int], wire_pb2.Twins], None]


def setting(environment: Mapping[str, str] | None = None) -> str:
    """What PHOS_TWINS says: "on", "off", or "".

    Raises:
        UsageError: something else.
    """
    said = (os.environ if environment is None else environment).get("PHOS_TWINS", "").strip().lower()
    if said not in ("", "on", "off"):
        raise UsageError(f"PHOS_TWINS={said} is neither on nor off.")
    return said


def wanted(window: TracingWindow, environment: Mapping[str, str] | None = None) -> bool:
    """Whether kernels are to have twins in a window.

    If PHOS_TWINS does not say: where nothing else finds a wrong guess, which is a lazy restore that is not strict. A
    checkpoint compares content hashes, and in a strict restore the GPU faults.
    """
    said = setting(environment)
    if said == "off" or window.shut:
        return False
    return said == "on" or window.loads


class Twins:
    """The twins of one process in one window."""

    def __init__(self, session: bytes, speculator: Speculator, window: TracingWindow, send: Send) -> None:
        """``send`` gives a packet to the frontend, with descriptors that stay ours; it may raise PhosError."""
        self.loads = window.loads
        self._session = session
        self._speculator = speculator
        self._window: TracingWindow | None = window
        self._send = send
        self._stop = threading.Event()
        size = -(-twin_table.WINDOW_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE + MAP_BYTES
        self._descriptor = sealed.make("phos-twins", size)
        try:
            self._table = mmap.mmap(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise
        header = twin_table.header()
        self._table[: len(header)] = header
        self._thread = threading.Thread(target=self._run, daemon=True, name="twins")

    def start(self) -> None:
        """Begin to send twins.

        Raises:
            RuntimeError: there can be no other thread.
        """
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._descriptor)
            raise

    def stop(self) -> None:
        """Send no more; returns at once."""
        self._stop.set()

    def join(self) -> None:
        """Wait until nothing is being sent. What was reported can still be read; the window may go."""
        self._stop.set()
        self._thread.join()
        self._window = None

    def report(self) -> twin_table.Report:
        """What they have reported so far."""
        return twin_table.read(self._table[: twin_table.WINDOW_BYTES])

    def counts(self) -> dict[str, int]:
        """The same, as it is counted in images and shown by phos-gpu status."""
        report = self.report()
        if not report.kernels:
            return {}
        return {
            "twin_kernels": report.kernels,
            "twins": report.launched,
            "twin_originals": report.originals,
            "violations": report.violations,
        }

    def _over(self) -> bool:
        return self._stop.is_set() or not self._shared()

    def _shared(self) -> list[int]:
        """The descriptors of the window's tables; none when it is over."""
        window = self._window
        return window.descriptors() if window is not None else []

    def _run(self) -> None:
        link: WorkerLink | None = None
        done: dict[int, set[str]] = {}
        try:
            while not self._over():
                for number, source, capability, kernels in self._speculator.modules(self._session):
                    new = kernels - done.setdefault(number, set())
                    if not new or self._over():
                        continue
                    done[number] |= new
                    try:
                        link = link or WorkerLink()
                        self._module(link, number, source, capability, new)
                    except WorkerLost as lost:
                        log.info("No twins of module %d: %s", number, lost)
                        link = None
                self._stop.wait(LOOK_SECONDS)
        except PhosError:
            pass  # the process has ended, or the window
        except OSError as error:
            log.warning("No twins: %s", error)
        finally:
            if link is not None:
                link.end()
            os.close(self._descriptor)

    def _module(self, link: WorkerLink, number: int, source: ModuleSource, capability: int, kernels: set[str]) -> None:
        request: dict[str, object] = {
            "id": number,
            "twins": True,
            "reads": self.loads,
            "capability": capability,
            "kernels": sorted(kernels),
            "limit": MODULE_SECONDS,
        }
        body = b""
        if isinstance(source, FileSource):
            request.update(source.request())
        else:
            body = source
        for answer in link.exchange(request, body, MODULE_SECONDS, lambda: not self._over()):
            for name, why in dict(answer.get("left_out", {})).items():
                log.info("Kernel %s has no twin: %s.", name, why)
            if answer.get("error"):
                log.info("No twins of module %d: %s", number, answer["error"])
            if file := str(answer.get("file", "")):
                self._send_file(number, file.encode())

    def _send_file(self, number: int, file: bytes) -> None:
        descriptors = self._shared()
        if not descriptors:
            return
        text = os.memfd_create("phos-twin", os.MFD_CLOEXEC)
        try:
            with open(text, "wb", closefd=False) as written:
                written.write(file)
            self._send([text, descriptors[0], self._descriptor], wire_pb2.Twins(module=number))
        finally:
            with suppress(OSError):
                os.close(text)
