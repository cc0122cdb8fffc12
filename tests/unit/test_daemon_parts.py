"""Parts of phosd alone: the keeper, claims and the job table, which GPU takes whose place, bounded driver calls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.cli import checkpoint
from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver, procfs, ring, toggle
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.copier import Copier, Progress, known_spans
from phos.gpu_engine.daemon import keeper, serve_dump
from phos.gpu_engine.daemon.holds import Holds
from phos.gpu_engine.daemon.jobs import REMEMBERED, Claims, JobTable
from phos.gpu_engine.daemon.keeper_link import HeldBlock, KeeperLink
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.daemon.registry import Registry
from phos.gpu_engine.daemon.serve_dump import LEAVE
from phos.gpu_engine.daemon.states import SessionState, StateMachine
from phos.gpu_engine.errors import (
    CheckpointFailed,
    DaemonUnavailable,
    DriverError,
    ExitStatus,
    NoSuchProcess,
    NotPermitted,
    RestoreFailed,
    UsageError,
)
from phos.gpu_engine.procfs import is_alive, start_time
from phos.gpu_engine.restore.base import match_gpus
from phos.gpu_engine.stop.settings import Settings
from phos.gpu_engine.timeline import Timeline
from phos.images.chunk_hash import zero_hash

SESSION, OTHER = bytes(16), bytes([7] * 16)


def wait_until(condition: object, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# The keeper, as a process of its own.


class Kept:
    """A keeper and a phosd's link to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keeper.sock"
        self.process = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__, str(folder)])
        wait_until(self.path.exists, "the keeper")
        self.link = KeeperLink(self.path)

    def held(self) -> list[HeldBlock]:
        found = list(self.link.held())
        for block in found:
            os.close(block.descriptor)
        return found

    def descriptors(self) -> int:
        return sum("memfd:kept" in os.readlink(entry) for entry in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def another_phosd(self) -> None:
        self.link.close()
        self.link = KeeperLink(self.path)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.link.close()  # first: it would start another
    made.process.kill()
    made.process.wait()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("kept")
    yield descriptor
    os.close(descriptor)


def test_keeper_hands_over_to_the_next_phosd(kept: Kept, memory: int) -> None:
    for number in range(3):
        kept.link.add(SESSION, os.getpid(), number, 2 << 20, 0, memory)
    kept.link.remove(SESSION, 1)
    kept.another_phosd()
    assert [(b.session, b.pid, b.block) for b in kept.held()] == [(SESSION, os.getpid(), 0), (SESSION, os.getpid(), 2)]
    kept.link.remove(SESSION, None)
    assert kept.held() == []
    assert kept.descriptors() == 0


def test_keeper_names_the_process_a_session_was_restored_as(kept: Kept, memory: int) -> None:
    """Before the restore phosd stands in for the process; a later phosd must find the process, not the dead phosd."""
    stand_in = subprocess.Popen(["sleep", "60"])
    kept.link.add(SESSION, stand_in.pid, 1, 2 << 20, 0, memory)
    kept.link.moved(SESSION, os.getpid())
    stand_in.kill()
    stand_in.wait()
    kept.another_phosd()
    assert [b.pid for b in kept.held()] == [os.getpid()]


def test_keeper_drops_what_ends_while_no_phosd_is_there(kept: Kept, memory: int) -> None:
    living, ended = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])
    ended.wait()
    kept.link.add(SESSION, living.pid, 1, 2 << 20, 0, memory)
    kept.link.add(OTHER, ended.pid, 1, 2 << 20, 0, memory)  # it was gone before its block came
    assert len(kept.held()) == 2
    kept.link.close()
    wait_until(lambda: kept.descriptors() == 1, "the block of the process that had ended")
    living.kill()
    living.wait()
    wait_until(lambda: kept.descriptors() == 0, "the block of the process that was killed")
    kept.link = KeeperLink(kept.path)


@pytest.mark.parametrize(
    "packet", [b"{", b"[]", b"null", b'{"op": "add"}', b'{"op": "remove", "session": []}', b'{"op": 3}', b"\xff\xfe"]
)
def test_keeper_survives_a_confused_phosd(kept: Kept, memory: int, packet: bytes) -> None:
    kept.link.add(SESSION, os.getpid(), 1, 2 << 20, 0, memory)
    kept.link._socket.send(packet)
    assert [b.block for b in kept.held()] == [1]


def holders(folder: Path) -> list[psutil.Process]:
    """The keepers of a folder."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            found += [child] if str(folder) in child.cmdline() else []
    return found


def test_keeper_that_is_killed_is_replaced_and_given_everything_again(
    kept: Kept, memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(kept.link)
    for number in (1, 2, 3):
        broker.add(Block((SESSION, number), 2 << 20, 0, os.dup(memory)), 1)
    broker.moved(SESSION, os.getpid())
    for turn in range(2):
        broker.remove((SESSION, turn + 1))
        wait_until(lambda: len(holders(kept.path.parent)) == 1, "one keeper, and none that is about to end")
        (running,) = holders(kept.path.parent)
        running.kill()
        broker.add(Block((OTHER, turn), 2 << 20, 0, os.dup(memory)), os.getpid())  # while there may be none
        broker.remove((OTHER, turn))
        running.wait(10)  # a dead one's socket may take a connection for a moment, and be lost a second time
        left = [(SESSION, os.getpid(), number) for number in range(turn + 2, 4)]
        wait_until(lambda left=left: held_now(kept) == left, "the new keeper to hold everything")
    assert "is gone: phosd starts another" in caplog.text
    kept.another_phosd()
    adopted = Broker(kept.link)
    assert adopted.adopt_from_keeper() == {SESSION: os.getpid()}
    for holder in (broker, adopted):
        holder.drop_session(SESSION)
    kept.link.close()
    for process in holders(kept.path.parent):
        process.kill()
        process.wait()


def held_now(kept: Kept) -> list[tuple[bytes, int, int]] | None:
    try:
        return [(block.session, block.pid, block.block) for block in kept.held()]
    except (DaemonUnavailable, OSError):
        return None


# Holds.


def test_holds_of_an_earlier_phosd_are_cleared_even_with_our_pid(tmp_path: Path) -> None:
    former = Holds(tmp_path / "hold")
    former.place(SESSION, os.getpid())
    link = tmp_path / "hold" / SESSION.hex()
    space = os.stat("/proc/self/ns/pid").st_ino
    assert os.readlink(link) == f"{os.getpid()}:{start_time(os.getpid())}:{space}:{space}"
    Holds(tmp_path / "hold").clear_stale()
    assert not link.is_symlink()
    former.release(SESSION)  # what is gone can be released


# Claims and jobs.


def test_two_checkpoints_cannot_have_one_process() -> None:
    claims = Claims()
    with claims.hold([1, 2]):
        with pytest.raises(CheckpointFailed, match="Process 2 is part of another checkpoint"), claims.hold([2, 3]):
            pass
        with claims.hold([3]):
            assert claims.any()
    assert not claims.any()
    with claims.hold([1, 2, 3]):
        pass


def test_a_checkpoint_that_is_just_ending_is_waited_for() -> None:
    """Its image is committed a moment before it lets its processes go, and whoever waited for that may ask at once."""
    claims = Claims()
    held, first = threading.Event(), claims.hold([1, 2])

    def hold_for_a_moment() -> None:
        with first:
            held.set()
            time.sleep(0.1)

    other = threading.Thread(target=hold_for_a_moment)
    other.start()
    held.wait()
    with claims.hold([2]):
        assert claims.has([2])
        assert not claims.has([1])
    other.join()


def test_a_session_is_not_restored_while_its_former_life_is_put_away() -> None:
    """Its memory has the same names: what is still to be dropped would be the restored process's."""
    said: list[str] = []
    dropping, go_on = threading.Event(), threading.Event()

    def drop_session(number: bytes) -> int:
        dropping.set()
        go_on.wait()
        said.append("dropped")
        return 0

    nothing = types.SimpleNamespace(forget=lambda *_, **__: None, release=lambda _: None)
    lock = threading.Lock()
    session: Any = types.SimpleNamespace(
        session=SESSION, pid=1, machine=types.SimpleNamespace(state=SessionState.RUNNING, end=lambda: None)
    )
    registry: Any = types.SimpleNamespace(
        lock=lock,
        forgotten=threading.Condition(lock),
        being_forgotten=set(),
        sessions={SESSION: session},
        restores={},
        reaper=nothing,
        holds=nothing,
        speculator=nothing,
        cow=types.SimpleNamespace(touched=nothing),
        broker=types.SimpleNamespace(drop_session=drop_session),
    )

    def restore() -> None:
        Registry.wait_forgotten(registry, SESSION)
        said.append("restored")

    ended = threading.Thread(target=Registry.forget, args=(registry, session))
    ended.start()
    dropping.wait()
    assert SESSION not in registry.sessions
    restored = threading.Thread(target=restore)
    restored.start()
    restored.join(0.05)
    go_on.set()
    for thread in (ended, restored):
        thread.join()
    assert said == ["dropped", "restored"]
    Registry.wait_forgotten(registry, SESSION)


class FakeJob:
    kind = "dump"
    state = "writing"
    error = ""
    since = 0.0

    def __init__(self, path: str = "", kind: str = "dump") -> None:
        self.path = path
        self.kind = kind
        self.progress = Progress(10, [1, 2])
        self.timeline = Timeline()
        self.pids = [1]

    def warnings(self) -> list[str]:
        return ["take care"]


def test_job_table(tmp_path: Path) -> None:
    table = JobTable()
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    a, b = (os.open(folder, os.O_RDONLY) for folder in folders)
    assert table.state(a, "dump").state == "unknown"
    table.add(a, FakeJob("a"))
    assert table.state(a, "dump").state == "writing"
    assert table.state(a, "dump").bytes_done == 3
    assert table.state(a, "restore").state == "unknown"
    assert table.state(b, "dump").state == "unknown"
    newer = FakeJob("a")
    newer.state = "failed"
    table.add(a, newer)
    assert table.state(a, "dump").state == "failed", "the newest counts"
    table.none_for(b)
    assert table.state(b, "dump").state == "none"
    assert table.state(b, "restore").state == "none"
    for _ in range(REMEMBERED + 10):
        table.add(b, FakeJob("b"))
    assert len(table.report()) == REMEMBERED
    os.close(a)
    os.close(b)


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


def test_gpus_that_do_not_match() -> None:
    with pytest.raises(RestoreFailed, match=r"needs 2 GPU\(s\), this machine shows 1"):
        match_gpus([image_gpu(0, 1), image_gpu(1, 2)], [present_gpu(0, 1)])
    with pytest.raises(RestoreFailed, match=r"made on H100 .*this machine has B200.*same model"):
        match_gpus([image_gpu(0, 1)], [present_gpu(0, 9, "B200", 10)])
    with pytest.raises(RestoreFailed, match="same model"):
        match_gpus([image_gpu(0, 1), image_gpu(1, 2)], [present_gpu(0, 8), present_gpu(1, 9, "B200", 10)])


# The driver's calls, which wait for the target process.


def test_step_that_hangs_holds_up_nobody() -> None:
    release = threading.Event()
    order: list[str] = []

    def hang(_pid: int) -> None:
        release.wait(20)
        order.append("first")

    def after(_pid: int) -> None:
        order.append("second")

    hanging = toggle.Step(hang, os.getpid())
    quick = toggle.Step(lambda _pid: None, os.getpid())
    follower = toggle.Step(after, os.getpid(), hanging)
    assert toggle.wait_for([hanging, quick], 0.3) == [hanging]
    assert order == []
    release.set()
    assert toggle.wait_for([hanging, follower], 5) == []
    assert order == ["first", "second"]


def test_waiting_ends_when_only_stopped_processes_are_left() -> None:
    child = subprocess.Popen(["sleep", "60"])
    release = threading.Event()

    def hang(_pid: int) -> None:
        release.wait(20)

    step = toggle.Step(hang, child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: procfs.is_stopped(child.pid), "the stop")
    began = time.monotonic()
    assert toggle.wait_for([step], 15) == [step]
    assert time.monotonic() - began < 3
    release.set()
    child.kill()
    child.wait()
    assert not procfs.is_stopped(child.pid)


class FakeDriver:
    """The driver's checkpoint API for one process; what is in ``fail`` fails so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str | None = "running", **fail: int) -> None:
        self.state = state
        self.fail = fail
        self.code = 999
        self.dies = False
        monkeypatch.setattr(driver, "checkpoint_state", lambda _pid: self.state)
        monkeypatch.setattr(driver, "checkpoint_lock", lambda _pid, _ms: self.go("lock", "locked"))
        monkeypatch.setattr(driver, "checkpoint_checkpoint", lambda _pid: self.go("checkpoint", "checkpointed"))
        monkeypatch.setattr(driver, "checkpoint_restore", lambda _pid, _pairs=None: self.go("restore", "locked"))
        monkeypatch.setattr(driver, "checkpoint_unlock", lambda _pid: self.go("unlock", "running"))

    def go(self, call: str, state: str) -> None:
        if self.fail.get(call, 0) > 0:
            self.fail[call] -= 1
            if self.dies:
                self.state = None
            raise DriverError(call, self.code, "CUDA_ERROR_X")
        self.state = state


@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_checkpoint_that_fails_leaves_the_process_running(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    fake = FakeDriver(monkeypatch, "running", **{call: 1})
    with pytest.raises(CheckpointFailed, match="goes on as before"):
        toggle.checkpoint(1, 10)
    assert fake.state == "running"
    toggle.checkpoint(1, 10)
    assert fake.state == "checkpointed"
    toggle.revive(1)
    assert fake.state == "running"


def test_checkpoint_whose_undoing_fails_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, checkpoint=1, unlock=1)
    with pytest.raises(CheckpointFailed, match=r"checkpoint failed .*Bringing it back failed as well.*unlock"):
        toggle.checkpoint(1, 10)


def test_process_that_ends_meanwhile_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, lock=1).dies = True
    with pytest.raises(CheckpointFailed, match="ended while it was being checkpointed"):
        toggle.checkpoint(1, 10)
    FakeDriver(monkeypatch, "checkpointed", restore=1).dies = True
    with pytest.raises(NoSuchProcess, match="ended while"):
        toggle.revive(1)


def test_process_that_the_driver_gave_up_is_not_called_revived(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, "failed")
    with pytest.raises(CheckpointFailed, match="has lost the GPU state"):
        toggle.revive(1)


def test_only_lack_of_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(monkeypatch, "checkpointed", restore=1)
    fake.code = toggle.OUT_OF_MEMORY
    toggle.revive_when_there_is_room(1)
    assert fake.state == "running"
    FakeDriver(monkeypatch, "checkpointed", restore=1)
    with pytest.raises(DriverError):
        toggle.revive_when_there_is_room(1)


# Settings and command lines.


def test_settings_without_meaning_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment() == Settings()
    for text in ("soon", "-1", "0", "nan", "1e9"):
        monkeypatch.setenv("PHOS_QUIESCE_SECONDS", text)
        with pytest.raises(UsageError, match="PHOS_QUIESCE_SECONDS"):
            Settings.from_environment()
    monkeypatch.setenv("PHOS_QUIESCE_SECONDS", "2.5")
    monkeypatch.setenv("PHOS_REDUCERS", "none")
    none = Settings(quiesce_timeout=2.5, reduce_stack=False, huge_pages=False, residue=False)
    assert Settings.from_environment() == none


@pytest.mark.parametrize("text", ["stack", "stack-limit,hugepages", "none,stack-limit", "stack-limit,"])
def test_unknown_reducers_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PHOS_REDUCERS", text)
    with pytest.raises(UsageError, match=r"PHOS_REDUCERS=.*is no reducer.*stack-limit, huge-pages, residue with"):
        Settings.from_environment()


def test_reducers_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, chosen in (("huge-pages", ["huge-pages"]), (" stack-limit , huge-pages", ["stack-limit", "huge-pages"])):
        monkeypatch.setenv("PHOS_REDUCERS", text)
        assert Settings.from_environment().reducers() == chosen
    for text in ("", "none"):
        monkeypatch.setenv("PHOS_REDUCERS", text)
        assert Settings.from_environment().reducers() == []
    monkeypatch.delenv("PHOS_REDUCERS")
    assert Settings.from_environment().reducers() == ["stack-limit", "huge-pages", "residue"]


def test_size_of_the_first_residue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment().residue_bytes == 0
    monkeypatch.setenv("PHOS_RESIDUE_BYTES", "256M")
    assert Settings.from_environment().residue_bytes == 256 << 20
    monkeypatch.setenv("PHOS_RESIDUE_BYTES", "much")
    with pytest.raises(UsageError, match="PHOS_RESIDUE_BYTES=much is no size"):
        Settings.from_environment()


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


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_spans_of_known_hashes_keep_zeros_apart(zero: list[bool], most: int, most_zero: int, short: bool) -> None:
    size = len(zero) * ring.CHUNK_BYTES - (ring.CHUNK_BYTES // 2 if short else 0)
    lengths = [min(ring.CHUNK_BYTES, size - i * ring.CHUNK_BYTES) for i in range(len(zero))]
    hashes = [zero_hash(n) if z else bytes([i] * 16) for i, (n, z) in enumerate(zip(lengths, zero, strict=True))]
    block = Block((bytes(16), 1), size, 0, -1)
    spans = known_spans(block, hashes, most * ring.CHUNK_BYTES, most_zero * ring.CHUNK_BYTES)
    assert [hash_ for span in spans for hash_ in span.hashes or ()] == hashes
    end = 0
    for span in spans:
        assert span.offset == end
        assert 0 < span.size <= (most_zero if span.zero else most) * ring.CHUNK_BYTES
        first = span.offset // ring.CHUNK_BYTES
        assert zero[first : first + len(span.hashes or ())] == [span.zero] * len(span.hashes or ())
        end += span.size
    assert end == size


# Whom a dump takes.


class FakeSession:
    """A connected process that has not handed over all of its blocks."""

    pid = os.getpid()
    executable = "/bin/late"
    is_connected = True
    table_complete = False

    def __init__(self) -> None:
        self.machine = StateMachine(SessionState.RUNNING)


def test_process_that_does_not_hand_over_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its image would lack blocks, and detaching would lose them."""
    session = FakeSession()
    registry = SimpleNamespace(lock=threading.Lock(), sessions={SESSION: session}, path=tmp_path)
    server = serve_dump.DumpServer(registry)  # type: ignore[arg-type]
    monkeypatch.setattr(serve_dump, "REGISTER_SECONDS", 0.1)
    monkeypatch.setattr(toggle, "holds_cuda", lambda _pid: False)
    with pytest.raises(CheckpointFailed, match=r"/bin/late\) has not handed all of its GPU memory to phosd"):
        server._find_processes(session.pid)
    session.table_complete = True
    assert server._find_processes(session.pid) == ([session], [])


def test_process_of_another_user_is_refused_before_criu_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 4242)
    with pytest.raises(NotPermitted, match=f"belongs to user {owner}") as refused:
        checkpoint._require_cuda(os.getpid())
    assert refused.value.exit_status == ExitStatus.NOT_PERMITTED


@pytest.mark.parametrize("word", ["--leave-running", "--leave-r", "--leave-stopped", "-R", "-s", "-jR", "-vR", "-Rv4"])
def test_options_that_leave_tasks_alive(word: str) -> None:
    assert LEAVE.fullmatch(word)


@pytest.mark.parametrize(
    "word", ["-v4", "-D/tmp/Rs", "-ols", "-t12", "-j", "/x/-R", "--lib", "-L/plugins", "--shell-job"]
)
def test_options_that_do_not(word: str) -> None:
    assert not LEAVE.fullmatch(word)


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
        wait_until(lambda: procfs.is_stopped(child.pid), "the stop")
        assert is_alive(child.pid)
    finally:
        child.kill()
    wait_until(lambda: not is_alive(child.pid), "its end")  # a zombie, until it is waited for
    child.wait()
    assert start_time(child.pid) is None
