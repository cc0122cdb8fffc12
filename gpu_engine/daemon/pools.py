"""Pools as phosd keeps them: what is wanted, what is parked, and the refilling in the background.

One thread parks for all pools, one process at a time: CRIU wants the cores, and an image names files (residue.py) that
only one restore at a time may make.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.errors import NoSuchProcess, PhosError, RestoreFailed, UsageError
from phos.gpu_engine.restore import ids
from phos.gpu_engine.restore.pool import CRIU_FAILED, PooledRestore
from phos.gpu_engine.restore.pool_process import Warden
from phos.images.errors import ImageError

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
RETRY_SECONDS_MOST = 60.0
"""How long after a process could not be parked it is tried again: at first, and when it has failed many times."""

DEFER_SECONDS = 10.0
"""For so long after a take nothing is parked at most, while data of the process that was taken comes: CRIU and the
driver would want the processors, the image and the driver's lock just then."""

LOOK_SECONDS = 0.5
"""How often it is asked whether somebody still waits."""

WATCH_SECONDS = 5
"""How often it is looked whether a parked process has been taken."""

SIZE_MOST = 256

END_SECONDS = 10.0
"""How long a process that was killed may take to be gone."""

STATE_FILE = "pools.json"


@dataclass
class Entry:
    """One process of a pool, from before CRIU begins until it is taken or has ended."""

    id: str
    restore: PooledRestore
    warden: Warden | None = None
    parked: bool = False
    opening: bool = False
    since: float = field(default_factory=time.time)
    seconds: float = 0.0
    """How long parking took."""
    gone: bool = False


@dataclass
class Pool:
    """What a person asked for, and how it stands. Its fields are guarded by :class:`Pools`'s lock."""

    name: str
    path: str
    size: int
    lazy: str
    directory: int
    """An open descriptor of the image directory, good within :meth:`Pools.using`."""
    users: int = 0
    """Who uses the descriptor now."""
    entries: list[Entry] = field(default_factory=list)
    error: str = ""
    failed: bool = False
    """It can never be filled again."""
    failures: int = 0
    """In a row."""
    logged: str = ""
    """The number of the last that failed, whose log can be read; of the thread that parks alone."""
    next_try: float = 0.0
    taken: int = 0
    coming: int = 0
    """Processes that were handed out, and whose memory is not all there yet."""
    deferred: float = 0.0
    """Until when nothing is parked for them, by time.monotonic()."""
    waiting: int = 0
    """Who waits for one to be parked."""
    since: float = field(default_factory=time.time)
    dropped: bool = False
    criu_config: str = ""
    """A file with options for CRIU, beside those that it reads at any rate."""
    gpus: str = ""
    """On which GPUs its processes are to be (gpu_moves.py)."""
    held: bool = False
    """It has been tried to pin its image."""
    tables: dict[bytes, bytes] = field(default_factory=dict)
    """What its processes' kernels touch, by the image's session, once one that was taken has been described."""

    def parked(self) -> list[Entry]:
        """Those that can be taken, the one that has waited longest first."""
        return [entry for entry in self.entries if entry.parked and not entry.opening and not entry.gone]

    def missing(self) -> int:
        """How many more are wanted."""
        return 0 if self.failed or self.dropped else self.size - sum(not e.opening for e in self.entries)

    def state(self) -> str:
        """In a word, for people."""
        if self.failed:
            return "failed"
        if len(self.parked()) >= self.size:
            return "full"
        return "short" if self.error else "filling"


class Pools:
    """All pools. Methods may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        socket: Path,
        make: Callable[[Pool], PooledRestore],
        park: Callable[[Entry], None],
        let_go: Callable[[Entry], None],
        failed: Callable[[], None] = lambda: None,
        over: Callable[[Pool], None] = lambda _: None,
    ) -> None:
        """``folder`` is phosd's own. ``make`` opens a pool's image for one process, ``park`` prepares phosd for it, and
        ``let_go`` is told of one that has ended before anybody took it. ``failed`` is called when one could not be
        parked, ``over`` with a pool of which no more processes are made.
        """
        self._folder = folder / "pool"
        self._state = folder / STATE_FILE
        self._socket = socket
        self._make, self._park, self._let_go, self._failed, self._over = make, park, let_go, failed, over
        self._changed = threading.Condition()  # its lock guards _pools, _entries and all pools
        self._pools: dict[str, Pool] = {}
        self._entries: dict[str, Entry] = {}  # by number, those that are being opened too
        self._former = self._read()  # what an earlier phosd had and this one has not (yet)
        threading.Thread(target=self._fill_for_ever, name="pools", daemon=True).start()

    # What is asked for.

    def create(
        self,
        name: str,
        path: str,
        size: int,
        lazy: str,
        directory: int,
        *,
        criu_config: str = "",
        gpus: str = "",
        failed: str = "",
    ) -> Pool:
        """A new pool; filling it begins, unless it has ``failed``. ``directory`` becomes the pool's.

        Raises:
            UsageError: there is one of that name, or the numbers have no meaning.
        """
        if not 1 <= size <= SIZE_MOST:
            raise UsageError(f"A pool has 1 to {SIZE_MOST} processes, not {size}.")
        with self._changed:
            if name in self._pools:
                raise UsageError(f"There is a pool {name} already. Drop it, or choose another --name.")
            pool = Pool(name, path, size, lazy, directory, error=failed, failed=bool(failed))
            pool.criu_config, pool.gpus = criu_config, gpus
            self._pools[name] = pool
            self._former = [former for former in self._former if former.get("name") != name]
            self._remember()
            self._changed.notify_all()
        return pool

    def find(self, name: str) -> Pool:
        """A pool by its name, or by the path of its image if it has only one.

        Raises:
            NoSuchProcess: there is none.
            UsageError: there are several.
        """
        with self._changed:
            if name in self._pools:
                return self._pools[name]
            of_image = [pool for pool in self._pools.values() if pool.path == os.path.realpath(name)]
        if len(of_image) > 1:
            names = ", ".join(pool.name for pool in of_image)
            raise UsageError(f"There are {len(of_image)} pools of {name}: {names}. Say which.")
        if not of_image:
            hint = "" if "/" in name else f" An image's path is told from a name by a slash: ./{name}."
            raise NoSuchProcess(f"There is no pool {name}; 'phos-gpu pool list' shows those that there are.{hint}")
        return of_image[0]

    @contextmanager
    def using(self, pool: Pool) -> Iterator[None]:
        """Keep its image directory open for the time of the block, also when it is dropped meanwhile.

        Raises:
            RestoreFailed: it has been dropped.
        """
        with self._changed:
            if pool.dropped:
                raise RestoreFailed(f"Pool {pool.name} has been dropped.")
            pool.users += 1
        try:
            yield
        finally:
            with self._changed:
                pool.users -= 1
                self._close_unused(pool)

    @staticmethod
    def _close_unused(pool: Pool) -> None:
        """With the lock held."""
        if pool.dropped and not pool.users and pool.directory >= 0:
            os.close(pool.directory)
            pool.directory = -1

    def take(self, pool: Pool, wait: float, unwanted: Callable[[], bool] = lambda: False) -> Entry:
        """One of its parked processes, which is the caller's to open; waits so many seconds for it.

        ``unwanted``: asked now and then whether nobody waits any more.

        Raises:
            RestoreFailed: there is none.
        """
        deadline = time.monotonic() + wait
        waits = False
        with self._changed:
            while True:
                if pool.dropped:
                    raise RestoreFailed(f"Pool {pool.name} has been dropped.")
                if unwanted():
                    raise RestoreFailed(f"Whoever wanted a process of pool {pool.name} has gone.")
                if parked := pool.parked():
                    parked[0].opening = True
                    pool.coming += 1
                    pool.deferred = time.monotonic() + DEFER_SECONDS
                    return parked[0]
                if pool.failed:
                    raise RestoreFailed(f"Pool {pool.name} has no process and gets none: {pool.error}")
                left = deadline - time.monotonic()
                if left <= 0:
                    why = f" The last could not be parked: {pool.error}" if pool.error else ""
                    waited = f" within {wait:.0f} s" if wait else ""
                    raise RestoreFailed(f"Pool {pool.name} has no parked process{waited}.{why}")
                pool.waiting += 1
                if not waits:  # once: two who wait would wake each other without end
                    self._changed.notify_all()
                waits = True
                try:
                    self._changed.wait(min(left, LOOK_SECONDS))
                finally:
                    pool.waiting -= 1

    def taken(self, pool: Pool, entry: Entry) -> None:
        """It computes: another is parked in its place, when :meth:`arrived` says so or somebody waits for one."""
        with self._changed:
            pool.entries = [other for other in pool.entries if other is not entry]
            pool.taken += 1
            self._changed.notify_all()

    def arrived(self, pool: Pool) -> None:
        """The memory of one that was taken is all there, or never will be."""
        with self._changed:
            pool.coming -= 1
            self._changed.notify_all()

    def put_back(self, pool: Pool, entry: Entry) -> None:
        """It could not be opened, and is as it was."""
        with self._changed:
            entry.opening = False
            pool.coming -= 1
            unwanted = pool.dropped or pool.failed
            self._changed.notify_all()
        if unwanted:
            self._end(pool, entry)

    def lost(self, pool: Pool, entry: Entry) -> None:
        """It could not be opened, and has ended."""
        self.arrived(pool)
        self._end(pool, entry)

    def forget(self, entry: Entry) -> None:
        """Nothing of a process that was taken is left to be asked for."""
        with self._changed:
            self._entries.pop(entry.id, None)

    def spoil(self, pool: Pool, reason: str) -> None:
        """A pool whose image is no longer what it was: no process of it can ever be opened."""
        with self._changed:
            pool.failed, pool.error = True, reason
            entries = list(pool.entries)
            self._changed.notify_all()
        self._over(pool)
        for entry in entries:
            self._end(pool, entry, opening_too=False)

    def drop(self, pool: Pool) -> None:
        """End its parked processes, and have it no more. One that is being opened is whose who takes it."""
        with self._changed:
            if pool.dropped:
                return
            pool.dropped = True
            self._pools.pop(pool.name, None)
            self._remember()
            entries = list(pool.entries)
            self._changed.notify_all()
        self._over(pool)
        for entry in entries:
            self._end(pool, entry, opening_too=False)
        with self._changed:
            self._close_unused(pool)

    # What is there.

    def entry(self, number: str) -> Entry | None:
        """The process that a CRIU was started for."""
        with self._changed:
            return self._entries.get(number)

    def names_of(self, pid: int, session: bytes) -> dict[bytes, bytes]:
        """What the sessions of a process's image are called now, if it is of a pool and does not know yet."""
        with self._changed:
            entries = list(self._entries.values())
        return next((names for entry in entries if (names := entry.restore.names_for(pid, session))), {})

    def report(self) -> list[wire_pb2.Status.Pool]:
        """For ``phos-gpu status`` and ``pool list``."""
        with self._changed:
            return [self._report(pool) for pool in self._pools.values()]

    @staticmethod
    def _report(pool: Pool) -> wire_pb2.Status.Pool:
        parked = [
            wire_pb2.Status.Parked(
                pids=entry.restore.pids,
                state="opening" if entry.opening else "parked" if entry.parked else "parking",
                gpu_bytes=entry.restore.gpu_bytes,
                host_bytes=sum(procfs.resident(pid) for pid in entry.restore.tasks),
                since=entry.since,
                seconds=entry.seconds,
            )
            for entry in pool.entries
            if not entry.gone
        ]
        total = max((entry.restore.progress.total for entry in pool.entries), default=0)
        return wire_pb2.Status.Pool(
            name=procfs.readable(pool.name),
            image=procfs.readable(pool.path),
            size=pool.size,
            state=pool.state(),
            error=procfs.readable(pool.error),
            parked=parked,
            taken=pool.taken,
            bytes=total,
            since=pool.since,
        )

    # Across phosds.

    def _remember(self) -> None:
        """With the lock held: what a phosd after this one is to have."""
        wanted = [
            {
                "name": p.name,
                "image": p.path,
                "size": p.size,
                "lazy": p.lazy,
                "criu_config": p.criu_config,
                "gpus": p.gpus,
            }
            for p in self._pools.values()
        ]
        temporary = self._state.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(wanted + self._former))
            temporary.rename(self._state)
        except OSError as error:
            log.warning("A phosd after this one will not know of the pools: %s", error)

    def remembered(self) -> list[dict[str, Any]]:
        """What a former phosd had and this one has not."""
        with self._changed:
            return list(self._former)

    def _read(self) -> list[dict[str, Any]]:
        try:
            wanted = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return []
        return [pool for pool in wanted if isinstance(pool, dict)] if isinstance(wanted, list) else []

    # Filling.

    def _fill_for_ever(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                short = [pool for pool in self._pools.values() if pool.missing() > 0]
                deferred = max((pool.deferred for pool in self._pools.values() if pool.coming), default=0.0)
                due = {pool.name: pool.next_try if pool.waiting else max(pool.next_try, deferred) for pool in short}
                ready = [pool for pool in short if due[pool.name] <= now]
                if not ready:
                    self._changed.wait(min((at - now for at in due.values()), default=None))
                    continue
                # The one that has least of what it wants.
                pool = min(ready, key=lambda p: (p.size - p.missing()) / p.size)
            try:
                with self.using(pool):
                    self._fill_one(pool)
            except Exception as error:
                if not isinstance(error, (PhosError, ImageError, OSError)):
                    log.exception("Pool %s could not be filled in an unforeseen way", pool.name)
                self._note_failure(pool, str(error) or repr(error))
                self._failed()

    def _note_failure(self, pool: Pool, error: str) -> None:
        with self._changed:
            if pool.dropped or pool.failed:  # why it is, has been said
                return
            pool.error = error
            pool.failures += 1
            pause = min(RETRY_SECONDS * 2 ** (pool.failures - 1), RETRY_SECONDS_MOST)
            pool.next_try = time.monotonic() + pause
            self._changed.notify_all()
        log.warning("Pool %s: no process could be parked (again in %.0f s): %s", pool.name, pause, error)

    def _fill_one(self, pool: Pool) -> None:
        began = time.monotonic()
        restore = self._make(pool)
        entry = Entry(secrets.token_hex(8), restore)
        with self._changed:
            self._entries[entry.id] = entry
            pool.entries.append(entry)
        try:
            self._park(entry)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
            environment |= {"PHOS_SOCKET": str(self._socket), "PHOS_POOL": entry.id}
            environment |= {"CRIU_CONFIG_FILE": pool.criu_config} if pool.criu_config else {}
            avoid = ids.of_image(pool.directory)  # of threads too, and of processes that never used CUDA
            warden = Warden(Path(pool.path), self._folder / f"{entry.id}.log", environment, avoid)
            with self._changed:
                entry.warden = warden
                unwanted = pool.dropped or pool.failed
                too_late = entry.gone  # whoever ended it knew of no warden
            if too_late:
                self._end_warden(warden)
            if unwanted:
                raise RestoreFailed(f"Pool {pool.name} was dropped.")
            try:
                warden.wait_restored()
            except RestoreFailed as error:
                known = restore.error if restore.error != CRIU_FAILED else ""
                raise RestoreFailed(known or str(error)) from error
            restore.parked()
        except BaseException:
            self._end(pool, entry)
            former, pool.logged = pool.logged, entry.id
            self._remove_log(former)
            raise
        for number in (entry.id, pool.logged):
            self._remove_log(number)
        with self._changed:
            entry.parked, entry.seconds, entry.since = True, time.monotonic() - began, time.time()
            pool.failures, pool.error = 0, ""
            dropped = pool.dropped or pool.failed
            self._changed.notify_all()
        log.info("Pool %s: process %s is parked (%.2f s)", pool.name, restore.pids, entry.seconds)
        if dropped:
            self._end(pool, entry)
            return
        threading.Thread(target=self._watch, args=(pool, entry), daemon=True, name="parked").start()

    def _remove_log(self, number: str) -> None:
        """What CRIU has said about one; of no number there is nothing."""
        with suppress(OSError):
            for path in self._folder.glob(f"{number}.*") if number else ():
                path.unlink()

    def _watch(self, pool: Pool, entry: Entry) -> None:
        """One that ends before anybody takes it makes room for another."""
        assert entry.warden is not None
        descriptors: list[int] = []
        try:
            descriptors = [os.dup(entry.warden.pidfd), *entry.restore.descriptors()]
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            while not poll.poll(WATCH_SECONDS * 1000):
                with self._changed:
                    if entry not in pool.entries:  # taken: nothing of its restore is to be kept as long as it runs
                        return
        except OSError:
            pass  # it has been ended
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        with self._changed:
            # One that is being opened may be put back.
            self._changed.wait_for(lambda: not entry.opening or entry.gone or entry not in pool.entries)
            mine = entry in pool.entries and not entry.gone
            if mine and not pool.dropped and not pool.failed:
                log.warning("Pool %s: parked process %s has ended", pool.name, entry.restore.pids)
        if mine:
            self._end(pool, entry, opening_too=False)

    def _end(self, pool: Pool, entry: Entry, *, opening_too: bool = True) -> None:
        """An entry that nobody will take; not ``opening_too``: unless somebody has by now."""
        with self._changed:
            if entry.gone or (entry.opening and not opening_too):
                return
            entry.gone = True
        if entry.warden is not None:
            entry.warden.end()
        entry.restore.discard()
        if entry.warden is not None:
            self._end_warden(entry.warden)
        self._let_go(entry)
        with self._changed:
            self._entries.pop(entry.id, None)
            pool.entries = [other for other in pool.entries if other is not entry]
            self._changed.notify_all()

    @staticmethod
    def _end_warden(warden: Warden) -> None:
        warden.end()
        warden.wait_ended(END_SECONDS)
        warden.close()
