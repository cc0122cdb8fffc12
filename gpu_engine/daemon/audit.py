"""phosd's part of an audit: it knows what device memory looks like before each call and after it.

A frontend that is audited has a connection of its own for this, and one call under way at a time (frontend/audit.c).
``phos-gpu audit`` has another, over which the audit is opened, lasts, and is reported.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from phos.gen import wire_pb2
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.content_hash import SPAN_BYTES, ContentHasher, chunk_count
from phos.gpu_engine.daemon import kernels, wire
from phos.gpu_engine.daemon.registry import Registry
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.errors import DriverError, NotPermitted, PhosError, ProtocolError
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.spec.audit import (
    PLACES_NAMED,
    Audit,
    BlockHashes,
    Comparison,
    Launch,
    Place,
    Range,
    compare,
    source_of,
)

log = logging.getLogger(__name__)

DESCRIBE_SECONDS = 240.0
"""How long the audited program waits for access descriptors: a poor one would be a poor audit."""

CATCH_UP_SECONDS = 5.0
"""How long to wait for what the frontend has sent over its other connection."""

NAME_LIMIT = 2048
ARGUMENTS_LIMIT = 4096
RANGES_LIMIT = 1 << 20


@dataclass
class _Call:
    """The call that a frontend is about to make, or has made."""

    audit: Audit
    session: Session
    launch: Launch
    before: dict[int, list[bytes]]
    result: Comparison | None = None


@dataclass
class _Peer:
    """One audited process's connection."""

    ranges: list[Range] = field(default_factory=list)
    call: _Call | None = None
    sessions: set[bytes] = field(default_factory=set)


class AuditServer:
    """Serves the connections of audits, each in a thread of its own."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()  # guards _audits
        self._audits: dict[str, Audit] = {}
        self._hashing = threading.Lock()  # guards the three below
        self._hasher = ContentHasher(keep=True)
        self._mapped: dict[bytes, MappedBlocks] = {}
        self._blocks: dict[BlockKey, Block] = {}  # those that were mapped; their descriptors are closed
        registry.broker.removed = self._block_removed

    def serve(self, connection: wire.Connection, envelope: wire_pb2.Envelope, descriptors: list[int]) -> None:
        """Until the peer hangs up."""
        wire.close_all(descriptors)
        if envelope.WhichOneof("body") == "audit_open":
            self._serve_command(connection, envelope)
        else:
            self._serve_process(connection, envelope)

    # phos-gpu audit.

    def _serve_command(self, connection: wire.Connection, envelope: wire_pb2.Envelope) -> None:
        asked = envelope.audit_open
        audit = Audit(asked.first, asked.every, SPAN_BYTES, asked.patience)
        with self._lock:
            if not asked.audit or asked.audit in self._audits:
                connection.done(envelope.id, error=f"There is an audit '{asked.audit}' already.")
                return
            self._audits[asked.audit] = audit
        try:
            connection.done(envelope.id)
            while (packet := connection.receive()) is not None:
                wire.close_all(packet[1])
                if packet[0].WhichOneof("body") != "audit_report":
                    raise ProtocolError("An audit is opened and reported, and nothing else.")
                file = wire.file_of("phos-audit", json.dumps(audit.report()).encode())
                try:
                    connection.send(wire_pb2.Envelope(id=packet[0].id, done=wire_pb2.Done()), [file])
                finally:
                    os.close(file)
        finally:
            with self._lock:
                del self._audits[asked.audit]

    # Audited processes.

    def _serve_process(self, connection: wire.Connection, envelope: wire_pb2.Envelope) -> None:
        peer = _Peer()
        steps: dict[str, Callable[[wire.Connection, wire_pb2.Envelope, _Peer], None]] = {
            "audit_describe": self._describe,
            "audit_ranges": self._ranges,
            "audit_begin": self._begin,
            "audit_end": self._end,
            "audit_wrong": self._wrong,
        }
        try:
            while True:
                step = steps.get(envelope.WhichOneof("body") or "")
                if step is None:
                    raise ProtocolError(f"Process {connection.pid}, which is audited, sent an unexpected packet.")
                try:
                    step(connection, envelope, peer)
                except DriverError as error:
                    log.error("Process %d cannot be audited: %s", connection.pid, error)
                    connection.done(envelope.id, error=error)
                packet = connection.receive()
                if packet is None:
                    return
                envelope, descriptors = packet
                wire.close_all(descriptors)
        finally:
            for session in peer.sessions:
                self._forget(session)

    def _session(self, connection: wire.Connection, number: bytes) -> Session:
        with self._registry.lock:
            session = self._registry.sessions.get(number)
        if session is None:
            raise PhosError(f"Process {connection.pid}, which is audited, is not known.")
        if connection.uid not in (session.uid, 0):
            raise NotPermitted(f"Process {connection.pid} named a session of user {session.uid} in an audit.")
        return session

    def _describe(self, connection: wire.Connection, envelope: wire_pb2.Envelope, peer: _Peer) -> None:
        asked = envelope.audit_describe
        session = self._session(connection, asked.session)
        _wait(lambda: session.kernels_told >= asked.kernels)
        with self._lock:
            audit = self._audits.get(asked.audit)
        began = time.monotonic()
        patience = DESCRIBE_SECONDS if audit is None else audit.patience(DESCRIBE_SECONDS)
        table = kernels.table_file(self._registry.speculator, asked.session, patience)
        if audit is not None:
            audit.waited(time.monotonic() - began)
        try:
            connection.send(wire_pb2.Envelope(id=envelope.id, access_table=wire_pb2.AccessTable()), [table])
        finally:
            os.close(table)

    def _ranges(self, connection: wire.Connection, envelope: wire_pb2.Envelope, peer: _Peer) -> None:
        if len(peer.ranges) + len(envelope.audit_ranges.range) > RANGES_LIMIT:
            raise ProtocolError(f"Process {connection.pid} predicts more than {RANGES_LIMIT} ranges for one call.")
        peer.ranges += [Range(r.block, r.offset, r.size) for r in envelope.audit_ranges.range]

    def _begin(self, connection: wire.Connection, envelope: wire_pb2.Envelope, peer: _Peer) -> None:
        asked = envelope.audit_begin
        with self._lock:
            audit = self._audits.get(asked.audit)
        ready = wire_pb2.AuditReady(over=audit is None)
        peer.call = None
        if audit is not None:
            session = self._session(connection, asked.session)
            peer.sessions.add(asked.session)
            launch = Launch(
                kernel=asked.kernel[:NAME_LIMIT],
                module=asked.module,
                source=source_of(asked.kind, asked.source, asked.library),
                library=asked.library[:NAME_LIMIT],
                anything=asked.anything,
                predicted=(*peer.ranges, *(Range(r.block, r.offset, r.size) for r in asked.range)),
                arguments=asked.arguments[:ARGUMENTS_LIMIT],
            )
            wanted = audit.wanted(launch)
            if wanted and asked.skipped:
                audit.skipped(launch, asked.skipped[:NAME_LIMIT])
            elif wanted:
                _wait(lambda: asked.newest_block in session.block_keys())
                try:
                    peer.call = _Call(audit, session, launch, self._hashes(session))
                except DriverError:
                    audit.skipped(launch, "phosd could not look at the memory before it")
                    raise
                ready.wanted = True
        peer.ranges = []
        connection.reply(envelope.id, audit_ready=ready)

    def _end(self, connection: wire.Connection, envelope: wire_pb2.Envelope, peer: _Peer) -> None:
        call = peer.call
        if call is None:
            raise ProtocolError(f"Process {connection.pid} ended a call that it did not begin.")
        compared = wire_pb2.AuditCompared()
        if envelope.audit_end.skipped:
            call.audit.skipped(call.launch, envelope.audit_end.skipped[:NAME_LIMIT])
            peer.call = None
        else:
            after: BlockHashes = self._hashes(call.session)
            call.result = compare(call.launch, call.before, after, call.audit.chunk_bytes)
            for part in call.result.wrong[:PLACES_NAMED]:
                compared.wrong.add(block=part.block, offset=part.offset, size=part.size)
            if not compared.wrong:
                call.audit.add(call.launch, call.result)
                peer.call = None
        connection.reply(envelope.id, audit_compared=compared)

    def _wrong(self, connection: wire.Connection, envelope: wire_pb2.Envelope, peer: _Peer) -> None:
        call = peer.call
        peer.call = None
        if call is None or call.result is None:
            raise ProtocolError(f"Process {connection.pid} named places that nobody asked for.")
        places = [
            Place(p.address, p.allocation, p.size, p.entry_point[:NAME_LIMIT]) for p in envelope.audit_wrong.place
        ]
        known = self._registry.speculator.descriptors(call.session.session)
        descriptor = known.get((call.launch.module, call.launch.kernel))
        call.audit.add(call.launch, call.result, places[:PLACES_NAMED], descriptor, connection.pid)
        connection.done(envelope.id)

    # Memory.

    def _hashes(self, session: Session) -> dict[int, list[bytes]]:
        """The hashes of all chunks of all blocks that a process has, by its own numbers.

        Other threads of the process may free memory meanwhile: what is gone before it was looked at is left out.
        """
        numbers = session.block_keys()
        with self._hashing:
            mapped = self._mapped.setdefault(session.session, MappedBlocks())
            fresh = [key for key in numbers.values() if key not in mapped]
        borrowed: list[Block] = []
        try:
            for key in fresh:
                with suppress(KeyError):
                    borrowed += session.borrow([key])
            with self._hashing:
                mapped.add(borrowed)
                self._blocks.update((block.key, block) for block in borrowed)
                for key in fresh:
                    if self._registry.broker.get(key) is None:  # freed since: nobody else unmaps it
                        mapped.remove(key)
                        self._blocks.pop(key, None)
                known = {number: key for number, key in numbers.items() if key in mapped and key in self._blocks}
                blocks = [self._blocks[key] for key in dict.fromkeys(known.values())]
                flat = self._hasher.hash(blocks, mapped, SPAN_BYTES) if blocks else []
        finally:
            wire.close_all(block.descriptor for block in borrowed)
        found: dict[BlockKey, list[bytes]] = {}
        start = 0
        for block in blocks:
            count = chunk_count(block.size, SPAN_BYTES)
            found[block.key] = flat[start : start + count]
            start += count
        return {number: found[key] for number, key in known.items()}

    def _block_removed(self, key: BlockKey) -> None:
        """Its memory must come free at once: a mapping of ours would keep it."""
        if not self._mapped:
            return
        with self._hashing:
            self._blocks.pop(key, None)
            for mapped in self._mapped.values():
                mapped.remove(key)

    def _forget(self, session: bytes) -> None:
        with self._hashing:
            mapped = self._mapped.pop(session, None)
            if mapped is not None:
                mapped.close()
            if not self._mapped:
                self._blocks.clear()
                self._hasher.release()


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CATCH_UP_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)
