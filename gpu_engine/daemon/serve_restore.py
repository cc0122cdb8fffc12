"""Restores: what CRIU's plugin asks of phosd until the restored processes compute again, or never will."""

from __future__ import annotations

import logging
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import twins, wire
from phos.gpu_engine.daemon.registry import Registry, say_failure
from phos.gpu_engine.daemon.session import UNKNOWN_USER, Session
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import INTERRUPTED, RestoreFailed, UsageError
from phos.gpu_engine.interruption import Interruption
from phos.gpu_engine.restore import grown_files, ids
from phos.gpu_engine.restore.base import UNDER_WAY, Restore, RestoredProcess
from phos.gpu_engine.restore.eager import EagerRestore
from phos.gpu_engine.restore.gpu_moves import read_moves
from phos.gpu_engine.restore.lazy import LazyRestore
from phos.gpu_engine.restore.settings import LazySettings
from phos.gpu_engine.restore.socket_folders import SocketFolders
from phos.gpu_engine.scheduler_hooks import SchedulerHooks

log = logging.getLogger(__name__)

LAZY_PAGES = re.compile(r"--la[a-z-]*")
"""How ``--lazy-pages`` may look on CRIU's command line: no other of its long options begins with these letters."""

ENDING_SECONDS = 30.0
"""How long the restore of a process that has ended may still copy: its files would be in the way of another."""


HELD_SECONDS = 0.02
"""How often to look whether CRIU still holds the processes that it restores."""


class RestoreServer:
    """Serves the connections of CRIU's plugin while CRIU restores. Each runs in a thread of its own."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._restoring = threading.Lock()  # held while a restore looks for its processes and registers them
        self._beside: list[Restore] = []  # those of images of which other processes run; guarded by the registry's lock

    def serve(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """From the plugin's first packet until the restore has succeeded or failed."""
        if connection.uid not in (0, os.geteuid()):
            connection.done(envelope.id, error=f"User {connection.uid} may not restore here.")
            wire.close_all(descriptors)
            return
        with self._registry.runs.entered(connection, envelope.restore_begin.criu_pid) as interruption:
            hooks = SchedulerHooks()
            try:
                self._serve(connection, envelope, descriptors, interruption, hooks)
            finally:
                hooks.close()

    def _serve(
        self,
        connection: wire.Connection,
        envelope: wire_pb2.Envelope,
        descriptors: list[int],
        interruption: Interruption,
        hooks: SchedulerHooks,
    ) -> None:
        try:
            grown_files.check(envelope.restore_begin.grown_files)
            job = self._begin(connection, envelope.restore_begin, wire.only(descriptors))
        except Exception as error:
            say_failure("Restore", error)
            connection.done(envelope.id, error=error if str(error) else repr(error))
            return
        finally:
            wire.close_all(descriptors)
        if job is not None:
            restore = job
            interruption.on_asked(lambda: restore.fail(INTERRUPTED))
        warnings = job.warnings() if job is not None else []
        connection.done(envelope.id, error=INTERRUPTED if interruption.asked else "", warnings=warnings)
        if isinstance(job, LazyRestore):
            self._look_through(job)
        result: int | None = None
        criu_ended = threading.Event()
        ending = threading.Thread(
            target=self._end, args=(job, connection.pid, criu_ended), name="end-restore", daemon=True
        )
        if job is not None:
            with suppress(RuntimeError):  # there may be no more threads: it is done here then, when CRIU has ended
                ending.start()
        try:
            while (packet := connection.receive()) is not None:
                wire.close_all(packet[1])
                kind, alone = packet[0].WhichOneof("body"), list[wire_pb2.Alone]()
                try:
                    if kind == "task_restored" and job:
                        alone = _take(job, connection.pid, packet[0].task_restored.pid)
                    elif kind == "task_runs" and job:
                        job.bring_back([_outside(connection.pid, pid) for pid in packet[0].task_runs.pids])
                    elif kind == "restore_end":
                        result = packet[0].restore_end.result
                except RestoreFailed as failure:
                    assert job
                    job.fail(str(failure))
                # CRIU's log is where a person looks first; CRIU itself may not know why its tasks were killed.
                why = job.error if job and job.state not in (*UNDER_WAY, "attached") else ""
                connection.done(packet[0].id, error=why, alone=[] if why else alone)
        except Exception as error:
            say_failure(f"{job.path if job else 'Restore'}: CRIU's plugin", error)
            if job is not None:
                job.fail(f"What CRIU's plugin asked for failed: {error or repr(error)}")
        hooks.close()
        if job is None:
            return
        if result not in (None, 0) or (result is None and not job.pids):
            job.fail("CRIU failed; its own log says why (restore.log, or what -o names, or the terminal).")
        criu_ended.set()
        if ending.ident is None:
            self._end(job, connection.pid, criu_ended)
        else:
            ending.join()

    def _end(self, job: Restore, criu: int, criu_ended: threading.Event) -> None:
        """What follows once CRIU has let the processes go: in the foreground it stays there, until they end."""
        while job.held_by(criu) and not criu_ended.wait(HELD_SECONDS):
            pass
        job.let_go()
        job.watch_to_the_end()
        self.settle(job)

    def _begin(self, connection: wire.Connection, request: wire_pb2.RestoreBegin, directory: int) -> Restore | None:
        if self._registry.jobs.is_plain_criu(directory):
            path = os.readlink(f"/proc/self/fd/{directory}")
            if request.gpu_part:
                raise RestoreFailed(
                    f"The image in {path} lacks its GPU part: the checkpoint failed after CRIU had done its part, or "
                    "the files of PhOS (phos-*) were lost since. It cannot be used."
                )
            self._registry.jobs.none_for(directory, connection.uid, request.run)
            log.warning("%s holds no GPU part: CRIU restores it alone.", path)
            return None
        pids = ids.of_image(directory)
        in_the_way = ids.in_the_way(pids, connection.pid)
        job = self._job(connection, request, directory)
        while (ending := self._begin_unless_ending(job, directory, connection, request, pids, in_the_way)) is not None:
            if not ending.put_away.wait(ENDING_SECONDS):
                job.close()
                raise RestoreFailed(
                    f"The process of this image has ended, but its restore from {ending.path} is still being put away "
                    f"after {ENDING_SECONDS:.0f} s. Try again; phosd's log says what it does."
                )
        ids.keep_away(pids, connection.pid)
        return job

    def _begin_unless_ending(
        self,
        job: Restore,
        directory: int,
        connection: wire.Connection,
        request: wire_pb2.RestoreBegin,
        pids: list[int],
        in_the_way: str,
    ) -> Restore | None:
        """Begin, or name the restore of one of the processes that has ended and is still in the way.

        ``in_the_way``: who has a pid that CRIU needs, if it is not one of these very processes that still runs.

        Raises:
            PhosError, ImageError, OSError: it cannot begin; it has been closed.
        """
        with self._restoring:  # two restores of one image at the same moment: one of them finds the other's sessions
            try:
                ending = self._refuse_living(job, pids, connection.pid)
                if in_the_way:
                    raise RestoreFailed(in_the_way)
            except BaseException:
                job.close()
                raise
            if ending is not None:
                return ending
            put_away = job.close
            try:
                if job.names:
                    with self._registry.lock:
                        self._beside.append(job)
                self._registry.jobs.add(directory, job, connection.uid, request.run)
                job.begin(lambda process, blocks: self._register(job, process, blocks))
                put_away = job.watch_to_the_end  # it is being loaded
                self._registry.lend_imports(job)
                # Last: nothing else refuses any more.
                job.socket_folders = SocketFolders(directory, connection.pid)
                if request.grown_files == "cut":
                    grown_files.cut(directory, connection.pid)
            except BaseException as error:
                job.fail(str(error))
                put_away()
                self.settle(job)
                raise
        return None

    def _job(self, connection: wire.Connection, request: wire_pb2.RestoreBegin, directory: int) -> Restore:
        path, copier = os.readlink(f"/proc/self/fd/{directory}"), self._registry.copier
        settings = LazySettings.from_environment().changed(lazy=request.lazy)
        twins.setting()  # says what has no meaning before anything is done
        mode = request.mode or ("lazy" if _lazy_pages(connection.pid) else "eager")
        if mode not in ("lazy", "eager"):
            raise UsageError(f"PHOS_RESTORE={mode} is neither lazy nor eager.")
        gpu_moves = read_moves(request.gpus)
        job: Restore
        if mode == "lazy":
            job = lazy = LazyRestore(directory, path, copier, settings, self._registry.cow.touched)
            if not lazy.suits():
                lazy.close()
                mode = "eager"
                log.warning("%s has chunks of another size than this PhOS makes: it is restored eagerly.", path)
        if mode == "eager":
            job = EagerRestore(directory, path, copier)
        job.gpu_moves = gpu_moves
        return job

    def _refuse_living(self, job: Restore, pids: list[int], criu: int) -> Restore | None:
        """See to it that none of the processes runs; returns a former restore of one that is not put away yet.

        One that runs in another pid namespace than these are restored in is in nobody's way: they get sessions of their
        own, and wait for no former restore.
        """
        if self._is_beside(job, pids, criu):
            job.rename()
            log.info("%s: other processes of this image run already; these get sessions anew.", job.path)
            return None
        for process in job.processes:
            with self._registry.lock:
                existing = self._registry.sessions.get(process.session)
                restore = self._registry.loading.get(process.session)
            if existing is not None:
                if restore is not None and restore.state in UNDER_WAY:
                    raise RestoreFailed(f"The process of this image is being restored already, from {restore.path}.")
                if existing.alive():
                    raise RestoreFailed(
                        f"The process of this image still runs as pid {existing.pid} ({existing.executable}). "
                        "End it first, or restore in a pid namespace of its own."
                    )
                self._registry.forget(existing)
            self._registry.wait_forgotten(process.session)  # another thread may have been quicker
            if restore is not None and not restore.put_away.is_set():
                return restore
        return None

    def _is_beside(self, job: Restore, pids: list[int], criu: int) -> bool:
        """Whether one of the processes runs, in another pid namespace than CRIU restores these pids in.

        Without any pids they bring a namespace of their own, as a container's do. Where a process will be whose restore
        is under way nobody knows yet; and of files that the driver saved its part to there are none for two at a time.
        """
        for process in job.processes:
            with self._registry.lock:
                existing = self._registry.sessions.get(process.session)
                restore = self._registry.loading.get(process.session)
            if restore is not None and restore.state in UNDER_WAY:
                if not pids and not process.message.residues:
                    return True
            elif existing is not None and existing.alive() and _apart(pids, criu, existing):
                return True
        return False

    def _register(self, job: Restore, process: RestoredProcess, blocks: list[Block]) -> Session:
        session = self._registry.session(process.session, process.pid, UNKNOWN_USER, SessionState.DETACHED)
        session.restored_from(process.message, process.imports)
        with self._registry.lock:
            self._registry.sessions[process.session] = session
            self._registry.restores[process.session] = self._registry.loading[process.session] = job
            self._registry.given_up.discard(process.session)
        for block in blocks:
            self._registry.broker.add(block, os.getpid())  # the keeper watches phosd until the process exists
        return session

    def names_of(self, pid: int, session: bytes) -> dict[bytes, bytes]:
        """What a restored process is to call its image's sessions, if another one has the names that it knows."""
        with self._registry.lock:
            jobs = list(self._beside)
        return next((names for job in jobs if (names := job.names_for(pid, session))), {})

    def _look_through(self, job: Restore) -> None:
        """What the image knows of kernels, which the processes are told when they attach: now, while CRIU works.

        Where it does not name them all, it is put together with what they tell then, and nothing is gained now.
        """
        for process in job.processes:
            if not process.message.access_table_whole:
                continue
            with self._registry.lock:
                session = self._registry.sessions.get(process.session)
            if session is not None:
                session.access_table()

    def settle(self, job: Restore) -> None:
        """The restore is over. Processes of one that failed are dead: let their memory go."""
        with self._registry.lock:
            self._beside = [other for other in self._beside if other is not job]
            registered = {s for s, restore in self._registry.loading.items() if restore is job}
            for number in registered:
                del self._registry.loading[number]
            if job.state != "attached":
                self._registry.given_up |= registered
        if job.socket_folders is not None:
            if job.state == "attached":
                job.socket_folders.keep()
            else:
                job.socket_folders.discard()
        if job.state != "attached":
            for process in job.processes:
                with self._registry.lock:
                    session = self._registry.sessions.get(process.session)
                    ours = process.session in registered
                if session is not None and ours:
                    self._registry.forget(session)
        with self._registry.lock:
            ended = [process.session for process in job.processes if process.session not in self._registry.sessions]
        for number in ended:  # they may have been forgotten before the restore told what they had touched
            self._registry.cow.forget(number)
        job.put_away.set()
        self._registry.jobs.settle(job)
        if job.state != "attached" or job.unsound:
            with suppress(RuntimeError):  # there can be no thread: the next that fails tries it
                threading.Thread(target=self._registry.renew_if_broken, daemon=True, name="renew").start()


def _take(job: Restore, criu: int, number: int) -> list[wire_pb2.Alone]:
    """Returns the tasks, and their threads, that have to run now before CRIU lets any go, as CRIU numbers them.

    Raises:
        RestoreFailed: CRIU's number of a task or of its thread cannot be told.
    """
    alone = []
    for pid, thread in job.take_task(_outside(criu, number)).items():
        names = [procfs.number_for(criu, pid, inner) for inner in (procfs.inner_pid(pid), thread)]
        if not all(names):
            if not procfs.is_alive(criu):
                return []  # it has let all of them go
            raise RestoreFailed(f"Thread {thread} of process {pid}, the driver's, is not there.")
        alone.append(wire_pb2.Alone(pid=names[0], thread=names[1]))
    return alone


def _outside(criu: int, pid: int) -> int:
    """Our number of a task, as a CRIU names it that may be in another pid namespace.

    Raises:
        RestoreFailed: there is none, and whoever else has that number is not to be touched.
    """
    if not (found := procfs.outer_pid(criu, pid)):
        raise RestoreFailed(f"Process {pid} of CRIU's pid namespace is not to be found from phosd's.")
    return found


def _apart(pids: list[int], criu: int, existing: Session) -> bool:
    return not pids or procfs.pid_namespace(criu) != procfs.pid_namespace(existing.pid)


def _lazy_pages(criu: int) -> bool:
    """Whether a CRIU that is restoring was told to bring the CPU's memory on demand."""
    try:
        words = Path(f"/proc/{criu}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return any(LAZY_PAGES.fullmatch(word) for word in words)
