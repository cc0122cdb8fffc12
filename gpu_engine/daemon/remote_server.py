"""Images for other hosts: whoever knows the shared secret may read images in the folders that are shared, over TCP.

The protocol is in proto/remote.proto. Each connection has a thread, which reads from pinned memory where the image is
pinned.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from phos.gen import remote_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.daemon.pinned_images import PinnedImages
from phos.gpu_engine.daemon.remote_settings import RemoteSettings
from phos.gpu_engine.touch_order import ORDER_MOST
from phos.images import formats
from phos.images.errors import ImageError
from phos.images.formats import digest
from phos.images.reader import METADATA_MOST, Image
from phos.images.remote import stands_for_another
from phos.images.remote_wire import (
    ANSWER_SECONDS,
    DATA_LIMIT,
    REQUEST_LIMIT,
    WireError,
    challenge,
    receive_message,
    send_message,
)

log = logging.getLogger(__name__)

CONNECTIONS = 256
STRANGERS = 32
"""Connections that have not proved yet that they know the secret."""

IDLE_SECONDS = 600.0
"""How long a reader may ask for nothing; it comes again if it wants more."""

BIND_SECONDS = 5.0
"""After so long it is tried again to listen where something else does."""

PATH_LIMIT = 1024
TEXT_LIMIT = 2000
SEND_BYTES = 4 << 20


class _Shared:
    """The image that one connection is about."""

    def __init__(self, directory: int, pinned: PinnedImages) -> None:
        """``directory`` becomes this object's.

        Raises:
            ImageError: there is no whole image.
        """
        self._stack = ExitStack()
        self._stack.callback(os.close, directory)
        self._directory = directory
        try:
            if stands_for_another(directory):
                raise ImageError("that image is at yet another host: ask that one")
            self._memory = pinned.find(directory)
            image = Image.open(directory) if self._memory is None else self._memory
            self._stack.callback(image.close)
            commit = self._content(formats.COMMIT_FILE, METADATA_MOST)
            record = image.record
            self._sizes = {file.name: file.size for file in record.files}
            self._sizes[formats.COMMIT_FILE] = len(commit)
            self._commit = commit
            self._order = self._read_order()
            self._sizes[formats.ORDER_FILE] = len(self._order)
            self.opened = remote_pb2.Opened(
                image_id=record.image_id,
                record_hash=digest(commit),
                commit_size=len(commit),
                order_size=len(self._order),
                pinned=self._memory is not None,
            )
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> int:
        """A descriptor of a file of the image: its directory may be a user's, and a link lead to what nobody shares.

        Raises:
            OSError: it cannot be opened, or is a link.
        """
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._directory)

    def _content(self, name: str, most: int) -> bytes:
        """All of such a file. Raises OSError: as :meth:`_open`, or it is no regular file, or too large."""
        with open(self._open(name), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "It is no regular file", name)
            if len(content := file.read(most + 1)) > most:
                raise OSError(errno.EFBIG, f"It has more than {most} bytes", name)
            return content

    def _read_order(self) -> bytes:
        try:
            return self._content(formats.ORDER_FILE, ORDER_MOST)
        except OSError:
            return b""

    def send(self, connection: socket.socket, request: remote_pb2.Read) -> None:
        """Answer one request.

        Raises:
            ImageError: it asks for what there is not; nothing was sent. OSError: the connection cannot go on.
        """
        name, offset, length = request.file, request.offset, request.length
        size = self._sizes.get(name)
        if size is None:
            raise ImageError(f"the image has no file {name!r}")
        if length > DATA_LIMIT or offset + length > size:
            raise ImageError(f"{name} has {size} bytes: {length} at {offset} cannot be read at once")
        reply = remote_pb2.Reply(length=length)
        if name in (formats.COMMIT_FILE, formats.ORDER_FILE):  # as they were when the connection began
            content = self._commit if name == formats.COMMIT_FILE else self._order
            send_message(connection, reply)
            _send_all(connection, memoryview(content)[offset : offset + length])
            return
        stripe = formats.stripe_of(name)
        if stripe is not None and self._memory is not None:
            view = self._memory.view(stripe, offset, length)
            send_message(connection, reply)
            _send_all(connection, view)
            return
        try:
            descriptor = self._open(name)
        except OSError as error:
            raise ImageError(f"{name} cannot be read: {error.strerror}") from error
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < offset + length:
                raise ImageError(f"{name} is cut off: it has {status.st_size} bytes instead of {size}")
            send_message(connection, reply)
            connection.settimeout(ANSWER_SECONDS)
            for at in range(offset, offset + length, SEND_BYTES):
                part = min(SEND_BYTES, offset + length - at)
                if connection.sendfile(file, at, part) != part:
                    raise WireError(f"{name} shrank while it was read")

    def close(self) -> None:
        """Nobody reads it any more over this connection."""
        self._stack.close()


def _send_all(connection: socket.socket, view: memoryview) -> None:
    for at in range(0, len(view), SEND_BYTES):
        connection.settimeout(ANSWER_SECONDS)
        connection.sendall(view[at : at + SEND_BYTES])


class RemoteServer:
    """Listens and serves, in threads of its own."""

    def __init__(self, settings: RemoteSettings, pinned: PinnedImages) -> None:
        self._settings = settings
        self._pinned = pinned
        self._lock = threading.Lock()  # guards _connections, _strangers
        self._connections = 0
        self._strangers = 0
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self.listening = ""
        """Where; empty as long as it does not."""

    def start(self) -> None:
        """Begin, now or as soon as the address is free."""
        threading.Thread(target=self._listen, name="remote", daemon=True).start()

    def stop(self) -> None:
        """Accept nobody any more."""
        self._stopping.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _listen(self) -> None:
        host, port = self._settings.host, self._settings.port
        said = False
        while not self._stopping.is_set():
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listener = socket.create_server((host, port), family=family, backlog=64)
                break
            except OSError as error:
                if not said:
                    log.error("Images cannot be shared at %s:%d yet: %s", host, port, error.strerror or error)
                said = True
                self._stopping.wait(BIND_SECONDS)
        if self._listener is None:
            return
        self.listening = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("Images in %s are shared at %s.", ", ".join(map(str, self._settings.shares)), self.listening)
        while not self._stopping.is_set():
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    break
                log.warning("A remote connection could not be accepted: %s", error)
                self._stopping.wait(0.2)
                continue
            self._take(connection, str(peer[0]))

    def _take(self, connection: socket.socket, peer: str) -> None:
        with self._lock:
            full = self._connections >= CONNECTIONS or self._strangers >= STRANGERS
            if not full:
                self._connections += 1
                self._strangers += 1
        if full:
            log.warning("%s is not served: too many connections.", peer)
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection, peer), name=f"remote-{peer}", daemon=True).start()
        except RuntimeError as error:
            log.warning("%s is not served: %s", peer, error)
            connection.close()
            self._gone(stranger=True)

    def _gone(self, *, stranger: bool) -> None:
        with self._lock:
            self._connections -= 1
            self._strangers -= stranger

    def _serve(self, connection: socket.socket, peer: str) -> None:
        known = False

        def admitted() -> None:
            nonlocal known
            known = True
            with self._lock:
                self._strangers -= 1

        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self.serve(connection, admitted)
        except OSError as error:
            (log.info if known else log.warning)("The connection of %s has ended: %s", peer, error)
        except Exception:
            log.exception("The connection of %s", peer)
        finally:
            self._gone(stranger=not known)

    def serve(self, connection: socket.socket, admitted: Callable[[], None] | None = None) -> None:
        """One connection, until its end. ``admitted`` is called once the peer has proved that it knows the secret.

        Raises:
            OSError: the connection is lost, or the peer does not keep to the protocol.
        """
        challenge(connection, self._settings.key)
        if admitted is not None:
            admitted()
        shared: _Shared | None = None
        try:
            while True:
                try:
                    request = self._next(connection)
                except WireError:
                    if self._hung_up(connection):
                        return
                    raise
                try:
                    kind = request.WhichOneof("body")
                    if kind == "open" and shared is None:
                        shared = self._open(request.open.image)
                        send_message(connection, remote_pb2.Reply(opened=shared.opened))
                    elif kind == "read" and shared is not None:
                        shared.send(connection, request.read)
                    else:
                        raise WireError("a request that does not fit")
                except ImageError as error:
                    said = procfs.readable(str(error)[:TEXT_LIMIT])
                    send_message(connection, remote_pb2.Reply(error=said))
        finally:
            if shared is not None:
                shared.close()

    @staticmethod
    def _next(connection: socket.socket) -> remote_pb2.Request:
        # Nothing may come for long; but what has begun to come has to come.
        connection.settimeout(IDLE_SECONDS)
        connection.recv(1, socket.MSG_PEEK)
        deadline = time.monotonic() + ANSWER_SECONDS
        return receive_message(connection, remote_pb2.Request, REQUEST_LIMIT, deadline)

    @staticmethod
    def _hung_up(connection: socket.socket) -> bool:
        """Whether the peer has closed its end, and not in the middle of something."""
        connection.settimeout(0)
        try:
            return connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return False

    def _open(self, name: str) -> _Shared:
        """The image of that name or path.

        Raises:
            ImageError: none that is shared.
        """
        if 0 < len(name) <= PATH_LIMIT and "\0" not in name:
            entry = self._pinned.named(name)
            found = [Path(entry.path)] if entry else [share / name for share in self._settings.shares]
            for path in found:
                real = Path(os.path.realpath(path))
                if not self._is_shared(real):
                    continue
                try:
                    directory = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                except OSError:
                    continue
                # Asked again of what is open: a folder above it may have become a link meanwhile.
                if self._is_shared(Path(os.readlink(f"/proc/self/fd/{directory}"))):
                    return _Shared(directory, self._pinned)
                os.close(directory)
        # The same words for what is not there and what is not to be seen.
        raise ImageError(f"phosd there shares no image {name[:200]!r}: it has to be in a folder of PHOS_SHARE")

    def _is_shared(self, path: Path) -> bool:
        return any(share == path or share in path.parents for share in self._settings.shares)
