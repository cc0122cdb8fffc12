"""Who looks after a restore's processes once CRIU has ended, without a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from phos.gpu_engine.restore import base
from phos.gpu_engine.restore.eager import EagerRestore

REPLACED, OTHER = 7, 8


def restored() -> Any:
    """A restore of two processes, all of whose memory is there, and which wait to be let attach."""
    job: Any = EagerRestore.__new__(EagerRestore)  # no image is needed for this
    job.state, job.error = "loaded", ""
    job._lock = threading.Lock()
    job._changed = threading.Condition(job._lock)
    job._cancelled, job._loaded, job._over = threading.Event(), threading.Event(), threading.Event()
    job._loaded.set()
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
