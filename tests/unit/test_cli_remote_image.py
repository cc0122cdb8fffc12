"""Interruptions of the copying of another host's image, at moments at which an exception alone would not do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from phos.cli import image as image_commands
from phos.cli import remote_image
from phos.cli.launched import Interrupted
from phos.images.errors import ImageError

ADDRESS = "tcp://127.0.0.1:1/image"


def interrupt() -> None:
    """The kernel may give a process's signal to any of its threads; Python's handler runs in the first one."""
    taker = threading.Thread(target=signal.raise_signal, args=(signal.SIGTERM,))
    taker.start()
    taker.join()


def test_a_temporary_folder_that_has_just_been_made_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"

    def make(**_: object) -> str:
        folder.mkdir()
        interrupt()
        return str(folder)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    with pytest.raises(Interrupted), remote_image.fetched(ADDRESS):
        pytest.fail("the signal was not heeded")
    assert not folder.exists()


@pytest.mark.parametrize("why", ["its maker lives", "it is new", "somebody else has made it", ""])
def test_what_a_restore_that_was_killed_has_left_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    maker = {"its maker lives": str(os.getpid()), "somebody else has made it": "mine"}.get(why, str(ended.pid))
    left, only_log = (tmp_path / f"{remote_image.FOLDER}{maker}-{name}" for name in ("abc", "def"))
    for folder in (left, only_log):
        folder.mkdir()
        (folder / "restore.log").touch()
    (left / "pages-1.img").touch()
    if why != "it is new":
        for folder in (left, only_log):
            os.utime(folder, (0, 0))
    with suppress(ImageError), remote_image.fetched(ADDRESS):
        pytest.fail("nobody is there")
    assert (left / "pages-1.img").exists() is bool(why)
    assert all((folder / "restore.log").exists() for folder in (left, only_log))
    assert len(list(tmp_path.iterdir())) == 2


def test_an_image_directory_that_has_just_been_made_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into = tmp_path / "into"
    made = image_commands.image_directory

    def make(path: Path, *, create: bool) -> Path:
        made(path, create=create)
        interrupt()
        return path

    monkeypatch.setattr(image_commands, "image_directory", make)
    result = CliRunner().invoke(image_commands.fetch, [ADDRESS, str(into)])
    assert isinstance(result.exception, Interrupted)
    assert not into.exists()


def test_a_directory_that_is_refused_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "somebody's").touch()
    result = CliRunner().invoke(image_commands.fetch, [ADDRESS, str(tmp_path)])
    assert "is not empty" in str(result.exception)
    assert (tmp_path / "somebody's").exists()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what Python ignores, as in a command: pytest's own hook does not bear a handler that raises in it again."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)


def lost_in_a_finalizer() -> None:
    """Python prints what is raised in one, and forgets it."""
    thing = threading.Event()
    kept = weakref.ref(thing, lambda _: interrupt())
    del thing
    assert kept() is None


def lost_in_a_library() -> None:
    with suppress(Exception):
        interrupt()
        for _ in range(100):
            time.sleep(0)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("lost", [lost_in_a_finalizer, lost_in_a_library])
def test_an_exception_that_was_lost_is_raised_anew(
    lost: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even out of a call of the kernel that waits for a silent host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here, there = socket.socketpair()

    def copy(*_: object) -> None:
        lost()
        here.settimeout(30)
        here.recv(1)

    monkeypatch.setattr(remote_image, "fetch", copy)
    began = time.monotonic()
    with here, there, pytest.raises(Interrupted) as caught, remote_image.fetched(ADDRESS):
        pytest.fail("the signal was not heeded")
    assert caught.value.exit_status == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10
    assert list(tmp_path.iterdir()) == []
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0


@pytest.mark.usefixtures("silent")
def test_an_exception_that_was_lost_at_the_end_is_raised_before_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(remote_image, "fetch", lambda *_: lost_in_a_finalizer())
    with pytest.raises(Interrupted), remote_image.fetched(ADDRESS):
        pytest.fail("the signal was not heeded")
    assert list(tmp_path.iterdir()) == []


def test_what_is_cleared_is_cleared_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception is not raised again while it is on its way, nor is another signal's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    steps = []

    def copy(_: object, directory: Path) -> None:
        (directory / "one").touch()
        try:
            interrupt()
            time.sleep(30)
        finally:
            time.sleep(3 * remote_image.ANEW_SECONDS)
            interrupt()
            steps.append("left")

    def clear(directory: Path, clear: Callable[[Path], None] = remote_image.clear) -> None:
        time.sleep(3 * remote_image.ANEW_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)
        clear(directory)
        steps.append("cleared")

    monkeypatch.setattr(remote_image, "fetch", copy)
    monkeypatch.setattr(remote_image, "clear", clear)
    with pytest.raises(Interrupted) as caught, remote_image.fetched(ADDRESS):
        pytest.fail("the signal was not heeded")
    assert caught.value.exit_status == 128 + signal.SIGTERM
    assert steps == ["left", "cleared"]
    assert list(tmp_path.iterdir()) == []


def test_a_signal_while_a_copy_that_failed_is_cleared_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def clear(directory: Path, clear: Callable[[Path], None] = remote_image.clear) -> None:
        interrupt()
        time.sleep(3 * remote_image.ANEW_SECONDS)
        clear(directory)

    monkeypatch.setattr(remote_image, "clear", clear)
    with pytest.raises(Interrupted), remote_image.fetched(ADDRESS):
        pytest.fail("nobody listens there")
    assert list(tmp_path.iterdir()) == []
