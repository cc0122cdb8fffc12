"""Questions of ``phos-gpu`` and the launcher: what phosd holds, how far a job is; and the request to end."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence

from phos.gen import wire_pb2
from phos.gpu_engine import driver
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.jobs import SETTLED
from phos.gpu_engine.daemon.permissions import sees_all
from phos.gpu_engine.daemon.pools import Pools
from phos.gpu_engine.daemon.registry import Registry
from phos.gpu_engine.daemon.remote_server import RemoteServer
from phos.gpu_engine.errors import PhosError

log = logging.getLogger(__name__)

_LARGEST = (1 << 64) - 1


class ClientServer:
    """Serves the connections of command-line programs. Each runs in a thread of its own."""

    def __init__(
        self,
        registry: Registry,
        gpus: Sequence[driver.Gpu],
        pools: Pools,
        remote: RemoteServer | None = None,
    ) -> None:
        self._registry = registry
        self._gpus = gpus
        self._pools = pools
        self._remote = remote
        self._started = time.time()

    def serve(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """Until the client hangs up."""
        try:
            while True:
                kind = envelope.WhichOneof("body")
                if kind == "status_request":
                    self._answer_status(connection, envelope.id)
                elif kind in ("pin_image", "unpin_image"):
                    self._registry.pinned.serve(connection, envelope, descriptors)
                elif kind == "wait_image" and descriptors:
                    self._wait_image(connection, envelope, descriptors[0])
                elif kind == "interrupt":
                    self._interrupt(connection, envelope)
                elif kind == "shutdown" and not sees_all(connection.uid):
                    connection.done(envelope.id, error=f"User {connection.uid} may not stop this phosd.")
                elif kind == "shutdown":
                    connection.reply(envelope.id, done=wire_pb2.Done())
                    os.kill(os.getpid(), signal.SIGTERM)
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

    def _interrupt(self, connection: wire.Connection, envelope: wire_pb2.Envelope) -> None:
        try:
            self._registry.runs.interrupt(connection, envelope.interrupt.criu)
        except PhosError as error:
            connection.done(envelope.id, error=error)
        else:
            connection.done(envelope.id)

    def _wait_image(self, connection: wire.Connection, envelope: wire_pb2.Envelope, directory: int) -> None:
        request = envelope.wait_image
        deadline = time.monotonic() + request.timeout_s
        kind = "restore" if request.restore else "dump"
        while True:
            state = self._registry.jobs.state(directory, kind, connection.uid, request.run)
            state.final = state.state in SETTLED
            if not state.final and time.monotonic() > deadline:
                state.final = state.timed_out = True
                state.error = state.error or f"not complete after {request.timeout_s:.0f} s"
            if state.final or request.progress:
                connection.send(wire_pb2.Envelope(id=envelope.id, image_state=state))
            if state.final:
                return
            time.sleep(0.1 if request.progress else 0.005)

    def _answer_status(self, connection: wire.Connection, number: int) -> None:
        """Beside the packet: with some dozens of jobs it would not fit."""
        file = wire.file_of("phos-status", self._status(connection.uid).SerializeToString())
        try:
            connection.reply(number, [file], status=wire_pb2.Status())
        finally:
            os.close(file)

    def _status(self, viewer: int) -> wire_pb2.Status:
        status = wire_pb2.Status(
            pid=os.getpid(),
            version=self._registry.versions.phos,
            mode=self._registry.versions.device_kind,
            driver_version=self._registry.versions.cuda,
            since=self._started,
            ring_bytes=self._registry.copier.ring_bytes,
            pin_limit=self._registry.pinned.limit,
            listen=self._remote.listening if self._remote else "",
        )
        with self._registry.lock:
            sessions = list(self._registry.sessions.values())
        held: dict[int, int] = {}
        for session in sessions:
            blocks = session.own_blocks()
            for block in blocks:
                held[block.device] = held.get(block.device, 0) + block.size
            if not (sees_all(viewer) or viewer == session.uid):
                continue  # what runs where, and from which images, is its user's business
            kernels, kernels_pending = self._registry.speculator.progress(session.session)
            status.processes.append(
                wire_pb2.Status.Process(
                    pid=session.pid,
                    executable=session.executable,
                    state=session.machine.state.value,
                    session=session.session,
                    blocks=len(blocks),
                    bytes=_clamped(sum(block.size for block in blocks)),
                    uncarried=[
                        wire_pb2.Uncarried(kind=u.kind, count=u.count, bytes=u.bytes)
                        for u in list(session.uncarried.values())  # its own thread adds some
                    ],
                    modules=len(session.modules),
                    uid=session.uid,
                    since=session.machine.since,
                    devices=session.gpu_ordinals(),
                    kernels=kernels,
                    kernels_pending=kernels_pending,
                )
            )
        for block in self._registry.broker.left_behind():
            held[block.device] = held.get(block.device, 0) + block.size
        for gpu in self._gpus:
            status.gpus.append(
                wire_pb2.Status.Gpu(
                    ordinal=gpu.ordinal,
                    uuid=gpu.uuid,
                    name=gpu.name,
                    total=gpu.total_memory,
                    free=self._free(gpu.ordinal),
                    held=_clamped(held.get(gpu.ordinal, 0)),
                )
            )
        status.jobs.extend(self._registry.jobs.report(viewer))
        if sees_all(viewer):
            status.pinned.extend(self._registry.pinned.report())
            status.pools.extend(self._pools.report())
        return status

    def _free(self, ordinal: int) -> int:
        """Bytes that are free on a GPU; 0 if nobody knows: it may have no room for a context of phosd's, or be lost."""
        with self._registry.lock:
            prepared = ordinal in self._registry.prepared
        try:
            return driver.context(ordinal).free_memory() if prepared else 0
        except PhosError as error:
            log.warning("GPU %d does not say how much of its memory is free: %s", ordinal, error)
            return 0


def _clamped(number: int) -> int:
    """What a packet can carry of it: nobody's numbers keep everybody from an answer."""
    return max(0, min(number, _LARGEST))
