"""What phosd asks for access descriptors: takes modules and kernel names as they become known, and gives packed tables.

The analysis runs in processes of its own (worker.py), because phosd's threads share one interpreter lock and modules
may crash whoever reads them. It begins as soon as a kernel is heard of, while the application computes: at the lowest
priority, a few modules at a time, each fed to its process by a thread (a *lane*). Nothing waits for it but
:meth:`Speculator.table`, and that no longer than it is told to.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from phos.gpu_engine.spec import table as tables
from phos.gpu_engine.spec.cache import decode
from phos.gpu_engine.spec.descriptor import AccessDescriptor, Source
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.sources import FileSource, ModuleSource, identity_of
from phos.gpu_engine.spec.worker_link import WorkerLink, WorkerLost

__all__ = ["FileSource", "ModuleSource", "Speculator"]

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
LANES_MOST = 6
ENDED_KEPT = 4
"""Sessions whose processes were dumped and killed: what was not analysed yet is, for when they are restored."""


def usual_lanes() -> int:
    """Modules analysed at once: a third of the processors at most, as others have work to do."""
    return max(1, min(LANES_MOST, len(os.sched_getaffinity(0)) // 3))


@dataclass(eq=False)
class _Module:
    source: ModuleSource
    capability: int
    user: int
    """Who has loaded it."""
    identity: object
    busy: bool = False
    """A lane is at it."""
    confirmed: bool = True
    """Not so for a module of a process that was killed, until it is restored and has the same module again."""
    asked: set[str] = field(default_factory=set)
    """Kernels to be analysed; they leave when a final answer is there, good or bad."""
    known: dict[str, AccessDescriptor] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    """Kernels of which nothing could be found out."""
    lost: bool = False
    """Its bytes cannot be had: nothing can be found out of any."""


@dataclass
class _Session:
    modules: dict[int, _Module] = field(default_factory=dict)
    early: dict[int, set[str]] = field(default_factory=dict)
    """Kernels told of before their module was."""
    packed: bytes | None = None
    ended: bool = False
    """Its process was dumped and killed."""
    hurried_until: float = 0.0


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
        lanes: int | None = None,
    ) -> None:
        self._capability = capability
        self._module_seconds = module_seconds
        self._idle_seconds = idle_seconds
        self._lanes_most = usual_lanes() if lanes is None else lanes
        self._changed = threading.Condition()
        # Guarded by _changed: all that follows.
        self._sessions: dict[bytes, _Session] = {}
        self._hurry: list[bytes] = []  # sessions that a table() waits for
        self._closed = False
        self._lanes: set[threading.Thread] = set()
        self._waiting_lanes = 0
        self._workers: dict[threading.Thread, WorkerLink] = {}  # each used by its lane alone
        self._numbers = itertools.count(1)

    def add_module(
        self,
        session: bytes,
        module: int,
        source: ModuleSource,
        *,
        capability: int | None = None,
        user: int | None = None,
    ) -> None:
        """A session has loaded a module. The same module under its number again changes nothing.

        ``user``: whose process it is; phosd's own user if it is not said. What is found out is kept for that user.
        """
        identity = identity_of(source)
        with self._changed:
            of_session = self._sessions.setdefault(session, _Session())
            of_session.ended = False
            known = of_session.modules.get(module)
            if known is not None and known.identity == identity:
                if not known.confirmed:
                    known.confirmed = True
                    of_session.packed = None
                    self._ask(known, of_session.early.pop(module, set()))
                return
            if known is not None:  # of a later life of a process that has been restored from an earlier image
                of_session.packed = None
            added = _Module(
                source,
                self._capability if capability is None else capability,
                os.geteuid() if user is None else user,
                identity,
            )
            added.asked = of_session.early.pop(module, set())
            of_session.modules[module] = added
            self._wake(added)

    def add_lost_module(self, session: bytes, module: int) -> None:
        """A session has loaded a module whose bytes cannot be had: of its kernels nothing is known, nor will be."""
        with self._changed:
            of_session = self._sessions.setdefault(session, _Session())
            of_session.ended = False
            known = of_session.modules.get(module)
            if known is not None and known.lost:
                return
            added = _Module(b"", self._capability, os.geteuid(), None, lost=True)
            added.lacking = of_session.early.pop(module, set())
            of_session.modules[module] = added
            of_session.packed = None
            self._changed.notify_all()

    def add_kernels(self, session: bytes, module: int, names: Iterable[str]) -> None:
        """A session may launch these kernels of a module, which may be added later."""
        with self._changed:
            of_session = self._sessions.setdefault(session, _Session())
            of_session.ended = False
            known = of_session.modules.get(module)
            if known is None or not known.confirmed:
                of_session.early.setdefault(module, set()).update(names)
                return
            self._ask(known, names)

    def forget(self, session: bytes, *, finish: bool = False) -> None:
        """A session has ended. An analysis of a module of it alone is broken off.

        ``finish``: its process was dumped and killed, and may be restored. What was asked for is analysed to the end,
        after everything else, and what is known is at hand should the session come back with the same modules.
        """
        with self._changed:
            of_session = self._sessions.pop(session, None)
            if of_session is not None and finish:
                self._sessions[session] = of_session  # the last one
                of_session.ended, of_session.packed, of_session.hurried_until = True, None, 0.0
                of_session.early.clear()
                for module in of_session.modules.values():
                    module.confirmed = False
                ended = [number for number, known in self._sessions.items() if known.ended]
                for number in ended[:-ENDED_KEPT]:
                    del self._sessions[number]
            self._changed.notify_all()

    def hurry(self, session: bytes, seconds: float) -> None:
        """For so long, what this session asked for comes before the rest and at a better priority."""
        with self._changed:
            of_session = self._sessions.get(session)
            if of_session is not None:
                of_session.hurried_until = time.monotonic() + seconds

    def pending(self, session: bytes) -> bool:
        """Whether more will be known of its kernels than is now."""
        with self._changed:
            return self._pending(session) and not self._closed

    def complete(self, session: bytes) -> bool:
        """Whether nothing is to come of the kernels that it has asked for: their modules are there, and analysed."""
        with self._changed:
            of_session = self._sessions.get(session)
            return not self._pending(session) and (of_session is None or not any(of_session.early.values()))

    def progress(self, session: bytes) -> tuple[int, int]:
        """How many kernels a session may launch, and of how many of them the analysis is still to be done."""
        with self._changed:
            of_session = self._sessions.get(session, _Session())
            modules = of_session.modules.values()
            pending = sum(len(module.asked) for module in modules) + sum(map(len, of_session.early.values()))
            return pending + sum(len(module.known) + len(module.lacking) for module in modules), pending

    def table(self, session: bytes, timeout: float, *, quiet: bool = False) -> bytes:
        """The packed table (frontend/access_table.h) of the kernels a session may launch.

        Waits ``timeout`` seconds at most for what is still being analysed. Kernels that are not done by then are in it
        as far as they are known (by name or layout), or left out; :meth:`unfinished` and, if it has waited and is
        not to be ``quiet``, the log say which.
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
                (number, name)
                for number, module in of_session.modules.items()
                if module.confirmed
                for name in sorted(module.asked)
            ]
            if of_session.packed is None:
                rows = [
                    (number, found)
                    for number, module in of_session.modules.items()
                    if module.confirmed
                    for found in module.known.values()
                ]
                of_session.packed = tables.pack(rows)
            packed = of_session.packed
        if unfinished and timeout > 0 and not quiet:
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

    def modules(self, session: bytes) -> list[tuple[int, ModuleSource, int, set[str]]]:
        """A session's modules: number, source, the GPU's capability, and the kernels that it may launch."""
        with self._changed:
            of_session = self._sessions.get(session, _Session())
            return [
                (number, module.source, module.capability, module.asked | module.known.keys() | module.lacking)
                for number, module in of_session.modules.items()
                if not module.lost
            ]

    def close(self) -> None:
        """End the workers and the threads. Tables can still be had of what is known."""
        with self._changed:
            self._closed = True
            lanes = list(self._lanes)
            self._changed.notify_all()
        for lane in lanes:
            lane.join()

    # What follows is called with _changed held.

    def _pending(self, session: bytes) -> bool:
        of_session = self._sessions.get(session)
        return of_session is not None and any(
            module.asked and module.confirmed for module in of_session.modules.values()
        )

    def _ask(self, module: _Module, names: Iterable[str]) -> None:
        wanted = module.lacking if module.lost else module.asked
        wanted.update(name for name in names if name not in module.known and name not in module.lacking)
        self._wake(module)

    def _wake(self, module: _Module) -> None:
        if module.asked and not self._closed:
            self._staff()
            self._changed.notify_all()

    def _staff(self) -> None:
        """Another lane, if there is work for it."""
        if not self._waiting_lanes and len(self._lanes) < self._lanes_most:
            lane = threading.Thread(target=self._run, name="phos-spec", daemon=True)
            self._lanes.add(lane)
            lane.start()

    def _hurried(self, session: bytes) -> bool:
        of_session = self._sessions.get(session)
        return session in self._hurry or (of_session is not None and of_session.hurried_until > time.monotonic())

    def _next(self) -> tuple[bytes, _Module] | None:
        """A module to be analysed, and its session; first those that somebody waits for, last those of the dead."""

        def rank(session: bytes) -> tuple[bool, bool]:
            return not self._hurried(session), self._sessions[session].ended

        for session in sorted(self._sessions, key=rank):
            for module in self._sessions[session].modules.values():
                if module.asked and not module.busy:
                    return session, module
        return None

    # A lane.

    def _run(self) -> None:
        lane = threading.current_thread()
        try:
            while (chosen := self._choose()) is not None:
                session, module, kernels = chosen
                try:
                    self._analyse(lane, session, module, kernels)
                finally:
                    with self._changed:
                        module.busy = False
        except Exception:
            log.exception(
                "The thread that has modules analysed has failed; kernels are told of by layout only from now on."
            )
            with self._changed:
                self._closed = True
        finally:
            self._end_worker(lane)
            with self._changed:
                self._lanes.discard(lane)
                self._changed.notify_all()

    def _choose(self) -> tuple[bytes, _Module, set[str]] | None:
        """The next module and its kernels; None: there has been nothing to do for a while, or it is all over."""
        with self._changed:
            idle_until = time.monotonic() + self._idle_seconds
            while not self._closed:
                found = self._next()
                if found is not None and not self._hurried(found[0]):
                    self._changed.wait(GATHER_SECONDS)
                    if self._closed:
                        break
                    found = self._next()
                if found is not None:
                    session, module = found
                    module.busy = True
                    if self._next() is not None:
                        self._staff()
                    return session, module, set(module.asked)
                left = idle_until - time.monotonic()
                if left <= 0:
                    self._lanes.discard(threading.current_thread())  # who has work from here on starts another
                    return None
                self._waiting_lanes += 1
                self._changed.wait(left)
                self._waiting_lanes -= 1
            return None

    def _analyse(self, lane: threading.Thread, session: bytes, module: _Module, kernels: set[str]) -> None:
        error = ""
        later: set[str] = set()
        try:
            worker = self._workers.get(lane)
            if worker is None:
                worker = WorkerLink()
                with self._changed:
                    self._workers[lane] = worker
            for answer in worker.exchange(
                *self._request(module, kernels), self._module_seconds, lambda: self._wanted(session, module, worker)
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
            self._end_worker(lane)
        except OSError as failure:
            error = f"the analysis process cannot be started: {failure}"
            self._end_worker(lane)
        with self._changed:
            module.asked -= kernels
            if later != kernels:  # else no time would be enough
                module.asked |= later
            self._put_last(session, module)
            lacking = sorted(kernels - module.known.keys())
            module.lacking.update(lacking)
            self._changed.notify_all()
            if self._module_gone(session, module):
                return
        if error or lacking:
            log.warning("Analysing a module (%s): %s", _place(module.source), error or "some kernels are not in it.")
            if lacking:
                log.warning("Nothing is known of %d kernels: %s.", len(lacking), _some(lacking))

    def _request(self, module: _Module, kernels: set[str]) -> tuple[dict[str, object], bytes]:
        request: dict[str, object] = {
            "id": next(self._numbers),
            "capability": module.capability,
            "user": module.user,
            "kernels": sorted(kernels),
            "limit": self._module_seconds,
            "seconds": self._module_seconds / SHARE,
        }
        if isinstance(module.source, bytes):
            return request, module.source
        request.update(module.source.request())
        return request, b""

    def _wanted(self, session: bytes, module: _Module, worker: WorkerLink) -> bool:
        with self._changed:
            hurried = self._hurried(session)
            wanted = not self._closed and not self._module_gone(session, module)
        worker.hurry(hurried)
        return wanted

    def _module_gone(self, session: bytes, module: _Module) -> bool:
        of_session = self._sessions.get(session)
        return of_session is None or module not in of_session.modules.values()

    def _stale(self, session: bytes) -> None:
        of_session = self._sessions.get(session)
        if of_session is not None:
            of_session.packed = None

    def _put_last(self, session: bytes, module: _Module) -> None:
        modules = self._sessions[session].modules if session in self._sessions else {}
        for number, known in list(modules.items()):
            if known is module:
                modules[number] = modules.pop(number)

    def _end_worker(self, lane: threading.Thread) -> None:
        worker = self._workers.get(lane)
        if worker is not None:
            worker.end()
            with self._changed:
                del self._workers[lane]


def _place(source: ModuleSource) -> str:
    return (
        f"{len(source)} bytes" if isinstance(source, bytes) else f"{source.name or source.path}, offset {source.offset}"
    )


def _some(names: list[str]) -> str:
    """The first of many names, for a line of a log."""
    more = [f"and {len(names) - 8} more"] if len(names) > 8 else []
    return ", ".join([*names[:8], *more])
