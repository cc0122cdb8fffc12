"""Images over TCP: the wire, the secret, what is shared; and that nothing a stranger sends does any harm."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phos.gen import phos_image_pb2 as pb
from phos.gen import remote_pb2
from phos.gpu_engine.daemon import remote_server
from phos.gpu_engine.daemon.pinned_images import PinnedImages
from phos.gpu_engine.daemon.remote_server import RemoteServer
from phos.gpu_engine.daemon.remote_settings import RemoteSettings
from phos.gpu_engine.errors import UsageError
from phos.images import formats, remote, remote_wire
from phos.images.errors import ImageError
from phos.images.formats import digest
from phos.images.reader import Image
from phos.images.remote import Link, Links, RemoteImage, fetch_description
from phos.images.remote_wire import (
    DATA_LIMIT,
    REQUEST_LIMIT,
    Address,
    WireError,
    challenge,
    greet,
    proof,
    read_key,
    receive_message,
    send_message,
)
from tests.unit.image_sets import CONTENT, CRIU_FILES, aligned, write_small

KEY = bytes(range(32))


class Host:
    """A server over the images in a folder, which listens at a free port."""

    def __init__(self, shared: Path, key: bytes = KEY) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.server = RemoteServer(RemoteSettings("127.0.0.1", self.port, key, (shared,)), PinnedImages(0))
        self.server.start()
        deadline = time.monotonic() + 10
        while not self.server.listening:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def address(self, image: str = "image") -> Address:
        return Address("127.0.0.1", self.port, image)

    def connections(self) -> int:
        return self.server._connections


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    (folder / "image").mkdir(parents=True)
    write_small(folder / "image")
    return folder


@pytest.fixture
def host(shared: Path) -> Iterator[Host]:
    made = Host(shared)
    yield made
    made.server.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    return file


def fetched(host: Host, key_file: Path, folder: Path, image: str = "image") -> Path:
    folder.mkdir()
    fetch_description(host.address(image), key_file, folder)
    return folder


def content_of(image: Image | RemoteImage) -> dict[tuple[bytes, int], bytes]:
    found = {}
    for key, table in image.blocks.items():
        pieces = []
        for extent in table.extents():
            with aligned(bytes(extent.length)) as view:
                image.read_into(extent, view)
                pieces.append(bytes(view))
        found[key] = b"".join(pieces)
    return found


# What arrives.


def test_an_image_arrives_as_it_is(host: Host, key_file: Path, tmp_path: Path) -> None:
    here = fetched(host, key_file, tmp_path / "here")
    for name, content in CRIU_FILES.items():
        assert (here / name).read_bytes() == content
    assert Image.open(here).verify() != []  # for itself it is no image: it has no data
    directory = os.open(here, os.O_RDONLY)
    try:
        image = RemoteImage.open(directory)
    finally:
        os.close(directory)
    assert image is not None
    assert content_of(image) == {key: b"".join(chunks) for key, chunks in CONTENT.items()}
    image.close()


def test_a_directory_without_the_marker_is_not_remote(shared: Path) -> None:
    directory = os.open(shared / "image", os.O_RDONLY)
    try:
        assert RemoteImage.open(directory) is None
    finally:
        os.close(directory)


def opened(here: Path) -> RemoteImage:
    directory = os.open(here, os.O_RDONLY)
    try:
        image = RemoteImage.open(directory)
    finally:
        os.close(directory)
    assert image is not None
    return image


def test_damaged_data_is_noticed_where_it_arrives(host: Host, key_file: Path, shared: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    file = shared / "image" / "phos-data-0.raw"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(ImageError, match=r"phos-data-0.raw, byte 0: .* are damaged"):
        content_of(image)
    file.write_bytes(b"")
    with pytest.raises(ImageError, match=r"phos-data-0\.raw is cut off: it has 0 bytes"):
        content_of(image)
    file.unlink()
    with pytest.raises(ImageError, match=r"phos-data-0\.raw cannot be read: No such file"):
        content_of(image)
    image.close()


@pytest.mark.parametrize("name", ["pages-1.img", formats.CHUNKS_FILE, formats.INVENTORY_FILE])
def test_a_damaged_description_is_noticed(host: Host, key_file: Path, shared: Path, tmp_path: Path, name: str) -> None:
    file = shared / "image" / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ImageError, match="damaged"):
        fetched(host, key_file, tmp_path / "here")


def test_an_incomplete_image_is_said_to_be_so(host: Host, key_file: Path, shared: Path, tmp_path: Path) -> None:
    (shared / "image" / formats.COMMIT_FILE).unlink()
    with pytest.raises(ImageError, match="is incomplete"):
        fetched(host, key_file, tmp_path / "here")


def test_an_image_that_was_replaced_is_another_one(host: Host, key_file: Path, shared: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    shutil.rmtree(shared / "image")
    (shared / "image").mkdir()
    write_small(shared / "image")
    with pytest.raises(ImageError, match="is another image by now"):
        content_of(image)
    image.close()


def test_idle_connections_that_were_closed_are_made_anew(host: Host, key_file: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    first = content_of(image)
    for link in image._links._idle:
        link._socket.shutdown(socket.SHUT_RDWR)
    assert content_of(image) == first
    host.server.stop()
    for link in image._links._idle:
        link._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ImageError, match="cannot be reached: Connection refused"):
        content_of(image)
    image.close()


def test_several_threads_read_at_once(host: Host, key_file: Path, tmp_path: Path) -> None:
    image = opened(fetched(host, key_file, tmp_path / "here"))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(content_of(image))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(content == found[0] for content in found)
    image.close()


def copy(links: Links, file: pb.File, target: int) -> None:
    for job in remote._copies(links, file, target):
        job()


def test_files_of_the_driver_come_with_their_hashes_checked(
    host: Host, key_file: Path, shared: Path, tmp_path: Path
) -> None:
    """As residues are; a small file stands for one."""
    content = os.urandom(10000) + bytes(8192)
    (shared / "image" / "phos-residue-0.raw").write_bytes(content)
    links = Links(host.address(), KEY)
    file = pb.File(name="phos-residue-0.raw", size=len(content), segment_size=4096)
    file.hashes.extend(digest(content[at : at + 4096]) for at in range(0, len(content), 4096))
    with pytest.raises(ImageError, match="the image has no file"):  # its commit record does not name it
        copy(links, file, -1)
    with pytest.raises(ImageError, match="lacks hashes"):
        remote._copies(links, pb.File(name="x", size=1), -1)
    name = "pages-1.img"
    content = CRIU_FILES[name]
    file = pb.File(name=name, size=len(content), segment_size=4096)
    file.hashes.extend(digest(content[at : at + 4096]) for at in range(0, len(content), 4096))
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    copy(links, file, target)
    assert (tmp_path / "target").read_bytes() == content
    file.hashes[-1] = bytes(16)
    with pytest.raises(ImageError, match=r"pages-1.img: bytes 4096 to 8192 are damaged"):
        copy(links, file, target)
    os.close(target)
    links.close()


# What is shared.


@pytest.mark.parametrize(
    "image", ["", "nothing", "..", "../outside", "image/../../outside", "a\0b", "x" * 2000, "file"]
)
def test_nothing_else_is_shared(host: Host, shared: Path, tmp_path: Path, image: str) -> None:
    (tmp_path / "outside").mkdir()
    write_small(tmp_path / "outside")
    (shared / "file").write_text("")
    with pytest.raises(ImageError, match="shares no image"):
        Link(host.address(image), KEY)


def test_links_do_not_lead_out_of_what_is_shared(host: Host, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    write_small(tmp_path / "outside")
    (shared / "link").symlink_to(tmp_path / "outside")
    (shared / "inside").symlink_to(shared / "image")
    for name in ("link", str(tmp_path / "outside")):
        with pytest.raises(ImageError, match="shares no image"):
            Link(host.address(name), KEY)
    for name in ("inside", str(shared / "image"), "image/../image"):
        Link(host.address(name), KEY).close()


@pytest.mark.parametrize("file", ["dump.log", "../image/core-100.img", "/etc/passwd", "", "phos-data-9.raw"])
def test_only_files_of_the_image_are_read(host: Host, file: str) -> None:
    link = Link(host.address(), KEY)
    with pytest.raises(ImageError, match="has no file"):
        link.read_into(file, 0, memoryview(bytearray(1)))
    link.read_into("core-100.img", 0, memoryview(bytearray(1)))  # the connection goes on
    link.close()


@pytest.mark.parametrize("offset,length", [(0, 501), (500, 1), (2**63, 1), (2**64 - 1, 2), (0, 2**64 - 1)])
def test_nothing_is_read_past_the_end(host: Host, offset: int, length: int) -> None:
    link = Link(host.address(), KEY)
    request = remote_pb2.Request(read=remote_pb2.Read(file="core-100.img", offset=offset, length=length))
    with pytest.raises(ImageError, match=r"core-100\.img has 500 bytes"):
        link._ask(request)
    link.close()


def test_a_link_in_the_place_of_a_file_is_not_followed(host: Host, shared: Path, tmp_path: Path) -> None:
    link = Link(host.address(), KEY)
    (tmp_path / "outside").write_bytes(bytes(500))
    (shared / "image" / "core-100.img").unlink()
    (shared / "image" / "core-100.img").symlink_to(tmp_path / "outside")
    with pytest.raises(ImageError, match=r"core-100\.img cannot be read"):
        link.read_into("core-100.img", 0, memoryview(bytearray(1)))
    link.close()


# The secret.


@contextmanager
def pair(server: Callable[[socket.socket], object]) -> Iterator[tuple[socket.socket, list[BaseException]]]:
    """A connection whose other end a function has; what it raised."""
    ours, theirs = socket.socketpair()
    raised: list[BaseException] = []

    def run() -> None:
        with theirs:
            try:
                server(theirs)
            except BaseException as error:
                raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ours:
            yield ours, raised
    finally:
        thread.join(20)
        assert not thread.is_alive()


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
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected
    assert Address.parse(str(expected).replace(" ", "%20")) == expected


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://host/x", "tcp://host:7070/", "tcp://host:x/y", "http://host:1/x"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ImageError, match="is no address of an image"):
        Address.parse(text)


# Strangers.


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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
