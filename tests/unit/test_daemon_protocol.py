"""Packets of the control protocol that make no sense, or hardly fit."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.errors import PhosError, ProtocolError
from tests.unit.session_fake import NUMBER, Frontend, open_descriptors


@pytest.fixture
def light_collections() -> Iterator[None]:
    """Each example counts descriptors twice, and collects first; what earlier tests left alive is walked but once."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("light_collections")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(min_size=1, max_size=300), descriptors=st.integers(0, 3))
def test_garbage_is_refused_and_leaks_nothing(payload: bytes, descriptors: int) -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(theirs, [payload], [null] * descriptors)
    try:
        packet = wire.receive(ours)
        assert packet is not None
        assert len(packet[1]) == descriptors
        wire.close_all(packet[1])
    except ProtocolError:
        pass  # it says so, and has closed the descriptors: counted below
    for descriptor in (null, ours.detach(), theirs.detach()):
        os.close(descriptor)
    assert open_descriptors() == before


def test_no_other_program_gets_what_was_received() -> None:
    """phosd becomes another one when its GPU context is lost; nobody would ever let go of the memory behind them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull) as null:
        wire.send(theirs, wire_pb2.Envelope(id=1, done=wire_pb2.Done()), [null.fileno()] * 3)
        packet = wire.receive(ours)
    assert packet is not None
    assert [os.get_inheritable(descriptor) for descriptor in packet[1]] == [False] * 3
    wire.close_all(packet[1])


BODIES = [field.name for field in wire_pb2.Envelope.DESCRIPTOR.oneofs[0].fields]


@pytest.mark.usefixtures("light_collections")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packets=st.lists(st.tuples(st.sampled_from(BODIES), st.binary(max_size=24), st.integers(0, 2)), max_size=12))
def test_any_packet_in_any_order_leaks_nothing(
    tmp_path_factory: pytest.TempPathFactory, packets: list[tuple[str, bytes, int]]
) -> None:
    frontend = Frontend(tmp_path_factory.mktemp("holds"))
    null = os.open(os.devnull, os.O_RDONLY)
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frontend.session.connected(wire.Connection(ours), wire_pb2.Hello(session=NUMBER), {})  # type: ignore[arg-type]
    for body, raw, count in packets:
        envelope = wire_pb2.Envelope(id=1)
        try:
            getattr(envelope, body).ParseFromString(raw)
        except Exception:
            getattr(envelope, body).SetInParent()
        try:
            frontend.session.handle(envelope, [os.dup(null) for _ in range(count)])
        except PhosError:
            pass
    frontend.broker.drop_session(NUMBER)
    ours.close()
    theirs.close()
    assert open_descriptors() == before
    os.close(null)


def test_packet_that_is_too_long_or_brings_too_many_descriptors_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = open_descriptors()
    theirs.send(b"x" * (wire.PACKET_LIMIT + 1))
    with pytest.raises(ProtocolError, match="cut off"):
        wire.receive(ours)
    socket.send_fds(theirs, [wire_pb2.Envelope(id=1).SerializeToString()], [0] * 250)
    with pytest.raises(ProtocolError, match="cut off"):
        wire.receive(ours)
    assert open_descriptors() == before
    with pytest.raises(ProtocolError, match="does not fit"):
        wire.send(theirs, wire_pb2.Envelope(done=wire_pb2.Done(error="x" * wire.PACKET_LIMIT)))
    ours.close()
    theirs.close()


def test_sentences_fit_a_packet_whatever_a_file_is_called() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = wire.Connection(ours)
    connection.done(1, error=b"/tmp/\xff".decode(errors="surrogateescape") + "x" * 100_000, warnings=["w" * 9000] * 500)
    packet = wire.receive(theirs)
    assert packet is not None
    assert packet[0].done.error.startswith("/tmp/?x")
    assert packet[0].done.warnings[-1] == "... and 450 more warnings."
    connection.done(2, error="漢" * 9000, warnings=["字" * 600] * 60)
    packet = wire.receive(theirs)
    assert packet is not None
    assert set(packet[0].done.error) == {"漢"}
    assert set(packet[0].done.warnings[49]) == {"字"}
    connection.limit(receive=0.05)
    with pytest.raises(BlockingIOError):
        connection.receive()
    ours.close()
    theirs.close()
