"""Whose run of CRIU an interruption ends."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from phos.gpu_engine.daemon.runs import Runs
from phos.gpu_engine.errors import INTERRUPTED, CheckpointFailed, NotPermitted


def peer(uid: int = 0) -> Any:
    return SimpleNamespace(pid=os.getpid(), uid=uid)


def test_the_run_of_that_criu_ends_and_no_other() -> None:
    runs = Runs()
    with runs.entered(peer(), 71) as mine, runs.entered(peer(), 72) as other:
        runs.interrupt(peer(), 71)
        assert mine.asked
        assert not other.asked
        with pytest.raises(CheckpointFailed, match=INTERRUPTED):
            mine.settle()
        other.settle()
        runs.interrupt(peer(), 72)
        assert not other.asked, "its image is being committed"
    runs.interrupt(peer(), 71)  # it has ended


def test_only_its_user_and_root_may_end_it() -> None:
    runs = Runs()
    with runs.entered(peer(1000), 71) as mine:
        with pytest.raises(NotPermitted):
            runs.interrupt(peer(1001), 71)
        assert not mine.asked
        runs.interrupt(peer(1000), 71)
        assert mine.asked
    with runs.entered(peer(1000), 71) as mine:
        runs.interrupt(peer(), 71)
        assert mine.asked


def test_nobody_keeps_another_from_ending_his_own() -> None:
    """What a run calls its CRIU is only said."""
    runs = Runs()
    with runs.entered(peer(1001), 71) as said, runs.entered(peer(1000), 71) as mine:
        runs.interrupt(peer(1000), 71)
        assert mine.asked
        assert not said.asked
