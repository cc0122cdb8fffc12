"""What one ordinary user may take of phosd, and that root may take more."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import limits, wire
from phos.gpu_engine.daemon.requests import Requests
from phos.gpu_engine.daemon.server import Daemon
from phos.gpu_engine.errors import CheckpointFailed, NotPermitted, ProtocolError
from tests.unit.session_fake import NUMBER, OTHER, Frontend, MiB, block, memory_map, open_descriptors
from tests.unit.waiting import eventually

USER = 4242


def no_thread(_thread: threading.Thread) -> None:
    """In place of Thread.start()."""
    raise RuntimeError("can't start new thread")


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    """A process of an ordinary user."""
    made = Frontend(tmp_path, USER)
    made.broker.belongs(NUMBER, USER)
    made.connect()
    yield made
    made.close()
    made.broker.drop_session(NUMBER)


def test_a_user_has_so_many_and_root_has_more() -> None:
    counted = limits.PerUser("connections", 2)
    for uid in (USER, USER, 0, 0, 0, USER + 1):
        counted.take(uid)
    with pytest.raises(NotPermitted, match="User 4242 has 2 connections at phosd already"):
        counted.take(USER)
    counted.give_back(USER)
    counted.take(USER)


def test_who_is_refused_is_told_why() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = open_descriptors()
    null = os.open(os.devnull, os.O_RDONLY)
    wire.send(theirs, wire_pb2.Envelope(id=1, status_request=wire_pb2.StatusRequest()), [null])
    os.close(null)
    wire.Connection(ours).refuse("There are too many.")
    answer = wire.receive(theirs)
    assert answer is not None
    assert answer[0].done.error == "There are too many."
    assert wire.receive(theirs) is None
    assert open_descriptors() == before - 1
    theirs.close()


@pytest.mark.parametrize("asks", ["before it is read", "after it"])
def test_who_asks_while_it_is_refused_is_told_why_too(monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receive = wire.receive

    def ask() -> None:
        with suppress(BrokenPipeError):
            wire.send(theirs, wire_pb2.Envelope(id=1, status_request=wire_pb2.StatusRequest()))

    def read(connection: socket.socket) -> object:
        if asks == "before it is read":
            ask()
        try:
            return receive(connection)
        finally:
            if asks == "after it":
                ask()

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(wire, "receive", read)
        wire.Connection(ours).refuse("There are too many.")
    answer = receive(theirs)
    assert answer is not None
    assert answer[0].done.error == "There are too many."
    theirs.close()


def test_a_connection_too_many_is_refused_and_the_next_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon.__new__(Daemon)  # no GPU is needed for this
    daemon._connections = limits.PerUser("connections", 1)
    monkeypatch.setattr(limits, "sees_all", lambda _uid: False)
    others: list[socket.socket] = []
    for _ in range(2):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemon._begin(wire.Connection(ours))
        others.append(theirs)
    answer = wire.receive(others[1])
    assert answer is not None
    assert "connections at phosd already" in answer[0].done.error
    others[0].close()
    eventually(lambda: not daemon._connections._taken, "the end of the first")
    others[1].close()


def test_blocks_beyond_the_limit_are_not_held_and_the_program_runs_on(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "blocks", lambda: 3)
    null = os.open(os.devnull, os.O_RDONLY)
    for number in (1, 2, 3, 4, 3):  # the last is told again
        frontend.send((null,), block_added=block(number))
    frontend.settle()
    assert [held.key[1] for held in frontend.session.own_blocks()] == [1, 2, 3]
    with pytest.raises(CheckpointFailed, match="or its user has too many"):
        frontend.session._blocks.secure()
    frontend.send(block_removed=wire_pb2.BlockRemoved(block=4))
    frontend.settle()
    frontend.session._blocks.secure()
    frontend.broker.belongs(NUMBER, 0)
    frontend.send((null,), block_added=block(5))
    frontend.settle()
    assert len(frontend.session.own_blocks()) == 4
    os.close(null)


@pytest.mark.parametrize(
    ("size", "device", "said"),
    [
        (12 * MiB, 0, "GPU 0 has 10485760"),
        ((1 << 63) - 4096, 0, "GPU 0 has 10485760"),
        (2 * MiB, 7, "on GPU 7, which phosd does not see"),
        (10 * MiB, 1, "more than all GPUs have"),
    ],
)
def test_blocks_that_no_gpu_can_have_are_not_held(
    frontend: Frontend, caplog: pytest.LogCaptureFixture, size: int, device: int, said: str
) -> None:
    """What is made for each of their chunks, or counted of them, would be as large as anybody says."""
    frontend.broker.capacity = {0: 10 * MiB, 1: 10 * MiB}
    null = os.open(os.devnull, os.O_RDONLY)
    for number in range(1, 9):  # as many as are let in, told again and again
        added = wire_pb2.BlockAdded(block=number % 4, size=10 * MiB, device=number % 2)
        frontend.send((null,), block_added=added)
    other = (OTHER, 1)
    frontend.broker.belongs(OTHER, USER)
    frontend.broker.add(Block(other, 40 * MiB, 0, os.dup(null)), os.getpid())
    frontend.settle()
    before = open_descriptors()
    frontend.send((null,), block_added=wire_pb2.BlockAdded(block=9, size=size, device=device))
    frontend.settle()
    assert [held.key[1] for held in frontend.session.own_blocks()] == [0, 1, 2, 3]
    assert open_descriptors() == before
    assert said in caplog.text
    with pytest.raises(CheckpointFailed, match="larger ones than there is memory"):
        frontend.session._blocks.secure()
    frontend.send(block_removed=wire_pb2.BlockRemoved(block=9))
    for key in [other, *((NUMBER, number) for number in range(4))]:
        frontend.broker.remove(key)
    frontend.settle()
    frontend.send((null,), block_added=wire_pb2.BlockAdded(block=10, size=10 * MiB, device=1))
    frontend.settle()
    frontend.session._blocks.secure()
    assert len(frontend.session.own_blocks()) == 1
    os.close(null)


def test_a_map_with_another_size_of_a_block_is_not_believed(frontend: Frontend) -> None:
    """The tables of a window have a place for each chunk of it."""
    null = os.open(os.devnull, os.O_RDONLY)
    frontend.send((null,), block_added=block(1))
    frontend.settle()
    os.close(null)
    for size in (2 * MiB, 1 << 60):
        descriptor = memory_map(blocks=[wire_pb2.MemoryMap.Block(block=1, size=size)])
        with nullcontext() if size == 2 * MiB else pytest.raises(ProtocolError, match=f"{2 * MiB} as phosd was told"):
            frontend.session._blocks.parse_map(wire_pb2.DetachDone(), [descriptor])


@pytest.mark.parametrize("what", ["lost", "another's", "told again"])
def test_numbers_of_blocks_are_kept_up_to_a_number(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each takes memory of phosd's, which nothing else would bound."""
    monkeypatch.setattr(limits, "NUMBERS", 3)
    if what == "told again":
        frontend.close()
        frontend.connect(blocks=1000)
    for number in (1, 2, 3, 3, 4, 5):
        if what == "another's":
            added = wire_pb2.BlockAdded(block=number, size=2 * MiB, owner_session=OTHER, owner_block=1)
        else:
            added = block(number, descriptor_lost=True)
        with suppress(OSError):  # phosd has hung up
            frontend.send(block_added=added)
    assert frontend.thread
    frontend.thread.join(5)
    assert not frontend.thread.is_alive()
    blocks = frontend.session._blocks
    assert {1, 2, 3} in (blocks._unheld, blocks._imports.keys())
    assert not {4, 5} & {*blocks._unheld, *blocks._imports, *(blocks._seen or ())}


def test_wishes_for_memory_that_wait_are_counted(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    frontend.broker.needed = lambda *_: go_on.wait(30)
    monkeypatch.setattr(frontend.session._blocks, "entitled", lambda _key: True)
    asked = wire_pb2.TokenResolve(session=bytes(16), block=1)
    for number in range(limits.RESOLVES + 1):
        frontend.send((), number + 1, token_resolve=asked)
    assert frontend.end
    answer = wire.receive(frontend.end)
    assert answer is not None
    assert answer[0].id == limits.RESOLVES + 1
    assert "waits for 64 blocks of exported memory already" in answer[0].token_resolved.error
    go_on.set()
    for _ in range(limits.RESOLVES):
        assert wire.receive(frontend.end) is not None
    frontend.settle()


def test_a_wish_that_no_thread_can_wait_for_does_not_count(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends, and the process asks again over another."""
    monkeypatch.setattr(frontend.session._blocks, "entitled", lambda _key: True)
    asked = wire_pb2.TokenResolve(session=bytes(16), block=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for number in range(limits.RESOLVES):
            with pytest.raises(RuntimeError):
                frontend.session.handle(wire_pb2.Envelope(id=number + 1, token_resolve=asked), [])
    frontend.send((), 1000, token_resolve=asked)
    assert frontend.end
    answer = wire.receive(frontend.end)
    assert answer is not None
    assert "knows no such exported memory" in answer[0].token_resolved.error
    frontend.settle()


def test_files_are_read_up_to_a_size_and_never_waited_for(tmp_path: Path) -> None:
    text = os.memfd_create("text")
    os.write(text, b"12345")
    assert wire.content(text, 5) == b"12345"
    with pytest.raises(ProtocolError, match="a file of 5 bytes; phosd takes 4"):
        wire.content(text, 4)
    os.close(text)
    read_end, write_end = os.pipe()
    with pytest.raises(ProtocolError, match="no memfd"):
        wire.content(read_end, 5)
    os.close(read_end)
    os.close(write_end)


def test_a_map_that_is_too_large_is_not_read(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAP_BYTES", 1)
    with pytest.raises(ProtocolError, match="phosd takes 1"):
        frontend.session._blocks.parse_map(wire_pb2.DetachDone(), [memory_map(allocations=[{"size": 1}])])


def test_names_of_kernels_are_kept_up_to_a_size(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMES_BYTES", 10)
    kernels = frontend.session._kernels
    for _ in range(3):  # told again over every connection
        kernels.seen(wire_pb2.KernelsSeen(module=1, kernel=["12345", "67890"]))
    assert not kernels._incomplete
    kernels.seen(wire_pb2.KernelsSeen(module=1, kernel=["x", "12345"]))
    assert kernels._incomplete
    assert kernels.told == 8
    assert not kernels.table()[1], "the table does not name all of them"
    assert len(kernels._names) == 2


class _Session:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.told: list[wire_pb2.CheckpointResult] = []

    def tell(self, *, checkpoint_result: wire_pb2.CheckpointResult) -> None:
        self.told.append(checkpoint_result)


def test_checkpoints_that_wait_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(limits, "REQUESTS", 2)
    monkeypatch.setattr(Requests, "_checkpoint", lambda *_: go_on.wait(30))
    requests, session, peer = Requests(None), _Session(), type("Peer", (), {"uid": USER})  # type: ignore[arg-type]
    for number in (1, 2, 3):
        envelope = wire_pb2.Envelope(checkpoint_request=wire_pb2.CheckpointRequest(number=number))
        assert requests.take(session, peer, envelope, [])  # type: ignore[arg-type]
    assert [said.number for said in session.told] == [3]
    assert "has 2 checkpoints under way at phosd already" in session.told[0].error
    go_on.set()


def test_a_checkpoint_that_no_thread_can_work_on_is_answered_and_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(limits, "REQUESTS", 1)
    monkeypatch.setattr(Requests, "_checkpoint", lambda *_: None)
    requests, session, peer = Requests(None), _Session(), type("Peer", (), {"uid": USER})  # type: ignore[arg-type]
    before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for number in (1, 2):
            envelope = wire_pb2.Envelope(checkpoint_request=wire_pb2.CheckpointRequest(number=number))
            assert requests.take(session, peer, envelope, [os.open(tmp_path, os.O_RDONLY)])  # type: ignore[arg-type]
    assert ["phosd can start no new thread" in said.error for said in session.told] == [True, True]
    assert open_descriptors() == before
    envelope = wire_pb2.Envelope(checkpoint_request=wire_pb2.CheckpointRequest(number=3))
    assert requests.take(session, peer, envelope, [])  # type: ignore[arg-type]
    eventually(lambda: len(session.told) == 3)
    assert session.told[2].error == ""


def test_kernels_count_as_told_when_they_can_be_asked_for(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit waits until all are told, and asks what they touch then."""
    kernels = frontend.session._kernels
    told_before: list[int] = []
    monkeypatch.setattr(kernels._speculator, "add_kernels", lambda *_: told_before.append(kernels.told))
    kernels.seen(wire_pb2.KernelsSeen(module=1, kernel=["a", "b"]))
    assert (told_before, kernels.told) == ([0], 2)
