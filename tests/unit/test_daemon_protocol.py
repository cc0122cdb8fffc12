"""phosd's side of the control protocol without a GPU: sessions over real socket pairs, packets of every kind."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import session as session_module
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.daemon.states import _NEXT, SessionState, StateMachine
from phos.gpu_engine.errors import CheckpointFailed, MemoryLost, PhosError, ProtocolError, Unresponsive
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

    def held(self) -> Iterator[object]:
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


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    made = Frontend(tmp_path)
    made.connect()
    yield made
    made.close()
    made.broker.drop_session(NUMBER)


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


# What a session does with what it is told.


def test_blocks_are_held_and_let_go(frontend: Frontend) -> None:
    before = open_descriptors()
    read_end, write_end = os.pipe()
    for number in (1, 2, 3):
        frontend.send((write_end,), block_added=block(number))
    frontend.send(block_removed=wire_pb2.BlockRemoved(block=2))
    frontend.settle()
    os.close(write_end)
    os.close(read_end)
    assert [b.key for b in frontend.session.own_blocks()] == [(NUMBER, 1), (NUMBER, 3)]
    assert open_descriptors() == before + 2
    assert frontend.broker.drop_session(NUMBER) == 4 * MiB
    assert open_descriptors() == before


def test_what_was_freed_while_phosd_was_away_is_dropped(frontend: Frontend) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for number in (1, 2, 3):
        frontend.send((null,), block_added=block(number))
    frontend.settle()
    frontend.close()
    frontend.connect(blocks=2)
    assert not frontend.session.table_complete
    frontend.send((null,), block_added=block(3))
    frontend.send(block_added=block(1, descriptor_lost=True))  # imported once: it cannot be exported again
    frontend.settle()
    assert frontend.session.table_complete
    assert [b.key[1] for b in frontend.session.own_blocks()] == [1, 3]
    os.close(null)


def test_modules_and_totals_do_not_grow_with_every_connection(frontend: Frontend) -> None:
    for _ in range(3):
        frontend.send(module_loaded=wire_pb2.ModuleLoaded(entry_point="cuModuleLoad", size=1))
        frontend.send(uncarried=wire_pb2.Uncarried(kind="managed", count=1, bytes=5))
        frontend.settle()
        assert len(frontend.session.modules) == 1
        assert len(frontend.session.uncarried) == 1
        frontend.close()
        frontend.connect()


def test_a_mad_frontend_does_not_fill_memory(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MODULES_KEPT", 10)
    for number in range(200):
        frontend.send(uncarried=wire_pb2.Uncarried(kind=f"kind {number} " + "x" * 9000, count=1))
        frontend.send(module_loaded=wire_pb2.ModuleLoaded(path="p" * 9000))
    frontend.settle()
    assert len(frontend.session.uncarried) == session_module.KINDS_KEPT
    assert len(frontend.session.modules) == 10
    assert max(map(len, frontend.session.uncarried)) <= session_module.TEXT_KEPT


def test_memory_of_another_user_is_not_handed_out(frontend: Frontend) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    owner = Session(OTHER, 1, 2000, frontend.broker, frontend.session._holds, Speculator(), SessionState.RUNNING)
    owner.handle(wire_pb2.Envelope(block_added=block(7)), [os.dup(null)])
    assert frontend.end
    for user, allowed in ((2000, False), (1000, True)):
        frontend.broker.belongs(OTHER, user)
        frontend.send((), 5, token_resolve=wire_pb2.TokenResolve(session=OTHER, block=7))
        packet = wire.receive(frontend.end)
        assert packet is not None
        assert "no such exported memory" in packet[0].token_resolved.error or allowed
        assert not packet[1]  # this process sees no GPU at all, so even the right user gets a sentence
    frontend.broker.belongs(OTHER, 2000)
    frontend.send(block_added=block(8, owner_session=OTHER, owner_block=7))
    assert frontend.end.recv(1) == b"", "the connection must end"
    frontend.broker.drop_session(OTHER)
    os.close(null)


def test_token_gives_a_descriptor_to_the_same_user(frontend: Frontend) -> None:
    inode = os.fstat(descriptor := os.memfd_create("block")).st_ino
    frontend.session._blocks._ordinals = {3: 0}
    frontend.send((descriptor,), block_added=block(1, device=3))
    os.close(descriptor)
    frontend.send((), 5, token_resolve=wire_pb2.TokenResolve(session=NUMBER, block=1))
    assert frontend.end
    packet = wire.receive(frontend.end)
    assert packet is not None
    assert (packet[0].token_resolved.size, packet[0].token_resolved.device) == (2 * MiB, 3)
    assert [os.fstat(d).st_ino for d in packet[1]] == [inode]
    wire.close_all(packet[1])


# Quiesce, detach, attach: what phosd makes of every way to fail.


def quiesced(frontend: Frontend) -> None:
    thread = frontend.in_background("quiesce", quiesce_done=wire_pb2.QuiesceDone())
    frontend.session.quiesce(1.0)
    thread.join()


def test_quiesce_that_is_not_answered_is_followed_by_open(frontend: Frontend) -> None:
    with pytest.raises(Unresponsive, match="did not answer 'quiesce'"):
        frontend.session.quiesce(0.1)
    frontend.answer("quiesce")
    frontend.answer("open")
    assert frontend.session.machine.state is SessionState.RUNNING


def test_late_answer_is_nobodys(frontend: Frontend) -> None:
    before = open_descriptors()
    null = os.open(os.devnull, os.O_RDONLY)
    frontend.send((null,), 12345, detach_done=wire_pb2.DetachDone())
    frontend.settle()
    os.close(null)
    assert open_descriptors() == before


def test_detach_without_a_descriptor_of_everything_is_refused_before_it_begins(frontend: Frontend) -> None:
    frontend.send(block_added=block(1, descriptor_lost=True))
    frontend.settle()
    quiesced(frontend)
    with pytest.raises(CheckpointFailed, match="no descriptor of 1 GPU memory"):
        frontend.session.detach(reduce_stack=False, huge_pages=False)
    thread = frontend.in_background("open", done=wire_pb2.Done())  # not 'detach'
    frontend.session.open()
    thread.join()


@pytest.mark.parametrize("damage", ["no map", "two maps", "no protobuf", "memory of others"])
def test_detach_with_a_map_that_cannot_be_read_brings_the_process_back(frontend: Frontend, damage: str) -> None:
    quiesced(frontend)
    before = open_descriptors()
    maps = [memory_map()]
    if damage == "no map":
        os.close(maps.pop())
    elif damage == "two maps":
        maps.append(memory_map())
    elif damage == "no protobuf":
        os.write(maps[0], b"\xff" * 100)
        os.lseek(maps[0], 0, os.SEEK_SET)
    else:
        os.close(maps.pop())
        maps.append(memory_map(blocks=[wire_pb2.MemoryMap.Block(block=1, owner_session=OTHER, owner_block=7)]))
    thread = frontend.in_background("detach", detach_done=wire_pb2.DetachDone(), descriptors=tuple(maps))
    with pytest.raises(CheckpointFailed, match="cannot be read"):
        frontend.session.detach(reduce_stack=False, huge_pages=False)
    thread.join()
    for descriptor in maps:
        os.close(descriptor)
    assert frontend.session.machine.state is SessionState.RETURNING
    assert not list(frontend.session._holds._folder.iterdir())
    assert open_descriptors() == before


def test_detach_whose_process_ends_leaves_no_hold(frontend: Frontend) -> None:
    quiesced(frontend)

    def hang_up() -> None:
        frontend.answer("detach")
        frontend.end.close()  # type: ignore[union-attr]

    thread = threading.Thread(target=hang_up)
    thread.start()
    with pytest.raises(CheckpointFailed, match="ended, or closed its connection, at 'detach'"):
        frontend.session.detach(reduce_stack=False, huge_pages=False)
    thread.join()
    assert not list(frontend.session._holds._folder.iterdir())


def test_connecting_anew_ends_what_was_asked_before(frontend: Frontend) -> None:
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            frontend.session.quiesce(20.0)
        except PhosError as error:
            failure.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    frontend.answer("quiesce")
    former, former_thread = frontend.end, frontend.thread
    frontend.connect()
    thread.join(5)
    assert not thread.is_alive()
    assert "closed its connection" in str(failure[0])
    former.close()  # type: ignore[union-attr]
    former_thread.join(5)  # type: ignore[union-attr]
    assert frontend.session.is_connected


def test_attach_of_memory_that_is_gone_is_said(frontend: Frontend) -> None:
    frontend.session.machine.adopt(SessionState.ATTACHING)
    frontend.session._blocks._imports = {4: (OTHER, 7)}
    with pytest.raises(MemoryLost, match="no longer holds GPU memory block 7"):
        frontend.session.attach()


def test_attach_sends_thousands_of_descriptors_in_packets(frontend: Frontend) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for number in range(450):
        frontend.send((null,), block_added=block(number))
    frontend.settle()
    os.close(null)
    before = open_descriptors()
    got: list[int] = []
    sizes: list[int] = []

    def take() -> None:
        assert frontend.end
        while True:
            packet = wire.receive(frontend.end)
            assert packet is not None
            wire.close_all(packet[1])
            kind = packet[0].WhichOneof("body")
            if kind == "attach_blocks":
                sizes.append(len(packet[1]))
                got.extend(packet[0].attach_blocks.block)
            elif kind == "attach":
                assert packet[0].attach.blocks == len(got)
                frontend.send((), packet[0].id, attach_done=wire_pb2.AttachDone())
            else:
                frontend.send((), packet[0].id, done=wire_pb2.Done())
                return

    thread = threading.Thread(target=take)
    thread.start()
    frontend.session.attach()
    thread.join()
    assert got == list(range(450))
    assert sizes == [200, 200, 50]
    assert open_descriptors() == before


# Garbage.


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(min_size=1, max_size=300), descriptors=st.integers(0, 3))
def test_garbage_is_refused_and_leaks_nothing(payload: bytes, descriptors: int) -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(theirs, [payload], [null] * descriptors)
    try:
        packet = wire.receive(ours)
        assert packet is not None
        assert len(packet[1]) == descriptors
        wire.close_all(packet[1])
    except ProtocolError:
        pass  # it says so, and has closed the descriptors: counted below
    for descriptor in (null, ours.detach(), theirs.detach()):
        os.close(descriptor)
    assert open_descriptors() == before


BODIES = [field.name for field in wire_pb2.Envelope.DESCRIPTOR.oneofs[0].fields]


@settings(max_examples=60, deadline=None)
@given(packets=st.lists(st.tuples(st.sampled_from(BODIES), st.binary(max_size=24), st.integers(0, 2)), max_size=12))
def test_any_packet_in_any_order_leaks_nothing(
    tmp_path_factory: pytest.TempPathFactory, packets: list[tuple[str, bytes, int]]
) -> None:
    frontend = Frontend(tmp_path_factory.mktemp("holds"))
    null = os.open(os.devnull, os.O_RDONLY)
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    frontend.session.connected(wire.Connection(ours), wire_pb2.Hello(session=NUMBER), {})  # type: ignore[arg-type]
    for body, raw, count in packets:
        envelope = wire_pb2.Envelope(id=1)
        try:
            getattr(envelope, body).ParseFromString(raw)
        except Exception:
            getattr(envelope, body).SetInParent()
        try:
            frontend.session.handle(envelope, [os.dup(null) for _ in range(count)])
        except PhosError:
            pass
    frontend.broker.drop_session(NUMBER)
    ours.close()
    theirs.close()
    assert open_descriptors() == before
    os.close(null)


def test_packet_that_is_too_long_or_brings_too_many_descriptors_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = open_descriptors()
    theirs.send(b"x" * (wire.PACKET_LIMIT + 1))
    with pytest.raises(ProtocolError, match="cut off"):
        wire.receive(ours)
    socket.send_fds(theirs, [wire_pb2.Envelope(id=1).SerializeToString()], [0] * 250)
    with pytest.raises(ProtocolError, match="cut off"):
        wire.receive(ours)
    assert open_descriptors() == before
    with pytest.raises(ProtocolError, match="does not fit"):
        wire.send(theirs, wire_pb2.Envelope(done=wire_pb2.Done(error="x" * wire.PACKET_LIMIT)))
    ours.close()
    theirs.close()


def test_sentences_fit_a_packet_whatever_a_file_is_called() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = wire.Connection(ours)
    connection.done(1, error=b"/tmp/\xff".decode(errors="surrogateescape") + "x" * 100_000, warnings=["w" * 9000] * 500)
    packet = wire.receive(theirs)
    assert packet is not None
    assert packet[0].done.error.startswith("/tmp/?x")
    assert packet[0].done.warnings[-1] == "... and 450 more warnings."
    connection.limit(receive=0.05)
    with pytest.raises(BlockingIOError):
        connection.receive()
    ours.close()
    theirs.close()


# States.


def test_every_change_of_state_is_legal_or_refused() -> None:
    for before in SessionState:
        for after in SessionState:
            machine = StateMachine(before)
            if after in _NEXT[before]:
                machine.to(after)
                assert machine.state is after
            else:
                with pytest.raises(ProtocolError, match=f"from {before.value} to {after.value}"):
                    machine.to(after)
                assert machine.state is before


def test_the_end_is_final() -> None:
    machine = StateMachine(SessionState.RUNNING)
    waiting = threading.Thread(target=machine.wait_for, args=(SessionState.DETACHED,), kwargs={"timeout": 30})
    waiting.start()
    machine.end()
    waiting.join(5)
    assert not waiting.is_alive()
    machine.adopt(SessionState.RETURNING)
    assert machine.state is SessionState.ENDED


class SessionLife(RuleBasedStateMachine):
    """Any order of what phosd asks and what a frontend does: the session stays in step with it and loses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.frontend: Frontend
        self.gate = "open"
        self.blocks: set[int] = set()
        self.next = 1

    @initialize()
    def start(self) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.frontend = Frontend(Path(self.folder.name))
        self.frontend.connect()
        self.null = os.open(os.devnull, os.O_RDONLY)

    @property
    def state(self) -> SessionState:
        return self.frontend.session.machine.state

    @precondition(lambda self: self.gate == "open")
    @rule()
    def allocate(self) -> None:
        self.frontend.send((self.null,), block_added=block(self.next))
        self.blocks.add(self.next)
        self.next += 1
        self.frontend.settle()

    @precondition(lambda self: self.gate == "open" and self.blocks)
    @rule()
    def free(self) -> None:
        self.frontend.send(block_removed=wire_pb2.BlockRemoved(block=self.blocks.pop()))
        self.frontend.settle()

    @precondition(lambda self: self.gate == "open")
    @rule(refuse=st.booleans())
    def quiesce(self, refuse: bool) -> None:
        done = wire_pb2.QuiesceDone(error="a thread did not leave" if refuse else "")
        thread = self.frontend.in_background("quiesce", quiesce_done=done)
        try:
            self.frontend.session.quiesce(1.0)
            assert not refuse
            self.gate = "quiesced"
        except CheckpointFailed:
            assert refuse
        thread.join()

    @precondition(lambda self: self.gate == "quiesced")
    @rule()
    def open(self) -> None:
        thread = self.frontend.in_background("open", done=wire_pb2.Done())
        self.frontend.session.open()
        thread.join()
        self.gate = "open"

    @precondition(lambda self: self.gate == "quiesced")
    @rule(refuse=st.booleans())
    def detach(self, refuse: bool) -> None:
        memory = memory_map(blocks=[wire_pb2.MemoryMap.Block(block=n, size=2 * MiB) for n in sorted(self.blocks)])
        done = wire_pb2.DetachDone(error="no memory for the map" if refuse else "")
        thread = self.frontend.in_background("detach", detach_done=done, descriptors=(memory,))
        try:
            detached = self.frontend.session.detach(reduce_stack=True, huge_pages=True)
            assert {b.number for b in detached.blocks} == self.blocks
            self.gate = "detached"
        except CheckpointFailed:
            assert refuse
        thread.join()
        os.close(memory)
        if self.gate == "detached":
            self.frontend.close()

    @precondition(lambda self: self.gate == "detached")
    @rule()
    def attach(self) -> None:
        session = self.frontend.session
        session.allow_attach()
        session.machine.to(SessionState.ATTACHING)
        self.frontend.connect(wire_pb2.DETACHED)

        def serve() -> None:
            if self.blocks:
                self.frontend.answer("attach_blocks")
            self.frontend.answer("attach", attach_done=wire_pb2.AttachDone())
            self.frontend.answer("open", done=wire_pb2.Done())

        thread = threading.Thread(target=serve)
        thread.start()
        session.attach()
        thread.join()
        session.machine.to(SessionState.RUNNING)
        self.gate = "open"

    @precondition(lambda self: self.gate in ("open", "quiesced"))
    @rule()
    def reconnect(self) -> None:
        """phosd's server adopts what the frontend says when it comes back."""
        self.frontend.close()
        self.frontend.connect(blocks=len(self.blocks))
        self.frontend.session.machine.adopt(SessionState.RUNNING)
        for number in self.blocks:
            self.frontend.send((self.null,), block_added=block(number))
        self.frontend.settle()
        self.gate = "open"

    @invariant()
    def in_step(self) -> None:
        if not hasattr(self, "frontend"):
            return
        expected = {"open": SessionState.RUNNING, "quiesced": SessionState.QUIESCED, "detached": SessionState.DETACHED}
        assert self.state is expected[self.gate]
        assert {b.key[1] for b in self.frontend.session.own_blocks()} == self.blocks
        holds = list(self.frontend.session._holds._folder.iterdir())
        assert bool(holds) == (self.gate == "detached")

    def teardown(self) -> None:
        if hasattr(self, "frontend"):
            self.frontend.close()
            self.frontend.broker.drop_session(NUMBER)
            os.close(self.null)
            self.folder.cleanup()


TestSessionLife = SessionLife.TestCase
TestSessionLife.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_stopped_process_is_noticed_at_once(tmp_path: Path) -> None:
    import signal
    import subprocess

    child = subprocess.Popen(["sleep", "60"])
    frontend = Frontend(tmp_path)
    frontend.connect()
    frontend.session.pid = child.pid
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(Unresponsive, match="is stopped"):
        frontend.session.quiesce(20.0)
    assert time.monotonic() - began < 5
    child.kill()
    child.wait()
    frontend.close()
