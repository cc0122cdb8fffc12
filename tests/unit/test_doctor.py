"""``phos-gpu doctor`` on phosd's socket: what hinders phosd is not called harmless, nor the wrong cause named."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from phos.cli import probes
from phos.cli.probes import Finding


def examined(place: Path, monkeypatch: pytest.MonkeyPatch) -> Finding:
    """What is found of phosd where its socket is to be there."""
    monkeypatch.setenv("PHOS_SOCKET", str(place))
    return list(probes.installation())[-1]


def test_where_phosd_cannot_start_something_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place, why in ((tmp_path / "file", "is no socket"), (tmp_path / ("x" * 107), "bytes too long")):
        found = examined(place, monkeypatch)
        assert (found.name, found.state) == ("phosd", "missing")
        assert why in found.found


def test_a_folder_that_is_none_belongs_to_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    found = examined(tmp_path / "file" / "phosd.sock", monkeypatch)
    assert (found.state, found.found) == ("warning", f"{tmp_path}/file/phosd.sock: Not a directory")
    assert "PHOS_SOCKET" in found.remedy


def test_a_phosd_that_accepts_nobody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hanging:
        hanging.bind(str(tmp_path / "phosd.sock"))
        hanging.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(str(tmp_path / "phosd.sock"))
            found = examined(tmp_path / "phosd.sock", monkeypatch)
    assert (found.state, found.found) == ("warning", f"does not answer at {tmp_path}/phosd.sock")


@pytest.mark.parametrize(("answers", "state"), [(True, "ok"), (False, "warning")])
def test_a_phosd_that_is_stopped_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, state: str
) -> None:
    """The kernel takes the connection all the same."""

    def answer() -> None:
        listening.accept()[0].close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "phosd.sock"))
        listening.listen(8)
        if answers:
            threading.Thread(target=answer).start()
        assert examined(tmp_path / "phosd.sock", monkeypatch).state == state
