"""A small phosd for tests of the frontend: real sockets, real descriptors, no GPU of its own.

It keeps what frontends send, and quiesces, detaches, attaches and opens them when a test says so. One thread a
connection reads; tests call from theirs.
"""

from __future__ import annotations

import array
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phos.gen import wire_pb2 as wire

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("PHOS_BUILD", ROOT / "build"))
CUDA_INCLUDE = Path(os.environ.get("CUDA_INCLUDE", ROOT / "build" / "cuda" / "include"))
"""The folder of cuda.h, as make has it."""
LIBPHOS = BUILD / "lib" / "libphos.so"
SOFTGPU = BUILD / "softgpu"
built = pytest.mark.skipif(not (LIBPHOS.exists() and (SOFTGPU / "libcuda.so.1").exists()), reason="not built")
UNIT = 2 << 20  # physical memory comes in multiples of it
SLAB = 16 * UNIT
PATIENCE = 30.0  # seconds; nothing here takes one


def process_start(pid: int) -> int:
    """Field 22 of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


@dataclass
class Block:
    """A block as a frontend registered it."""

    size: int
    owner: int
    descriptor: int  # -1: none came
    lost: bool
    owner_session: bytes
    owner_block: int


@dataclass
class Session:
    """One frontend, over all its connections."""

    number: bytes
    pid: int
    blocks: dict[int, Block] = field(default_factory=dict)
    uncarried: dict[str, tuple[int, int]] = field(default_factory=dict)
    modules: list[tuple[str, str, int, int, bytes]] = field(default_factory=list)
    files: list[wire.ModuleLoaded] = field(default_factory=list)  # of the modules that are in one
    module_numbers: list[int] = field(default_factory=list)
    kernels: list[tuple[int, str]] = field(default_factory=list)  # module and name, as often as they were told
    connection: Connection | None = None
    hellos: list[wire.Hello] = field(default_factory=list)
    memory_map: wire.MemoryMap | None = None
    requests: list[tuple[wire.CheckpointRequest, list[str]]] = field(default_factory=list)  # and the directories
    settled: int = 0  # how often it asked whether freed memory was let go of


class Connection:
    """One connection of one frontend."""

    def __init__(self, daemon: FakePhosd, peer: socket.socket) -> None:
        self.daemon = daemon
        self.peer = peer
        self.session: Session | None = None
        self.replies: queue.Queue[tuple[wire.Envelope, list[int]]] = queue.Queue()
        self.ended = threading.Event()
        self.last_id = 100
        self.lock = threading.Lock()

    def serve(self) -> None:
        """Begin to read, in a thread."""
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, envelope: wire.Envelope, descriptors: list[int] | None = None) -> None:
        ancillary = []
        if descriptors:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
        with self.lock:
            self.peer.sendmsg([envelope.SerializeToString()], ancillary)

    def ask(
        self, timeout: float = PATIENCE, descriptors: list[int] | None = None, **body: object
    ) -> tuple[wire.Envelope, list[int]]:
        """Send a request and wait for its reply. Raises queue.Empty if none comes (any more)."""
        self.last_id += 1
        self.send(wire.Envelope(id=self.last_id, **body), descriptors)  # type: ignore[arg-type]
        deadline = time.monotonic() + timeout
        while True:
            ended = self.ended.is_set()
            try:
                left = min(0.1, deadline - time.monotonic())
                envelope, descriptors = self.replies.get(timeout=max(0.0, left))
            except queue.Empty:
                if ended or time.monotonic() > deadline:
                    raise
                continue
            if envelope.id == self.last_id:
                return envelope, descriptors

    def close(self) -> None:
        try:
            self.peer.shutdown(socket.SHUT_RDWR)
        except OSError:  # it ended by itself just now
            pass

    def _read(self) -> None:
        try:
            while self._read_one():
                pass
        finally:
            self.ended.set()
            self.peer.close()

    def _read_one(self) -> bool:
        try:
            room = socket.CMSG_SPACE(4 * 253)
            data, ancillary, flags, _ = self.peer.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        descriptors: list[int] = []
        for _, _, content in ancillary:
            descriptors += array.array("i", content[: len(content) // 4 * 4])
        try:
            if data:
                self._take(wire.Envelope.FromString(data), descriptors)
        except BrokenPipeError:  # it has hung up
            return False
        return bool(data)

    def _take(self, envelope: wire.Envelope, descriptors: list[int]) -> None:
        kind = envelope.WhichOneof("body")
        if kind == "hello":
            self.session = self.daemon.sessions.setdefault(
                envelope.hello.session, Session(envelope.hello.session, envelope.hello.pid)
            )
            self.session.hellos.append(envelope.hello)
            if envelope.hello.state != wire.DETACHED:
                self.session.blocks.clear()
            self.session.connection = self
            self.send(wire.Envelope(id=envelope.id, welcome=self.daemon.welcome(envelope.hello)))
            self.daemon.arrivals.put(self)
            return
        if kind in ("quiesce_done", "detach_done", "attach_done", "done"):
            self.replies.put((envelope, descriptors))
            return
        assert self.session is not None
        if self.session.connection is not self:  # it has begun anew; what was under way here was told again there
            for descriptor in descriptors:
                os.close(descriptor)
            return
        if kind == "block_added":
            added = envelope.block_added
            former = self.session.blocks.get(added.block)
            assert former is None or former.lost, "a block was added twice"
            self.daemon.descriptors.update(descriptors)
            self.session.blocks[added.block] = Block(
                added.size, added.owner, descriptors[0] if descriptors else -1, added.descriptor_lost,
                added.owner_session, added.owner_block,
            )  # fmt: skip
        elif kind == "block_removed":
            if envelope.block_removed.block:
                self.daemon.removed.append(self.session.blocks.pop(envelope.block_removed.block))
            if not self.daemon.reluctant or (envelope.id and self.daemon.settles):
                while self.daemon.removed:
                    self.daemon.let_go(self.daemon.removed.pop())
            if envelope.id:
                self.session.settled += 1
                if self.daemon.settles:
                    self.send(wire.Envelope(id=envelope.id, done=wire.Done()))
        elif kind == "uncarried":
            self.session.uncarried[envelope.uncarried.kind] = (envelope.uncarried.count, envelope.uncarried.bytes)
        elif kind == "module_loaded":
            module = envelope.module_loaded
            content = b""
            if descriptors:
                content = os.pread(descriptors[0], module.size, 0)
                os.close(descriptors[0])
            self.session.module_numbers.append(module.module)
            self.session.files += [module] if module.path else []
            self.session.modules.append((module.entry_point, module.path, module.offset, module.size, content))
        elif kind == "kernels_seen":
            told = set(self.session.module_numbers)
            assert envelope.kernels_seen.module in told, "kernels of a module that nobody was told of"
            self.session.kernels += [(envelope.kernels_seen.module, name) for name in envelope.kernels_seen.kernel]
        elif kind == "token_resolve":
            if self.daemon.questions is None:
                self.resolve(envelope)
            else:
                self.daemon.questions.put(envelope)
        elif kind == "checkpoint_request":
            self.session.requests.append(
                (envelope.checkpoint_request, [os.readlink(f"/proc/self/fd/{d}") for d in descriptors])
            )
            for descriptor in descriptors:
                os.close(descriptor)

    def resolve(self, envelope: wire.Envelope) -> None:
        """Answer whose memory a token stands for."""
        asked = envelope.token_resolve
        owner = self.daemon.sessions.get(asked.session)
        block = owner.blocks.get(asked.block) if owner else None
        if block is None or block.descriptor < 0:
            self.send(wire.Envelope(id=envelope.id, token_resolved=wire.TokenResolved(error="no such memory")))
        else:
            resolved = wire.TokenResolved(size=block.size, device=0)
            self.send(wire.Envelope(id=envelope.id, token_resolved=resolved), [block.descriptor])


class FakePhosd:
    """Listens; a context manager."""

    def __init__(self, folder: Path | None = None) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="phos-test-"))
        self.path = self.folder / "phosd.sock"
        (self.folder / "hold").mkdir(exist_ok=True)
        self.sessions: dict[bytes, Session] = {}
        self.arrivals: queue.Queue[Connection] = queue.Queue()
        self.action = wire.Welcome.ATTACH  # what a detached frontend is told
        self.reluctant = False  # whether it lets go of blocks only for who waits for that
        self.removed: list[Block] = []  # not let go of yet
        self.settles = True  # whether it answers who waits for that
        self.questions: queue.Queue[wire.Envelope] | None = None  # about tokens; None: they are answered at once
        self.connections: list[Connection] = []
        self.descriptors: set[int] = set()  # those of blocks, open until the block is let go of or the test is over
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path.unlink(missing_ok=True)
        self.listener.bind(str(self.path))
        self.listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FakePhosd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End, and leave nothing behind."""
        self.stop()
        for connection in self.connections:
            connection.ended.wait(PATIENCE)
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def let_go(self, block: Block) -> None:
        """Close a block's memory."""
        if block.descriptor >= 0:
            self.descriptors.discard(block.descriptor)
            os.close(block.descriptor)
            block.descriptor = -1

    def stop(self) -> None:
        """As if killed."""
        try:
            self.listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.listener.close()
        self.path.unlink(missing_ok=True)
        for connection in self.connections:
            if not connection.ended.is_set():
                connection.close()

    def welcome(self, hello: wire.Hello) -> wire.Welcome:
        if hello.state == wire.DETACHED:
            return wire.Welcome(action=self.action, retry_ms=5, error="the test says so")
        return wire.Welcome(action=wire.Welcome.STAY)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            connection = Connection(self, peer)
            self.connections.append(connection)  # before anything of it can be seen: stop() closes what is in there
            connection.serve()

    def arrival(self, timeout: float = PATIENCE) -> Session:
        """The next frontend that says hello."""
        connection = self.arrivals.get(timeout=timeout)
        assert connection.session is not None
        return connection.session

    def quiesce(self, session: Session, timeout_ms: int = 5000) -> wire.QuiesceDone:
        assert session.connection is not None
        return session.connection.ask(quiesce=wire.Quiesce(timeout_ms=timeout_ms))[0].quiesce_done

    def open(self, session: Session) -> wire.Done:
        assert session.connection is not None
        return session.connection.ask(open=wire.Open())[0].done

    def hold(self, session: Session) -> Path:
        """Make the hold of a session."""
        link = self.folder / "hold" / session.number.hex()
        link.symlink_to(f"{os.getpid()}:{process_start(os.getpid())}")
        return link

    def detach(
        self, session: Session, *, reduce_stack: bool = True, huge_pages: bool = True, copy_threads: bool = True
    ) -> wire.DetachDone:
        """Make the hold and detach. The hold stays if that succeeded."""
        link = self.hold(session)
        connection = session.connection
        assert connection is not None
        request = wire.Detach(reduce_stack=reduce_stack, huge_pages=huge_pages, copy_threads=copy_threads)
        envelope, descriptors = connection.ask(detach=request)
        done = envelope.detach_done
        if done.error:
            link.unlink()
            return done
        assert connection.ended.wait(PATIENCE), "the frontend kept its socket after DetachDone"
        with os.fdopen(descriptors[0], "rb") as file:
            session.memory_map = wire.MemoryMap.FromString(file.read())
        return done

    def attach(self, session: Session, blocks: dict[int, int] | None = None, **how: bool) -> wire.AttachDone:
        """Remove the hold, wait for the frontend, and give it its memory; `blocks`: other descriptors than its own."""
        (self.folder / "hold" / session.number.hex()).unlink()
        assert self._return(session) is session
        return self.give(session, blocks, **how)

    def _return(self, session: Session) -> Session:
        """Who says hello next, once the hold of this one is gone; queue.Empty where its process has ended meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.arrival(0.05)
            except queue.Empty:
                if time.monotonic() > deadline or not os.path.exists(f"/proc/{session.pid}"):
                    raise

    def give(self, session: Session, blocks: dict[int, int] | None = None, **how: bool) -> wire.AttachDone:
        """``how``: fields of Attach."""
        connection = session.connection
        assert connection is not None
        given = blocks if blocks is not None else {n: b.descriptor for n, b in session.blocks.items()}
        numbers = list(given)
        for at in range(0, len(numbers), 200):
            part = numbers[at : at + 200]
            message = wire.Envelope(attach_blocks=wire.AttachBlocks(block=part))
            connection.send(message, [given[number] for number in part])
        return connection.ask(attach=wire.Attach(blocks=len(numbers), **how))[0].attach_done

    def toggle(self, session: Session) -> None:
        """Quiesce, detach, attach, open; every step must succeed."""
        for step in (self.quiesce, self.detach, self.attach, self.open):
            error = step(session).error  # type: ignore[operator]
            assert not error, f"{step.__name__}: {error}"


PRELUDE = '''
import ctypes, os, sys, threading, time
from cuda.bindings import driver as cu

def ok(result):
    """The value of a driver call that must succeed."""
    if int(result[0]):
        raise AssertionError(f"driver error {result[0]!r}")
    return result[1] if len(result) == 2 else result[1:]

def start(device=0):
    ok(cu.cuInit(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(device))))
    ok(cu.cuCtxSetCurrent(context))
    return context

def fill(pointer, size, value):
    ok(cu.cuMemsetD8(pointer, value, size))

def read(pointer, size):
    data = bytearray(size)
    ok(cu.cuMemcpyDtoH(data, pointer, size))
    return bytes(data)

def descriptors():
    """What is open, by number."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass
    return found

def newer(name, *types):
    """An entry point of CUDA 13.5, for programs with SOFTGPU_DRIVER_VERSION=13050."""
    pointer, _ = ok(cu.cuGetProcAddress(name.encode(), 13050, 0))
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(int(pointer))

def say(*words):
    print(*words, flush=True)

def heard():
    return sys.stdin.readline().strip()
'''


# Work in a stream of its own that waits until the program writes 1 to `flag`.
WAITING = """
start()
flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
ctypes.memset(flag, 0, 4096)
waiting = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamWaitValue32(waiting, flag, 1, 0))
def let_go():
    ctypes.memset(flag, 1, 1)
"""


class Program:
    """A Python program under the frontend, on the software GPU, that one can talk to by lines."""

    def __init__(self, phosd: FakePhosd | Path, body: str, **environment: str) -> None:
        socket_path = phosd.path if isinstance(phosd, FakePhosd) else phosd
        self.process = subprocess.Popen(
            # The last line keeps it until finish(): a program that ends at once may end before phosd hears of it.
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body) + "\nheard()\n"],
            env=environment_for(socket_path) | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.error_reader = threading.Thread(target=self._read_errors, daemon=True)
        self.error_reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    @property
    def stderr(self) -> str:
        return "".join(self.errors)

    def line(self, timeout: float = PATIENCE) -> str:
        """The next line it says."""
        line = self.lines.get(timeout=timeout)
        if line is None:
            self.error_reader.join(5)
            raise AssertionError(f"the program ended with {self.process.wait()}: {self.stderr}")
        return line

    def tell(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self, timeout: float = PATIENCE) -> None:
        """Let it end, and wait for a good end."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        status = self.process.wait(timeout)
        self.error_reader.join(5)
        assert status == 0, self.stderr

    def descriptors(self) -> list[str]:
        folder = f"/proc/{self.process.pid}/fd"
        found = []
        for name in os.listdir(folder):
            try:
                found.append(os.readlink(f"{folder}/{name}"))
            except FileNotFoundError:
                pass
        return sorted(found)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def environment_for(socket_path: Path, *, preload: bool = True) -> dict[str, str]:
    """The environment of a program on the software GPU, under the frontend or not."""
    environment = dict(os.environ)
    environment.pop("PHOS_DAEMON_COMMAND", None)
    environment["LD_LIBRARY_PATH"] = str(SOFTGPU)
    environment["PHOS_SOCKET"] = str(socket_path)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["SOFTGPU_MACHINE"] = socket_path.parent.name  # whose memory no other test uses
    environment.setdefault("PHOS_LOG", "info")
    if preload:
        environment["LD_PRELOAD"] = str(LIBPHOS)
    else:
        environment.pop("LD_PRELOAD", None)
    return environment


@contextmanager
def program(phosd: FakePhosd, body: str, **environment: str) -> Iterator[tuple[Program, Session]]:
    """A program that has said hello; killed at the end unless it has ended."""
    running = Program(phosd, body, **environment)
    try:
        yield running, phosd.arrival()
    finally:
        running.kill()


@contextmanager
def alone(body: str, **environment: str) -> Iterator[Program]:
    """A program without a phosd: nobody else holds its memory. Killed at the end unless it has ended."""
    with tempfile.TemporaryDirectory(prefix="phos-test-") as folder:
        running = Program(Path(folder) / "nobody.sock", body, **environment)
        try:
            yield running
        finally:
            running.kill()
