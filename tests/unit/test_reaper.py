"""The end of processes is noticed, also of one for which there was no descriptor; and of no process that lives."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from phos.gpu_engine.daemon import reaper
from phos.gpu_engine.daemon.reaper import Reaper
from tests.unit.waiting import eventually


@dataclass(eq=False)
class Session:
    """As much of one as the reaper needs."""

    pid: int


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as made:
        yield made
        made.kill()


@pytest.fixture
def ended() -> list[object]:
    return []


@pytest.fixture
def watcher(ended: list[object]) -> Reaper:
    return Reaper(ended.append)


def test_an_end_is_reported_once(process: subprocess.Popen[bytes], watcher: Reaper, ended: list[object]) -> None:
    session = Session(process.pid)
    for _ in range(2):
        watcher.watch(process.pid, session)  # type: ignore[arg-type]
    time.sleep(0.05)
    assert not ended
    process.kill()
    process.wait()
    eventually(lambda: ended == [session], "the end")
    watcher.watch(process.pid, session)  # type: ignore[arg-type]
    assert ended == [session, session], "one that is gone is reported at once"


def refuse(_pid: int, _flags: int = 0) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("ends", ["before there is one", "later", "is forgotten"])
def test_one_without_a_descriptor_has_not_ended(
    process: subprocess.Popen[bytes],
    watcher: Reaper,
    ended: list[object],
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
) -> None:
    monkeypatch.setattr(reaper, "AGAIN_SECONDS", 0.05)
    session = Session(process.pid)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", refuse)
        watcher.watch(process.pid, session)  # type: ignore[arg-type]
        watcher.watch(process.pid, session)  # type: ignore[arg-type]
        time.sleep(0.2)
        assert not ended
        if ends == "is forgotten":
            watcher.forget(session)  # type: ignore[arg-type]
        elif ends == "before there is one":
            process.kill()
            process.wait()
    if ends == "later":
        time.sleep(0.2)
        assert not ended
    if process.poll() is None:
        process.kill()
        process.wait()
    if ends == "is forgotten":
        time.sleep(0.2)
        assert not ended
    else:
        eventually(lambda: ended == [session], "the end")
        time.sleep(0.1)
        assert ended == [session]
