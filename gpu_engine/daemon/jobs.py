"""The checkpoints and restores that phosd has done lately, by image directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from phos.gen import wire_pb2
from phos.gpu_engine import procfs
from phos.gpu_engine.copy_work import Progress
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.permissions import sees_all
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.job_states import FAILED, FINAL, SUCCEEDED
from phos.gpu_engine.restore.base import Restore
from phos.gpu_engine.timeline import Timeline
from phos.images.files import identity
from phos.images.formats import COMMIT_FILE

REMEMBERED = 64
"""Of one user's jobs that have ended, so that nobody's pushes out another's; what is under way is remembered."""

SETTLED = ("unknown", "none", *FINAL)
"""States of an image in which nothing is done for it any more."""

RELEASE_SECONDS = 1.0
"""A checkpoint says that it has ended a moment before it lets its processes go; who asks at once waits so long."""


class Job(Protocol):
    """What the table shows of a checkpoint or restore."""

    @property
    def kind(self) -> str:
        """``dump`` or ``restore``."""

    @property
    def path(self) -> str:
        """Its image directory."""

    @property
    def state(self) -> str:
        """Where it stands (job_states.py has the last ones)."""

    @property
    def error(self) -> str:
        """Why it failed, if it did."""

    @property
    def since(self) -> float:
        """When it began, in seconds since 1970."""

    @property
    def progress(self) -> Progress:
        """How far its copies are."""

    @property
    def timeline(self) -> Timeline:
        """Its phases."""

    @property
    def pids(self) -> list[int]:
        """Its processes."""

    def warnings(self) -> list[str]:
        """What a person should know although nothing failed."""


@dataclass(frozen=True, eq=False)
class EndedJob:
    """What is remembered of a job that is over: the job itself knows every chunk of the image, and every process."""

    kind: str
    path: str
    state: str
    error: str
    since: float
    progress: Progress
    timeline: Timeline
    pids: list[int]
    warned: list[str]
    counts: dict[str, int]
    mode: str

    @classmethod
    def of(cls, job: Job) -> EndedJob:
        """As the table shows it from now on."""
        return cls(
            kind=job.kind,
            path=job.path,
            state=state_of(job),
            error=job.error,
            since=job.since,
            progress=job.progress,
            timeline=job.timeline,
            pids=list(job.pids),
            warned=list(job.warnings()),
            counts=counts_of(job),
            mode=mode_of(job),
        )

    def warnings(self) -> list[str]:
        """As the job's."""
        return self.warned


def counts_of(job: Job) -> dict[str, int]:
    """What the processes of a restore met with while their memory was loaded; nothing for other jobs."""
    if isinstance(job, EndedJob):
        return job.counts
    counts: dict[str, int] = job.window_counts() if isinstance(job, Restore) else {}
    return counts


def mode_of(job: Job) -> str:
    """How a restore loads memory; nothing for other jobs."""
    return job.mode if isinstance(job, (Restore, EndedJob)) else ""


def state_of(job: Job) -> str:
    """Its state; "ending" while something is left of a failed restore that would be in the way of another."""
    ending = isinstance(job, Restore) and job.state in FAILED and not job.put_away.is_set()
    return "ending" if ending else job.state


class Claims:
    """Which processes a checkpoint has in its hands: at most one at a time has a process."""

    def __init__(self) -> None:
        self._lock = threading.Condition()  # guards _claimed
        self._claimed: dict[int, object] = {}  # pid → the claim, another object each time

    def any(self) -> bool:
        """Whether a checkpoint is under way."""
        with self._lock:
            return bool(self._claimed)

    def has(self, pids: Iterable[int]) -> bool:
        """Whether a checkpoint has one of these processes."""
        with self._lock:
            return any(pid in self._claimed for pid in pids)

    def wait_unless_shared(self, owner: int, guest: int, seconds: float) -> bool:
        """Whether no checkpoint has process ``owner``, or one that has ``guest`` too, within so many seconds."""

        def may_have() -> bool:
            return owner not in self._claimed or self._claimed[owner] is self._claimed.get(guest)

        with self._lock:
            return self._lock.wait_for(may_have, seconds)

    @contextmanager
    def hold(self, pids: Iterable[int]) -> Iterator[None]:
        """Claim processes for the time of the block.

        Raises:
            CheckpointFailed: another checkpoint has one of them.
        """
        wanted = set(pids)
        with self._lock:
            self._lock.wait_for(lambda: not wanted & self._claimed.keys(), RELEASE_SECONDS)
            if taken := wanted & self._claimed.keys():
                raise CheckpointFailed(
                    f"Process {min(taken)} is part of another checkpoint that is under way. "
                    "Wait for it ('phos-gpu status' shows it)."
                )
            claim = object()
            self._claimed |= dict.fromkeys(wanted, claim)
        try:
            yield
        finally:
            with self._lock:
                for pid in wanted:
                    del self._claimed[pid]
                self._lock.notify_all()


@dataclass(frozen=True, eq=False)
class _Entry:
    directory: tuple[int, int, bytes]
    job: Job | None  # None: a dump without a GPU part
    owner: int  # the user whose it is
    run: str = ""  # of CRIU, as who has started that calls it

    def has_ended(self) -> bool:
        return self.job is None or state_of(self.job) in FINAL


class JobTable:
    """Jobs by the identity of their image directory, so that any path to it finds them."""

    def __init__(self, failed: Callable[[], None] = lambda: None) -> None:
        """``failed`` is called when the table has let go of a job that has failed, or was cut off."""
        self._failed = failed
        self._lock = threading.Lock()  # guards _jobs
        self._jobs: list[_Entry] = []

    def add(self, directory: int, job: Job, owner: int, run: str = "") -> None:
        """Remember a job of user ``owner``; the newest for a directory counts. ``run``: see ImageState.run."""
        self._add(_Entry(identity(directory), job, owner, run))

    def none_for(self, directory: int, owner: int, run: str = "") -> None:
        """Remember that the last dump into this directory had no GPU part."""
        self._add(_Entry(identity(directory), None, owner, run))

    def _add(self, entry: _Entry) -> None:
        with self._lock:
            ended = [known for known in self._jobs if known.owner == entry.owner and known.has_ended()]
            oldest = ended[: max(0, len(ended) - REMEMBERED + 1)]
            self._jobs = [known for known in self._jobs if known not in oldest] + [entry]

    def settle(self, job: Job) -> None:
        """It is over, and nothing of it changes any more: what the table shows of it is all that is kept."""
        ended = EndedJob.of(job)
        with self._lock:
            self._jobs = [replace(known, job=ended) if known.job is job else known for known in self._jobs]
        # A restore whose process ends while its memory is being loaded has not failed, nor has a checkpoint whose image
        # is whole, although its process could not be brought back.
        if ended.state not in SUCCEEDED or ended.error or ended.progress.done < ended.progress.total:
            self._failed()

    @staticmethod
    def is_plain_criu(directory: int) -> bool:
        """Whether a directory holds CRIU's files and none of ours."""
        names = set(os.listdir(directory))
        return "inventory.img" in names and not any(name.startswith("phos-") for name in names)

    def state(self, directory: int, kind: str, viewer: int, run: str = "") -> wire_pb2.ImageState:
        """Where the newest job of that kind for a directory stands; ``none`` if it had no GPU part.

        Of another user's, user ``viewer`` is told nothing. With ``run``: the newest that this run of a CRIU began.
        """
        wanted = identity(directory)
        with self._lock:
            for entry in reversed(self._jobs):
                if entry.directory != wanted or not _shown(entry, viewer) or (run and entry.run != run):
                    continue
                job = entry.job
                if job is None:
                    return wire_pb2.ImageState(state="none", run=entry.run)
                if job.kind == kind == "dump" and job.state in SUCCEEDED and not _has_record(directory):
                    break  # the image has been removed since
                if job.kind == kind:
                    return wire_pb2.ImageState(
                        state=state_of(job),
                        error=wire.sentence(job.error),
                        bytes_done=job.progress.done,
                        bytes_total=job.progress.total,
                        warnings=wire.sentences(job.warnings()),
                        window=counts_of(job),
                        since=job.since,
                        run=entry.run,
                    )
        return wire_pb2.ImageState(state="unknown", error="phosd knows of no such job for this directory.")

    def report(self, viewer: int) -> list[wire_pb2.Status.Job]:
        """All remembered jobs that user ``viewer`` may see, oldest first."""
        with self._lock:
            return [
                wire_pb2.Status.Job(
                    image=procfs.readable(job.path),
                    kind=job.kind,
                    state=job.state,
                    bytes_done=job.progress.done,
                    bytes_total=job.progress.total,
                    error=procfs.readable(job.error),
                    since=job.since,
                    pids=job.pids,
                    phases=[
                        wire_pb2.Status.Phase(name=p.name, start=p.start, seconds=p.seconds, concurrent=p.concurrent)
                        for p in job.timeline.phases()
                    ],
                    window=counts_of(job),
                    mode=mode_of(job),
                )
                for job in (entry.job for entry in self._jobs if _shown(entry, viewer))
                if job is not None
            ]


def _has_record(directory: int) -> bool:
    try:
        os.stat(COMMIT_FILE, dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def _shown(entry: _Entry, viewer: int) -> bool:
    return sees_all(viewer) or viewer == entry.owner
