"""What the launcher says of a CRIU that failed, and how long it waits."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import CRIU_FAILED, DaemonUnavailable

BEGAN = 1000.0


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[wire_pb2.ImageState], list[float]]:
    """Make phosd answer so; returns the seconds for which it was asked to wait."""

    def set_answer(state: wire_pb2.ImageState) -> list[float]:
        waited: list[float] = []

        def answer(_directory: Path, *, restore: bool, timeout: float) -> wire_pb2.ImageState:
            assert restore
            waited.append(timeout)
            return state

        monkeypatch.setattr(client, "wait_image", answer)
        return waited

    return set_answer


def test_its_own_job_is_waited_for(
    answers: Callable[[wire_pb2.ImageState], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    waited = answers(wire_pb2.ImageState(state="failed", error="The disk is full.", since=BEGAN + 1))
    client.show_undone("image", restore=True, began=BEGAN)
    assert max(waited) == client.UNDO_SECONDS
    assert capsys.readouterr().err == "phos: The disk is full.\n"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (wire_pb2.ImageState(state="failed", error=CRIU_FAILED), ""),  # CRIU has said why
        (wire_pb2.ImageState(state="committed"), ""),
        (
            wire_pb2.ImageState(state="writing", error="not complete after 60 s", timed_out=True),
            "phos: phosd is still undoing its part; 'phos-gpu status' shows it.\n",
        ),
    ],
)
def test_what_is_no_reason_is_not_said(
    answers: Callable[[wire_pb2.ImageState], list[float]],
    capsys: pytest.CaptureFixture[str],
    state: wire_pb2.ImageState,
    said: str,
) -> None:
    state.since = BEGAN
    answers(state)
    client.show_undone("image", restore=True, began=BEGAN)
    assert capsys.readouterr().err == said


def test_a_phosd_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "phosd.sock"
    monkeypatch.setenv("PHOS_SOCKET", str(path))
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        client.show_undone(str(tmp_path), restore=False, began=BEGAN)
    assert capsys.readouterr().err == ""


def test_an_earlier_one_is_none_of_its_business(
    answers: Callable[[wire_pb2.ImageState], list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    """As where CRIU failed before it asked phosd for anything, or was refused because that one is still under way."""
    waited = answers(wire_pb2.ImageState(state="loading", error="not complete after 0 s", since=BEGAN - 1))
    client.show_undone("image", restore=True, began=BEGAN)
    assert max(waited) < 1
    assert capsys.readouterr().err == ""


def test_a_phosd_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*_words: object, **_names: object) -> wire_pb2.ImageState:
        raise DaemonUnavailable("phosd does not answer")

    monkeypatch.setattr(client, "wait_image", answer)
    client.show_undone("image", restore=False, began=BEGAN)
    assert capsys.readouterr().err == ""
