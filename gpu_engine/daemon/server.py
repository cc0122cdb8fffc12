"""phosd's server: who connects and who serves them; the connections of frontends."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from phos.gen import wire_pb2
from phos.gpu_engine import driver, inventory, procfs, shared_memory, toggle
from phos.gpu_engine.daemon import limits, wire
from phos.gpu_engine.daemon.attach_failures import AttachFailures
from phos.gpu_engine.daemon.audit import AuditServer
from phos.gpu_engine.daemon.custody import give_back_left
from phos.gpu_engine.daemon.paths import custody_folder
from phos.gpu_engine.daemon.permissions import uid_of
from phos.gpu_engine.daemon.registry import Registry
from phos.gpu_engine.daemon.remote_server import RemoteServer
from phos.gpu_engine.daemon.remote_settings import RemoteSettings
from phos.gpu_engine.daemon.requests import Requests
from phos.gpu_engine.daemon.serve_client import ClientServer
from phos.gpu_engine.daemon.serve_dump import DumpServer
from phos.gpu_engine.daemon.serve_pool import PoolServer
from phos.gpu_engine.daemon.serve_restore import RestoreServer
from phos.gpu_engine.daemon.session import UNKNOWN_USER, Session
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import MemoryLost, NotPermitted, PhosError, ProtocolError
from phos.gpu_engine.process import CONTROL_THREAD

log = logging.getLogger(__name__)

SESSION_BYTES = 16

FIRST_PACKET_SECONDS = 30.0
"""How long a peer that has connected may take to say what it wants."""

SEND_SECONDS = 60.0
"""How long a packet to a peer that reads nothing may block."""

READY_SECONDS = 1.0
"""For so long a process that is being restored is kept waiting for an answer before it has to ask again."""

RECONNECT_SECONDS = 5.0
"""After this long without a connection a process that still runs has replaced its program: its memory is dropped."""

CONNECTED = frozenset({SessionState.RUNNING, SessionState.QUIESCED})
AWAY = frozenset({SessionState.DETACHED, SessionState.RETURNING, SessionState.ATTACHING, SessionState.LOST})
"""In those states of its session a process has a connection, or makes one at once; in these it may take any time."""


NEVER_RESTORED = (
    "Its restore failed, or phosd ended meanwhile: what it asks for is the memory of another process of its image. "
    "Restore it again."
)
"""To a process that was restored beside another one."""


class Daemon:
    """phosd: what it does for the processes under the frontend, and the way to those who serve the others."""

    def __init__(self, path: Path, version: str, sharing: RemoteSettings | None = None) -> None:
        cuda = driver.initialise()
        self.gpus = driver.gpus()
        versions = inventory.Versions(
            phos=version, criu="", driver=driver.release(), cuda=cuda, device_kind=driver.kind()
        )
        self._registry = Registry(path, versions, _capability(self.gpus))
        self._registry.broker.capacity = {gpu.ordinal: gpu.total_memory for gpu in self.gpus}
        self._dumps = DumpServer(self._registry)
        self._restores = RestoreServer(self._registry)
        self._pools = PoolServer(self._registry, self._restores)
        self._requests = Requests(self._registry)
        self._audits = AuditServer(self._registry)
        self._stopping = threading.Event()
        self._connections = limits.PerUser("connections", limits.CONNECTIONS)
        self._remote = RemoteServer(sharing, self._registry.pinned) if sharing else None
        self._clients = ClientServer(self._registry, self.gpus, self._pools.pools, self._remote)
        self._ordinals = {bytes.fromhex(g.uuid.removeprefix("GPU-").replace("-", "")): g.ordinal for g in self.gpus}
        for session, pid in self._registry.broker.adopt_from_keeper().items():
            self._adopt(session, pid)
        self._registry.holds.clear_stale()
        shared_memory.claim()
        shared_memory.sweep()
        self._pools.revive()
        give_back_left(custody_folder(path))

    def _adopt(self, number: bytes, pid: int) -> None:
        """A session of an earlier phosd. Its frontend will say itself whether it is detached."""
        session = self._registry.session(number, pid, uid_of(pid), SessionState.RUNNING)
        session.identity.executable = procfs.executable(pid)
        if not session.alive():
            self._registry.broker.drop_session(number)
            return
        session.adopted()
        self._registry.broker.belongs(number, session.uid)
        self._registry.sessions[number] = session
        self._registry.reaper.watch(pid, session)

    # Connections.

    def serve(self, listener: socket.socket) -> None:
        """Accept until :meth:`stop`."""
        if self._remote is not None:
            self._remote.start()
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
                self._begin(wire.Connection(connection))
            except (OSError, RuntimeError) as error:
                log.warning("A connection could not be served: %s", error)
                connection.close()

    def _begin(self, peer: wire.Connection) -> None:
        """Serve a connection in a thread of its own, unless its user has too many.

        Raises:
            OSError, RuntimeError: there can be no thread.
        """
        try:
            self._connections.take(peer.uid)
        except NotPermitted as error:
            peer.refuse(error)
            return
        try:
            threading.Thread(target=self._serve_one, args=(peer,), daemon=True).start()
        except BaseException:
            self._connections.give_back(peer.uid)
            raise

    def stop(self, listener: socket.socket) -> None:
        """End :meth:`serve`; from any thread."""
        self._stopping.set()
        if self._remote is not None:
            self._remote.stop()
        with suppress(OSError):  # it has been already
            listener.shutdown(socket.SHUT_RDWR)

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
                self._dumps.serve(connection, envelope, descriptors)
            elif kind == "task_runs":
                self._dumps.serve_lost(connection, envelope, descriptors)
            elif kind == "restore_begin" and envelope.restore_begin.pool:
                self._pools.serve_criu(connection, envelope, descriptors)
            elif (kind or "").startswith("pool_"):
                self._pools.serve(connection, envelope, descriptors)
            elif kind == "restore_begin":
                self._restores.serve(connection, envelope, descriptors)
            elif (kind or "").startswith("audit_"):
                self._audits.serve(connection, envelope, descriptors)
            else:
                self._clients.serve(connection, envelope, descriptors)
        except BlockingIOError:
            log.info("Process %d connected and said nothing.", connection.pid)
        except (PhosError, OSError) as error:
            log.warning("Connection of process %d: %s", connection.pid, error)
        except Exception:
            log.exception("Connection of process %d", connection.pid)
        finally:
            connection.close()
            self._connections.give_back(connection.uid)

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
        given = self._pools.names_of(connection.pid, hello.session)
        given = given or self._restores.names_of(connection.pid, hello.session)
        names = [wire_pb2.SessionName(old=old, now=now) for old, now in given.items()]
        hello.session = given.get(hello.session, hello.session)
        with self._registry.lock:
            given_up = hello.state == wire_pb2.DETACHED and hello.session in self._registry.given_up
        if given_up:
            log.error("Process %d was restored, and its restore has failed: it is ended.", connection.pid)
            os.kill(connection.pid, signal.SIGKILL)
            return
        if hello.state == wire_pb2.DETACHED and self._is_anothers(hello.session, connection.pid):
            log.error(
                "Process %d was restored beside another one of its image, and never got its memory.", connection.pid
            )
            lost = wire_pb2.Welcome(action=wire_pb2.Welcome.LOST, error=NEVER_RESTORED)
            connection.reply(envelope.id, welcome=lost)
            while (packet := connection.receive()) is not None:
                wire.close_all(packet[1])
            return
        session = self._session_for(connection, hello)
        if hello.state != wire_pb2.DETACHED:
            self._replace_program(session, connection.pid)
            session.connected(connection, hello, self._ordinals)
            if not self._registry.knows(session):
                session.disconnected(connection)
                return  # forgotten just now; when it asks again, it is another session
            if session.machine.state in (SessionState.QUIESCED, SessionState.RETURNING, SessionState.ATTACHING):
                # Its connection broke while it was quiesced, or had just been attached: it opened its gate for that.
                session.machine.adopt(SessionState.RUNNING)
                with self._registry.lock:
                    restore = self._registry.restores.get(session.session)
                if restore is not None:
                    restore.fail(f"The connection to process {session.pid} broke while it was given its memory back.")
            connection.reply(envelope.id, welcome=wire_pb2.Welcome(action=wire_pb2.Welcome.STAY))
            self._registry.reaper.watch(connection.pid, session)
            threading.Thread(target=self._prepare, args=(session.gpu_ordinals(),), daemon=True).start()
        else:
            answer = self._answer_detached(session, connection)
            if answer.action == wire_pb2.Welcome.ATTACH:
                session.machine.to(SessionState.ATTACHING)  # a second connection at the same moment fails here
                session.connected(connection, hello, self._ordinals)
                answer.session.extend(names)
            connection.reply(envelope.id, welcome=answer)
            if answer.action == wire_pb2.Welcome.RETRY:
                return
            self._registry.reaper.watch(connection.pid, session)
            if answer.action == wire_pb2.Welcome.LOST:
                while (packet := connection.receive()) is not None:
                    wire.close_all(packet[1])  # hanging up would only make it ask again
                return
            try:
                threading.Thread(target=self._attach, args=(session,), daemon=True).start()
            except RuntimeError as error:  # a limit on processes
                self._not_attached(session, PhosError(f"Process {session.pid} is not attached yet: {error}."))
        try:
            while (packet := connection.receive()) is not None:
                if not self._requests.take(session, connection, *packet):
                    session.handle(*packet)
        finally:
            session.disconnected(connection)
            if session.machine.state in CONNECTED | AWAY:
                self._expire_later(session)

    def _is_anothers(self, number: bytes, pid: int) -> bool:
        """Whether the session that a detached process names is that of another one, which lives.

        It was restored beside that one, and phosd or its restore ended before it learnt what it is called from now on.
        """
        with self._registry.lock:
            session, restore = self._registry.sessions.get(number), self._registry.restores.get(number)
        if session is None or session.pid == pid or (restore is not None and restore.restored(pid)):
            return False
        return session.alive()

    def _replace_program(self, session: Session, pid: int) -> None:
        """A process has one session at a time: one that it had before ended with the program that it replaced."""
        with self._registry.lock:
            former = [
                other
                for other in self._registry.sessions.values()
                if other.pid == pid
                and other is not session
                and not other.is_connected
                and other.session not in self._registry.restores
                and other.machine.state in CONNECTED | AWAY
            ]
            restores = [job for number, job in self._registry.restores.items() if number != session.session]
        for other in former:
            self._registry.forget(other)
        for restore in restores:
            if restore.awaits(pid):
                restore.fail(f"Process {pid} replaced its program before its GPU state was back.")

    def _session_for(self, connection: wire.Connection, hello: wire_pb2.Hello) -> Session:
        self._registry.wait_forgotten(hello.session)  # it is late, and what it registers would be dropped as well
        with self._registry.lock:
            session = self._registry.sessions.get(hello.session)
            if session is None:
                has = sum(other.uid == connection.uid for other in self._registry.sessions.values())
                limits.refuse_more(has, connection.uid, "processes", limits.SESSIONS)
                state = SessionState.LOST if hello.state == wire_pb2.DETACHED else SessionState.RUNNING
                session = self._registry.session(hello.session, connection.pid, connection.uid, state)
                if state is SessionState.LOST:
                    session.lost_reason = (
                        "phosd holds no GPU memory for this process: it and its keeper were restarted, or another "
                        "phosd restores the process, which was started with this one's PHOS_SOCKET."
                    )
                self._registry.sessions[hello.session] = session
        if session.uid == UNKNOWN_USER:
            with self._registry.lock:
                restore = self._registry.restores.get(session.session)
            if connection.uid != 0 and restore is not None and not restore.restored(connection.pid):
                raise NotPermitted(f"Process {connection.pid} is not the one that is being restored.")
            session.identity.uid = connection.uid
        if connection.uid not in (session.uid, 0):
            raise NotPermitted(
                f"Process {connection.pid} of user {connection.uid} named a session of user {session.uid}."
            )
        if session.is_connected and session.pid != connection.pid and session.alive():
            raise NotPermitted(f"Process {connection.pid} named the session of process {session.pid}.")
        self._registry.broker.belongs(session.session, session.uid)
        return session

    def _answer_detached(self, session: Session, connection: wire.Connection) -> wire_pb2.Welcome:
        welcome = wire_pb2.Welcome
        with self._registry.lock:
            restore = self._registry.restores.get(session.session)
        state = session.machine.state
        if restore is not None and state is SessionState.DETACHED:
            # It would ask again every other millisecond, which takes processors from who brings its driver's part back.
            if not restore.wait_ready(connection.pid, READY_SECONDS):
                return welcome(action=welcome.RETRY, retry_ms=1)
            session.machine.to(SessionState.RETURNING)
        elif state in (SessionState.RUNNING, SessionState.QUIESCED):
            # It was detached under an earlier phosd that was killed: nobody else brings its driver state back.
            toggle.revive(connection.pid)
            session.machine.adopt(SessionState.RETURNING)
        elif state is SessionState.LOST:
            return welcome(action=welcome.LOST, error=session.lost_reason)
        elif state is not SessionState.RETURNING:
            return welcome(action=welcome.RETRY, retry_ms=2)
        elif pause := session.attach_failures.pause():
            return welcome(action=welcome.RETRY, retry_ms=1 + int(1000 * pause))
        return welcome(action=welcome.ATTACH)

    def _attach(self, session: Session) -> None:
        with self._registry.lock:
            restore = self._registry.restores.get(session.session)
        try:
            began = restore.timeline.now() if restore else 0.0
            if restore:
                restore.attaching(session.pid)
            session.attach()
            session.machine.adopt(SessionState.RUNNING)  # unless it was quick, and has ended
            session.attach_failures = AttachFailures()
            if restore:
                restore.timeline.add("attach", began)
                restore.attached(session.pid)
                with self._registry.lock:
                    if self._registry.restores.get(session.session) is restore:
                        del self._registry.restores[session.session]
        except Exception as error:
            if restore:
                restore.not_attached(session.pid)
            if session.machine.state is SessionState.ENDED:
                return  # said by whoever noticed
            if not isinstance(error, PhosError):
                log.exception("Process %d could not be attached", session.pid)
            if restore:
                log.error("%s", error)
                restore.fail(str(error))
            elif session.machine.state is not SessionState.RUNNING:  # else it has connected again since, and computes
                self._not_attached(session, error)

    def _not_attached(self, session: Session, error: Exception) -> None:
        """It is tried again, after a pause, for as long as the reason may pass: phosd has all of its memory."""
        new = session.attach_failures.add(error)
        if isinstance(error, MemoryLost) or session.attach_failures.hopeless:
            log.error("%s", error)
            session.lose(str(error))
            return
        if new:
            log.warning("%s. It is tried again, until it succeeds.", session.attach_failures.last)
        session.machine.adopt(SessionState.RETURNING)
        session.hang_up()  # it asks again

    def _prepare(self, ordinals: Sequence[int]) -> None:
        """Make the context and pin the ring before anybody waits for them."""
        for ordinal in ordinals:
            with self._registry.lock:
                if ordinal in self._registry.prepared:
                    continue
                self._registry.prepared.add(ordinal)
            try:
                self._registry.copier.prepare(ordinal)
            except PhosError as error:
                log.warning("GPU %d could not be prepared: %s", ordinal, error)

    def _expire_later(self, session: Session) -> None:
        known = (session, session.connections, procfs.is_stopped(session.pid))
        timer = threading.Timer(RECONNECT_SECONDS, self._expire, known)
        timer.daemon = True
        timer.start()

    def _may_come_back(self, session: Session) -> bool:
        """One that is away is gone only with its program; a checkpoint or restore of it goes on whatever it does."""
        with self._registry.lock:
            if session.session in self._registry.restores:
                return True
        names = procfs.thread_names(session.pid)  # without any nobody knows, or it has ended, which others notice
        return self._registry.claims.has([session.pid]) or not names or CONTROL_THREAD in names

    def _expire(self, session: Session, connections: int, was_stopped: bool) -> None:
        if session.connections != connections or session.is_connected:
            return  # it came back meanwhile
        state = session.machine.state
        if state not in CONNECTED | AWAY:
            return
        if was_stopped or procfs.is_stopped(session.pid) or (state in AWAY and self._may_come_back(session)):
            self._expire_later(session)  # it cannot come back now, or may just have been continued
            return
        log.info("Process %d has replaced its program, or closed its connection for good.", session.pid)
        self._registry.forget(session, connections)


def _capability(gpus: Sequence[driver.Gpu]) -> int:
    """Which machine code the driver takes from modules; GPUs of one machine are mostly of one kind."""
    major, minor = gpus[0].compute_capability if gpus else (0, 0)
    return 10 * major + minor
