"""What the parts of phosd share: its sessions and their memory, the restores and jobs under way, the copier."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

from phos.gpu_engine import driver, inventory
from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.cow.dump import CowMemory
from phos.gpu_engine.daemon.garbage import Garbage
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.jobs import Claims, JobTable
from phos.gpu_engine.daemon.keeper_link import KeeperLink
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.daemon.paths import hold_folder, keeper_socket
from phos.gpu_engine.daemon.pinned_images import PinnedImages, limit_from
from phos.gpu_engine.daemon.reaper import Reaper
from phos.gpu_engine.daemon.runs import Runs
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import PhosError
from phos.gpu_engine.restore.base import UNDER_WAY, Restore
from phos.gpu_engine.restore.sources import use_pinned
from phos.gpu_engine.spec.speculator import Speculator
from phos.images.errors import ImageError

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 1.0


class Registry:
    """What the parts share.

    ``lock`` guards ``sessions``, ``restores``, ``loading``, ``prepared``, ``being_forgotten``,
    ``given_up``; the rest is safe.
    """

    def __init__(self, path: Path, versions: inventory.Versions, capability: int) -> None:
        """``capability``: of the GPUs, 90 for 9.0: which machine code of a module is analysed."""
        self.path = path
        self.versions = versions
        self.garbage = Garbage()
        self.jobs = JobTable(self.garbage.look_soon)
        self.claims = Claims()
        self.runs = Runs()
        self.copier = Copier()
        self.cow = CowMemory()
        self.pinned = PinnedImages(limit_from(os.environ))
        use_pinned(self.pinned)
        self.speculator = Speculator(capability)
        self.holds = Holds(hold_folder(path))
        self.broker = Broker(KeeperLink(keeper_socket(path)))
        self.broker.needed = self._need
        self.sessions: dict[bytes, Session] = {}
        self.restores: dict[bytes, Restore] = {}  # by session, until its process computes again
        self.loading: dict[bytes, Restore] = {}  # by session, until all of its memory is there as well
        self.given_up: set[bytes] = set()  # sessions whose restore has failed, until they are restored again
        self.prepared: set[int] = set()  # GPUs with a context of ours
        self.lock = threading.Lock()
        self.forgotten = threading.Condition(self.lock)
        self.being_forgotten: set[bytes] = set()
        self.reaper = Reaper(self._process_ended)

    def session(self, number: bytes, pid: int, uid: int, state: SessionState) -> Session:
        """A new session; the caller puts it among the others."""
        return Session(number, pid, uid, self.broker, self.holds, self.speculator, state)

    def _need(self, key: BlockKey, guest: int, seconds: float) -> bool:
        """Memory that is still being restored, or in the hands of a checkpoint, is handed to nobody who does not wait.

        Those of the same tree stand still with its owner when it is saved, and must not wait for that. Returns whether
        it may be handed over, within so many seconds.
        """
        deadline = time.monotonic() + seconds
        with self.lock:
            restore = self.loading.get(key[0])
            owner = self.sessions.get(key[0])
        if restore is not None and not restore.need(key, seconds):
            return False
        left = max(0.0, deadline - time.monotonic())
        return owner is None or self.claims.wait_unless_shared(owner.pid, guest, left)

    def lend_imports(self, job: Restore) -> None:
        """Each process of a restore keeps what it will map of the others, who may end before it has its memory.

        To be called when all of it is held, and before any of them runs.
        """
        for process in job.processes:
            with self.lock:
                session = self.sessions.get(process.session)
            try:
                if session is not None:
                    session.keep_imports(os.getpid())  # the keeper watches phosd until the process exists
            except (KeyError, OSError) as error:  # one in a pool was killed, for example
                log.warning("%s: what process %d maps of others goes with them: %r", job.path, process.pid, error)

    def _process_ended(self, session: Session) -> None:
        if not session.alive():
            self.forget(session)

    def forget(self, session: Session, connections: int | None = None) -> None:
        """A session has ended: let go of its memory and of everything that waits for it.

        ``connections``: unless it has come back, and made more than so many.
        """
        with self.lock:
            if self.sessions.get(session.session) is not session:
                return
            if connections is not None and (session.connections != connections or session.is_connected):
                return
            del self.sessions[session.session]
            self.restores.pop(session.session, None)
            self.being_forgotten.add(session.session)
        try:
            self.reaper.forget(session)
            dumped = session.machine.state is SessionState.DETACHED
            session.end()
            self.holds.release(session.session)
            self.speculator.forget(session.session, finish=dumped)
            self.cow.forget(session.session)
            freed = self.broker.drop_session(session.session)
        finally:
            with self.lock:
                self.being_forgotten.discard(session.session)
                self.forgotten.notify_all()
        log.info("Process %d has ended; %d bytes of GPU memory let go.", session.pid, freed)

    def knows(self, session: Session) -> bool:
        """Whether a session has not been forgotten: one that has made another connection before is not from then on."""
        with self.lock:
            return self.sessions.get(session.session) is session

    def wait_forgotten(self, number: bytes) -> None:
        """Return when nothing is left of the session's former life.

        A process may be restored right after its end, under the same number: what is still to be dropped, by broker and
        keeper, would be the restored process's memory.
        """
        with self.lock:
            self.forgotten.wait_for(lambda: number not in self.being_forgotten)

    def renew_if_broken(self) -> None:
        """After a failed job: phosd's own GPU context may be beyond repair, and with it every later job.

        Only a new process gets a new context, so this one becomes one: applications reconnect, the keeper has their
        memory. Waits for other jobs to end, and a moment for those who want to know how this one did.
        """
        if not (why := driver.broken()):
            return
        log.error("phosd starts anew, because its GPU context is lost: %s", why)
        while True:
            time.sleep(RENEWAL_SECONDS)
            with self.lock:
                jobs = [*self.restores.values(), *self.loading.values()]
                restoring = any(job.state in UNDER_WAY for job in jobs)
            if not restoring and not self.claims.any():
                break
        logging.shutdown()
        os.execv(sys.executable, sys.orig_argv)


def say_failure(what: str, error: Exception) -> None:
    """Log why something failed: a sentence where the error is one, else where it came from."""
    if isinstance(error, (PhosError, ImageError, OSError)):
        log.error("%s: %s", what, error)
    else:
        log.error("%s", what, exc_info=error)
