"""Pools: what phos-gpu asks for, and CRIU's plugin while it parks a process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.pools import Entry, Pool, Pools
from phos.gpu_engine.daemon.registry import Registry, say_failure
from phos.gpu_engine.daemon.serve_restore import RestoreServer
from phos.gpu_engine.daemon.session import UNKNOWN_USER, Session
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import NotPermitted, PhosError, ProtocolError, RestoreFailed
from phos.gpu_engine.restore.base import RestoredProcess
from phos.gpu_engine.restore.gpu_moves import read_moves
from phos.gpu_engine.restore.pool import CRIU_FAILED, PooledRestore
from phos.gpu_engine.restore.settings import LazySettings
from phos.images.errors import ImageError

log = logging.getLogger(__name__)

ATTACH_SECONDS = 120.0
"""How long a process that was let go may take to compute; one that is to have all of its memory first, without any of
that coming."""


def _comes_to_run(job: PooledRestore, *, eager: bool) -> bool:
    """Wait until it computes, or has failed; whether it has not just stood still for ATTACH_SECONDS."""
    done = -1
    while not job.running.wait(ATTACH_SECONDS):
        if not eager or done == (done := job.progress.done):
            return False
    return True


def in_its_place(pool: Pool) -> None:
    """See to it that CRIU, which is told the image's path, finds the image that phosd has open.

    Raises:
        RestoreFailed: another directory has that path now.
    """
    try:
        there = os.path.samestat(os.fstat(pool.directory), os.stat(pool.path))
    except OSError:
        there = False
    if not there:
        raise RestoreFailed(
            f"The image of pool {pool.name} is no longer at {pool.path}. Put it back, or drop the pool and create "
            "one from where it is."
        )


class PoolServer:
    """Serves connections about pools. Each runs in a thread of its own."""

    def __init__(self, registry: Registry, restores: RestoreServer) -> None:
        self._registry = registry
        self._restores = restores
        self.pools = Pools(
            registry.path.parent,
            registry.path,
            self._make,
            self._park,
            self._let_go,
            failed=registry.garbage.look_soon,
            over=lambda pool: registry.pinned.leave(id(pool)),
        )

    def revive(self) -> None:
        """Pools that a former phosd had."""
        for wanted in self.pools.remembered():
            try:
                self._revive(wanted["name"], wanted["image"], int(wanted["size"]), wanted)
            except (KeyError, TypeError, ValueError, PhosError) as error:
                log.warning("A pool of a former phosd is not filled again: %s", error)

    def _revive(self, name: str, image: str, size: int, wanted: Mapping[str, Any]) -> None:
        directory, gone = -1, ""
        try:
            directory = os.open(image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:  # a disk that is mounted later, perhaps
            gone = f"Its image at {image} is gone ({error.strerror}). Put it back and restart phosd, or drop the pool."
        try:
            config, gpus = (str(wanted.get(key, "")) for key in ("criu_config", "gpus"))
            self.pools.create(name, image, size, wanted["lazy"], directory, criu_config=config, gpus=gpus, failed=gone)
        except BaseException:
            if directory >= 0:
                os.close(directory)
            raise
        if gone:
            log.warning("Pool %s is not filled again: %s", name, gone)
        else:
            log.info("Pool %s is filled again.", name)

    # What phos-gpu asks for.

    def serve(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """One request."""
        kind = envelope.WhichOneof("body")
        try:
            if connection.uid not in (0, os.geteuid()):
                raise NotPermitted(f"User {connection.uid} may not restore here, and so not have pools.")
            if kind == "pool_create":
                self._create(envelope.pool_create, wire.only(descriptors))
                connection.done(envelope.id)
            elif kind == "pool_take":
                self._take(connection, envelope)
            elif kind == "pool_drop":
                self.pools.drop(self.pools.find(envelope.pool_drop.name))
                connection.done(envelope.id)
            else:
                raise ProtocolError(f"phosd does not take '{kind}' here.")
        except (PhosError, ImageError, OSError) as error:
            if kind == "pool_take":
                connection.reply(envelope.id, pool_taken=wire_pb2.PoolTaken(error=wire.sentence(error), final=True))
            else:
                connection.done(envelope.id, error=error)
        finally:
            wire.close_all(descriptors)

    def _create(self, request: wire_pb2.PoolCreate, directory: int) -> None:
        path = os.readlink(f"/proc/self/fd/{directory}")
        LazySettings.from_environment().changed(lazy=request.lazy)
        PooledRestore.check(
            directory, path, self._registry.copier, self._registry.cow.touched, read_moves(request.gpus)
        )
        kept = os.dup(directory)
        try:
            name = request.name or os.path.basename(path)
            config, gpus = request.criu_config, request.gpus
            self.pools.create(name, path, request.size, request.lazy, kept, criu_config=config, gpus=gpus)
        except PhosError:
            os.close(kept)
            raise

    def _take(self, connection: wire.Connection, envelope: wire_pb2.Envelope) -> None:
        pool = self.pools.find(envelope.pool_take.name)
        with self.pools.using(pool):
            self._take_from(pool, connection, envelope)

    def _take_from(self, pool: Pool, connection: wire.Connection, envelope: wire_pb2.Envelope) -> None:
        request = envelope.pool_take
        began = time.time()
        entry = self.pools.take(pool, request.wait_s, connection.hung_up)
        waited = time.time()
        job = entry.restore
        try:
            job.unchanged(pool.directory)
        except RestoreFailed as error:
            self.pools.put_back(pool, entry)
            self.pools.spoil(pool, f"{error} Drop the pool, and create one from an image that is there.")
            raise RestoreFailed(pool.error) from error
        except BaseException:
            self.pools.put_back(pool, entry)
            raise
        try:
            self._open(pool, entry, eager=request.eager)
        except BaseException as error:
            if job.state == "parked":
                self.pools.put_back(pool, entry)
            else:
                job.fail(str(error) or repr(error))
                self.pools.lost(pool, entry)
            raise
        said = wire_pb2.PoolTaken(pids=job.pids, began=began, bytes=job.progress.total)
        said.image, said.pool = procfs.readable(pool.path), procfs.readable(pool.name)
        said.waited = waited - began
        try:
            if not _comes_to_run(job, eager=request.eager):
                job.fail(f"It did not compute again within {ATTACH_SECONDS:.0f} s.")
            if job.error:
                raise RestoreFailed(job.error)
            said.attached = time.time() - began
            assert entry.warden is not None
            for number in job.sessions:  # only now: until it is taken it ends with phosd, and its memory may too
                self._registry.broker.entrust(number)
            entry.warden.taken()  # before its lifeline is closed: else it takes that for phosd's end
            entry.warden.close()
            self.pools.taken(pool, entry)
        except BaseException as error:
            job.fail(str(error) or repr(error))
            self.pools.lost(pool, entry)
            raise
        try:
            connection.reply(envelope.id, pool_taken=said)
            job.wait()
        finally:
            self.pools.arrived(pool)
        counts = job.window_counts()
        data = [phase.start + phase.seconds for phase in job.timeline.phases() if phase.name == "GPU data"]
        first = counts.get("first_launch_ns", 0)
        said.error = procfs.readable(job.error)
        said.first_kernel = max(0.0, first * 1e-9 - began) if first else 0.0
        said.last_byte = job.since + data[-1] - began if data else 0.0
        for name, value in counts.items():
            said.window[name] = value
        said.final = True
        connection.reply(envelope.id, pool_taken=said)
        self._learn(pool, job)

    def _learn(self, pool: Pool, job: PooledRestore) -> None:
        """What the kernels of one that was taken touch, the next need not find out."""
        for process in job.processes:
            with self._registry.lock:
                session = self._registry.sessions.get(process.session)
            if session is None:
                continue
            table, whole = session.access_table()
            if whole:
                pool.tables[process.message.session] = table

    def _open(self, pool: Pool, entry: Entry, *, eager: bool) -> None:
        job = entry.restore
        with self._registry.lock:
            for number in job.sessions:
                self._registry.loading[number] = job
                self._registry.sessions[number].machine.to(SessionState.DETACHED)

        def hold(blocks: list[Block]) -> None:
            self._registry.broker.hold(blocks, os.getpid())
            self._registry.lend_imports(job)

        try:
            job.open(hold, eager=eager)
        except BaseException:
            with self._registry.lock:
                for number in job.sessions:
                    self._registry.loading.pop(number, None)
                    if session := self._registry.sessions.get(number):
                        session.machine.adopt(SessionState.PARKED)
            raise
        self._registry.jobs.add(pool.directory, job, os.geteuid())
        try:
            threading.Thread(target=self._follow, args=(entry,), daemon=True, name="taken").start()
        except RuntimeError as error:
            job.fail(f"phosd cannot see its loading through: {error}.")
            self._follow(entry)
            raise RestoreFailed(job.error) from error

    def _follow(self, entry: Entry) -> None:
        entry.restore.watch_to_the_end()
        self._restores.settle(entry.restore)
        self.pools.forget(entry)

    # Parking.

    def _make(self, pool: Pool) -> PooledRestore:
        in_its_place(pool)
        if not pool.held:
            pool.held = True
            self._hold_image(pool)
        settings = LazySettings.from_environment().changed(lazy=pool.lazy)
        registry = self._registry
        job = PooledRestore(pool.directory, pool.path, registry.copier, settings, registry.cow.touched)
        job.tables, job.gpu_moves = pool.tables, read_moves(pool.gpus)
        return job

    def _hold_image(self, pool: Pool) -> None:
        """What is pinned where it lies takes no memory, and is copied faster than files are read and checked."""
        pinned = self._registry.pinned
        try:
            pinned.hold(pool.directory, id(pool), pool.name)
        except ImageError as error:
            self.pools.spoil(pool, str(error))
            raise
        except PhosError as error:
            log.info("The image of pool %s is not pinned: %s", pool.name, error)
        if pool.dropped or pool.failed:  # before there was anything to let go of
            pinned.leave(id(pool))

    def _park(self, entry: Entry) -> None:
        entry.restore.park(lambda process, blocks: self._register(entry.restore, process))

    def _register(self, job: PooledRestore, process: RestoredProcess) -> Session:
        session = self._registry.session(process.session, 0, UNKNOWN_USER, SessionState.PARKED)
        session.restored_from(process.message, process.imports)
        if table := job.tables.get(process.message.session):
            session.knows(table)
        session.access_table()  # looked through now, and not when it is taken
        with self._registry.lock:
            self._registry.sessions[process.session] = session
            self._registry.restores[process.session] = job
        return session

    def _let_go(self, entry: Entry) -> None:
        for number in entry.restore.sessions:
            with self._registry.lock:
                session = self._registry.sessions.get(number)
            if session is not None:
                self._registry.forget(session)

    def serve_criu(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """CRIU's plugin, from its first packet until CRIU has ended."""
        entry = self.pools.entry(envelope.restore_begin.pool)
        try:
            if entry is None or connection.uid not in (0, os.geteuid()):
                raise RestoreFailed("phosd parks no such process (PHOS_POOL is for phosd's own use).")
            entry.restore.unchanged(wire.only(descriptors))  # CRIU was told a name, and phosd has it open
        except (PhosError, OSError) as error:
            connection.done(envelope.id, error=error)
            return
        finally:
            wire.close_all(descriptors)
        connection.done(envelope.id)
        try:
            self._serve_parking(connection, entry)
        finally:
            entry.restore.let_go()

    def _serve_parking(self, connection: wire.Connection, entry: Entry) -> None:
        while (packet := connection.receive()) is not None:
            number, kind = packet[0].id, packet[0].WhichOneof("body")
            wire.close_all(packet[1])
            done = wire_pb2.Done(park=True)
            try:
                if kind == "task_restored":
                    request = packet[0].task_restored
                    if thread := self._adopt(entry, procfs.outer_pid(connection.pid, request.pid)):
                        done.alone.add(pid=request.pid, thread=thread)
                elif kind == "task_runs":
                    entry.restore.bring_back([procfs.outer_pid(connection.pid, p) for p in packet[0].task_runs.pids])
                elif kind == "restore_end" and packet[0].restore_end.result:
                    entry.restore.fail(CRIU_FAILED)
            except (PhosError, OSError) as error:
                say_failure(f"A process of {entry.restore.path} cannot be parked", error)
                entry.restore.fail(str(error))
                done.error = wire.sentence(error)
            with suppress(OSError):
                connection.send(wire_pb2.Envelope(id=number, done=done))

    def _adopt(self, entry: Entry, pid: int) -> int:
        if not pid:
            raise RestoreFailed("CRIU's process is not to be found.")
        thread = entry.restore.adopt(pid)
        for process in entry.restore.processes:
            if process.pid == procfs.inner_pid(pid):
                with self._registry.lock:
                    session = self._registry.sessions.get(process.session)
                if session is not None:
                    session.identity.pid = pid
        return thread

    def names_of(self, pid: int, session: bytes) -> dict[bytes, bytes]:
        """What a process of a pool is to call its image's sessions from now on."""
        return self.pools.names_of(pid, session)
