"""How images are read over TCP (proto/remote.proto): framing, proofs of the shared secret, addresses."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from google.protobuf.message import DecodeError, Message

from phos.gen import remote_pb2
from phos.images.errors import ImageError
from phos.images.source import SCHEME

VERSION = 1
MAGIC = "phos-image"

NONCE_BYTES = 32
REQUEST_LIMIT = 4096
REPLY_LIMIT = 64 << 10
DATA_LIMIT = 32 << 20
"""Most that one Read may ask for; bytes."""

CONNECT_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
ANSWER_SECONDS = 30.0
"""How long nothing may come where something should."""

KEY_BYTES = (16, 4096)
"""How long a secret may be."""

DEFAULT_KEY = Path("/etc/phos/remote.key")


_SIZE = struct.Struct("<I")
M = TypeVar("M", bound=Message)


class WireError(OSError):
    """The peer says what does not fit the protocol, or has gone away."""


def receive_into(connection: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fill a buffer. ``deadline`` (time.monotonic()): for all of it; else each part may take ANSWER_SECONDS.

    Raises:
        OSError: it did not come.
    """
    done = 0
    while done < len(view):
        seconds = ANSWER_SECONDS if deadline is None else deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the other side is too slow")
        connection.settimeout(seconds)
        n = connection.recv_into(view[done:])
        if n == 0:
            raise WireError("the other side has closed the connection")
        done += n


def send_message(connection: socket.socket, message: Message) -> None:
    """Send one message."""
    body: bytes = message.SerializeToString()
    connection.settimeout(ANSWER_SECONDS)
    connection.sendall(_SIZE.pack(len(body)) + body)


def receive_message(connection: socket.socket, kind: type[M], limit: int, deadline: float | None = None) -> M:
    """The next message, of at most ``limit`` bytes.

    Raises:
        OSError: it did not come, or is none.
    """
    head = bytearray(_SIZE.size)
    receive_into(connection, memoryview(head), deadline)
    (size,) = _SIZE.unpack(head)
    if size > limit:
        raise WireError(f"a message of {size} bytes, where at most {limit} are allowed")
    body = bytearray(size)
    receive_into(connection, memoryview(body), deadline)
    message = kind()
    try:
        message.ParseFromString(bytes(body))
    except (DecodeError, ValueError) as error:
        raise WireError("something that is no message of this protocol") from error
    return message


def proof(key: bytes, who: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What only somebody with the secret can say; ``who`` is "client" or "server"."""
    text = f"phos image {who}".encode() + struct.pack("<I", VERSION) + server_nonce + client_nonce
    return hmac.digest(key, text, "sha256")


def greet(connection: socket.socket, key: bytes) -> None:
    """The client's part of the beginning.

    Raises:
        WireError: the server speaks another protocol, or one of the two does not know the secret.
        OSError: the connection is lost.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    challenge = receive_message(connection, remote_pb2.Challenge, REQUEST_LIMIT, deadline)
    if challenge.magic != MAGIC:
        raise WireError("no phosd that shares images listens there")
    if challenge.version != VERSION:
        raise WireError(
            f"it speaks version {challenge.version} of the protocol, this PhOS {VERSION}: use the same release"
        )
    if len(challenge.nonce) != NONCE_BYTES:
        raise WireError("its challenge is malformed")
    nonce = secrets.token_bytes(NONCE_BYTES)
    said = remote_pb2.Proof(version=VERSION, nonce=nonce, proof=proof(key, "client", challenge.nonce, nonce))
    send_message(connection, said)
    accepted = receive_message(connection, remote_pb2.Accepted, REPLY_LIMIT, deadline)
    if accepted.error:
        raise WireError(f"it says: {accepted.error}")
    if not hmac.compare_digest(accepted.proof, proof(key, "server", challenge.nonce, nonce)):
        raise WireError("it does not know the shared secret; do not trust what it says")


def challenge(connection: socket.socket, key: bytes) -> None:
    """The server's part of the beginning.

    Raises:
        WireError: the client is not to be served; it has been told.
        OSError: the connection is lost.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    nonce = secrets.token_bytes(NONCE_BYTES)
    send_message(connection, remote_pb2.Challenge(magic=MAGIC, version=VERSION, nonce=nonce))
    said = receive_message(connection, remote_pb2.Proof, REQUEST_LIMIT, deadline)
    error = ""
    if said.version != VERSION:
        error = f"phosd here speaks version {VERSION} of the protocol, you {said.version}: use the same release"
    elif len(said.nonce) != NONCE_BYTES or not hmac.compare_digest(said.proof, proof(key, "client", nonce, said.nonce)):
        error = "that is not the shared secret: the key files of the two hosts differ"
    if error:
        send_message(connection, remote_pb2.Accepted(error=error))
        raise WireError(error)
    send_message(connection, remote_pb2.Accepted(proof=proof(key, "server", nonce, said.nonce)))


def read_key(path: Path) -> bytes:
    """The shared secret: all of a file's bytes.

    Raises:
        ImageError: it cannot be read, others can read it, or it is too short.
    """
    make = f"Make one with 'head -c 32 /dev/urandom > {path}; chmod 600 {path}' and copy it to the other host."
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ImageError(f"The key file {path} cannot be read ({error.strerror}). {make}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"The key file {path} is no regular file. {make}")
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise ImageError(f"Others may read or change the key file {path}: chmod 600 it, and own it.")
        key = os.read(descriptor, KEY_BYTES[1] + 1)
    finally:
        os.close(descriptor)
    if not KEY_BYTES[0] <= len(key) <= KEY_BYTES[1]:
        raise ImageError(
            f"The key file {path} has {len(key)} bytes; a secret has {KEY_BYTES[0]} to {KEY_BYTES[1]}. {make}"
        )
    return key


def refuse_host(name: str) -> None:
    """
    Raises:
        ValueError: no host can have that name, and whoever asks the system for it gets no OSError.
    """
    name.encode("idna")


@dataclass(frozen=True)
class Address:
    """Where an image is: ``tcp://host:port/image``."""

    host: str
    port: int
    image: str

    @staticmethod
    def parse(text: str) -> Address:
        """Raises ImageError if it is no such address."""
        # The path by hand: versions of Python differ in what they make of one that begins with two slashes.
        authority, _, path = text.removeprefix(SCHEME).partition("/")
        try:
            parts = urlsplit(f"//{authority}")
            host, port, image = parts.hostname, parts.port, unquote(path)
            refuse_host(host or "")
            image.encode()  # as it is sent; some words of a command line are no UTF-8
        except ValueError:
            host, port, image = None, None, ""
        if not text.startswith(SCHEME) or not host or not port or not image:
            raise ImageError(f"{text} is no address of an image: tcp://HOST:PORT/NAME, or tcp://HOST:PORT//PATH")
        return Address(host, port, image)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        image = self.image.replace("%", "%25")  # nothing else of it means something to parse()
        return f"{SCHEME}{host}:{self.port}/{image}"
