"""Images over TCP: nothing that a stranger sends, or one who knows the secret, does any harm."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phos.gen import remote_pb2
from phos.gpu_engine.daemon import remote_server
from phos.gpu_engine.daemon.pinned_images import PinnedImages
from phos.gpu_engine.daemon.remote_server import RemoteServer
from phos.gpu_engine.daemon.remote_settings import RemoteSettings
from phos.images.remote import Link
from phos.images.remote_wire import DATA_LIMIT, REQUEST_LIMIT, greet, receive_message
from tests.unit.image_sets import write_small
from tests.unit.remote_peers import KEY, Host, pair


class _Fuzzed:
    """A server without a listener, and a shared image."""

    def __init__(self, folder: Path) -> None:
        (folder / "image").mkdir(parents=True)
        write_small(folder / "image")
        self.server = RemoteServer(RemoteSettings("127.0.0.1", 1, KEY, (folder,)), PinnedImages(0))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> _Fuzzed:
    return _Fuzzed(tmp_path_factory.mktemp("fuzzed"))


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def swallow(ours: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    ours.settimeout(20)
    heard = b""
    with suppress(ConnectionError):
        while piece := ours.recv(1 << 16):
            heard += piece
    return heard


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(framed),
        st.builds(
            lambda v, n, p: framed(remote_pb2.Proof(version=v, nonce=n, proof=p).SerializeToString()),
            st.integers(0, 3),
            st.binary(max_size=40),
            st.binary(max_size=40),
        ),
    )
)
def test_a_stranger_hears_a_challenge_and_no_more(fuzzed: _Fuzzed, said: bytes) -> None:
    with pair(fuzzed.server.serve) as (ours, raised):
        ours.sendall(said)
        ours.shutdown(socket.SHUT_WR)
        heard = swallow(ours)
    (size,) = struct.unpack_from("<I", heard)
    rest = heard[4 + size :]
    if rest:
        accepted = remote_pb2.Accepted.FromString(rest[4:])
        assert accepted.error
        assert not accepted.proof
    assert raised
    assert all(isinstance(error, OSError) for error in raised)


read_requests = st.builds(
    lambda f, o, n: remote_pb2.Request(read=remote_pb2.Read(file=f, offset=o, length=n)),
    st.one_of(
        st.sampled_from(["core-100.img", "phos-data-0.raw", "phos-commit.img", "phos-order.img"]), st.text(max_size=20)
    ),
    st.one_of(st.integers(0, 9000), st.integers(0, 2**64 - 1)),
    st.one_of(st.integers(0, 9000), st.integers(0, 2**64 - 1)),
)
open_requests = st.builds(
    lambda name: remote_pb2.Request(open=remote_pb2.Open(image=name)),
    st.one_of(st.sampled_from(["image", "image/", "./image"]), st.text(max_size=30)),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            read_requests.map(lambda m: framed(m.SerializeToString())),
            open_requests.map(lambda m: framed(m.SerializeToString())),
            st.binary(max_size=60).map(framed),
            st.integers(REQUEST_LIMIT + 1, 2**32 - 1).map(lambda n: struct.pack("<I", n)),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_whatever_an_acquaintance_asks_is_answered_or_ends_the_connection(
    fuzzed: _Fuzzed, requests: list[bytes], opens: bool
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    first = [framed(remote_pb2.Request(open=remote_pb2.Open(image="image")).SerializeToString())] if opens else []
    with pair(fuzzed.server.serve) as (ours, raised):
        greet(ours, KEY)
        ours.sendall(b"".join(first + requests))
        ours.shutdown(socket.SHUT_WR)
        heard = swallow(ours)
    at = 0
    while at + 4 <= len(heard):  # every answer is whole
        (size,) = struct.unpack_from("<I", heard, at)
        reply = remote_pb2.Reply.FromString(heard[at + 4 : at + 4 + size])
        assert reply.length <= DATA_LIMIT
        at += 4 + size + reply.length
    assert at == len(heard)
    assert all(isinstance(error, OSError) for error in raised)
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_strangers_are_sent_away(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_server, "STRANGERS", 2)
    known = Link(host.address(), KEY)
    waiting = [socket.create_connection(("127.0.0.1", host.port)) for _ in range(2)]
    for connection in waiting:
        receive_message(connection, remote_pb2.Challenge, 4096)
    with pytest.raises(OSError):
        Link(host.address(), KEY)
    known.read_into("core-100.img", 0, memoryview(bytearray(1)))  # who is known goes on
    for connection in waiting:
        connection.close()
    deadline = time.monotonic() + 10
    while host.connections() > 1:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    Link(host.address(), KEY).close()
    known.close()
