"""Workers that several jobs share: who copies for whom.

Each job has its fair part of the workers, so that none waits for all of another's data: neither who takes a process
from a pool for the one that was taken before, nor a checkpoint for a restore. A worker changes between two items, when
what it had under way has landed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

SLICE_SECONDS = 0.02
"""For how long a job may keep a worker while another job has none at all: there are more jobs than workers then."""

LOOK_SECONDS = 0.05
"""How often to look whether a job that waits is still wanted."""

Worker = TypeVar("Worker")


class _Job(Generic[Worker]):
    """All but ``body`` is guarded by the lock of :class:`SharedWorkers`."""

    def __init__(self, body: Callable[[Worker, Lease[Worker]], None], limit: int) -> None:
        self.body = body
        self.limit = limit
        self.workers = 0
        """Those that work for it, or are about to."""
        self.inside = 0
        """Calls of ``body`` that have not returned."""
        self.over = False
        """Its last item has been given out, or it has failed, or been given up: no worker is to begin."""
        self.given_up = False
        self.served = 0.0
        """When a worker came to it last."""
        self.failures: list[BaseException] = []


class Lease(Generic[Worker]):
    """A worker's time with one job. Of one thread."""

    def __init__(self, shared: SharedWorkers[Worker], job: _Job[Worker]) -> None:
        self._shared = shared
        self._job = job
        self.began = time.monotonic()
        self.following: _Job[Worker] | None = None
        """For whom the worker works next; None: not decided."""

    def leave(self) -> bool:
        """To be asked before each item: whether the worker is to finish what it has under way, and return."""
        if self._job.over or self.following is not None:
            return True
        return self._shared.moves(self, self._job)

    def over(self) -> None:
        """The job has no further item."""
        self._shared.end(self._job)


class SharedWorkers(Generic[Worker]):
    """A thread for each worker, from the first job to :meth:`close`.

    To start a dozen takes 4 ms while others map memory, which is 2 % of what it takes to load 8 GB.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)
        self._lock = threading.Lock()  # guards all below, and the jobs
        self._changed = threading.Condition(self._lock)  # for who waits for a job's end
        self._wanted = threading.Condition(self._lock)  # for workers that have nothing to do
        self._jobs: list[_Job[Worker]] = []
        self._threads: dict[int, threading.Thread] = {}  # by the worker's number
        self._following: dict[int, _Job[Worker]] = {}  # by the worker's number: for whom it works next
        self._closed = False

    def run(
        self,
        body: Callable[[Worker, Lease[Worker]], None],
        given_up: Callable[[], bool],
        limit: Callable[[], int | None] = lambda: None,
    ) -> bool:
        """Call ``body`` with workers, until it has no further item.

        At most ``limit`` of them at a time (None: all); it may become more, and is asked now and then.

        Returns when every call has returned: True, or False because ``given_up`` said so first.

        Raises:
            BaseException: the first that ``body`` raised; the others were told to leave.
            RuntimeError: not one thread can be started, or they have ended.
        """
        job = _Job(body, self._bounded(limit()))
        with self._changed:
            if self._closed:
                raise RuntimeError("the workers' threads have ended")
            self._jobs.append(job)
            try:
                self._call()
                while not job.over or job.inside:
                    self._changed.wait(LOOK_SECONDS)
                    if not job.over and given_up():
                        job.over = job.given_up = True
                    if not job.over and (now := self._bounded(limit())) > job.limit:
                        job.limit = now
                        self._call()
            finally:
                job.over = True
                self._jobs.remove(job)
        if job.failures:
            raise job.failures[0]
        return not job.given_up

    def _bounded(self, limit: int | None) -> int:
        most = len(self._workers)
        return max(1, min(most if limit is None else limit, most))

    def prepare(self) -> None:
        """Start the threads, ahead of the first job; if none can be started, that says so."""
        with self._lock, suppress(RuntimeError):
            self._call()

    def close(self) -> None:
        """Let the threads end, and wait for that. No job may be under way."""
        with self._lock:
            self._closed = True
            self._wanted.notify_all()
        for thread in self._threads.values():
            thread.join()

    def _call(self) -> None:
        """There is something to do: have all who have nothing look. With the lock held.

        Raises:
            RuntimeError: not one thread can be started.
        """
        for number in range(len(self._workers)):
            if number in self._threads:
                continue
            thread = threading.Thread(target=self._work, args=(number,), name=f"copy-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
                break  # the others have to do
            self._threads[number] = thread
        self._wanted.notify_all()

    def _work(self, number: int) -> None:
        while self._wait_for_work(number):
            self._do_work(number)

    def _wait_for_work(self, number: int) -> bool:
        """Return when there is a job that wants another worker, or this one; whether it is to go on."""
        with self._lock:
            while not (number in self._following or self._closed or self._wanting()):
                self._wanted.wait()
            return not self._closed

    def _do_work(self, number: int) -> None:
        """A worker's time with the job that it has been told of, or another. Nothing of it is left in the thread."""
        with self._changed:
            following = self._following.pop(number, None)
            if following is not None and following.over:
                following.workers -= 1
                following = None
            job = following or self._pick()
            following = None
            if job is None:
                return
            job.inside += 1
            job.served = time.monotonic()
        lease = Lease(self, job)
        failure: BaseException | None = None
        try:
            job.body(self._workers[number], lease)
        except BaseException as error:
            failure = error
        with self._changed:
            if failure is not None:
                job.failures.append(failure)
            if lease.following is None:
                job.workers -= 1
            else:
                self._following[number] = lease.following
            if lease.following is None or failure is not None:
                job.over = True
            job.inside -= 1
            self._changed.notify_all()

    def _wanting(self) -> list[_Job[Worker]]:
        """Jobs that have fewer workers than they may. With the lock held."""
        return [job for job in self._jobs if not job.over and job.workers < job.limit]

    def _pick(self) -> _Job[Worker] | None:
        """Whoever has the fewest; among those, who has waited longest. With the lock held."""
        if not (wanting := self._wanting()):
            return None
        job = min(wanting, key=lambda job: (job.workers, job.served))
        job.workers += 1
        return job

    def moves(self, lease: Lease[Worker], job: _Job[Worker]) -> bool:
        """Whether a worker leaves its job for one that has less than its part."""
        if len(self._jobs) < 2:  # without the lock: who has just come is seen with the next item
            return False
        with self._changed:
            others = [other for other in self._wanting() if other is not job]
            if not others:
                return False
            other = min(others, key=lambda job: (job.workers, job.served))
            kept_long = not other.workers and time.monotonic() - lease.began >= SLICE_SECONDS
            if other.workers + 1 >= job.workers and not kept_long:
                return False
            job.workers -= 1
            other.workers += 1
            lease.following = other
            return True

    def end(self, job: _Job[Worker]) -> None:
        """See :meth:`Lease.over`."""
        with self._changed:
            job.over = True
