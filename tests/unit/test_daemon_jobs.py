"""Whom a dump takes, the claims on them, and the jobs that are under way."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import threading
import time
import types
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phos.cli import checkpoint
from phos.gen import wire_pb2
from phos.gpu_engine import toggle
from phos.gpu_engine.copy_work import Progress
from phos.gpu_engine.daemon import serve_dump, wire
from phos.gpu_engine.daemon.jobs import REMEMBERED, Claims, JobTable
from phos.gpu_engine.daemon.registry import Registry
from phos.gpu_engine.daemon.serve_client import ClientServer
from phos.gpu_engine.daemon.serve_dump import LEAVE
from phos.gpu_engine.daemon.states import SessionState, StateMachine
from phos.gpu_engine.errors import CheckpointFailed, ExitStatus, NoSuchProcess, NotPermitted
from phos.gpu_engine.interruption import Interruption
from phos.gpu_engine.timeline import Timeline
from phos.images.formats import COMMIT_FILE

SESSION = bytes(16)


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
        session=SESSION, pid=1, end=lambda: None, machine=types.SimpleNamespace(state=SessionState.RUNNING)
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
        cow=nothing,
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
    assert table.state(a, "dump", 0).state == "unknown"
    first = FakeJob("a")
    table.add(a, first, 0)
    assert table.state(a, "dump", 0).state == "writing"
    assert table.state(a, "dump", 0).bytes_done == 3
    assert table.state(a, "restore", 0).state == "unknown"
    assert table.state(b, "dump", 0).state == "unknown"
    newer = FakeJob("a")
    first.state = newer.state = "failed"
    table.add(a, newer, 0)
    assert table.state(a, "dump", 0).state == "failed", "the newest counts"
    table.none_for(b, 0)
    assert table.state(b, "dump", 0).state == "none"
    assert table.state(b, "restore", 0).state == "none"
    under_way = FakeJob("a")
    table.add(a, under_way, 0)
    for n in range(REMEMBERED + 10):
        ended = FakeJob(f"b{n}")
        ended.state = "committed"
        table.add(b, ended, 0)
    report = table.report(0)
    assert len(report) == REMEMBERED + 1
    assert report[0].image == "a", "what is under way is not forgotten for what has ended"
    assert report[-1].image == f"b{REMEMBERED + 9}"
    under_way.state = "failed"
    table.add(b, FakeJob("last"), 0)
    assert table.report(0)[0].image != "a"
    assert table.state(a, "dump", 0).state == "unknown"
    os.close(a)
    os.close(b)


def test_whose_job_it_is_that_is_asked_after(tmp_path: Path) -> None:
    """Somebody takes a process of a pool of the same image meanwhile, or restores one that has no GPU part."""
    table = JobTable()
    directory = os.open(tmp_path, os.O_RDONLY)
    first = FakeJob("a", "restore")
    table.add(directory, first, 0, "one")
    first.state = "attached"
    table.add(directory, FakeJob("a", "restore"), 0)
    assert [table.state(directory, "restore", 0, run).state for run in ("one", "")] == ["attached", "writing"]
    assert table.state(directory, "restore", 0, "other").state == "unknown"
    for run in ("two", "three"):
        table.none_for(directory, 0, run)
    assert table.state(directory, "restore", 0, "two").run == "two"
    os.close(directory)


def test_an_image_that_was_removed_is_not_committed(tmp_path: Path) -> None:
    """Nor is another directory of its name, which mostly has its inode."""
    table, folder = JobTable(), tmp_path / "a"

    def state() -> str:
        directory = os.open(folder, os.O_RDONLY)
        try:
            return table.state(directory, "dump", 0).state
        finally:
            os.close(directory)

    def ended(state: str) -> None:
        directory = os.open(folder, os.O_RDONLY)
        job = FakeJob("a")
        job.state = state
        table.add(directory, job, 0)
        os.close(directory)

    folder.mkdir()
    (folder / COMMIT_FILE).touch()
    ended("committed")
    assert state() == "committed"
    (folder / COMMIT_FILE).unlink()
    assert state() == "unknown"
    ended("failed")
    assert state() == "failed"
    for _ in range(20):
        folder.rmdir()
        folder.mkdir()
        assert state() == "unknown"


def test_of_a_job_that_is_over_what_is_shown_is_kept_and_nothing_else(tmp_path: Path) -> None:
    table = JobTable()
    directory = os.open(tmp_path, os.O_RDONLY)
    job = FakeJob("a")
    table.add(directory, job, 0)
    table.add(directory, FakeJob("b", "restore"), 0)
    with job.timeline.phase("detach"):
        pass
    job.state, job.error = "failed", "The disk is full."
    before = table.state(directory, "dump", 0), table.report(0)
    table.settle(job)
    gone = weakref.ref(job)
    del job
    gc.collect()
    assert gone() is None
    assert (table.state(directory, "dump", 0), table.report(0)) == before
    assert before[0].error == "The disk is full."
    assert list(before[0].warnings) == ["take care"]
    assert [phase.name for phase in before[1][0].phases] == ["detach"]
    os.close(directory)


def test_jobs_are_shown_to_their_user_and_to_root_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    table = JobTable()
    directory = os.open(tmp_path, os.O_RDONLY)
    table.add(directory, FakeJob("a"), 4242)
    assert [table.state(directory, "dump", viewer).state for viewer in (0, 4242, 4243)] == ["writing"] * 2 + ["unknown"]
    assert [len(table.report(viewer)) for viewer in (0, 4242, 4243)] == [1, 1, 0]
    for _ in range(REMEMBERED + 10):
        table.none_for(directory, 4243)
    assert len(table.report(4242)) == 1, "another user's pushed it out"
    os.close(directory)


def test_a_wait_of_no_time_is_answered_at_once(tmp_path: Path) -> None:
    table = JobTable()
    folder = os.open(tmp_path, os.O_RDONLY)
    table.add(folder, FakeJob(), 0)
    server = ClientServer(SimpleNamespace(jobs=table), (), None)  # type: ignore[arg-type]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(20)
    asked = wire_pb2.Envelope(id=1, wait_image=wire_pb2.WaitImage(timeout_s=0))
    threading.Thread(target=server.serve, args=(wire.Connection(ours), asked, [folder]), daemon=True).start()
    answer = wire.receive(theirs)
    assert answer is not None
    assert (answer[0].image_state.state, answer[0].image_state.timed_out) == ("writing", True)
    theirs.close()


class FakeSession:
    """A connected process that has not handed over all of its blocks."""

    pid = os.getpid()
    executable = "/bin/late"
    session = SESSION
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


def test_a_process_that_another_checkpoint_has_just_ended_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is under way that could be waited for."""
    session = FakeSession()
    session.machine.end()
    registry = SimpleNamespace(lock=threading.Lock(), claims=Claims(), loading={}, broker=SimpleNamespace(keeper_pid=0))
    server = serve_dump.DumpServer(registry)  # type: ignore[arg-type]
    monkeypatch.setattr(server, "_find_processes", lambda _root: ([session], []))
    connection: Any = SimpleNamespace(uid=0, gid=0, pid=os.getpid())
    directory = os.open(tmp_path, os.O_RDONLY)
    with subprocess.Popen(["sleep", "100"]) as child, ExitStack() as claim:
        envelope = wire_pb2.Envelope(dump_begin=wire_pb2.DumpBegin(pid=child.pid))
        try:
            with pytest.raises(NoSuchProcess, match=rf"Process {session.pid} \(/bin/late\) has ended"):
                server._begin(connection, envelope, directory, claim, Interruption())
        finally:
            child.kill()
            os.close(directory)


@pytest.mark.parametrize("who", ["phosd itself", "phosd's keeper"])
def test_a_tree_that_holds_phosd_is_refused(who: str) -> None:
    """An application that is the first process of its container becomes the parent of every daemon there."""
    with subprocess.Popen(["sleep", "100"]) as child:
        keeper = child.pid if who == "phosd's keeper" else 0
        registry = SimpleNamespace(broker=SimpleNamespace(keeper_pid=keeper))
        server = serve_dump.DumpServer(registry)  # type: ignore[arg-type]
        pid = keeper or os.getpid()
        try:
            with pytest.raises(CheckpointFailed, match=rf"{who} \(process {pid}\) is in the process tree of"):
                server._refuse_ourselves(pid)
            registry.broker.keeper_pid = 0
            server._refuse_ourselves(child.pid)
        finally:
            child.kill()


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
