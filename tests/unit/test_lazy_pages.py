"""The server of CPU pages beside a restore: when it ends, and what becomes of what was restored."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phos.cli.lazy_pages import LazyPages

MISSING = "before all of the CPU's memory was there"


class Server:
    """What has started one, which does what the shell is told to."""

    def __init__(self, folder: Path, script: str) -> None:
        self.ended = 0
        began = time.perf_counter()
        child = subprocess.Popen(["sh", "-c", script])
        self.begun: Any = SimpleNamespace(began=began, pages=child.pid, work=str(folder), interrupted=0, when_late=None)
        self.child = child
        self.pages = LazyPages(self.begun, self._end)

    def _end(self) -> None:
        self.ended += 1


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(tmp_path, request.param)
    yield made
    made.child.returncode = 0  # LazyPages has waited for it


@pytest.mark.parametrize("server", ["exit 3", "sleep 0.5; exit 3", "sleep 0.5; kill -9 $$"], indirect=True)
def test_whenever_it_fails_what_was_restored_is_ended(server: Server) -> None:
    """After the block as well, when the processes compute already: what they read from there on would be zeros."""
    with server.pages:
        pass
    assert MISSING in server.pages.error
    assert server.ended == 1


@pytest.mark.parametrize("server", ["sleep 0.5"], indirect=True)
def test_it_is_waited_for(server: Server) -> None:
    with server.pages:
        pass
    assert server.pages.error == ""
    assert server.pages.seconds is not None
    assert server.pages.seconds >= 0.5
    assert server.ended == 0


@pytest.mark.parametrize("server", ["exec sleep 60"], indirect=True)
@pytest.mark.parametrize("how", ["a failure", "an interruption"])
def test_it_is_ended_when_nobody_needs_it(server: Server, how: str) -> None:
    """Whoever had it ends what was restored, if there is anything."""

    def leave() -> None:
        with server.pages:
            if how == "a failure":
                raise ValueError
            server.begun.interrupted = 2

    if how == "a failure":
        with pytest.raises(ValueError):
            leave()
    else:
        leave()
    assert server.ended == 0


@pytest.mark.parametrize("server", ["exec sleep 60"], indirect=True)
def test_an_interruption_that_comes_late_ends_it_too(server: Server) -> None:
    with server.pages:
        pages = server.pages
        wait = pages._watcher.join

        def interrupted() -> None:
            server.begun.when_late()
            wait()

        pages._watcher.join = interrupted  # type: ignore[method-assign,assignment]
    assert server.ended == 0
