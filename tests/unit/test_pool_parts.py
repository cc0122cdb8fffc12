"""Pools without CRIU and without a GPU: who is parked when, and what becomes of takes, drops and failures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.daemon import pools as module
from phos.gpu_engine.daemon import serve_pool, wire
from phos.gpu_engine.daemon.pools import LOOK_SECONDS, Entry, Pool, Pools
from phos.gpu_engine.daemon.serve_pool import in_its_place
from phos.gpu_engine.errors import NoSuchProcess, RestoreFailed, UsageError
from phos.gpu_engine.restore.pool_process import far_from
from tests.unit.waiting import eventually

PATIENCE = 10.0


class FakeRestore:
    """Stands for a PooledRestore."""

    made: ClassVar[list[FakeRestore]] = []

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pids = [1]
        self.tasks = [os.getpid()]
        self.gpu_bytes = 5
        self.progress = SimpleNamespace(total=7)
        self.error = ""
        self.discarded = 0
        self._read, self._write = os.pipe()
        FakeRestore.made.append(self)

    def names_for(self, pid: int, session: bytes) -> dict[bytes, bytes]:
        return {b"old": b"now"} if pid in self.pids and session == b"old" else {}

    def parked(self) -> None:
        """It is."""

    def descriptors(self) -> list[int]:
        return [os.dup(self._read)]

    def die(self) -> None:
        os.write(self._write, b"x")

    def discard(self) -> None:
        self.discarded += 1

    def forget(self) -> None:
        """Called when the test is over."""
        os.close(self._read)
        os.close(self._write)


class FakeWarden:
    """Stands for a Warden; fails while told to."""

    failing = ""
    made: ClassVar[list[FakeWarden]] = []

    def __init__(self, *arguments: Any) -> None:
        self.avoid = arguments[-1]
        self.log: Path = arguments[1]
        for path in (self.log, self.log.with_suffix(".out")):
            path.write_text("what CRIU says")
        self.pidfd = os.open("/dev/null", os.O_RDONLY)
        read, self._write = os.pipe()
        os.dup2(read, self.pidfd)
        os.close(read)
        self.ended = False
        FakeWarden.made.append(self)

    def wait_restored(self) -> None:
        if FakeWarden.failing:
            raise RestoreFailed(FakeWarden.failing)

    def end(self) -> None:
        self.ended = True

    def wait_ended(self, seconds: float) -> None:
        """It is."""

    def close(self) -> None:
        """Nothing: the test looks at it afterwards."""

    def forget(self) -> None:
        """Called when the test is over."""
        os.close(self.pidfd)
        os.close(self._write)


class Site:
    """Pools, and what they were told."""

    def __init__(self, folder: Path) -> None:
        self.let_go: list[Entry] = []
        self.folder = folder
        self.pools = self.again()
        self.directory = os.open(folder, os.O_RDONLY)

    def again(self) -> Pools:
        make: Any = lambda _: FakeRestore()  # noqa: E731
        return Pools(self.folder, self.folder / "phosd.sock", make, lambda _: None, self.let_go.append)

    def create(self, name: str = "p", size: int = 2) -> Pool:
        return self.pools.create(name, str(self.folder / name), size, "", os.dup(self.directory))

    def close(self) -> None:
        for report in self.pools.report():
            self.pools.drop(self.pools.find(report.name))
        os.close(self.directory)

    def filled(self, pool: Pool, count: int) -> None:
        eventually(lambda: len(pool.parked()) == count)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(module, "Warden", FakeWarden)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    FakeWarden.failing = ""
    FakeWarden.made = []
    FakeRestore.made = []
    made = Site(tmp_path)
    yield made
    made.close()
    for one in [*FakeWarden.made, *FakeRestore.made]:
        one.forget()


def test_a_pool_is_filled_and_refilled(site: Site) -> None:
    pool = site.create(size=3)
    site.filled(pool, 3)
    first = pool.parked()[0]
    entry = site.pools.take(pool, 0)
    assert entry is first, "the one that has waited longest"
    site.pools.taken(pool, entry)
    site.pools.arrived(pool)
    site.filled(pool, 3)
    assert pool.taken == 1
    assert pool.state() == "full"
    assert len(FakeWarden.made) == 4
    assert not site.let_go


def test_none_is_parked_while_memory_of_one_that_was_taken_comes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, other = site.create(size=2), site.create("other", size=1)
    site.filled(pool, 2)
    site.filled(other, 1)
    entry = site.pools.take(pool, 0)
    site.pools.taken(pool, entry)
    site.pools.lost(other, site.pools.take(other, 0))
    assert not fills_up(pool, 2)
    assert not other.parked(), "of no pool"
    site.pools.arrived(pool)
    site.filled(pool, 2)
    site.filled(other, 1)
    assert (pool.coming, other.coming) == (0, 0)
    for _ in range(2):
        site.pools.taken(pool, site.pools.take(pool, 0))
    assert not fills_up(pool, 1)
    entry = site.pools.take(pool, PATIENCE)  # somebody waits
    site.pools.put_back(pool, entry)
    monkeypatch.setattr(module, "DEFER_SECONDS", 0.2)
    site.pools.taken(pool, site.pools.take(pool, 0))
    site.filled(pool, 2)  # whoever does not say that all is there holds it up for so long


def fills_up(pool: Pool, size: int) -> bool:
    """Whether it comes to be filled all the same."""
    until = time.monotonic() + 0.3
    while time.monotonic() < until and len(pool.parked()) < size:
        time.sleep(0.01)
    return len(pool.parked()) >= size


def test_takes_of_several_threads_get_different_processes(site: Site) -> None:
    pool = site.create(size=2)
    got: list[Entry] = []

    def take() -> None:
        entry = site.pools.take(pool, PATIENCE)
        got.append(entry)
        site.pools.taken(pool, entry)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({entry.id for entry in got}) == 6
    site.filled(pool, 2)


def test_nobody_gets_a_process_who_has_gone(site: Site) -> None:
    """Interrupted while waiting: it would compute for nobody."""
    FakeWarden.failing = "No room."
    pool = site.create(size=1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = wire.Connection(ours)
    failed: list[str] = []

    def take() -> None:
        try:
            site.pools.take(pool, 600.0, connection.hung_up)
        except RestoreFailed as error:
            failed.append(str(error))

    taking = threading.Thread(target=take)
    taking.start()
    eventually(lambda: pool.waiting)
    theirs.send(b"said before")
    theirs.close()
    taking.join()
    assert failed == ["Whoever wanted a process of pool p has gone."]
    connection.close()
    FakeWarden.failing = ""
    site.filled(pool, 1)


def test_who_waits_does_not_wake_others_who_wait(site: Site) -> None:
    """They would wake each other without end, and take processors from the CRIU that parks for them."""
    FakeWarden.failing = "No room."
    pool = site.create(size=1)
    looks: list[int] = []

    def take() -> None:
        with pytest.raises(RestoreFailed):
            site.pools.take(pool, 2 * LOOK_SECONDS, lambda: bool(looks.append(1)))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looks) < 300  # the filling that fails wakes them now and then


def test_what_fails_is_tried_again_and_said(site: Site) -> None:
    FakeWarden.failing = "No room."
    pool = site.create(size=1)
    eventually(lambda: pool.failures >= 3)
    assert pool.state() == "short"
    with pytest.raises(RestoreFailed, match=r"no parked process\. The last could not be parked: No room\."):
        site.pools.take(pool, 0)
    FakeWarden.failing = ""
    site.filled(pool, 1)
    assert (pool.state(), pool.error, pool.failures) == ("full", "", 0)
    assert all(entry.restore.discarded == 1 for entry in site.let_go)  # type: ignore[attr-defined]
    assert len(site.let_go) >= 3


def test_of_those_that_failed_the_last_one_s_log_can_be_read(site: Site) -> None:
    """A pool may be short for days, and another is tried every minute; the folder is in memory."""

    def logs() -> set[str]:
        return {path.name for path in (site.folder / "pool").iterdir()}

    FakeWarden.failing = "Its log is there."
    pool = site.create(size=1)
    eventually(lambda: pool.failures >= 3)
    eventually(lambda: logs() == {FakeWarden.made[-1].log.with_suffix(kind).name for kind in (".log", ".out")})
    FakeWarden.failing = ""
    site.filled(pool, 1)
    assert logs() == set()


def test_one_that_ends_is_replaced(site: Site) -> None:
    pool = site.create(size=1)
    site.filled(pool, 1)
    (entry,) = pool.parked()
    entry.restore.die()  # type: ignore[attr-defined]
    eventually(lambda: entry.gone)
    site.filled(pool, 1)
    assert pool.parked()[0] is not entry
    assert site.let_go == [entry]


def test_one_that_could_not_be_opened_is_taken_by_the_next(site: Site) -> None:
    pool = site.create(size=1)
    entry = site.pools.take(pool, PATIENCE)
    site.pools.put_back(pool, entry)
    assert site.pools.take(pool, 0) is entry


def test_one_that_ends_while_it_cannot_be_opened_is_not_put_back(site: Site) -> None:
    pool = site.create(size=1)
    entry = site.pools.take(pool, PATIENCE)
    entry.restore.die()  # type: ignore[attr-defined]
    time.sleep(0.2)  # it is noticed meanwhile
    assert not entry.gone
    site.pools.put_back(pool, entry)
    eventually(lambda: entry.gone)
    assert site.pools.take(pool, PATIENCE) is not entry


def test_a_drop_spares_who_is_being_opened_and_ends_who_waits(site: Site) -> None:
    pool = site.create(size=2)
    site.filled(pool, 2)
    opening = site.pools.take(pool, 0)
    (other,) = pool.parked()
    taken = site.pools.take(pool, 0)
    site.pools.put_back(pool, taken)
    site.pools.drop(pool)
    with pytest.raises(RestoreFailed, match="Pool p has been dropped"):
        site.pools.take(pool, PATIENCE)
    with pytest.raises(NoSuchProcess):
        site.pools.find("p")
    assert site.let_go == [other]
    assert not opening.gone
    site.pools.put_back(pool, opening)  # its take has failed: nobody else can have it now
    assert opening.gone


def test_one_that_is_taken_while_others_are_ended_is_left_to_who_takes_it(site: Site) -> None:
    """Ending each takes a while."""
    pool = site.create(size=2)
    site.filled(pool, 2)
    got: list[Entry] = []

    def let_go(_: Entry) -> None:
        if not got:
            got.append(site.pools.take(pool, 0.0))

    site.pools._let_go = let_go
    site.pools.spoil(pool, "Another image has been written in its place.")
    assert not got[0].gone
    site.pools.put_back(pool, got[0])
    assert got[0].gone


def test_one_that_comes_back_to_a_spoilt_pool_is_ended(site: Site) -> None:
    pool = site.create(size=1)
    entry = site.pools.take(pool, PATIENCE)
    site.pools.spoil(pool, "Its image is gone.")
    site.pools.put_back(pool, entry)
    assert entry.gone


def test_a_drop_leaves_the_image_directory_to_who_uses_it(site: Site) -> None:
    pool = site.create(size=1)
    site.filled(pool, 1)
    with site.pools.using(pool):
        site.pools.drop(pool)
        assert os.path.samestat(os.fstat(pool.directory), os.stat(site.folder))
    eventually(lambda: pool.directory == -1)
    with pytest.raises(RestoreFailed, match="Pool p has been dropped"), site.pools.using(pool):
        pass


SlowWarden = tuple[threading.Event, threading.Event]


@pytest.fixture
def slow_warden(site: Site, monkeypatch: pytest.MonkeyPatch) -> SlowWarden:
    """Wardens set the first event when they are being started, and wait for the second."""
    starting, go_on = threading.Event(), threading.Event()

    class Slow(FakeWarden):
        def __init__(self, *what: object) -> None:
            starting.set()
            go_on.wait()
            super().__init__(*what)

    monkeypatch.setattr(module, "Warden", Slow)
    return starting, go_on


def test_a_drop_while_criu_is_being_started_ends_it(site: Site, slow_warden: SlowWarden) -> None:
    starting, go_on = slow_warden
    pool = site.create(size=1)
    starting.wait()
    site.pools.drop(pool)
    assert len(site.let_go) == 1
    go_on.set()
    eventually(lambda: FakeWarden.made and FakeWarden.made[0].ended)


def test_a_spoilt_pool_is_filled_no_more(site: Site) -> None:
    pool = site.create(size=2)
    site.filled(pool, 2)
    site.pools.spoil(pool, "Its image is gone.")
    assert pool.state() == "failed"
    assert not pool.entries
    with pytest.raises(RestoreFailed, match="gets none: Its image is gone"):
        site.pools.take(pool, PATIENCE)
    made = len(FakeWarden.made)
    time.sleep(0.2)
    assert len(FakeWarden.made) == made


def test_a_pool_that_is_spoilt_while_it_is_filled_says_why(site: Site, slow_warden: SlowWarden) -> None:
    starting, go_on = slow_warden
    pool = site.create(size=1)
    starting.wait()
    site.pools.spoil(pool, "Its image is gone.")
    go_on.set()
    eventually(lambda: not pool.users)
    other = site.create("other", size=1)
    site.filled(other, 1)  # whoever fills has done with the first
    with pytest.raises(RestoreFailed, match="gets none: Its image is gone"):
        site.pools.take(pool, PATIENCE)


def test_names_and_sizes_that_make_no_sense_are_refused(site: Site) -> None:
    site.create("p", 1)
    with pytest.raises(UsageError, match="There is a pool p already"):
        site.create("p", 1)
    with pytest.raises(UsageError, match="not 0"):
        site.create("q", 0)
    with pytest.raises(NoSuchProcess):
        site.pools.find("q")


def test_a_pool_is_found_by_its_image_if_that_is_clear(site: Site) -> None:
    directory = os.dup(site.directory)
    pool = site.pools.create("a", "/images/x", 1, "", directory)
    assert site.pools.find("/images/x") is pool
    site.pools.create("b", "/images/x", 1, "", os.dup(site.directory))
    with pytest.raises(UsageError, match="There are 2 pools of /images/x: a, b"):
        site.pools.find("/images/x")


def test_a_phosd_after_this_one_knows_of_the_pools(site: Site) -> None:
    pool = site.create("p", 2)
    site.create("q", 1)
    site.pools.drop(pool)
    assert [wanted["name"] for wanted in site.again().remembered()] == ["q"]
    (site.folder / module.STATE_FILE).write_text("not json")
    assert site.again().remembered() == []
    (site.folder / module.STATE_FILE).write_text(json.dumps({"a": 1}))
    assert site.again().remembered() == []


def test_a_phosd_that_ends_while_it_revives_pools_forgets_none(site: Site) -> None:
    for name in ("a", "b", "c"):
        site.create(name, 1)
    second = site.again()
    second.create("a", "/images/a", 1, "", -1, failed="Its image is gone.")
    third = site.again()
    assert [wanted["name"] for wanted in third.remembered()] == ["a", "b", "c"]
    third.drop(third.create("b", "/images/b", 1, "", -1, failed="Its image is gone."))
    assert sorted(wanted["name"] for wanted in site.again().remembered()) == ["a", "c"]


def test_an_image_with_another_in_its_place_is_not_parked(tmp_path: Path) -> None:
    """CRIU would restore that other one, with the GPU memory of the one that phosd has open."""
    image = tmp_path / "image"
    image.mkdir()
    pool = Pool("p", str(image), 1, "", os.open(image, os.O_RDONLY))
    in_its_place(pool)
    image.rename(tmp_path / "elsewhere")
    with pytest.raises(RestoreFailed, match=f"pool p is no longer at {image}"):
        in_its_place(pool)
    image.mkdir()
    with pytest.raises(RestoreFailed, match="no longer at"):
        in_its_place(pool)
    os.close(pool.directory)


def test_who_does_not_know_its_new_name_is_told(site: Site) -> None:
    pool = site.create(size=1)
    site.filled(pool, 1)
    assert site.pools.names_of(1, b"old") == {b"old": b"now"}
    assert site.pools.names_of(1, b"now") == {}
    assert site.pools.names_of(2, b"old") == {}


def test_the_report_says_what_each_costs(site: Site) -> None:
    pool = site.create(size=1)
    site.filled(pool, 1)
    (report,) = site.pools.report()
    assert (report.name, report.size, report.state, report.bytes) == ("p", 1, "full", 7)
    (parked,) = report.parked
    assert (list(parked.pids), parked.state, parked.gpu_bytes) == ([1], "parked", 5)
    assert parked.host_bytes > 1 << 20


def test_what_criu_needs_are_the_numbers_of_threads_too(site: Site) -> None:
    for number in (32322, 32369, 32375):
        (site.folder / f"core-{number}.img").touch()
    site.filled(site.create(size=1), 1)
    assert FakeWarden.made[0].avoid == [32322, 32369, 32375]


def test_criu_gets_a_pid_far_from_those_that_it_needs() -> None:
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    usual = far_from([])
    assert 0 < usual < limit - 200
    for pids in ([usual], [usual + 150], [usual + 10, usual - 100]):
        chosen = far_from(pids)
        assert not any(chosen <= pid <= chosen + 200 for pid in pids)


def test_pids_of_our_own_namespace_are_what_they_are() -> None:
    pid = os.getpid()
    assert procfs.inner_pid(pid) == pid
    assert procfs.outer_pid(pid, 4711) == 4711
    assert procfs.inner_thread(pid, threading.get_native_id()) == threading.get_native_id()
    assert procfs.number_for(pid, pid, threading.get_native_id()) == threading.get_native_id()
    assert procfs.pid_namespace(pid) == os.stat("/proc/self/ns/pid").st_ino
    assert procfs.pid_namespace(1 << 30) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes pid namespaces")
def test_a_thread_of_another_namespace_is_found_by_who_is_outside() -> None:
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", THREADED]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None
        try:
            inner = int(outside.stdout.readline())
            pid = psutil.Process(outside.pid).children()[0].pid
            found = procfs.number_for(os.getpid(), pid, inner)
            assert str(found) in os.listdir(f"/proc/{pid}/task")
            assert found not in (pid, inner)
            assert procfs.inner_thread(pid, found) == inner
            assert procfs.number_for(pid, pid, inner) == inner
            assert procfs.number_for(os.getpid(), pid, inner + 100) == 0
            assert procfs.number_for(pid, os.getpid(), threading.get_native_id()) == 0  # it is not seen from there
        finally:
            outside.kill()


@pytest.mark.parametrize(
    ("eager", "done", "runs", "expected"),
    [(False, [0, 1, 2, 3], 9, False), (True, [0, 1, 2, 3, 4], 4, True), (True, [0, 5, 5, 7], 9, False)],
)
def test_one_that_is_to_have_all_memory_first_may_take_as_long_as_memory_comes(
    monkeypatch: pytest.MonkeyPatch, eager: bool, done: list[int], runs: int, expected: bool
) -> None:
    monkeypatch.setattr(serve_pool, "ATTACH_SECONDS", 7.0)
    waits: list[float] = []

    class Running:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > runs

    class Progress:
        @property
        def done(self) -> int:
            return done[len(waits) - 1]

    job: Any = SimpleNamespace(running=Running(), progress=Progress())
    assert serve_pool._comes_to_run(job, eager=eager) is expected
    assert set(waits) == {7.0}


THREADED = """
import threading, time
def show():
    print(threading.get_native_id(), flush=True)
    time.sleep(60)
threading.Thread(target=show).start()
"""
