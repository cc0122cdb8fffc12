"""phosd's server: who connects, and which job or session their packets go to."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from phos.gen import wire_pb2
from phos.gpu_engine import driver, inventory, toggle
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.jobs import Claims, JobTable
from phos.gpu_engine.daemon.keeper_link import KeeperLink
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.daemon.paths import hold_folder, keeper_socket
from phos.gpu_engine.daemon.permissions import may_write
from phos.gpu_engine.daemon.reaper import Reaper
from phos.gpu_engine.daemon.session import Session, executable_of
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import (
    CheckpointFailed,
    MemoryLost,
    NoSuchProcess,
    NotPermitted,
    PhosError,
    ProtocolError,
    RestoreFailed,
)
from phos.gpu_engine.process import Detached, ForeignProcess, GatedProcess
from phos.gpu_engine.restore.eager import EagerRestore, RestoredProcess
from phos.gpu_engine.stop.dump import Settings, StopDump
from phos.images.errors import ImageError

log = logging.getLogger(__name__)

REGISTER_SECONDS = 10.0
"""How long a process with the frontend in it may take to connect to a phosd that has just been started."""

SESSION_BYTES = 16

RENEWAL_SECONDS = 1.0

UNKNOWN_USER = -1
"""Of a session whose process has not been restored yet."""

FIRST_PACKET_SECONDS = 30.0
"""How long a peer that has connected may take to say what it wants."""

SEND_SECONDS = 60.0
"""How long a packet to a peer that reads nothing may block."""

ATTACH_TRIES = 3

RECONNECT_SECONDS = 5.0
"""After this long without a connection a process that still runs has replaced its program: its memory is dropped."""


class Daemon:
    """All state of phosd."""

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        self.started = time.time()
        cuda = driver.initialise()
        self.gpus = driver.gpus()
        self.versions = inventory.Versions(
            phos=version, criu="", driver=driver.release(), cuda=cuda, device_kind=driver.kind()
        )
        self.jobs = JobTable()
        self._claims = Claims()
        self.copier = Copier()
        self._ordinals = {bytes.fromhex(g.uuid.removeprefix("GPU-").replace("-", "")): g.ordinal for g in self.gpus}
        self._holds = Holds(hold_folder(path))
        self._broker = Broker(KeeperLink(keeper_socket(path)))
        self._sessions: dict[bytes, Session] = {}
        self._restores: dict[bytes, EagerRestore] = {}  # by session, until its process computes again
        self._lock = threading.Lock()  # guards _sessions, _restores, _prepared
        self._restoring = threading.Lock()  # held while a restore looks for its processes and registers them
        self._prepared: set[int] = set()
        self._reaper = Reaper(self._process_ended)
        self._stopping = threading.Event()
        for session, pid in self._broker.adopt_from_keeper().items():
            self._adopt(session, pid)
        self._holds.clear_stale()

    def _adopt(self, number: bytes, pid: int) -> None:
        """A session of an earlier phosd. Its frontend will say itself whether it is detached."""
        session = Session(number, pid, _uid_of(pid), self._broker, self._holds, SessionState.RUNNING)
        session.executable = executable_of(pid)
        if not session.alive():
            self._broker.drop_session(number)
            return
        self._broker.belongs(number, session.uid)
        self._sessions[number] = session
        self._reaper.watch(pid, session)

    def _renew_if_broken(self) -> None:
        """After a failed job: phosd's own GPU context may be beyond repair, and with it every later job.

        Only a new process gets a new context, so this one becomes one: applications reconnect, the keeper has their
        memory. Waits for other jobs to end, and a moment for those who want to know how this one did.
        """
        if not (why := driver.broken()):
            return
        log.error("phosd starts anew, because its GPU context is lost: %s", why)
        while True:
            time.sleep(RENEWAL_SECONDS)
            with self._lock:
                restoring = any(job.state in ("loading", "loaded") for job in self._restores.values())
            if not restoring and not self._claims.any():
                break
        logging.shutdown()
        os.execv(sys.executable, sys.orig_argv)

    # Connections.

    def serve(self, listener: socket.socket) -> None:
        """Accept until :meth:`stop`."""
        while not self._stopping.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._stopping.is_set() or error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    break
                log.warning("A connection could not be accepted: %s", error)  # no descriptors left, for example
                self._stopping.wait(0.2)
                continue
            try:
                peer = wire.Connection(connection)
                threading.Thread(target=self._serve_one, args=(peer,), daemon=True).start()
            except (OSError, RuntimeError) as error:
                log.warning("A connection could not be served: %s", error)
                connection.close()

    def stop(self, listener: socket.socket) -> None:
        """End :meth:`serve`."""
        self._stopping.set()
        listener.shutdown(socket.SHUT_RDWR)

    @property
    def stopping(self) -> threading.Event:
        """Set when somebody asked phosd to end."""
        return self._stopping

    def _serve_one(self, connection: wire.Connection) -> None:
        try:
            connection.limit(receive=FIRST_PACKET_SECONDS, send=SEND_SECONDS)
            first = connection.receive()
            if first is None:
                return
            connection.limit(receive=0)
            envelope, descriptors = first
            kind = envelope.WhichOneof("body")
            if kind == "hello":
                wire.close_all(descriptors)
                self._serve_frontend(connection, envelope)
            elif kind == "dump_begin":
                self._serve_dump(connection, envelope, descriptors)
            elif kind == "restore_begin":
                self._serve_restore(connection, envelope, descriptors)
            else:
                self._serve_client(connection, envelope, descriptors)
        except BlockingIOError:
            log.info("Process %d connected and said nothing.", connection.pid)
        except (PhosError, OSError) as error:
            log.warning("Connection of process %d: %s", connection.pid, error)
        except Exception:
            log.exception("Connection of process %d", connection.pid)
        finally:
            connection.close()

    # Frontends.

    def _serve_frontend(self, connection: wire.Connection, envelope: wire_pb2.Envelope) -> None:
        hello = envelope.hello
        if len(hello.session) != SESSION_BYTES:
            raise ProtocolError(f"Process {connection.pid} named a session of {len(hello.session)} bytes.")
        if hello.protocol != wire.PROTOCOL_VERSION:
            raise PhosError(
                f"Process {connection.pid} speaks version {hello.protocol} of the control protocol, phosd "
                f"{wire.PROTOCOL_VERSION}: it was started under another PhOS."
            )
        session = self._session_for(connection, hello)
        if hello.state != wire_pb2.DETACHED:
            self._replace_program(session, connection.pid)
            session.connected(connection, hello, self._ordinals)
            if session.machine.state is SessionState.QUIESCED:
                # Its connection broke while it was quiesced, and it opened its gate for that.
                session.machine.adopt(SessionState.RUNNING)
            connection.reply(envelope.id, welcome=wire_pb2.Welcome(action=wire_pb2.Welcome.STAY))
            self._reaper.watch(connection.pid, session)
            threading.Thread(target=self._prepare, args=(session.gpu_ordinals(),), daemon=True).start()
        else:
            answer = self._answer_detached(session, connection)
            if answer.action == wire_pb2.Welcome.ATTACH:
                session.machine.to(SessionState.ATTACHING)  # a second connection at the same moment fails here
                session.connected(connection, hello, self._ordinals)
            connection.reply(envelope.id, welcome=answer)
            if answer.action == wire_pb2.Welcome.RETRY:
                return
            self._reaper.watch(connection.pid, session)
            if answer.action == wire_pb2.Welcome.LOST:
                while (packet := connection.receive()) is not None:
                    wire.close_all(packet[1])  # hanging up would only make it ask again
                return
            threading.Thread(target=self._attach, args=(session,), daemon=True).start()
        try:
            while (packet := connection.receive()) is not None:
                session.handle(*packet)
        finally:
            session.disconnected(connection)
            if session.machine.state in (SessionState.RUNNING, SessionState.QUIESCED):
                self._expire_later(session)

    def _replace_program(self, session: Session, pid: int) -> None:
        """A process has one session at a time: one that it had before ended with the program that it replaced."""
        with self._lock:
            former = [
                other
                for other in self._sessions.values()
                if other.pid == pid
                and other is not session
                and not other.is_connected
                and other.session not in self._restores
                and other.machine.state in (SessionState.RUNNING, SessionState.QUIESCED)
            ]
        for other in former:
            self._forget(other)

    def _session_for(self, connection: wire.Connection, hello: wire_pb2.Hello) -> Session:
        with self._lock:
            session = self._sessions.get(hello.session)
            if session is None:
                state = SessionState.LOST if hello.state == wire_pb2.DETACHED else SessionState.RUNNING
                session = Session(hello.session, connection.pid, connection.uid, self._broker, self._holds, state)
                session.lost_reason = "phosd holds no GPU memory for this process: phosd and its keeper were restarted."
                self._sessions[hello.session] = session
        if session.uid == UNKNOWN_USER:
            with self._lock:
                restore = self._restores.get(session.session)
            if connection.uid != 0 and restore is not None and not restore.restored(connection.pid):
                raise NotPermitted(f"Process {connection.pid} is not the one that is being restored.")
            session.uid = connection.uid
        if connection.uid not in (session.uid, 0):
            raise NotPermitted(
                f"Process {connection.pid} of user {connection.uid} named a session of user {session.uid}."
            )
        if session.is_connected and session.pid != connection.pid and session.alive():
            raise NotPermitted(f"Process {connection.pid} named the session of process {session.pid}.")
        self._broker.belongs(session.session, session.uid)
        return session

    def _answer_detached(self, session: Session, connection: wire.Connection) -> wire_pb2.Welcome:
        welcome = wire_pb2.Welcome
        with self._lock:
            restore = self._restores.get(session.session)
        state = session.machine.state
        if restore is not None and state is SessionState.DETACHED:
            if not restore.ready(connection.pid):
                return welcome(action=welcome.RETRY, retry_ms=1)
            self._broker.moved(session.session, connection.pid)
            session.machine.to(SessionState.RETURNING)
        elif state in (SessionState.RUNNING, SessionState.QUIESCED):
            # It was detached under an earlier phosd that was killed: nobody else brings its driver state back.
            toggle.revive(connection.pid)
            session.machine.adopt(SessionState.RETURNING)
        elif state is SessionState.LOST:
            return welcome(action=welcome.LOST, error=session.lost_reason)
        elif state is not SessionState.RETURNING:
            return welcome(action=welcome.RETRY, retry_ms=2)
        return welcome(action=welcome.ATTACH)

    def _attach(self, session: Session) -> None:
        with self._lock:
            restore = self._restores.get(session.session)
        try:
            began = restore.timeline.now() if restore else 0.0
            session.attach()
            if session.machine.state is not SessionState.ENDED:  # it may have been quick
                session.machine.to(SessionState.RUNNING)
            session.attach_failures = 0
            if restore:
                restore.timeline.add("attach", began)
                restore.attached(session.pid)
                with self._lock:
                    self._restores.pop(session.session, None)
        except Exception as error:
            if session.machine.state is SessionState.ENDED:
                return  # said by whoever noticed
            if isinstance(error, PhosError):
                log.error("%s", error)
            else:
                log.exception("Process %d could not be attached", session.pid)
            session.attach_failures += 1
            if restore:
                restore.fail(str(error))
            elif session.attach_failures < ATTACH_TRIES and not isinstance(error, MemoryLost):
                session.machine.adopt(SessionState.RETURNING)
                session.hang_up()  # it asks again
            else:
                session.lose(str(error))

    def _prepare(self, ordinals: Sequence[int]) -> None:
        """Make the context and pin the ring before anybody waits for them."""
        for ordinal in ordinals:
            with self._lock:
                if ordinal in self._prepared:
                    continue
                self._prepared.add(ordinal)
            try:
                self.copier.prepare(ordinal)
            except PhosError as error:
                log.warning("GPU %d could not be prepared: %s", ordinal, error)

    def _expire_later(self, session: Session) -> None:
        timer = threading.Timer(RECONNECT_SECONDS, self._expire, (session, session.connections))
        timer.daemon = True
        timer.start()

    def _expire(self, session: Session, connections: int) -> None:
        if session.connections != connections or session.is_connected:
            return  # it came back meanwhile
        if session.machine.state not in (SessionState.RUNNING, SessionState.QUIESCED):
            return
        if toggle.is_stopped(session.pid):
            self._expire_later(session)  # it cannot come back now
            return
        log.info("Process %d has replaced its program, or closed its connection for good.", session.pid)
        self._forget(session)

    def _process_ended(self, session: Session) -> None:
        if not session.alive():
            self._forget(session)

    def _forget(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.session) is not session:
                return
            del self._sessions[session.session]
            self._restores.pop(session.session, None)
        self._reaper.forget(session)
        session.machine.end()
        self._holds.release(session.session)
        freed = self._broker.drop_session(session.session)
        log.info("Process %d has ended; %d bytes of GPU memory let go.", session.pid, freed)

    # Dump.

    def _serve_dump(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        request = envelope.dump_begin
        with ExitStack() as claim:
            try:
                job = self._begin_dump(connection, request, _only(descriptors), claim)
            except Exception as error:
                self._say_failure(f"Checkpoint of process {request.pid}", error)
                connection.done(envelope.id, error=error if str(error) else repr(error))
                threading.Thread(target=self._renew_if_broken, daemon=True, name="renew").start()
                return
            finally:
                wire.close_all(descriptors)
            connection.done(envelope.id, warnings=job.warnings() if job else [])
            result = -1
            try:
                result = self._follow_criu(connection, job, kills=not _leaves_alive(connection.pid))
            except (PhosError, OSError) as error:
                log.error("Checkpoint of process %d: CRIU's plugin is not to be understood: %s", request.pid, error)
            # CRIU's process has ended: its tasks are killed, or run.
            if job:
                try:
                    job.finish(result)
                except CheckpointFailed as error:
                    log.error("Checkpoint of process %d: %s", request.pid, error)
                except Exception as error:
                    log.exception("Checkpoint of process %d", request.pid)
                    job.abandon(f"The checkpoint failed in an unforeseen way ({error!r}).")
        if job and job.state == "failed":
            self._renew_if_broken()

    @staticmethod
    def _follow_criu(connection: wire.Connection, job: StopDump | None, *, kills: bool) -> int:
        """Until CRIU's process ends. Returns its result; -1 if it did not say any, or was told to keep the tasks."""
        result = -1
        while (packet := connection.receive()) is not None:
            wire.close_all(packet[1])
            if packet[0].WhichOneof("body") != "dump_end":
                connection.done(packet[0].id, error="phosd expects the end of the dump here.")
                continue
            result = packet[0].dump_end.result
            try:
                if job:
                    job.criu_ended(result, kills=kills)
            except CheckpointFailed as error:
                result = -1
                connection.done(packet[0].id, error=error)
            else:
                connection.done(packet[0].id)
        return result

    @staticmethod
    def _say_failure(what: str, error: Exception) -> None:
        if isinstance(error, (PhosError, ImageError, OSError)):
            log.error("%s: %s", what, error)
        else:
            log.error("%s", what, exc_info=error)

    def _begin_dump(
        self, connection: wire.Connection, request: wire_pb2.DumpBegin, directory: int, claim: ExitStack
    ) -> StopDump | None:
        root = request.pid
        if not psutil.pid_exists(root):
            raise NoSuchProcess(f"There is no process {root}.")
        if connection.uid not in (0, _uid_of(root)):
            raise NotPermitted(f"User {connection.uid} may not checkpoint process {root} of user {_uid_of(root)}.")
        if not may_write(directory, connection.uid, connection.gid):
            # phosd writes with its own rights, and a descriptor opened for reading is no proof of the caller's.
            raise NotPermitted(f"User {connection.uid} may not write to {os.readlink(f'/proc/self/fd/{directory}')}.")
        try:
            gated, foreign = self._find_processes(root)
        except psutil.NoSuchProcess as error:
            raise NoSuchProcess(f"Process {root} has ended.") from error
        if not gated and not foreign:
            self.jobs.none_for(directory)
            return None
        claim.enter_context(self._claims.hold([p.pid for p in gated] + [p.pid for p in foreign]))
        for session in gated:
            if session.machine.state is SessionState.LOST:
                raise CheckpointFailed(
                    f"The GPU memory of process {session.pid} ({session.executable}) is lost: {session.lost_reason}"
                )
            if session.machine.state is not SessionState.RUNNING:
                raise CheckpointFailed(
                    f"Process {session.pid} ({session.executable}) is {session.machine.state.value}: "
                    "another checkpoint or restore of it is under way. Wait for it ('phos-gpu status' shows it)."
                )
        versions = dataclasses.replace(self.versions, criu=request.criu_version)
        path = os.readlink(f"/proc/self/fd/{directory}")
        job = StopDump(directory, path, gated, foreign, self.copier, Settings.from_environment(), versions)
        self.jobs.add(directory, job)
        job.begin(self._broker.borrow, self._describe)
        return job

    def _find_processes(self, root: int) -> tuple[list[Session], list[ForeignProcess]]:
        tree = [root] + [child.pid for child in psutil.Process(root).children(recursive=True)]
        deadline = time.monotonic() + REGISTER_SECONDS
        while True:
            with self._lock:
                by_pid = {
                    s.pid: s
                    for s in self._sessions.values()
                    if s.is_connected or s.machine.state is not SessionState.RUNNING
                }
            gated = [by_pid[pid] for pid in tree if pid in by_pid]
            others = [pid for pid in tree if pid not in by_pid and toggle.holds_cuda(pid)]
            late = [pid for pid in others if _has_frontend(pid)]
            if (not late and all(s.table_complete for s in gated)) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for pid in late:
            raise CheckpointFailed(
                f"Process {pid} ({executable_of(pid)}) runs under PhOS but has not connected to this phosd "
                f"({self.path}) within {REGISTER_SECONDS:.0f} s. Is it stopped, or was it started with another "
                "PHOS_SOCKET?"
            )
        return gated, [ForeignProcess(pid, executable_of(pid)) for pid in others]

    def _describe(self, process: GatedProcess, detached: Detached) -> inventory.ProcessRecord:
        arguments, parent = inventory.command_line(process.pid)
        with self._lock:
            session = self._sessions.get(process.session)
        if session is None:
            raise CheckpointFailed(f"Process {process.pid} ({process.executable}) ended while it was checkpointed.")
        return inventory.ProcessRecord(
            pid=process.pid,
            session=process.session,
            executable=process.executable,
            command_line=[wire.sentence(argument) for argument in arguments],
            parent_pid=parent,
            detached=detached,
            own_blocks=process.own_blocks(),
            modules=session.modules,
            devices=session.gpu_ordinals(),
        )

    # Restore.

    def _serve_restore(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        if connection.uid not in (0, os.geteuid()):
            connection.done(envelope.id, error=f"User {connection.uid} may not restore here.")
            wire.close_all(descriptors)
            return
        try:
            job = self._begin_restore(_only(descriptors))
        except Exception as error:
            self._say_failure("Restore", error)
            connection.done(envelope.id, error=error if str(error) else repr(error))
            return
        finally:
            wire.close_all(descriptors)
        connection.done(envelope.id)
        result: int | None = None
        try:
            while (packet := connection.receive()) is not None:
                wire.close_all(packet[1])
                kind = packet[0].WhichOneof("body")
                if kind == "task_restored" and job:
                    job.take_task(packet[0].task_restored.pid)
                elif kind == "restore_end":
                    result = packet[0].restore_end.result
                # CRIU's log is where a person looks first; CRIU itself may not know why its tasks were killed.
                connection.done(packet[0].id, error=job.error if job and job.state == "failed" else "")
        except (PhosError, OSError) as error:
            log.error("%s: CRIU's plugin is not to be understood: %s", job.path if job else "Restore", error)
        if job is None:
            return
        if result not in (None, 0) or (result is None and not job.pids):
            job.fail("CRIU failed; its own log says why (restore.log, or what -o names, or the terminal).")
        job.watch_to_the_end()
        self._settle(job)

    def _begin_restore(self, directory: int) -> EagerRestore | None:
        if self.jobs.is_plain_criu(directory):
            self.jobs.none_for(directory)
            log.warning("%s holds no GPU part: CRIU restores it alone.", os.readlink(f"/proc/self/fd/{directory}"))
            return None
        job = EagerRestore(directory, os.readlink(f"/proc/self/fd/{directory}"), self.copier)
        with self._restoring:  # two restores of one image at the same moment: one of them finds the other's sessions
            try:
                self._refuse_living(job)
            except BaseException:
                job.close()
                raise
            self.jobs.add(directory, job)
            try:
                job.begin(lambda process, blocks: self._register(job, process, blocks))
            except BaseException as error:
                job.fail(str(error))
                job.close()
                self._settle(job)
                raise
        return job

    def _refuse_living(self, job: EagerRestore) -> None:
        for process in job.processes:
            with self._lock:
                existing = self._sessions.get(process.session)
                restore = self._restores.get(process.session)
            if existing is None:
                continue
            if restore is not None and restore.state in ("loading", "loaded"):
                raise RestoreFailed(f"The process of this image is being restored already, from {restore.path}.")
            if existing.alive():
                raise RestoreFailed(
                    f"The process of this image still runs as pid {existing.pid} ({existing.executable}). End it first."
                )
            self._forget(existing)

    def _register(self, job: EagerRestore, process: RestoredProcess, blocks: list[Block]) -> None:
        session = Session(process.session, process.pid, UNKNOWN_USER, self._broker, self._holds, SessionState.DETACHED)
        session.restored_from(process.message, process.imports)
        with self._lock:
            self._sessions[process.session] = session
            self._restores[process.session] = job
        for block in blocks:
            self._broker.add(block, os.getpid())  # the keeper watches phosd until the process exists

    def _settle(self, job: EagerRestore) -> None:
        """CRIU is gone. Processes of a failed restore are dead: let their memory go."""
        if job.state == "failed":
            threading.Thread(target=self._renew_if_broken, daemon=True, name="renew").start()
            for process in job.processes:
                with self._lock:
                    session = self._sessions.get(process.session)
                    ours = self._restores.get(process.session) is job
                if session is not None and ours:
                    self._forget(session)

    # phos-gpu and the launcher.

    def _serve_client(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        try:
            while True:
                kind = envelope.WhichOneof("body")
                if kind == "status_request":
                    connection.reply(envelope.id, status=self._status(connection.uid))
                elif kind == "wait_image" and descriptors:
                    self._wait_image(connection, envelope, descriptors[0])
                elif kind == "shutdown" and connection.uid in (0, os.geteuid()):
                    connection.reply(envelope.id, done=wire_pb2.Done())
                    self._stopping.set()
                    os.kill(os.getpid(), 15)
                else:
                    connection.done(envelope.id, error=f"phosd does not take '{kind}' here.")
                wire.close_all(descriptors)
                descriptors = []
                packet = connection.receive()
                if packet is None:
                    return
                envelope, descriptors = packet
        finally:
            wire.close_all(descriptors)

    def _wait_image(self, connection: wire.Connection, envelope: wire_pb2.Envelope, directory: int) -> None:
        request = envelope.wait_image
        deadline = time.monotonic() + (request.timeout_s or 3600.0)
        while True:
            state = self.jobs.state(directory, "restore" if request.restore else "dump")
            state.final = state.state in ("unknown", "none", "committed", "failed", "attached")
            if time.monotonic() > deadline:
                state.final = True
                state.error = state.error or f"not complete after {request.timeout_s:.0f} s"
            if state.final or request.progress:
                connection.send(wire_pb2.Envelope(id=envelope.id, image_state=state))
            if state.final:
                return
            time.sleep(0.1 if request.progress else 0.005)

    def _status(self, viewer: int) -> wire_pb2.Status:
        status = wire_pb2.Status(
            pid=os.getpid(),
            version=self.versions.phos,
            mode=self.versions.device_kind,
            driver_version=self.versions.cuda,
            since=self.started,
            ring_bytes=self.copier.ring_bytes,
        )
        with self._lock:
            sessions = list(self._sessions.values())
        held: dict[int, int] = {}
        for session in sessions:
            blocks = session.own_blocks()
            for block in blocks:
                held[block.device] = held.get(block.device, 0) + block.size
            status.processes.append(
                wire_pb2.Status.Process(
                    pid=session.pid,
                    executable=session.executable,
                    state=session.machine.state.value,
                    # A session's number opens its memory to the same user's processes: nobody else's business.
                    session=session.session if viewer in (0, session.uid) else b"",
                    blocks=len(blocks),
                    bytes=sum(block.size for block in blocks),
                    uncarried=[
                        wire_pb2.Uncarried(kind=u.kind, count=u.count, bytes=u.bytes)
                        for u in session.uncarried.values()
                    ],
                    modules=len(session.modules),
                    uid=session.uid,
                    since=session.machine.since,
                    devices=session.gpu_ordinals(),
                )
            )
        for gpu in self.gpus:
            with self._lock:
                prepared = gpu.ordinal in self._prepared
            status.gpus.append(
                wire_pb2.Status.Gpu(
                    ordinal=gpu.ordinal,
                    uuid=gpu.uuid,
                    name=gpu.name,
                    total=gpu.total_memory,
                    free=driver.context(gpu.ordinal).free_memory() if prepared else 0,
                    held=held.get(gpu.ordinal, 0),
                )
            )
        status.jobs.extend(self.jobs.report())
        return status


def _only(descriptors: list[int]) -> int:
    """The one descriptor that has to come with a request: the image directory's."""
    if len(descriptors) != 1:
        raise ProtocolError("A checkpoint or restore needs the descriptor of its image directory.")
    return descriptors[0]


LEAVE = re.compile(r"--leave-(r\w*|s\w*)|-[A-CE-IKNP-VX-Za-npqsu-z]*[Rs].*")
"""How ``--leave-running`` (-R) and ``--leave-stopped`` (-s) may look on CRIU's command line."""


def _leaves_alive(criu: int) -> bool:
    """Whether a CRIU that is dumping will leave its tasks alive. In doubt (an RPC client asked it): it will not."""
    try:
        words = Path(f"/proc/{criu}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return any(LEAVE.fullmatch(word) for word in words)


def _uid_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _has_frontend(pid: int) -> bool:
    try:
        return "libphos.so" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
