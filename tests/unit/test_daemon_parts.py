"""Small parts alone: holds, which GPU takes whose place, the ring, /proc."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.cli.criu import image_directory
from phos.gen import phos_image_pb2 as pb
from phos.gen import wire_pb2
from phos.gpu_engine import driver, procfs, ring
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import known_spans
from phos.gpu_engine.daemon import server
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.jobs import Claims
from phos.gpu_engine.daemon.registry import Registry
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import RestoreFailed, UsageError
from phos.gpu_engine.procfs import is_alive, start_time
from phos.gpu_engine.restore.gpu_moves import read_moves
from phos.gpu_engine.restore.gpus import match_gpus
from phos.images.chunk_hash import zero_hash
from tests.unit.as_user import as_user, needs_root
from tests.unit.waiting import eventually

SESSION = bytes(16)


def test_holds_of_an_earlier_phosd_are_cleared_even_with_our_pid(tmp_path: Path) -> None:
    former = Holds(tmp_path / "hold")
    former.place(SESSION, os.getpid())
    link = tmp_path / "hold" / SESSION.hex()
    space = os.stat("/proc/self/ns/pid").st_ino
    assert os.readlink(link) == f"{os.getpid()}:{start_time(os.getpid())}:{space}:{space}"
    Holds(tmp_path / "hold").clear_stale()
    assert not link.is_symlink()
    former.release(SESSION)  # what is gone can be released


@needs_root
def test_holds_of_others_can_be_looked_up_and_not_listed(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    (tmp_path / "hold").mkdir()  # as an earlier phosd had it
    Holds(tmp_path / "hold").place(SESSION, os.getpid())
    assert as_user(tmp_path, lambda: os.listdir("hold")) == "EACCES"
    assert as_user(tmp_path, lambda: os.readlink(f"hold/{SESSION.hex()}")) == ""


def test_image_directories_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    made = image_directory(tmp_path / "images" / "1", create=True)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


# Which GPU takes whose place.


def image_gpu(ordinal: int, uuid: int, name: str = "H100", major: int = 9) -> pb.Gpu:
    return pb.Gpu(ordinal=ordinal, uuid=bytes([uuid] * 16), name=name, major=major, minor=0)


def present_gpu(ordinal: int, uuid: int, name: str = "H100", major: int = 9) -> driver.Gpu:
    return driver.Gpu(ordinal, driver.format_uuid(bytes([uuid] * 16)), name, (major, 0), 80 << 30)


def pairs(**moves: int) -> dict[str, str]:
    return {driver.format_uuid(bytes([int(k[1:])] * 16)): driver.format_uuid(bytes([v] * 16)) for k, v in moves.items()}


MATCHES = {
    "the same": ([(0, 1)], [(0, 1)], {0: 0}, {}),
    "the same in another order": ([(0, 1), (1, 2)], [(0, 2), (1, 1)], {0: 1, 1: 0}, {}),
    "one of several": ([(0, 2)], [(0, 1), (1, 2)], {0: 1}, {}),
    "another of the same model": ([(0, 1)], [(0, 9)], {0: 0}, pairs(u1=9)),
    "the driver wants all that are visible": ([(0, 1)], [(0, 8), (1, 9)], {0: 0}, pairs(u1=8, u9=9)),
    "one is the same, one moves": ([(0, 1), (1, 2)], [(0, 1), (1, 9)], {0: 0, 1: 1}, pairs(u1=1, u2=9)),
    "who is still there stays": ([(0, 1), (1, 2)], [(0, 2), (1, 9)], {0: 1, 1: 0}, pairs(u1=9, u2=2)),
}


@pytest.mark.parametrize("name", MATCHES)
def test_gpus_that_match(name: str) -> None:
    wanted, present, ordinals, moves = MATCHES[name]
    found = match_gpus([image_gpu(*gpu) for gpu in wanted], [present_gpu(*gpu) for gpu in present])
    assert found == (ordinals, moves)


TWO, THREE = [(0, 1), (1, 2)], [(0, 1), (1, 2), (2, 3)]
SECOND = driver.format_uuid(bytes([2] * 16))
ASKED = {
    "the other": (TWO, TWO, "0=1", {0: 1, 1: 0}, pairs(u1=2, u2=1)),
    "the other, by its UUID": (TWO, TWO, f"0={SECOND}", {0: 1, 1: 0}, pairs(u1=2, u2=1)),
    "the other, by how its UUID begins": (TWO, TWO, "0=GPU-0202", {0: 1, 1: 0}, pairs(u1=2, u2=1)),
    "both": (TWO, TWO, "0=1,1=0", {0: 1, 1: 0}, pairs(u1=2, u2=1)),
    "where it is": (TWO, TWO, "0=0", {0: 0, 1: 1}, {}),
    "who is in nobody's way stays": (THREE, THREE, "0=2", {0: 2, 1: 1, 2: 0}, pairs(u1=3, u2=2, u3=1)),
    "one that the image does not know": ([(0, 1)], TWO, "0=1", {0: 1}, pairs(u1=2, u2=1)),
    "on another machine": (TWO, [(0, 8), (1, 9)], "1=0", {0: 1, 1: 0}, pairs(u1=9, u2=8)),
    "on a larger one": ([(0, 1)], [(0, 7), (1, 8), (2, 9)], "0=2", {0: 2}, pairs(u1=9, u7=7, u8=8)),
}


@pytest.mark.parametrize("name", ASKED)
def test_gpus_that_were_asked_for(name: str) -> None:
    wanted, present, words, ordinals, moves = ASKED[name]
    found = match_gpus([image_gpu(*gpu) for gpu in wanted], [present_gpu(*gpu) for gpu in present], read_moves(words))
    assert found == (ordinals, moves)


REFUSED_MOVES = {
    "2=0": r"The image has no GPU 2 that could come to 0; it has 0, 1 ",
    "0=2": r"There is no GPU 2 here for the image's GPU 0. phosd has 0 \(GPU-0101",
    "0=GPU-03": "There is no GPU GPU-03 here",
    "0=GPU-": "There are several GPUs GPU- here",
    "0=1,1=1": "GPU 1 is to take the place of two",
}


@pytest.mark.parametrize("words", REFUSED_MOVES)
def test_gpus_that_were_asked_for_and_cannot_be_had(words: str) -> None:
    wanted, present = [image_gpu(*gpu) for gpu in TWO], [present_gpu(*gpu) for gpu in TWO]
    with pytest.raises(RestoreFailed, match=REFUSED_MOVES[words]):
        match_gpus(wanted, present, read_moves(words))
    with pytest.raises(RestoreFailed, match="same model"):
        match_gpus([image_gpu(0, 1)], [present_gpu(0, 1), present_gpu(1, 2, "B200", 10)], read_moves("0=1"))


@pytest.mark.parametrize("words", ["0", "0=", "=1", "0=1=2", "a=1", "0=-1", "0=b", "0=GPU-x", "0 = 1", "\u0661=0"])
def test_words_that_say_of_no_gpu_where_it_comes(words: str) -> None:
    with pytest.raises(UsageError, match=r"says of no GPU where it comes\. It is OLD=NEW, as 0=1"):
        read_moves(words)
    with pytest.raises(UsageError, match=r"says twice where the image's GPU 0 comes"):
        read_moves("0=1,0=0")
    assert read_moves("") == {}


def test_gpus_that_do_not_match() -> None:
    with pytest.raises(RestoreFailed, match=r"needs 2 GPU\(s\), this machine shows 1"):
        match_gpus([image_gpu(0, 1), image_gpu(1, 2)], [present_gpu(0, 1)])
    with pytest.raises(RestoreFailed, match=r"made on H100 .*this machine has B200.*same model"):
        match_gpus([image_gpu(0, 1)], [present_gpu(0, 9, "B200", 10)])
    with pytest.raises(RestoreFailed, match="same model"):
        match_gpus([image_gpu(0, 1), image_gpu(1, 2)], [present_gpu(0, 8), present_gpu(1, 9, "B200", 10)])


# The ring, and what is copied through it.


@pytest.mark.parametrize("text", ["2G", "many", "-1", "1.5"])
def test_ring_without_a_size_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PHOS_RING_BYTES", text)
    with pytest.raises(UsageError, match=f"PHOS_RING_BYTES={text} is no size"):
        Copier()


def test_size_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_RING_BYTES", str(64 << 20))
    assert ring.wanted_bytes(4) == 64 << 20
    monkeypatch.setenv("PHOS_RING_BYTES", str(1 << 40))
    assert ring.wanted_bytes(4) == ring.MAXIMUM_RING
    monkeypatch.delenv("PHOS_RING_BYTES")
    assert ring.wanted_bytes(4) == 8 * ring.SLOT_BYTES
    copier = Copier(threads=16)
    assert 2 * copier.threads * copier.slot_bytes == 128 << 20


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6), st.booleans())
def test_spans_of_known_hashes_keep_zeros_apart(zero: list[bool], most: int, short: bool) -> None:
    size = len(zero) * ring.CHUNK_BYTES - (ring.CHUNK_BYTES // 2 if short else 0)
    lengths = [min(ring.CHUNK_BYTES, size - i * ring.CHUNK_BYTES) for i in range(len(zero))]
    hashes = [zero_hash(n) if z else bytes([i] * 16) for i, (n, z) in enumerate(zip(lengths, zero, strict=True))]
    block = Block((bytes(16), 1), size, 0, -1)
    spans = known_spans(block, hashes, most * ring.CHUNK_BYTES)
    assert [hash_ for span in spans for hash_ in span.hashes or ()] == hashes
    end = 0
    for span in spans:
        assert span.offset == end
        assert 0 < span.size <= most * ring.CHUNK_BYTES
        first = span.offset // ring.CHUNK_BYTES
        assert zero[first : first + len(span.hashes or ())] == [span.zero] * len(span.hashes or ())
        end += span.size
    assert end == size


# Processes in /proc.


def test_process_with_a_confusing_name(tmp_path: Path) -> None:
    """The name stands between the pid and the rest, and may look like the rest."""
    program = tmp_path / ") Z 1 (x"
    shutil.copy("/bin/sleep", program)
    child = subprocess.Popen([program, "60"])
    try:
        assert is_alive(child.pid)
        assert not procfs.is_stopped(child.pid)
        assert (start_time(os.getpid()) or 0) < (start_time(child.pid) or 0)
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: procfs.is_stopped(child.pid), "the stop")
        assert is_alive(child.pid)
    finally:
        child.kill()
    eventually(lambda: not is_alive(child.pid), "its end")  # a zombie, until it is waited for
    child.wait()
    assert start_time(child.pid) is None


def test_a_process_that_was_stopped_has_time_to_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been continued just before phosd looks; its memory must not be dropped for that."""
    looks: list[bool] = []
    forgotten: list[int] = []

    def is_stopped(_pid: int) -> bool:
        looks.append(len(looks) < 2)
        return looks[-1]

    monkeypatch.setattr(server, "RECONNECT_SECONDS", 0.02)
    monkeypatch.setattr(server.procfs, "is_stopped", is_stopped)
    daemon = server.Daemon.__new__(server.Daemon)  # no GPU is needed for this
    registry: Any = SimpleNamespace(forget=lambda _session, _connections: forgotten.append(len(looks)))
    daemon._registry = registry
    state = SimpleNamespace(state=SessionState.RUNNING)
    session: Any = SimpleNamespace(pid=1, connections=1, is_connected=False, machine=state)
    daemon._expire_later(session)
    eventually(lambda: forgotten)
    assert looks.count(False) > 1, "it had no time after it was seen running"


@pytest.mark.parametrize("back", ["", "and is away again", "and is there"])
def test_one_that_comes_back_at_the_last_moment_is_not_forgotten(back: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never be seen again: what it said over that connection is of a session that nobody has."""
    machine = SimpleNamespace(state=SessionState.RUNNING)
    session: Any = SimpleNamespace(session=SESSION, pid=1, connections=1, is_connected=False, machine=machine)
    session.end = lambda: None

    def is_stopped(_pid: int) -> bool:
        if back:
            session.connections, session.is_connected = 2, back == "and is there"
        return False

    monkeypatch.setattr(server.procfs, "is_stopped", is_stopped)
    nothing: Any = SimpleNamespace(**dict.fromkeys(("forget", "release", "finish"), lambda *_, **_named: None))
    nothing.drop_session = lambda _number: 0
    registry: Any = Registry.__new__(Registry)
    registry.lock = threading.Lock()
    registry.forgotten = threading.Condition(registry.lock)
    registry.sessions, registry.restores, registry.being_forgotten = {SESSION: session}, {}, set()
    registry.reaper = registry.holds = registry.speculator = registry.cow = registry.broker = nothing
    daemon = server.Daemon.__new__(server.Daemon)  # no GPU is needed for this
    daemon._registry = registry
    daemon._expire(session, 1, False)
    assert registry.knows(session) == bool(back)


@pytest.mark.parametrize("state", ["detached", "returning", "attaching", "lost"])
def test_one_that_replaces_its_program_before_it_is_back_keeps_nothing(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have its memory for as long as the other program runs."""
    threads = [{"phos", "x"}, set(), {"phos", "x"}, {"x"}]  # of nobody: that cannot be told for a moment
    forgotten: list[int] = []
    monkeypatch.setattr(server, "RECONNECT_SECONDS", 0.02)
    monkeypatch.setattr(server.procfs, "is_stopped", lambda _pid: False)
    monkeypatch.setattr(server.procfs, "thread_names", lambda _pid: threads.pop(0))
    daemon = server.Daemon.__new__(server.Daemon)  # no GPU is needed for this
    registry: Any = SimpleNamespace(lock=threading.Lock(), restores={}, claims=Claims())
    registry.forget = lambda _session, _connections: forgotten.append(len(threads))
    daemon._registry = registry
    machine = SimpleNamespace(state=SessionState(state))
    session: Any = SimpleNamespace(session=SESSION, pid=1, connections=1, is_connected=False, machine=machine)
    daemon._expire_later(session)
    eventually(lambda: forgotten)
    assert forgotten == [0], "it was let go although its own program may have come back"


@pytest.mark.parametrize(
    ("state", "known"), [(s, s not in ("parked", "ended")) for s in (member.value for member in SessionState)]
)
def test_a_program_that_connects_has_replaced_what_its_process_was_before(state: str, known: bool) -> None:
    former: Any = SimpleNamespace(session=SESSION, pid=1, is_connected=False)
    former.machine = SimpleNamespace(state=SessionState(state))
    others = [SimpleNamespace(**{**vars(former), "pid": 2}), SimpleNamespace(**{**vars(former), "is_connected": True})]
    now: Any = SimpleNamespace(session=bytes(range(16)), pid=1)
    forgotten: list[object] = []
    daemon = server.Daemon.__new__(server.Daemon)  # no GPU is needed for this
    registry: Any = SimpleNamespace(lock=threading.Lock(), restores={}, forget=forgotten.append)
    registry.sessions = dict(enumerate([former, *others, now]))
    daemon._registry = registry
    daemon._replace_program(now, 1)
    assert forgotten == ([former] if known else [])


def test_a_program_that_connects_is_not_what_a_restore_waits_for_in_its_process() -> None:
    """Nobody asks for that memory any more, and the restore would wait for as long as the program runs."""
    failed: list[str] = []
    job = SimpleNamespace(awaits=lambda pid: pid == 7, fail=failed.append)
    other: Any = SimpleNamespace(session=bytes(range(16)), pid=7)
    daemon = server.Daemon.__new__(server.Daemon)  # no GPU is needed for this
    registry: Any = SimpleNamespace(lock=threading.Lock(), sessions={})
    daemon._registry = registry
    for restores in ({other.session: job}, {SESSION: SimpleNamespace(awaits=lambda _: False)}):
        registry.restores = restores
        daemon._replace_program(other, 7)
    assert failed == [], "it is the one, or the restore waits for others"
    registry.restores = {SESSION: job}
    daemon._replace_program(other, 8)
    assert failed == []
    daemon._replace_program(other, 7)
    assert failed == ["Process 7 replaced its program before its GPU state was back."]


def test_who_connects_while_its_former_session_is_dropped_loses_nothing() -> None:
    """What it registers would be dropped with what it had."""
    lock = threading.Lock()
    registry: Any = SimpleNamespace(
        lock=lock, forgotten=threading.Condition(lock), being_forgotten={SESSION}, sessions={}, restores={}
    )
    registry.broker = SimpleNamespace(belongs=lambda *_: None)
    registry.wait_forgotten = lambda number: Registry.wait_forgotten(registry, number)
    made: list[bool] = []
    registry.session = lambda number, pid, uid, _state: (
        made.append(SESSION in registry.being_forgotten)
        or SimpleNamespace(session=number, pid=pid, uid=uid, is_connected=False)
    )
    daemon = server.Daemon.__new__(server.Daemon)  # no GPU is needed for this
    daemon._registry = registry
    peer: Any = SimpleNamespace(pid=1, uid=0)
    connecting = threading.Thread(target=daemon._session_for, args=(peer, wire_pb2.Hello(session=SESSION)))
    connecting.start()
    connecting.join(0.2)
    with lock:
        registry.being_forgotten.discard(SESSION)
        registry.forgotten.notify_all()
    connecting.join()
    assert made == [False]
