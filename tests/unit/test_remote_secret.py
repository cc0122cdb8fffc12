"""Images over TCP: both ends prove that they know the secret; where it is kept, settings and addresses."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import pytest

from phos.gen import remote_pb2
from phos.gpu_engine.daemon.remote_settings import RemoteSettings
from phos.gpu_engine.errors import UsageError
from phos.images import remote_wire
from phos.images.errors import ImageError
from phos.images.remote_wire import (
    Address,
    WireError,
    challenge,
    greet,
    proof,
    read_key,
    receive_message,
    send_message,
)
from tests.unit.remote_peers import KEY, pair


def test_both_have_to_know_the_secret() -> None:
    with pair(lambda theirs: challenge(theirs, KEY)) as (ours, raised):
        greet(ours, KEY)
    assert raised == []
    with (
        pair(lambda theirs: challenge(theirs, KEY)) as (ours, raised),
        pytest.raises(WireError, match="not the shared"),
    ):
        greet(ours, KEY[:-1] + b"x")
    assert "not the shared secret" in str(raised[0])

    def liar(theirs: socket.socket) -> None:
        """Accepts everybody."""
        send_message(theirs, remote_pb2.Challenge(magic="phos-image", version=1, nonce=bytes(32)))
        said = receive_message(theirs, remote_pb2.Proof, 4096)
        assert said.proof == proof(KEY, "client", bytes(32), said.nonce)
        send_message(theirs, remote_pb2.Accepted(proof=said.proof))  # what it heard is not what it has to say

    with pair(liar) as (ours, raised), pytest.raises(WireError, match="it does not know the shared secret"):
        greet(ours, KEY)
    assert raised == []


def test_a_proof_cannot_be_used_twice() -> None:
    heard: list[remote_pb2.Proof] = []

    def first(theirs: socket.socket) -> None:
        send_message(theirs, remote_pb2.Challenge(magic="phos-image", version=1, nonce=bytes(32)))
        heard.append(receive_message(theirs, remote_pb2.Proof, 4096))

    with pair(first) as (ours, _), suppress(OSError):
        greet(ours, KEY)
    with pair(lambda theirs: challenge(theirs, KEY)) as (ours, raised):
        receive_message(ours, remote_pb2.Challenge, 4096)
        send_message(ours, heard[0])
        assert receive_message(ours, remote_pb2.Accepted, 4096).error
    assert raised


@pytest.mark.parametrize("side", ["client", "server"])
def test_another_version_is_said_to_be_one(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "client":

        def newer(theirs: socket.socket) -> None:
            send_message(theirs, remote_pb2.Challenge(magic="phos-image", version=2, nonce=bytes(32)))

        with (
            pair(newer) as (ours, _),
            pytest.raises(WireError, match="it speaks version 2 of the protocol, this PhOS 1"),
        ):
            greet(ours, KEY)
    else:
        with pair(lambda theirs: challenge(theirs, KEY)) as (ours, raised):
            receive_message(ours, remote_pb2.Challenge, 4096)
            send_message(ours, remote_pb2.Proof(version=2, nonce=bytes(32), proof=bytes(32)))
            assert "speaks version 1 of the protocol, you 2" in receive_message(ours, remote_pb2.Accepted, 4096).error
        assert raised


def test_what_is_no_phosd_is_said_to_be_none() -> None:
    def web(theirs: socket.socket) -> None:
        theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pair(web) as (ours, _), pytest.raises(WireError, match="where at most 4096 are allowed"):
        greet(ours, KEY)


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_wire, "HANDSHAKE_SECONDS", 0.2)

    def slow(ours: socket.socket) -> None:
        receive_message(ours, remote_pb2.Challenge, 4096)
        with suppress(OSError):
            for byte in struct.pack("<I", 100) + bytes(100):  # each part in time, but not the whole
                ours.sendall(bytes([byte]))
                time.sleep(0.05)

    with pair(lambda theirs: challenge(theirs, KEY)) as (ours, raised):
        slow(ours)
    assert isinstance(raised[0], TimeoutError)


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ImageError, match=r"cannot be read \(No such file or directory\). Make one with"):
        read_key(file)
    file.write_bytes(b"short")
    file.chmod(0o600)
    with pytest.raises(ImageError, match="has 5 bytes; a secret has 16 to 4096"):
        read_key(file)
    file.write_bytes(bytes(5000))
    with pytest.raises(ImageError, match="has 4097 bytes"):
        read_key(file)
    file.write_bytes(KEY)
    assert read_key(file) == KEY
    for mode in (0o640, 0o604, 0o602):
        file.chmod(mode)
        with pytest.raises(ImageError, match="Others may read or change"):
            read_key(file)
    with pytest.raises(ImageError, match="is no regular file"):
        read_key(tmp_path)


def test_settings(tmp_path: Path, key_file: Path) -> None:
    assert RemoteSettings.from_environment({}) is None
    good = {"PHOS_LISTEN": "[::1]:7070", "PHOS_SHARE": f"{tmp_path}:/", "PHOS_REMOTE_KEY": str(key_file)}
    with pytest.raises(UsageError, match="/ cannot be shared"):
        RemoteSettings.from_environment(good)
    good["PHOS_SHARE"] = f"{tmp_path}:"
    found = RemoteSettings.from_environment(good)
    assert found == RemoteSettings("::1", 7070, KEY, (tmp_path.resolve(),))
    for name, value, sentence in (
        ("PHOS_LISTEN", "7070", "is no address"),
        ("PHOS_LISTEN", ":7070", "is no address"),
        ("PHOS_LISTEN", "host:0", "is no address"),
        ("PHOS_LISTEN", "host:99999", "is no address"),
        ("PHOS_LISTEN", "gpu..example:7070", "is no address"),
        ("PHOS_SHARE", "", "names no folder"),
        ("PHOS_SHARE", "relative", "cannot be shared"),
        ("PHOS_REMOTE_KEY", str(tmp_path / "none"), "not shared without a secret"),
    ):
        with pytest.raises(UsageError, match=sentence):
            RemoteSettings.from_environment({**good, name: value})


@pytest.mark.parametrize(
    "text, expected",
    [
        ("tcp://host:7070/image", Address("host", 7070, "image")),
        ("tcp://host:7070//srv/images/a%20b", Address("host", 7070, "/srv/images/a b")),
        ("tcp://[::1]:7070/a/b", Address("::1", 7070, "a/b")),
        ("tcp://host:7070/a%2520b", Address("host", 7070, "a%20b")),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    """A folder that stands for an image keeps its address as text."""
    assert Address.parse(text) == expected
    assert Address.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tcp://",
        "tcp://host/x",
        "tcp://host:7070/",
        "tcp://host:x/y",
        "http://host:1/x",
        "tcp://gpu..example:7070/x",
        "tcp://host:7070/\udcff",  # no UTF-8
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ImageError, match="is no address of an image"):
        Address.parse(text)
