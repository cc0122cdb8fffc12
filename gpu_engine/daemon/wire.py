"""Packets of the control protocol (proto/wire.proto) over a SOCK_SEQPACKET Unix connection."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import blocking, keeper
from phos.gpu_engine.errors import ProtocolError

PACKET_LIMIT = 64 << 10
"""Largest packet in bytes."""

DESCRIPTOR_LIMIT = 200
"""Most descriptors beside one packet; the kernel's own limit is 253 (SCM_MAX_FD)."""

PROTOCOL_VERSION = 1


_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_SO_PEERPIDFD = 77  # asm-generic/socket.h

TEXT_LIMIT = 8000
"""Longest sentence in a packet, in bytes."""

WARNING_LIMIT = 500
"""The same of one of many."""


def sentence(text: object, most: int = TEXT_LIMIT) -> str:
    """A text that protobuf takes (no lone surrogates, as file names that are not UTF-8 have) and that fits a packet."""
    return str(text)[:most].encode(errors="replace")[:most].decode(errors="ignore")


def sentences(texts: Iterable[object]) -> list[str]:
    """As many of these as fit a packet, and how many more there are."""
    said = [sentence(text, WARNING_LIMIT) for text in texts]
    return said[:50] + ([f"... and {len(said) - 50} more warnings."] if len(said) > 50 else [])


def file_of(name: str, content: bytes) -> int:
    """A file in memory that nobody can change, to go beside a packet that it would not fit; for the caller to close.

    Raises:
        OSError: there is no descriptor left, or no memory.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def content_of(descriptor: int) -> bytes:
    """All of a file that came beside a packet; the descriptor stays the caller's."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def send(connection: socket.socket, envelope: wire_pb2.Envelope, descriptors: Iterable[int] = ()) -> None:
    """Send one packet with the descriptors beside it; they stay the caller's.

    Raises:
        OSError: the connection is broken.
    """
    payload = envelope.SerializeToString()
    if len(payload) > PACKET_LIMIT:
        raise ProtocolError(f"A packet of {len(payload)} bytes does not fit the limit of {PACKET_LIMIT}.")
    socket.send_fds(connection, [payload], list(descriptors), socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[wire_pb2.Envelope, list[int]] | None:
    """The next packet and the descriptors beside it (now the caller's), or None when the peer is gone."""
    try:
        payload, descriptors, flags = keeper.receive(connection, PACKET_LIMIT, DESCRIPTOR_LIMIT)
    except ConnectionResetError:
        return None
    if not payload:
        close_all(descriptors)
        return None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(descriptors)
        raise ProtocolError("A packet was cut off: too long, or more descriptors than this process may open.")
    envelope = wire_pb2.Envelope()
    try:
        envelope.ParseFromString(payload)
    except Exception as error:
        close_all(descriptors)
        raise ProtocolError(f"A packet of {len(payload)} bytes is not a message of the control protocol.") from error
    return envelope, descriptors


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected, from the kernel (SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def content(descriptor: int, most: int) -> bytes:
    """All of the file in memory that a descriptor of another process stands for.

    Raises:
        ProtocolError: it is no file in memory, which alone is read without waiting, or has more than ``most`` bytes.
        OSError: it cannot be read.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("A packet came with a descriptor that is no memfd.") from error
    size = os.fstat(descriptor).st_size
    if size > most:
        raise ProtocolError(f"A packet came with a file of {size} bytes; phosd takes {most}.")
    parts = bytearray()
    while len(parts) < size and (part := os.pread(descriptor, size - len(parts), len(parts))):
        parts += part
    return bytes(parts)


def only(descriptors: list[int]) -> int:
    """The one descriptor that has to come with a request: an image directory's, for example."""
    if len(descriptors) != 1:
        raise ProtocolError("A request came without the one descriptor that belongs to it.")
    return descriptors[0]


class Connection:
    """A connection whose packets may be sent from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()  # one packet at a time
        self.pid, self.uid, self.gid = peer_credentials(connection)

    def send(self, envelope: wire_pb2.Envelope, descriptors: Iterable[int] = ()) -> None:
        """See :func:`send`."""
        with self._send_lock:
            send(self._socket, envelope, descriptors)

    def reply(self, request_id: int, descriptors: Iterable[int] = (), /, **body: object) -> None:
        """Answer a request; a peer that has gone away meanwhile is no error. The descriptors stay the caller's."""
        try:
            self.send(wire_pb2.Envelope(id=request_id, **body), descriptors)  # type: ignore[arg-type]
        except OSError:
            pass

    def done(
        self,
        request_id: int,
        error: object = "",
        warnings: Iterable[str] = (),
        *,
        gpu_part: bool = False,
        alone: Iterable[wire_pb2.Alone] = (),
        kept: bool = False,
        device_files: Iterable[str] = (),
        names: bool = False,
        copies: bool = False,
    ) -> None:
        """Answer a request that wants no more than to know whether it was carried out.

        ``gpu_part``: of the begin of a dump, that the image will have a part of ours, without which it is useless.
        ``alone``, ``kept``, ``device_files``, ``names`` and ``copies``: see Done in proto/wire.proto.
        """
        done = wire_pb2.Done(
            error=sentence(error),
            warnings=sentences(warnings),
            gpu_part=gpu_part,
            alone=alone,
            kept=kept,
            device_files=device_files,
            names=names,
            copies=copies,
        )
        self.reply(request_id, done=done)

    def limit(self, *, receive: float | None = None, send: float | None = None) -> None:
        """See :func:`~phos.gpu_engine.daemon.blocking.limit`."""
        blocking.limit(self._socket, receive=receive, send=send)

    def hung_up(self) -> bool:
        """Whether the peer has gone, whatever it has said before."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def receive(self) -> tuple[wire_pb2.Envelope, list[int]] | None:
        """See :func:`receive`."""
        return receive(self._socket)

    def peer_pidfd(self) -> int:
        """A pidfd of the process that has connected (SO_PEERPIDFD, Linux 6.5), the caller's; -1: it is not to be had.

        Its pid may be another's by now; of this there is no doubt.
        """
        try:
            return self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:
            return -1

    def shutdown(self) -> None:
        """Wake the receiving thread with an end of file."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def refuse(self, error: object) -> None:
        """Say why this peer is not served, as an answer to whatever it asks, and close; nothing is waited for."""
        self._socket.setblocking(False)
        # A packet that is there unread at the close is an error for the peer, and hides the answer. So no more come in,
        # and the one that has (a peer waits for its first answer) is read.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)
        with suppress(OSError, ProtocolError):
            packet = self.receive()
            if packet is not None:
                close_all(packet[1])
        self.done(0, error)
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
