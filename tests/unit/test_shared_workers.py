"""Workers that several jobs share: nobody is starved, nothing is done twice, whatever comes and goes."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from phos.gpu_engine.shared_workers import Lease, SharedWorkers

PATIENCE = 20.0


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


def copying() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("copy-")]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_job_that_is_alone_has_all_workers() -> None:
    shared, work = SharedWorkers(list("abcd")), Work(200)
    assert shared.run(work.body, never)
    assert work.done == Counter(range(200))
    assert set(work.by) == set("abcd")
    eventually(lambda: not copying())


def test_the_second_job_does_not_wait_for_the_end_of_the_first() -> None:
    shared = SharedWorkers(list("abcd"))
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


def test_more_jobs_than_workers_take_turns() -> None:
    shared = SharedWorkers(["only"])
    works = [Work(60, 0.002) for _ in range(4)]
    began = time.monotonic()
    threads = [beside(lambda work=work: shared.run(work.body, never)) for work in works]  # type: ignore[misc]
    for work in works:
        assert work.first_done.wait(PATIENCE)
    assert sum(work.left > 0 for work in works) >= 3, f"{[work.left for work in works]}: one after the other"
    for thread in threads:
        thread.join(PATIENCE)
    assert all(work.done == Counter(range(60)) for work in works), time.monotonic() - began


def test_a_job_that_wants_few_leaves_the_others() -> None:
    shared = SharedWorkers(list("abcd"))
    few, many = Work(60, 0.002), Work(180, 0.002)
    first = beside(lambda: shared.run(few.body, never, lambda: 1))
    assert shared.run(many.body, never)
    first.join(PATIENCE)
    assert few.most_at_once == 1
    assert many.most_at_once >= 3


def test_a_failure_ends_its_job_and_no_other() -> None:
    shared = SharedWorkers(list("ab"))
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


def test_a_job_is_given_up_while_it_waits() -> None:
    shared = SharedWorkers(["only"])
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
def test_whatever_comes_and_goes_everything_is_done_once(seed: int) -> None:
    source = random.Random(seed)
    shared = SharedWorkers(list(range(source.randrange(1, 6))))
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
    eventually(lambda: not copying())


def test_a_limit_may_become_more() -> None:
    shared = SharedWorkers(range(4))
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
