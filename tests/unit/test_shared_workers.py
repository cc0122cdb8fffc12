"""Workers that several jobs share: nobody is starved, nothing is done twice, whatever comes and goes."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from phos.gpu_engine.shared_workers import Lease, SharedWorkers

PATIENCE = 20.0

Sharing = Callable[[Sequence[Any]], SharedWorkers[Any]]


class Work:
    """A job of so many items, each of which takes so long."""

    def __init__(self, items: int, seconds: float = 0.001) -> None:
        self.left = items
        self.seconds = seconds
        self.done: Counter[int] = Counter()
        self.by: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.first_done = threading.Event()
        self._lock = threading.Lock()

    def body(self, worker: str, lease: Lease[str]) -> None:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            while not lease.leave():
                with self._lock:
                    if not self.left:
                        lease.over()
                        return
                    self.left -= 1
                    item = self.left
                time.sleep(self.seconds)
                with self._lock:
                    self.done[item] += 1
                    self.by[worker] += 1
                self.first_done.set()
        finally:
            with self._lock:
                self.at_once -= 1


def never() -> bool:
    return False


def beside(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.fixture
def sharing() -> Iterator[Sharing]:
    """Makes workers, which have nothing to do at the test's end, and as many threads as they should."""
    made: list[tuple[int, SharedWorkers[Any]]] = []
    before = copying()

    def make(workers: Sequence[Any]) -> SharedWorkers[Any]:
        made.append((len(workers), SharedWorkers(workers)))
        return made[-1][1]

    yield make
    assert copying() - before <= sum(count for count, _ in made)
    for _, shared in made:
        shared.close()
    assert copying() == before


def copying() -> int:
    return sum(thread.name.startswith("copy-") for thread in threading.enumerate())


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_job_that_is_alone_has_all_workers(sharing: Sharing) -> None:
    shared, work = sharing(list("abcd")), Work(200)
    assert shared.run(work.body, never)
    assert work.done == Counter(range(200))
    assert set(work.by) == set("abcd")


def test_the_second_job_does_not_wait_for_the_end_of_the_first(sharing: Sharing) -> None:
    shared = sharing(list("abcd"))
    long, short = Work(1 << 30), Work(40, 0.005)
    given_up = threading.Event()
    first = beside(lambda: shared.run(long.body, given_up.is_set))
    long.first_done.wait(PATIENCE)
    assert shared.run(short.body, never)
    assert short.done == Counter(range(40))
    assert short.most_at_once == 2, "half of the workers"
    eventually(lambda: long.at_once == 4)
    given_up.set()
    first.join(PATIENCE)
    assert not first.is_alive()


def test_more_jobs_than_workers_take_turns(sharing: Sharing) -> None:
    shared = sharing(["only"])
    works = [Work(60, 0.002) for _ in range(4)]
    began = time.monotonic()
    threads = [beside(lambda work=work: shared.run(work.body, never)) for work in works]  # type: ignore[misc]
    for work in works:
        assert work.first_done.wait(PATIENCE)
    assert sum(work.left > 0 for work in works) >= 3, f"{[work.left for work in works]}: one after the other"
    for thread in threads:
        thread.join(PATIENCE)
    assert all(work.done == Counter(range(60)) for work in works), time.monotonic() - began


def test_a_job_that_wants_few_leaves_the_others(sharing: Sharing) -> None:
    shared = sharing(list("abcd"))
    few, many = Work(60, 0.002), Work(180, 0.002)
    first = beside(lambda: shared.run(few.body, never, lambda: 1))
    assert shared.run(many.body, never)
    first.join(PATIENCE)
    assert few.most_at_once == 1
    assert many.most_at_once >= 3


def test_a_failure_ends_its_job_and_no_other(sharing: Sharing) -> None:
    shared = sharing(list("ab"))
    good = Work(200)
    failing = threading.Event()

    def body(worker: str, lease: Lease[str]) -> None:
        while not lease.leave():
            time.sleep(0.001)
            if failing.is_set():
                raise ValueError(worker)

    first = beside(lambda: shared.run(good.body, never))
    threading.Timer(0.05, failing.set).start()
    with pytest.raises(ValueError, match=r"^[ab]$"):
        shared.run(body, never)
    first.join(PATIENCE)
    assert good.done == Counter(range(200))


def test_a_job_is_given_up_while_it_waits(sharing: Sharing) -> None:
    shared = sharing(["only"])
    hold, inside = threading.Event(), threading.Event()

    def slow(_: str, lease: Lease[str]) -> None:
        inside.set()
        hold.wait(PATIENCE)
        lease.over()

    first = beside(lambda: shared.run(slow, never))
    inside.wait(PATIENCE)
    work = Work(1)
    assert not shared.run(work.body, lambda: True)
    assert not work.done
    hold.set()
    first.join(PATIENCE)
    assert shared.run(work.body, never)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_and_goes_everything_is_done_once(sharing: Sharing, seed: int) -> None:
    source = random.Random(seed)
    shared = sharing(list(range(source.randrange(1, 6))))
    works = [Work(source.randrange(0, 120), source.choice((0.0, 0.0002, 0.002))) for _ in range(12)]
    limits = [source.choice((None, 1, 2, 9)) for _ in works]
    threads = []
    for work, limit in zip(works, limits, strict=True):
        time.sleep(source.random() * 0.02)
        threads.append(beside(lambda work=work, limit=limit: shared.run(work.body, never, lambda: limit)))  # type: ignore
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for work, limit in zip(works, limits, strict=True):
        assert set(work.done.values()) <= {1}
        assert work.left == 0
        assert work.at_once == 0
        assert limit is None or work.most_at_once <= limit


def test_a_limit_may_become_more(sharing: Sharing) -> None:
    shared = sharing(range(4))
    limit = 1
    seen: list[int] = []
    inside: set[int] = set()
    lock = threading.Lock()
    left = 400

    def body(worker: int, lease: Lease[int]) -> None:
        nonlocal left, limit
        with lock:
            inside.add(worker)
        try:
            while not lease.leave():
                with lock:
                    left -= 1
                    seen.append(len(inside))
                    if left < 300:
                        limit = 4
                    if left <= 0:
                        lease.over()
                time.sleep(0.002)
        finally:
            with lock:
                inside.discard(worker)

    assert shared.run(body, never, lambda: limit)
    assert set(seen[:100]) == {1}
    assert max(seen) > 1


def test_threads_are_kept_and_keep_nothing(sharing: Sharing) -> None:
    """One for each worker, from job to job; what a job has used goes when it is over, and workers wait for the next."""
    before_any = copying()
    shared = sharing("abc")
    shared.prepare()
    assert copying() == before_any + 3

    def identities() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name.startswith("copy-")}

    before = identities()
    for turn in range(3):
        work = Work(30)
        gone = weakref.ref(work)

        def body(worker: str, lease: Lease[str], work: Work = work, fails: bool = turn == 1) -> None:
            work.body(worker, lease)
            if fails:
                raise ValueError(worker)

        if turn == 1:
            with pytest.raises(ValueError, match=r"^[abc]$"):
                shared.run(body, never)
        else:
            assert shared.run(body, never)
        assert work.done
        del work, body
        if turn != 1:  # an exception refers to the frames that raised it
            eventually(lambda gone=gone: gone() is None)  # type: ignore[misc]
    assert identities() == before


def test_an_idle_worker_comes_to_a_job_as_soon_as_there_is_one(sharing: Sharing) -> None:
    shared = sharing(range(8))
    shared.prepare()
    everybody = threading.Barrier(8)

    def body(worker: int, lease: Lease[int]) -> None:
        everybody.wait(PATIENCE)
        lease.over()

    for _ in range(50):
        assert shared.run(body, never)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, sharing: Sharing, most: int) -> None:
    """The others do the work; without any the job says so; and the next one tries again."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) >= most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    shared, work = sharing("abc"), Work(60)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        shared.prepare()
        if most:
            assert shared.run(work.body, never)
            assert work.most_at_once == most
        else:
            with pytest.raises(RuntimeError, match="can't start"):
                shared.run(work.body, never)
            assert not work.done
    again = Work(200)
    assert shared.run(again.body, never)
    assert again.most_at_once == 3


def test_a_job_that_is_given_up_before_a_worker_comes_leaves_nothing(sharing: Sharing) -> None:
    """The worker had been told to follow it, and goes back to another."""
    shared = sharing(["only"])
    hold, told = threading.Event(), threading.Event()
    left = 3

    def long(_: str, lease: Lease[str]) -> None:
        nonlocal left
        left -= 1
        while not lease.leave():
            time.sleep(0.001)
        told.set()
        hold.wait(PATIENCE)
        if not left:
            lease.over()

    given_up = threading.Event()
    first = beside(lambda: shared.run(long, given_up.is_set))
    eventually(lambda: left == 2)
    second = Work(1)
    gone = weakref.ref(second)
    stop = threading.Event()
    other = beside(partial(shared.run, second.body, stop.is_set))
    assert told.wait(PATIENCE), "it leaves for the second"
    stop.set()
    other.join(PATIENCE)
    told.clear()
    assert not second.done
    del second, other
    hold.set()
    eventually(lambda: left == 1)
    eventually(lambda: gone() is None)
    given_up.set()
    first.join(PATIENCE)
    assert not first.is_alive()


def test_there_is_no_job_after_the_end() -> None:
    shared = SharedWorkers("ab")
    shared.prepare()
    shared.close()
    with pytest.raises(RuntimeError, match="have ended"):
        shared.run(Work(1).body, never)
