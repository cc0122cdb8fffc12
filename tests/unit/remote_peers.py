"""Both ends of connections for the tests of images over TCP: a host with images, and a function in its place."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from phos.gpu_engine.daemon.pinned_images import PinnedImages
from phos.gpu_engine.daemon.remote_server import RemoteServer
from phos.gpu_engine.daemon.remote_settings import RemoteSettings
from phos.images.remote_wire import Address

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
