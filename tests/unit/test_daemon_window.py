"""The end of a window, of processes that answer, do not, or cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import wire
from phos.gpu_engine.daemon.session_window import SessionWindow
from phos.gpu_engine.errors import Mispredicted
from tests.unit.session_fake import NUMBER, Frontend, open_descriptors
from tests.unit.waiting import eventually


class Window:
    """A checkpoint's, with tables that nobody looks at."""

    shut = loads = False

    def __init__(self) -> None:
        self._tables = [os.memfd_create("table") for _ in range(2)]

    def attaching(self) -> None:
        """Nothing to do."""

    def descriptors(self) -> list[int]:
        return self._tables

    def wait_saved(self) -> None:
        """It is."""

    def close(self) -> None:
        wire.close_all(self._tables)


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    """Of a process that can be stopped."""
    child = subprocess.Popen(["sleep", "60"])
    made = Frontend(tmp_path)
    made.connect()
    made.session.identity.pid = child.pid
    yield made
    made.close()
    made.broker.drop_session(NUMBER)
    child.kill()
    child.wait()


@pytest.fixture
def window() -> Iterator[Window]:
    made = Window()
    yield made
    made.close()


def in_window(frontend: Frontend, window: Window) -> None:
    frontend.session.trace(window)
    thread = frontend.in_background("window_begin", done=wire_pb2.Done())
    frontend.session._window.open()
    thread.join()


def stop(frontend: Frontend) -> None:
    os.kill(frontend.session.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{frontend.session.pid}/stat")
    eventually(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")


def test_a_window_ends_with_an_answer(frontend: Frontend, window: Window) -> None:
    in_window(frontend, window)
    wait = frontend.session.untrace()
    thread = frontend.in_background("window_end", done=wire_pb2.Done())
    wait(5.0)
    thread.join()


def test_who_is_stopped_is_not_waited_for_and_told_all_the_same(frontend: Frontend, window: Window) -> None:
    in_window(frontend, window)
    stop(frontend)
    before = open_descriptors()
    began = time.monotonic()
    frontend.session.untrace()(60.0)
    assert time.monotonic() - began < 2
    frontend.answer("window_end", done=wire_pb2.Done(), descriptors=(os.memfd_create("nonsense"),))
    frontend.settle()
    assert open_descriptors() == before + 1, "what comes with the late answer is nobody's"


def test_who_takes_long_is_not_waited_for_longer(frontend: Frontend, window: Window) -> None:
    in_window(frontend, window)
    began = time.monotonic()
    frontend.session.untrace()(0.2)
    assert 0.1 < time.monotonic() - began < 2


def test_a_window_ends_that_has_not_been_begun(frontend: Frontend, window: Window) -> None:
    """The process was stopped with its gate closed, and has not read of it; nobody waits for that."""
    frontend.session.trace(window)
    opening = threading.Thread(target=frontend.session._window.open)
    opening.start()
    eventually(lambda: frontend.session._window._opening)
    stop(frontend)
    began = time.monotonic()
    frontend.session.untrace()(60.0)
    assert time.monotonic() - began < 2
    frontend.answer("window_begin", done=wire_pb2.Done())
    frontend.answer("window_end", done=wire_pb2.Done())
    opening.join(5)
    assert not opening.is_alive()
    assert not frontend.session._window._tracing, "nobody would ever end it"


def test_a_connection_that_breaks_in_a_window_is_said(frontend: Frontend, window: Window) -> None:
    in_window(frontend, window)
    frontend.close()
    frontend.connect()
    with pytest.raises(Mispredicted, match="broke while its memory was saved"):
        frontend.session.untrace()(5.0)
    frontend.session.untrace()(0.0)  # said once


def test_a_window_that_ends_just_as_the_process_connects_again_is_not_taken_for_whole(
    frontend: Frontend, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off before its window was open, and computes, unwatched."""
    waits: list[Callable[[float], None]] = []
    going = threading.Lock()

    class Watched(SessionWindow):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_adrift" and going.acquire(blocking=False):  # once
                waits.append(self.untrace())

    frontend.session.trace(window)
    frontend.session._window.cut_off()
    monkeypatch.setattr(frontend.session._window, "__class__", Watched)
    frontend.session._window.connected(detached=False)
    with pytest.raises(Mispredicted, match="broke while its memory was saved"):
        waits[0](0.0)
