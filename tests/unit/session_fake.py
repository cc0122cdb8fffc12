"""A session of phosd over a real socket pair, whose other end the test plays."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import PhosError
from phos.gpu_engine.spec.speculator import Speculator

NUMBER = bytes(range(16))
OTHER = bytes(range(16, 32))
MiB = 1 << 20


class FakeKeeper:
    """Notes what the real one would be told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def add(self, *what: object) -> None:
        self.told.append(("add", *what[:3]))

    def remove(self, *what: object) -> None:
        self.told.append(("remove", *what))

    def moved(self, *what: object) -> None:
        self.told.append(("moved", *what))

    def detached(self, *what: object) -> None:
        self.told.append(("detached", *what))

    def attached(self, *what: object) -> None:
        self.told.append(("attached", *what))

    def held(self, _detached: object = None) -> Iterator[object]:
        return iter(())


class Frontend:
    """The other end of a session's connection, played by the test."""

    def __init__(self, folder: Path, uid: int = 1000) -> None:
        self.broker = Broker(FakeKeeper())  # type: ignore[arg-type]
        self.session = Session(
            NUMBER, os.getpid(), uid, self.broker, Holds(folder / "hold"), Speculator(), SessionState.RUNNING
        )
        self.end: socket.socket | None = None
        self.connection: wire.Connection | None = None
        self.thread: threading.Thread | None = None

    def connect(self, state: int = wire_pb2.OPEN, blocks: int = 0) -> None:
        """Connect and say hello, as server.py lets it."""
        ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.settimeout(5)
        connection = self.connection = wire.Connection(ours)
        self.session.connected(connection, wire_pb2.Hello(session=NUMBER, state=state, blocks=blocks), {})  # type: ignore[arg-type]

        def serve() -> None:
            try:
                while (packet := connection.receive()) is not None:
                    self.session.handle(*packet)
            except (PhosError, OSError):
                pass
            finally:
                self.session.disconnected(connection)
                connection.close()

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    def send(self, descriptors: tuple[int, ...] = (), number: int = 0, **body: object) -> None:
        assert self.end
        wire.send(self.end, wire_pb2.Envelope(id=number, **body), descriptors)  # type: ignore[arg-type]

    def answer(self, *expected: str, **body: object) -> None:
        """Take the next request, which has to be one of ``expected``, and answer it."""
        assert self.end
        packet = wire.receive(self.end)
        assert packet is not None
        assert packet[0].WhichOneof("body") in expected
        wire.close_all(packet[1])
        if body:
            descriptors = body.pop("descriptors", ())
            self.send(descriptors, packet[0].id, **body)  # type: ignore[arg-type]

    def in_background(self, *arguments: object, **body: object) -> threading.Thread:
        thread = threading.Thread(target=self.answer, args=arguments, kwargs=body)
        thread.start()
        return thread

    def settle(self) -> None:
        """Until phosd has handled all that was sent: a question is answered only after what came before it."""
        assert self.end
        self.send((), 99, token_resolve=wire_pb2.TokenResolve(session=bytes(16), block=0))
        packet = wire.receive(self.end)
        assert packet is not None
        assert packet[0].id == 99

    def close(self) -> None:
        if self.end:
            self.end.close()
        if self.thread:
            self.thread.join(5)
            assert not self.thread.is_alive()
        self.end = self.thread = None


def block(number: int, **more: object) -> wire_pb2.BlockAdded:
    return wire_pb2.BlockAdded(block=number, size=2 * MiB, owner=wire_pb2.BlockAdded.FRONTEND, **more)  # type: ignore[arg-type]


def memory_map(**more: object) -> int:
    descriptor = os.memfd_create("map")
    os.write(descriptor, wire_pb2.MemoryMap(**more).SerializeToString())  # type: ignore[arg-type]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def open_descriptors() -> int:
    gc.collect()  # what earlier tests left behind would be closed in the middle of this one
    return len(os.listdir("/proc/self/fd"))
