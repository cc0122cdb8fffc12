"""phosd's side of a conversation with one process, without a GPU."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phos.gen import phos_image_pb2 as pb
from phos.gen import wire_pb2
from phos.gpu_engine import sealed
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import kernels, limits, wire
from phos.gpu_engine.daemon import session as session_module
from phos.gpu_engine.daemon.conversation import Conversation
from phos.gpu_engine.daemon.serve_dump import DumpServer
from phos.gpu_engine.daemon.session import Session
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import CheckpointFailed, MemoryLost, PhosError, Unresponsive
from phos.gpu_engine.process import Detached
from phos.gpu_engine.spec import table as tables
from phos.gpu_engine.spec.descriptor import Parameter, from_layout
from phos.gpu_engine.spec.speculator import Speculator
from tests.unit.session_fake import NUMBER, OTHER, Frontend, MiB, block, memory_map, open_descriptors
from tests.unit.waiting import eventually


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    made = Frontend(tmp_path)
    made.connect()
    yield made
    made.close()
    made.broker.drop_session(NUMBER)


# What a session does with what it is told.


class SlowToLetGo:
    """A lock; one thread loses the processor whenever it has released it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.slow: threading.Thread | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread() is self.slow:
            time.sleep(0.5)


def test_an_answer_at_the_last_moment_counts_or_is_put_away() -> None:
    """Whoever asked gave up just when it had come: nobody closed what came with it."""
    conversation = Conversation(SimpleNamespace(pid=os.getpid(), executable="x"))
    lock: Any = SlowToLetGo()
    conversation._lock = lock
    conversation.begin(SimpleNamespace(send=lambda *_: lock.slow.start()))  # type: ignore[arg-type]
    null = os.open(os.devnull, os.O_RDONLY)
    answer = wire_pb2.Envelope(id=1, detach_done=wire_pb2.DetachDone())
    lock.slow = threading.Thread(target=conversation.take_answer, args=(answer, [null]))
    with ExitStack() as undo:
        undo.callback(lock.slow.join)
        assert conversation.call(0.2, detach=wire_pb2.Detach()) == (answer, [null])
    os.close(null)


def test_kernels_told_of_by_a_process_that_has_ended_are_not_kept(tmp_path: Path) -> None:
    """What it has told and nobody has read yet is read after its end; nobody would ever forget it again."""
    frontend = Frontend(tmp_path)
    frontend.connect()
    speculator = frontend.session._kernels._speculator
    frontend.session.end()
    speculator.forget(NUMBER)
    module = wire_pb2.ModuleLoaded(module=1, path="/proc/self/exe", size=1)
    frontend.send(module_loaded=module)
    frontend.send(kernels_seen=wire_pb2.KernelsSeen(module=1, kernel=["k"]))
    frontend.settle()
    assert speculator.progress(NUMBER) == (0, 0)
    assert not speculator._sessions
    frontend.close()


def test_what_is_found_in_a_module_is_kept_for_its_user(
    frontend: Frontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOS_CACHE", str(tmp_path / "cache"))
    text = os.memfd_create("module")
    os.write(text, b"module")
    frontend.send(module_loaded=wire_pb2.ModuleLoaded(module=1, path="/proc/self/exe", size=1))
    frontend.send((text,), module_loaded=wire_pb2.ModuleLoaded(module=2, size=6, digest=1))
    frontend.settle()
    os.close(text)
    modules = frontend.session._kernels._speculator._sessions[NUMBER].modules
    assert {number: module.user for number, module in modules.items()} == {1: 1000, 2: 1000}


def test_a_module_that_cannot_be_taken_costs_no_connection(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The frontend would connect again, and tell of it again, for as long as its program runs."""

    def fail(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kernels.FileSource, "of", fail)
    speculator = frontend.session._kernels._speculator
    frontend.send(kernels_seen=wire_pb2.KernelsSeen(module=1, kernel=["early"]))
    for number in (1, 2):
        frontend.send(module_loaded=wire_pb2.ModuleLoaded(module=number, path="/proc/self/exe", size=1))
    frontend.send(kernels_seen=wire_pb2.KernelsSeen(module=1, kernel=["late"]))
    frontend.settle()
    assert len(frontend.session.modules) == 2
    assert speculator.complete(NUMBER)
    assert speculator.progress(NUMBER) == (2, 0)
    assert speculator.unfinished(NUMBER) == [(1, "early"), (1, "late")]
    assert tables.is_empty(speculator.table(NUMBER, 5))
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.count("is not analysed") == 2


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


def test_what_is_read_after_the_process_has_ended_is_not_held(frontend: Frontend) -> None:
    """It was killed while it allocated: its end is noticed before the last of what it told is read."""
    read_end, write_end = os.pipe()
    frontend.send((write_end,), block_added=block(1))
    frontend.settle()
    frontend.session.end()
    frontend.broker.drop_session(NUMBER)
    before = open_descriptors()
    restored = Block((NUMBER, 3), 2 * MiB, 0, os.dup(write_end))  # by then, of another process under the same number
    frontend.broker.add(restored, os.getpid())
    frontend.send((write_end,), block_added=block(2))
    frontend.send((write_end,), block_added=block(3))
    frontend.send(block_removed=wire_pb2.BlockRemoved(block=3))
    frontend.settle()
    assert frontend.broker.of_session(NUMBER) == [restored]
    assert open_descriptors() == before + 1
    os.close(write_end)
    os.close(read_end)


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


@pytest.mark.parametrize("from_image", [False, True])
def test_what_was_told_before_a_detach_is_remembered(frontend: Frontend, from_image: bool) -> None:
    """Not what the process told that was dumped, when it comes from the image."""
    frontend.send(module_loaded=wire_pb2.ModuleLoaded(entry_point="cuModuleLoad", size=1))
    frontend.send(uncarried=wire_pb2.Uncarried(kind="managed", count=1, bytes=5))
    frontend.settle()
    quiesced(frontend)
    thread = frontend.in_background("detach", detach_done=wire_pb2.DetachDone(), descriptors=(memory_map(),))
    frontend.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
    thread.join()
    frontend.close()
    frontend.session._from_image = from_image
    frontend.session.machine.adopt(SessionState.ATTACHING)
    frontend.connect(wire_pb2.DETACHED)
    assert len(frontend.session.modules) == (0 if from_image else 1)
    assert not frontend.session.uncarried
    asked: list[wire_pb2.Envelope] = []

    def returns() -> None:
        assert frontend.end
        for answer in ({"attach_done": wire_pb2.AttachDone()}, {"done": wire_pb2.Done()}):
            packet = wire.receive(frontend.end)
            assert packet is not None
            asked.append(packet[0])
            frontend.send((), packet[0].id, **answer)

    thread = threading.Thread(target=returns)
    thread.start()
    frontend.session.attach()
    thread.join()
    assert asked[0].attach.remembers != from_image
    frontend.send(module_loaded=wire_pb2.ModuleLoaded(entry_point="cuModuleLoad", size=1))
    frontend.settle()
    assert len(frontend.session.modules) == (1 if from_image else 2)


def test_what_is_loaded_after_a_checkpoint_is_not_in_its_image(frontend: Frontend) -> None:
    """The image is written when the process computes again; phosd goes on with the list that it remembers."""
    frontend.send(module_loaded=wire_pb2.ModuleLoaded(entry_point="cuModuleLoad", size=1))
    frontend.settle()
    registry = SimpleNamespace(lock=threading.Lock(), sessions={NUMBER: frontend.session})
    server = SimpleNamespace(_registry=registry)
    detached = Detached(blocks=[], allocations=[], host_allocations=[], uncarried=[], unmap=0.0, reduce=0.0)
    record = DumpServer._describe(server, frontend.session, detached)  # type: ignore[arg-type]
    frontend.send(module_loaded=wire_pb2.ModuleLoaded(entry_point="cuModuleLoadData", size=2))
    frontend.settle()
    assert [module.entry_point for module in record.modules] == ["cuModuleLoad"]
    assert len(frontend.session.modules) == 2


def test_a_table_for_an_image_is_of_the_modules_of_its_moment(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restored process may give the number of one that was loaded since to another, with a kernel of that name."""
    modules: list[int] = []

    def load(number: int) -> None:
        modules.append(number)
        frontend.send(module_loaded=wire_pb2.ModuleLoaded(module=number, path="/proc/self/exe", size=1))
        frontend.settle()

    def named() -> list[int]:
        return [number for number, _, _ in tables.unpack(frontend.session.access_table()[0])]

    def known(*_: object, **__: object) -> bytes:
        return tables.pack((number, from_layout("k", (Parameter(0, 8),))) for number in modules)

    monkeypatch.setattr(frontend.session._kernels._speculator, "table", known)
    load(1)
    assert named() == [1], "it was never detached"
    quiesced(frontend)
    thread = frontend.in_background("detach", detach_done=wire_pb2.DetachDone(), descriptors=(memory_map(),))
    frontend.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
    thread.join()
    assert named() == [1]
    frontend.close()
    frontend.connect(wire_pb2.DETACHED)
    load(2)
    assert named() == [1]


def test_a_mad_frontend_does_not_fill_memory(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MODULES", 10)
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
    asked: list[object] = []
    frontend.broker.needed = lambda *what: bool(asked.append(what)) or True  # type: ignore[func-returns-value]
    frontend.send((), 6, token_resolve=wire_pb2.TokenResolve(session=OTHER, block=7))
    assert wire.receive(frontend.end) is not None
    assert not asked, "a restore would hurry for it"
    assert not frontend.session.blocks_of_others(), "a checkpoint of the owner would be refused for it"
    frontend.send(block_added=block(8, owner_session=OTHER, owner_block=7))
    assert frontend.end.recv(1) == b"", "the connection must end"
    frontend.broker.drop_session(OTHER)
    os.close(null)


def test_token_gives_a_descriptor_to_the_same_user(frontend: Frontend) -> None:
    inode = os.fstat(descriptor := sealed.make("block", 2 * MiB)).st_ino
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


def test_who_exports_its_own_does_not_wait_for_those_who_import(frontend: Frontend) -> None:
    """Its question is asked in a call of the application, which would fail, or after a detach that has failed."""
    frontend.session._resolving = threading.BoundedSemaphore(1)
    descriptor = sealed.make("block", 2 * MiB)
    frontend.session._blocks._ordinals = {3: 0}
    frontend.send((descriptor,), block_added=block(1, device=3))
    os.close(descriptor)
    frontend.broker.belongs(OTHER, 1000)
    begun, over = threading.Event(), threading.Event()

    def needed(*_: object) -> bool:
        begun.set()
        return over.wait(10)

    frontend.broker.needed = needed
    frontend.send((), 5, token_resolve=wire_pb2.TokenResolve(session=OTHER, block=7))
    assert begun.wait(5)
    assert frontend.end
    for number in range(6, 90):
        frontend.send((), number, token_resolve=wire_pb2.TokenResolve(session=NUMBER, block=1))
        packet = wire.receive(frontend.end)
        assert packet is not None
        assert (packet[0].id, packet[0].token_resolved.error, len(packet[1])) == (number, "", 1)
        wire.close_all(packet[1])
    over.set()
    packet = wire.receive(frontend.end)
    assert packet is not None
    assert packet[0].id == 5


def wish(frontend: Frontend, number: int, *, waits: bool) -> None:
    """For memory of another process."""
    frontend.send((), number, token_resolve=wire_pb2.TokenResolve(session=OTHER, block=7, waits=waits))


def test_who_waits_for_memory_hears_that_it_will_come(frontend: Frontend) -> None:
    asked: list[float] = []

    def needed(_key: object, _pid: int, seconds: float) -> bool:
        asked.append(seconds)
        assert frontend.session.blocks_of_others(), "a checkpoint of the owner would not wait for it"
        return len(asked) > 3

    frontend.broker.belongs(OTHER, 1000)
    frontend.broker.needed = needed
    wish(frontend, 5, waits=True)
    assert frontend.end
    answers = []
    for _ in range(4):
        packet = wire.receive(frontend.end)
        assert packet is not None
        assert packet[0].id == 5
        answers.append(packet[0].token_resolved)
    assert [answer.coming for answer in answers] == [True, True, True, False]
    assert "no such exported memory" in answers[3].error
    assert max(asked) <= 1, "the frontend takes silence for the end of phosd"


@pytest.mark.parametrize("ends", ["its connection", "its patience"])
def test_nobody_waits_for_who_does_not_any_more(frontend: Frontend, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setattr(session_module, "SILENCE_SECONDS", 3600.0 if ends == "its connection" else 0.3)
    frontend.broker.belongs(OTHER, 1000)
    frontend.broker.needed = lambda *_: bool(time.sleep(0.01))  # type: ignore[func-returns-value]
    wish(frontend, 5, waits=False)

    def waiting() -> int:
        return sum(thread.name == "resolve" for thread in threading.enumerate())

    eventually(waiting)
    if ends == "its connection":
        former, former_thread = frontend.end, frontend.thread
        frontend.connect()
        former.close()  # type: ignore[union-attr]
        former_thread.join(5)  # type: ignore[union-attr]
    eventually(lambda: not waiting())
    assert not frontend.session.blocks_of_others()


# Quiesce, detach, attach: what phosd makes of every way to fail.


def quiesced(frontend: Frontend) -> None:
    thread = frontend.in_background("quiesce", quiesce_done=wire_pb2.QuiesceDone())
    frontend.session.quiesce(1.0, 1.0)
    thread.join()


def test_quiesce_that_is_not_answered_is_followed_by_open(frontend: Frontend) -> None:
    with pytest.raises(Unresponsive, match="did not answer 'quiesce'"):
        frontend.session.quiesce(0.1, 0.1)
    frontend.answer("quiesce")
    frontend.answer("open")
    assert frontend.session.machine.state is SessionState.RUNNING


def test_watching_that_is_not_answered_is_followed_by_its_end(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phos.gpu_engine.daemon.session_window.ANSWER_SECONDS", 0.2)
    frontend.connect()
    tables = [os.memfd_create("table") for _ in range(2)]
    with pytest.raises(Unresponsive):
        frontend.session.watch(tables)
    wire.close_all(tables)
    frontend.answer("window_begin", done=wire_pb2.Done())
    frontend.answer("window_end", done=wire_pb2.Done())
    frontend.settle()


def test_the_end_of_watching_keeps_nobody_waiting(frontend: Frontend) -> None:
    """It comes when a checkpoint is given up, perhaps because this process does not answer; others stand still."""
    frontend.session.unwatch()
    frontend.answer("window_end", done=wire_pb2.Done())
    frontend.settle()


def test_only_who_is_quiesced_is_asked_to_open_its_gate(frontend: Frontend) -> None:
    """Who was detached after all opens it when it has its memory, and not before."""
    frontend.session.machine.adopt(SessionState.ATTACHING)
    frontend.session.open()
    frontend.settle()
    assert frontend.session.machine.state is SessionState.ATTACHING


def test_one_that_does_not_say_that_its_gate_is_open_can_be_checkpointed_later(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be stopped; what it is asked next it reads when its gate is open."""
    quiesced(frontend)
    monkeypatch.setattr(session_module, "ANSWER_SECONDS", 0.1)
    with pytest.raises(Unresponsive, match="did not answer 'open'"):
        frontend.session.open()
    frontend.answer("open", done=wire_pb2.Done())
    frontend.settle()
    assert frontend.session.machine.state is SessionState.RUNNING
    quiesced(frontend)


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
        frontend.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
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
        frontend.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
    thread.join()
    for descriptor in maps:
        os.close(descriptor)
    assert frontend.session.machine.state is SessionState.RETURNING
    assert not list(frontend.session._holds._folder.iterdir())
    assert open_descriptors() == before


def test_detach_whose_process_ends_right_after_its_answer_leaves_nothing(frontend: Frontend) -> None:
    quiesced(frontend)
    memory = memory_map()
    before = open_descriptors()

    def end() -> None:
        frontend.session.machine.end()
        frontend.answer("detach", detach_done=wire_pb2.DetachDone(), descriptors=(memory,))

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(CheckpointFailed, match="ended while it was being checkpointed"):
        frontend.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
    thread.join()
    assert open_descriptors() == before
    assert not list(frontend.session._holds._folder.iterdir())
    os.close(memory)


def test_detach_whose_process_ends_leaves_no_hold(frontend: Frontend) -> None:
    quiesced(frontend)

    def hang_up() -> None:
        frontend.answer("detach")
        frontend.end.close()  # type: ignore[union-attr]

    thread = threading.Thread(target=hang_up)
    thread.start()
    with pytest.raises(CheckpointFailed, match="ended, or closed its connection, at 'detach'"):
        frontend.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
    thread.join()
    assert not list(frontend.session._holds._folder.iterdir())


def test_connecting_anew_ends_what_was_asked_before(frontend: Frontend) -> None:
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            frontend.session.quiesce(20.0, 20.0)
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


@pytest.mark.parametrize("restored", [False, True])
def test_attach_has_time_for_what_is_to_be_pinned(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    """Of a restored process CRIU may bring it page by page."""
    monkeypatch.setattr(session_module, "ANSWER_SECONDS", 1.0)
    session = frontend.session
    if restored:
        session.restored_from(pb.Process(host_allocations=[pb.HostAllocation(size=1 << 30)]), {})
    else:
        pinned = wire_pb2.MemoryMap.HostAllocation(size=1 << 30)
        quiesced(frontend)
        descriptors = (memory_map(host_allocations=[pinned]),)
        thread = frontend.in_background("detach", detach_done=wire_pb2.DetachDone(), descriptors=descriptors)
        session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
        thread.join()
        frontend.close()
    session.machine.adopt(SessionState.ATTACHING)
    frontend.connect(wire_pb2.DETACHED)

    def returns() -> None:
        assert frontend.end
        packet = wire.receive(frontend.end)
        assert packet is not None
        time.sleep(2)
        frontend.send((), packet[0].id, attach_done=wire_pb2.AttachDone())
        frontend.answer("open", done=wire_pb2.Done())

    thread = threading.Thread(target=returns)
    thread.start()
    session.attach()
    thread.join()


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


def test_stopped_process_is_noticed_at_once(tmp_path: Path) -> None:
    import signal
    import subprocess

    child = subprocess.Popen(["sleep", "60"])
    frontend = Frontend(tmp_path)
    frontend.connect()
    frontend.session.identity.pid = child.pid
    os.kill(child.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(Unresponsive, match="is stopped"):
        frontend.session.quiesce(20.0, 20.0)
    assert time.monotonic() - began < 5
    child.kill()
    child.wait()
    frontend.close()
