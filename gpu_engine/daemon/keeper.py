"""The keeper: a small process that outlives phosd and holds a second copy of every block's descriptor.

A frontend that was detached and attached again has its memory from imported descriptors, and the driver does not
export those a second time (DESIGN §2). If phosd alone held them, killing it would make that memory unreachable for
every later checkpoint. The keeper does nothing else than hold them, so there is little that could kill it.

It also remembers which processes are detached: the next phosd would not know one that has no memory.

It runs as ``python -I -S keeper.py FOLDER`` with the standard library alone, speaks to one phosd at a time, and ends
when it holds nothing and no phosd has been there for a while. A process's descriptors are dropped when the process has
ended and no phosd is connected (with one connected, phosd decides: an image may still be written from them).

Packets are JSON objects on a SOCK_SEQPACKET socket. From phosd: ``{"op": "add", "session": hex, "pid": n, "block": n,
"size": n, "device": n}`` with a descriptor, and with ``"owner": [hex, n]``, which means nothing here, if the session
was only lent the block; ``{"op": "remove", "session": hex, "block": n | null}`` (null: the whole session); ``{"op":
"pid", "session": hex, "pid": n}``; ``{"op": "detached", "session": hex, "pid": n}`` and ``{"op": "attached",
"session": hex}``; ``{"op": "list"}``, answered by one packet for each block, with all that was said of it and its
descriptor, one ``{"session": hex, "pid": n, "block": null}`` for each detached session, and a last ``{"end": true}``.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

LOCK = "keeper.lock"
LOCK_SECONDS = 2.0
"""How long a keeper that was just started waits for another to end: phosd cannot tell a dying one from one to come."""

LONELY_SECONDS = 10.0
"""How long a keeper that holds nothing waits for a phosd before it ends."""


def receive(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int], int]:
    """A packet of at most ``size`` bytes, at most ``most`` descriptors beside it (now the caller's), and its flags.

    :func:`socket.recv_fds` ignores its flags (Python 3.11): what it received would stay open when this process becomes
    another program, as a phosd does whose GPU context is lost.

    Raises:
        OSError: the connection is broken.
    """
    number = array.array("i")
    room = socket.CMSG_LEN(most * number.itemsize)
    payload, beside, flags, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            number.frombytes(data[: len(data) // number.itemsize * number.itemsize])
    return payload, list(number), flags


class Keeper:
    """State of the keeper: one listening socket, at most one phosd, and the descriptors by session and block."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "keeper.sock")
        self.held: dict[str, dict[int, tuple[int, dict[str, Any]]]] = {}
        self.detached: dict[str, int] = {}  # sessions that phosd has detached, or was about to → their processes
        self.pidfds: dict[str, int] = {}
        self.ended: set[str] = set()  # sessions whose process had ended when they came: phosd will say what to drop
        self.peer: socket.socket | None = None
        self.listener = self.listen()

    def listen(self) -> socket.socket:
        """A listening socket at our path."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        listener.bind(self.path)
        os.chmod(self.path, 0o600)
        listener.listen(4)
        return listener

    def run(self) -> None:
        """Serve until nothing is held and no phosd has come for a while."""
        while True:
            poll = select.poll()  # not select(): descriptor numbers go far beyond its 1024
            poll.register(self.listener, select.POLLIN)
            if self.peer:
                poll.register(self.peer, select.POLLIN)
            else:
                for session in list(self.ended):
                    self.drop(session)
                for pidfd in self.pidfds.values():
                    poll.register(pidfd, select.POLLIN)
            lonely = not self.peer and not self.held and not self.detached
            ready = {descriptor for descriptor, _ in poll.poll(LONELY_SECONDS * 1000 if lonely else None)}
            if not ready and lonely:
                os.unlink(self.path)
                # Nobody can come any more. Who came at the last moment is the one phosd of this folder, and waits for
                # answers: serve it, and be found again.
                if not select.select([self.listener], [], [], 0)[0]:
                    return
                self.accept()
                self.listener.close()
                self.listener = self.listen()
                continue
            for session in [s for s, pidfd in self.pidfds.items() if pidfd in ready]:
                self.drop(session)
            if self.peer and self.peer.fileno() in ready:
                self.serve()
            if self.listener.fileno() in ready:
                self.accept()

    def accept(self) -> None:
        """Take a new phosd; an old one that is still connected is dead or dying."""
        connection, _ = self.listener.accept()
        while self.pending():
            self.serve()  # what it said before it died: a descriptor may be among it
        if self.peer:
            self.peer.close()
        self.peer = connection

    def pending(self) -> bool:
        """Whether phosd has said something, or has gone."""
        if not self.peer:
            return False
        poll = select.poll()
        poll.register(self.peer, select.POLLIN)
        return bool(poll.poll(0))

    def serve(self) -> None:
        """One packet from phosd."""
        assert self.peer
        try:
            payload, descriptors, _ = receive(self.peer, 4096, 1)
        except OSError:
            payload, descriptors = b"", []
        if not payload:
            self.peer.close()
            self.peer = None
            return
        try:
            self.obey(json.loads(payload), descriptors)
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # nothing that a confused phosd says may cost the descriptors of others
        for descriptor in descriptors:
            os.close(descriptor)

    def obey(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Carry out one request; a descriptor that is kept is taken out of ``descriptors``."""
        operation = request.pop("op")
        if operation == "add":
            if len(descriptors) == 1:  # none: this process may open no more
                self.add(request, descriptors.pop())
        elif operation == "remove":
            self.remove(request["session"], request["block"])
        elif operation == "pid":
            self.moved(request["session"], request["pid"])
        elif operation == "detached":
            self.detaches(request["session"], request["pid"])
        elif operation == "attached":
            self.detached.pop(request["session"], None)
            self.settle(request["session"])
        elif operation == "list":
            self.list()

    def add(self, record: dict[str, Any], descriptor: int) -> None:
        """Hold a block's descriptor."""
        session, block = record["session"], record["block"]
        blocks = self.held.setdefault(session, {})
        if block in blocks:
            os.close(blocks[block][0])
        blocks[block] = (descriptor, record)
        if session not in self.pidfds:
            self.watch(session, record["pid"])

    def detaches(self, session: str, pid: int) -> None:
        """The next phosd is to know of the session, whether it has blocks or not."""
        self.detached[session] = int(pid)
        if session not in self.pidfds:
            self.watch(session, pid)

    def moved(self, session: str, pid: int) -> None:
        """The session was restored: it lives in process ``pid`` from now on, and so it says when it is asked."""
        for _, record in self.held.get(session, {}).values():
            record["pid"] = pid
        if session in self.detached:
            self.detached[session] = pid
        self.watch(session, pid)

    def watch(self, session: str, pid: int) -> None:
        """Notice the end of process ``pid``, in which the session lives."""
        if session in self.pidfds:
            os.close(self.pidfds.pop(session))
        self.ended.discard(session)
        try:
            self.pidfds[session] = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended.add(session)
        except OSError:
            pass  # no descriptor left: a process that lives must not lose its memory for that

    def remove(self, session: str, block: int | None) -> None:
        """Let a block go, or a whole session."""
        if block is None:
            self.drop(session)
        elif session in self.held and block in self.held[session]:
            os.close(self.held[session].pop(block)[0])
            self.settle(session)

    def settle(self, session: str) -> None:
        """Forget a session of which there is nothing to remember any more."""
        if not self.held.get(session) and session not in self.detached:
            self.drop(session)

    def drop(self, session: str) -> None:
        """Let everything of a session go."""
        self.ended.discard(session)
        self.detached.pop(session, None)
        for descriptor, _ in self.held.pop(session, {}).values():
            os.close(descriptor)
        if session in self.pidfds:
            os.close(self.pidfds.pop(session))

    def list(self) -> None:
        """Hand copies of everything to phosd."""
        assert self.peer
        try:
            for blocks in self.held.values():
                for descriptor, record in blocks.values():
                    socket.send_fds(self.peer, [json.dumps(record).encode()], [descriptor])
            for session, pid in self.detached.items():
                self.peer.send(json.dumps({"session": session, "pid": pid, "block": None}).encode())
            self.peer.send(b'{"end": true}')
        except OSError:
            pass  # phosd died while asking; the next one asks again


def main() -> None:
    """Run as a program of its own, away from phosd's session, so that what kills phosd's group spares it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if alone(sys.argv[1]):
        Keeper(sys.argv[1]).run()


def alone(folder: str) -> bool:
    """Whether no other keeper serves the folder, now and for this process's life; waits a moment for one that ends."""
    lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)


if __name__ == "__main__":
    main()
