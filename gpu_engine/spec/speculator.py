"""What phosd asks for access descriptors: takes modules and kernel names as they become known, and gives packed tables.

The analysis runs in a process of its own (worker.py), because phosd's threads share one interpreter lock and modules
may crash whoever reads them. A thread here feeds that process one module after another; nothing waits for it but
:meth:`Speculator.table`, and that no longer than it is told to.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from phos.gpu_engine.spec import table as tables
from phos.gpu_engine.spec.cache import decode
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Source
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.worker_link import WorkerLink, WorkerLost

log = logging.getLogger(__name__)

MODULE_SECONDS = 60.0
"""Longest time for one request. What is known by then stays; better is not found for its kernels in this session."""
SHARE = 3
"""A module may use this part of that time at once; then others have their turn before its other kernels."""
IDLE_SECONDS = 60.0
"""How long a worker without work stays: it holds some 50 MB."""
FINAL = (Source.PTX, Source.SASS)
"""Sources of which no better follows within one analysis."""
GATHER_SECONDS = 0.05
"""Kernel names come one by one while a program starts; a module is analysed for several of them at once."""


def believed(found: AccessDescriptor) -> AccessDescriptor:
    """The descriptor as the frontend is to act on it.

    A launch that may write through addresses from memory has to wait for all of memory. Machine code that keeps
    addresses in shared memory, or tensor maps in its workspace, looks like that and is not (cuBLASLt's kernels, for
    example), and such kernels are in every training step. So where machine code also writes through its arguments, that
    is all that is believed of it; a checkpoint that this makes wrong is found by its content hashes and made anew.
    """
    writes = any(field.access & Access.WRITE for field in found.fields)
    if found.source is not Source.SASS or not writes:
        return found
    return replace(found, indirect=found.indirect & ~Access.WRITE)


@dataclass(frozen=True)
class FileSource:
    """A module in a file: a path that this process can open, and bytes; size 0 is up to the end of the module."""

    path: str
    offset: int = 0
    size: int = 0


ModuleSource = bytes | FileSource


@dataclass
class _Module:
    source: ModuleSource
    capability: int
    asked: set[str] = field(default_factory=set)
    """Kernels to be analysed; they leave when a final answer is there, good or bad."""
    known: dict[str, AccessDescriptor] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    """Kernels of which nothing could be found out."""


@dataclass
class _Session:
    modules: dict[int, _Module] = field(default_factory=dict)
    early: dict[int, set[str]] = field(default_factory=dict)
    """Kernels told of before their module was."""
    packed: bytes | None = None


class Speculator:
    """Descriptors for all sessions of a phosd. Any thread may call; all but table() and close() return at once.

    Arguments:
        capability: of the GPUs, as 90 for 9.0, for modules that come without one; 0 takes what is newest in a module.
        module_seconds: time limit for the analysis of one module.
    """

    def __init__(
        self,
        capability: int = 0,
        *,
        module_seconds: float = MODULE_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._capability = capability
        self._module_seconds = module_seconds
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        # Guarded by _changed: all that follows.
        self._sessions: dict[bytes, _Session] = {}
        self._hurry: list[bytes] = []  # sessions that a table() waits for
        self._closed = False
        self._thread: threading.Thread | None = None
        # Used by the thread alone; the pid is read by tests.
        self._worker: WorkerLink | None = None
        self._numbers = itertools.count(1)

    def add_module(self, session: bytes, module: int, source: ModuleSource, *, capability: int | None = None) -> None:
        """A session has loaded a module. The same number again replaces nothing: numbers are never reused."""
        with self._changed:
            of_session = self._sessions.setdefault(session, _Session())
            if module in of_session.modules:
                return
            added = _Module(source, self._capability if capability is None else capability)
            added.asked = of_session.early.pop(module, set())
            of_session.modules[module] = added
            self._wake(added)

    def add_kernels(self, session: bytes, module: int, names: Iterable[str]) -> None:
        """A session may launch these kernels of a module, which may be added later."""
        with self._changed:
            of_session = self._sessions.setdefault(session, _Session())
            known = of_session.modules.get(module)
            if known is None:
                of_session.early.setdefault(module, set()).update(names)
                return
            known.asked.update(name for name in names if name not in known.known and name not in known.lacking)
            self._wake(known)

    def forget(self, session: bytes) -> None:
        """A session has ended. An analysis of a module of it alone is broken off."""
        with self._changed:
            self._sessions.pop(session, None)
            self._changed.notify_all()

    def table(self, session: bytes, timeout: float) -> bytes:
        """The packed table (frontend/access_table.h) of the kernels a session may launch.

        Waits ``timeout`` seconds at most for what is still being analysed. Kernels that are not done by then are in it
        as far as they are known (by name or layout), or left out; :meth:`unfinished` and the log say which.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._hurry.append(session)
            self._changed.notify_all()
            try:
                while self._pending(session) and not self._closed:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break
            finally:
                self._hurry.remove(session)
            of_session = self._sessions.get(session)
            if of_session is None:
                return tables.pack(())
            unfinished = [
                (number, name) for number, module in of_session.modules.items() for name in sorted(module.asked)
            ]
            if of_session.packed is None:
                rows = [
                    (number, believed(found))
                    for number, module in of_session.modules.items()
                    for found in module.known.values()
                ]
                of_session.packed = tables.pack(rows)
            packed = of_session.packed
        if unfinished:
            named = _some([f"{name} of module {number}" for number, name in unfinished])
            log.warning("Kernels whose analysis was not done in %g s: %s.", timeout, named)
        return packed

    def unfinished(self, session: bytes) -> list[tuple[int, str]]:
        """(module, kernel) of what is asked for and not analysed to the end: still to be done, or without an answer."""
        with self._changed:
            of_session = self._sessions.get(session, _Session())
            found = [
                (number, name)
                for number, module in of_session.modules.items()
                for name in module.asked | module.lacking
            ]
            found += [(number, name) for number, names in of_session.early.items() for name in names]
            return sorted(found)

    def descriptors(self, session: bytes) -> dict[tuple[int, str], AccessDescriptor]:
        """All that is known of a session's kernels by now, by (module, kernel)."""
        with self._changed:
            of_session = self._sessions.get(session, _Session())
            return {
                (number, name): found
                for number, module in of_session.modules.items()
                for name, found in module.known.items()
            }

    def close(self) -> None:
        """End the worker and the thread. Tables can still be had of what is known."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    # What follows is called with _changed held.

    def _pending(self, session: bytes) -> bool:
        of_session = self._sessions.get(session)
        return of_session is not None and any(module.asked for module in of_session.modules.values())

    def _wake(self, module: _Module) -> None:
        if not module.asked or self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="phos-spec", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _next(self) -> tuple[bytes, int] | None:
        """Session and number of a module to be analysed; first those that somebody waits for."""
        for session in [*self._hurry, *self._sessions]:
            of_session = self._sessions.get(session)
            for number, module in of_session.modules.items() if of_session else ():
                if module.asked:
                    return session, number
        return None

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    idle_from = time.monotonic()
                    while not self._closed and self._next() is None:
                        left = idle_from + self._idle_seconds - time.monotonic()
                        if self._worker is None:
                            self._changed.wait()
                        elif left > 0:
                            self._changed.wait(left)
                        else:
                            self._end_worker()
                    if not self._closed and not self._hurry:
                        self._changed.wait(GATHER_SECONDS)
                    chosen = self._next()
                    if self._closed:
                        return
                    if chosen is None:
                        continue
                    session, number = chosen
                    module = self._sessions[session].modules[number]
                    kernels = set(module.asked)
                self._analyse(session, module, kernels)
        except Exception:
            log.exception(
                "The thread that has modules analysed has failed; kernels are told of by layout only from now on."
            )
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        finally:
            self._end_worker()

    def _analyse(self, session: bytes, module: _Module, kernels: set[str]) -> None:
        error = ""
        later: set[str] = set()
        try:
            if self._worker is None:
                self._worker = WorkerLink()
            for answer in self._worker.exchange(
                *self._request(module, kernels), self._module_seconds, lambda: self._wanted(session)
            ):
                found = {item.kernel: item for item in map(decode, answer.get("descriptors", []))}
                error = str(answer.get("error", ""))
                later = kernels.intersection(answer.get("later", []))
                with self._changed:
                    # Names that were not asked for are no use, and a worker taken over by a module may send any.
                    module.known.update({name: item for name, item in found.items() if name in kernels})
                    module.asked -= {name for name, item in found.items() if item.source in FINAL}
                    self._stale(session)
        except (WorkerLost, SpecError) as lost:
            error, later = str(lost), set()
            self._end_worker()
        except OSError as failure:
            error = f"the analysis process cannot be started: {failure}"
            self._end_worker()
        with self._changed:
            module.asked -= kernels
            if later != kernels:  # else no time would be enough
                module.asked |= later
            self._put_last(session, module)
            lacking = sorted(kernels - module.known.keys())
            module.lacking.update(lacking)
            self._changed.notify_all()
            if session not in self._sessions:
                return
        if error or lacking:
            log.warning("Analysing a module (%s): %s", _place(module.source), error or "some kernels are not in it.")
            if lacking:
                log.warning("Nothing is known of %d kernels: %s.", len(lacking), _some(lacking))

    def _request(self, module: _Module, kernels: set[str]) -> tuple[dict[str, object], bytes]:
        request: dict[str, object] = {
            "id": next(self._numbers),
            "capability": module.capability,
            "kernels": sorted(kernels),
            "limit": self._module_seconds,
            "seconds": self._module_seconds / SHARE,
        }
        if isinstance(module.source, bytes):
            return request, module.source
        request.update(path=module.source.path, offset=module.source.offset, size=module.source.size)
        return request, b""

    def _wanted(self, session: bytes) -> bool:
        with self._changed:
            return not self._closed and session in self._sessions

    def _stale(self, session: bytes) -> None:
        of_session = self._sessions.get(session)
        if of_session is not None:
            of_session.packed = None

    def _put_last(self, session: bytes, module: _Module) -> None:
        modules = self._sessions[session].modules if session in self._sessions else {}
        for number, known in list(modules.items()):
            if known is module:
                modules[number] = modules.pop(number)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def _place(source: ModuleSource) -> str:
    return f"{len(source)} bytes" if isinstance(source, bytes) else f"{source.path}, offset {source.offset}"


def _some(names: list[str]) -> str:
    """The first of many names, for a line of a log."""
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join([*names[:8], *more])
