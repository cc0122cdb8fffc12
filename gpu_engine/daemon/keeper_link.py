"""phosd's side of the keeper: start one if none runs, hand it copies of descriptors, get them back after a crash."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phos.gpu_engine.daemon import keeper
from phos.gpu_engine.errors import DaemonUnavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldBlock:
    """What the keeper knows of a block; ``descriptor`` is the receiver's own copy."""

    session: bytes
    pid: int
    block: int
    size: int
    device: int
    descriptor: int


class KeeperLink:
    """The connection to the keeper. Losing it is survivable and logged: only a second crash would then lose memory."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()  # one packet, or one list, at a time; guards _gone
        self._gone = False
        self._socket = self._connect(path)

    @staticmethod
    def _connect(path: Path) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started = False
        deadline = time.monotonic() + 10
        while True:
            try:
                connection.connect(str(path))
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
                    raise DaemonUnavailable(
                        f"The keeper of GPU memory descriptors did not start within 10 s ({path}). "
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
                self._gone = True  # said once, not for every block
                log.warning(
                    "The keeper is gone (%s): if phosd is killed as well, GPU memory descriptors are lost. "
                    "Restart phosd when that is convenient.",
                    error,
                )

    def add(self, session: bytes, pid: int, block: int, size: int, device: int, descriptor: int) -> None:
        """Give the keeper a copy of a block's descriptor."""
        record = {"op": "add", "session": session.hex(), "pid": pid, "block": block, "size": size, "device": device}
        self._send(record, [descriptor])

    def remove(self, session: bytes, block: int | None) -> None:
        """A block is freed, or (None) a whole session is."""
        self._send({"op": "remove", "session": session.hex(), "block": block}, [])

    def moved(self, session: bytes, pid: int) -> None:
        """The session now lives in another process: it was restored."""
        self._send({"op": "pid", "session": session.hex(), "pid": pid}, [])

    def held(self) -> Iterator[HeldBlock]:
        """Everything the keeper holds, each with a fresh descriptor."""
        with self._lock:
            self._socket.send(b'{"op": "list"}')
            while True:
                payload, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 1, socket.MSG_CMSG_CLOEXEC)
                if not payload:
                    raise DaemonUnavailable("The keeper of GPU memory descriptors ended while it was asked for them.")
                record = json.loads(payload)
                if record.get("end"):
                    return
                yield HeldBlock(
                    session=bytes.fromhex(record["session"]),
                    pid=record["pid"],
                    block=record["block"],
                    size=record["size"],
                    device=record["device"],
                    descriptor=descriptors[0],
                )

    def close(self) -> None:
        """Leave the keeper alone."""
        os.close(self._socket.detach())
