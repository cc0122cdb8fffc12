"""phosd's side of the keeper: start one if none runs, hand it copies of descriptors, get them back after a crash.

A keeper that is killed is replaced at once, and the owner of the descriptors hands all of them over again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.daemon import keeper
from phos.gpu_engine.daemon.wire import peer_credentials
from phos.gpu_engine.errors import DaemonUnavailable

log = logging.getLogger(__name__)

START_SECONDS = 10.0
RETRY_SECONDS = 5.0
"""How long a new keeper may take to start, and how long to wait before the next try if it did not."""


@dataclass(frozen=True)
class HeldBlock:
    """What the keeper knows of a block; ``descriptor`` is the receiver's own copy.

    ``owner``: what its owner calls it, if the session has only been lent it.
    """

    session: bytes
    pid: int
    block: int
    size: int
    device: int
    descriptor: int
    owner: BlockKey | None = None


class KeeperLink:
    """The connection to the keeper. While there is none, only phosd's own end would lose memory."""

    restarted: Callable[[], None] | None = None
    """Called, in a thread of its own, when another keeper runs, or what was said was lost: it is told all anew."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # one packet, or one list, at a time; guards _gone and the change of _socket
        self._gone = False  # what is said now is left out: everything is handed over again afterwards
        self._closed = threading.Event()
        self._path = path
        self._socket = self._connect(path)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="keeper")
        self._watcher.start()

    def _watch(self) -> None:
        """Notice the keeper's end, also while nothing is said to it, and start another."""
        while not self._closed.is_set():
            poll = select.poll()
            poll.register(self._socket, 0)  # its end alone
            poll.poll()
            if self._closed.is_set():
                break
            with self._lock:
                self._gone = True
                self._socket.close()
            log.warning("The keeper of GPU memory descriptors is gone: phosd starts another.")
            while True:
                try:
                    fresh = self._connect(self._path)
                    break
                except (DaemonUnavailable, OSError) as error:
                    log.error("No keeper could be started; if phosd is killed now, GPU memory is lost: %s", error)
                    if self._closed.wait(RETRY_SECONDS):
                        return
            with self._lock:
                self._socket = fresh
                self._gone = False
            if self.restarted:
                self.restarted()
        with self._lock:
            self._gone = True
            self._socket.close()

    @staticmethod
    def _refuse_other_namespace(connection: socket.socket, path: Path) -> None:
        """The pids that a keeper knows are of its own pid namespace. In another all of them would seem to have ended.

        Raises:
            DaemonUnavailable: it is in another.
        """
        pid, _, _ = peer_credentials(connection)
        if pid == 0:
            connection.close()
            raise DaemonUnavailable(
                f"The keeper of GPU memory descriptors ({path}) is in another pid namespace than this process, as when "
                "CRIU is run inside of that of a pool's process. Start phosd outside: phosd --ensure."
            )

    @staticmethod
    def _connect(path: Path) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started = False
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                connection.connect(str(path))
                KeeperLink._refuse_other_namespace(connection, path)
                return connection
            except OSError:
                if not started:
                    # A session of its own, no library of a software GPU, no site-packages: as little as possible.
                    subprocess.Popen(
                        [sys.executable, "-I", "-S", keeper.__file__, str(path.parent)],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                        cwd="/",
                    )
                    started = True
                if time.monotonic() > deadline:
                    connection.close()
                    raise DaemonUnavailable(
                        f"The keeper of GPU memory descriptors did not start within {START_SECONDS:.0f} s ({path}). "
                        f"Is {path.parent} writable?"
                    ) from None
                time.sleep(0.005)

    def _send(self, record: dict[str, object], descriptors: list[int]) -> None:
        with self._lock:
            if self._gone:
                return
            try:
                socket.send_fds(self._socket, [json.dumps(record).encode()], descriptors, socket.MSG_NOSIGNAL)
            except OSError as error:
                log.warning("The keeper could not be told of GPU memory: %s", error)
                self._gone = True
                with suppress(OSError):  # it is closed at the other end
                    self._socket.shutdown(socket.SHUT_RDWR)  # _watch connects again, and all is told anew

    def add(
        self,
        session: bytes,
        pid: int,
        block: int,
        size: int,
        device: int,
        descriptor: int,
        owner: BlockKey | None = None,
    ) -> None:
        """Give the keeper a copy of a block's descriptor; ``owner``: see :class:`HeldBlock`."""
        record: dict[str, object] = {"op": "add", "session": session.hex(), "pid": pid, "block": block}
        record |= {"size": size, "device": device}
        if owner is not None:
            record["owner"] = [owner[0].hex(), owner[1]]
        self._send(record, [descriptor])

    def remove(self, session: bytes, block: int | None) -> None:
        """A block is freed, or (None) a whole session is."""
        self._send({"op": "remove", "session": session.hex(), "block": block}, [])

    def moved(self, session: bytes, pid: int) -> None:
        """The session now lives in another process: it was restored."""
        self._send({"op": "pid", "session": session.hex(), "pid": pid}, [])

    def detached(self, session: bytes, pid: int) -> None:
        """The session is about to be detached: it is to be known to the next phosd, also if it has no block."""
        self._send({"op": "detached", "session": session.hex(), "pid": pid}, [])

    def attached(self, session: bytes) -> None:
        """It is not detached any more."""
        self._send({"op": "attached", "session": session.hex()}, [])

    def held(self, detached: dict[bytes, int] | None = None) -> Iterator[HeldBlock]:
        """Everything the keeper holds, each with a fresh descriptor.

        ``detached``: takes the sessions that are detached, or were about to be, and their processes.

        Raises:
            DaemonUnavailable, OSError: it has ended, or this process had no descriptor left for some of it.
        """
        cut_off = False
        with self._lock:
            if self._gone:
                raise DaemonUnavailable("The keeper of GPU memory descriptors has just ended.")
            self._socket.send(b'{"op": "list"}')
            while True:
                payload, descriptors, _ = keeper.receive(self._socket, 4096, 1)
                if not payload:
                    raise DaemonUnavailable("The keeper of GPU memory descriptors ended while it was asked for them.")
                record = json.loads(payload)
                if record.get("end"):
                    break
                if record["block"] is None:
                    if detached is not None:
                        detached[bytes.fromhex(record["session"])] = record["pid"]
                    continue
                if not descriptors:  # all are received: what is left would be taken for the next answer
                    cut_off = True
                    continue
                owner = record.get("owner")
                yield HeldBlock(
                    session=bytes.fromhex(record["session"]),
                    pid=record["pid"],
                    block=record["block"],
                    size=record["size"],
                    device=record["device"],
                    descriptor=descriptors[0],
                    owner=(bytes.fromhex(owner[0]), owner[1]) if owner else None,
                )
        if cut_off:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    @property
    def pid(self) -> int:
        """The keeper's process; 0 while there is none."""
        with self._lock:
            return 0 if self._gone else peer_credentials(self._socket)[0]

    def close(self) -> None:
        """Leave the keeper alone."""
        self._closed.set()
        with self._lock, suppress(OSError):  # it is closed, or was never connected again
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes _watch, which closes it
        self._watcher.join()
