"""An interruption at the moment at which the place for another host's image has been made."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from phos.cli import image as image_commands
from phos.cli import remote_image
from phos.cli.launched import Interrupted

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
