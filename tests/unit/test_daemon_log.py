"""phosd's own log file does not grow for ever."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from phos.gpu_engine.daemon import own_log
from phos.gpu_engine.daemon.own_log import LogHandler


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    monkeypatch.setattr(own_log, "LIMIT", 4096)
    with open(tmp_path / "phosd.log", "a") as stream:
        yield stream


def say(handler: LogHandler, count: int) -> None:
    for number in range(count):
        handler.handle(logging.LogRecord("phosd", logging.INFO, "", 0, f"line {number:06}", None, None))


def test_the_newest_part_of_phosd_s_own_log_stays(log: TextIO) -> None:
    path = Path(log.name)
    path.write_text("of an earlier phosd\n" * 1000)
    say(LogHandler(log, path), 5000)
    assert path.stat().st_size <= 4096
    lines = path.read_text().splitlines()
    assert lines[0] == "(cut here)"
    assert lines[1:] == [f"line {number:06}" for number in range(5001 - len(lines), 5000)]
    assert len(lines) > 100


def test_another_file_is_its_owner_s(log: TextIO, tmp_path: Path) -> None:
    (tmp_path / "other.log").touch()
    for own in (tmp_path / "other.log", tmp_path / "none.log"):
        say(LogHandler(log, own), 1000)
    assert len(Path(log.name).read_text().splitlines()) == 2000
