"""Who looks after a restore's processes once CRIU has ended, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from phos.gpu_engine import procfs
from phos.gpu_engine.job_states import MISPREDICTED
from phos.gpu_engine.restore import base
from phos.gpu_engine.restore.eager import EagerRestore
from phos.gpu_engine.restore.lazy import LazyRestore

REPLACED, OTHER = 7, 8


def restored() -> Any:
    """A restore of two processes, all of whose memory is there, and which wait to be let attach."""
    job: Any = EagerRestore.__new__(EagerRestore)  # no image is needed for this
    job.state, job.error = "loaded", ""
    job._lock = threading.Lock()
    job._changed = threading.Condition(job._lock)
    job._cancelled, job._loaded, job._over = threading.Event(), threading.Event(), threading.Event()
    job._loaded.set()
    job._whole = True
    job._pids, job._beside, job._waiting_for = {REPLACED: -1, OTHER: -1}, {}, 2
    job._gated_pids, job._driver_ready = {REPLACED, OTHER}, {REPLACED, OTHER}
    job._computing, job._reviving, job._attaching, job._still = set(), set(), set(), set()
    job._residues = job._named_memory = None
    return job


@pytest.mark.parametrize("back", [False, True])
def test_one_that_is_another_program_by_now_may_have_been_back_before(
    back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not when it was looked who still waits, and then was, and replaced its program at once."""
    job = restored()

    def thread_names(pid: int) -> set[str]:
        if back and (pid == REPLACED or OTHER in looked):
            job.attaching(pid)
            job.attached(pid)
        looked.append(pid)
        return {"sleep"} if pid == REPLACED else {"phos"}

    killed: list[int] = []
    looked: list[int] = []
    monkeypatch.setattr(base, "PROGRAM_SECONDS", 0.0)
    monkeypatch.setattr(base, "thread_names", thread_names)
    monkeypatch.setattr(base, "inner_pid", lambda pid: pid)
    monkeypatch.setattr(base, "has_ended", lambda _pid, _pidfd: False)
    monkeypatch.setattr(job, "_kill", lambda pid, _pidfd: killed.append(pid))
    job.watch_to_the_end()
    assert (job.state, killed) == (("attached", []) if back else ("failed", [REPLACED, OTHER]))


def test_a_process_is_awaited_until_it_asks_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "inner_pid", lambda pid: pid)
    job = restored()
    job._gated_pids.discard(OTHER)  # has no memory that it could ask for
    assert [job.awaits(pid) for pid in (REPLACED, OTHER, 9)] == [True, False, False]
    job.attaching(REPLACED)
    assert not job.awaits(REPLACED)
    job.not_attached(REPLACED)
    assert job.awaits(REPLACED)
    job.attached(REPLACED)
    assert not job.awaits(REPLACED)


def test_one_that_is_being_killed_has_not_replaced_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control thread is gone at once, but the last of its threads may need a second for a GPU's files."""
    job = restored()
    begun = time.monotonic()
    monkeypatch.setattr(base, "PROGRAM_SECONDS", 0.0)
    monkeypatch.setattr(base, "thread_names", lambda pid: {"x"} if pid == REPLACED else {"phos"})
    monkeypatch.setattr(base, "inner_pid", lambda pid: pid)
    monkeypatch.setattr(base, "has_ended", lambda pid, _pidfd: pid == REPLACED and time.monotonic() > begun + 0.1)
    monkeypatch.setattr(base.procfs, "is_ending", lambda pid: pid == REPLACED)
    monkeypatch.setattr(job, "_kill", lambda _pid, _pidfd: None)
    job.watch_to_the_end()
    assert job.error == f"Process {REPLACED} ended before its GPU state was back."


def test_a_process_that_is_about_to_end_is_seen_to_be() -> None:
    """One that runs is not; nor is one that is not there."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        assert not procfs.is_ending(running.pid)
        running.kill()
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
        assert procfs.is_ending(running.pid)  # what is left of it
    assert not procfs.is_ending(running.pid)


@pytest.mark.parametrize("state", ["failed", MISPREDICTED, "attached"])
@pytest.mark.parametrize("kind", [EagerRestore, LazyRestore])
def test_nobody_is_given_memory_of_a_restore_that_has_failed(kind: Any, state: str) -> None:
    """Whoever waits for a block's data hears that it does not come, also if all processes have ended before."""
    job: Any = kind.__new__(kind)
    job.state, job.error, job._whole = "loading", "", False
    job._lock, job._counting = threading.Lock(), threading.Lock()
    job._changed = threading.Condition(job._lock)
    job._cancelled, job._loaded, job._over = threading.Event(), threading.Event(), threading.Event()
    job._pids, job._beside, job._windows = {}, {}, {}
    job._laid_out, job._table, job._plan = False, None, None
    key = (bytes(16), 1)
    assert not job.need(key, 0.01)
    if state == "attached":
        job._all_have_ended()
    else:
        job.fail("A guess was wrong.", state)
    job._loaded.set()
    with pytest.raises(KeyError):
        job.need(key, 5)


@pytest.mark.parametrize("kind", [EagerRestore, LazyRestore])
def test_memory_of_a_restore_that_is_whole_is_given_out(kind: Any) -> None:
    job: Any = kind.__new__(kind)
    job.state, job._whole, job._lock = "loaded", True, threading.Lock()
    job._loaded, job._over = threading.Event(), threading.Event()
    job._loaded.set()
    assert job.need((bytes(16), 1), 0)
