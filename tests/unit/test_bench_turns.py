"""Two processes that compute in turns, and both ends of the conversation with them, without a GPU."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import process
import turns
from process import ProcessError

ANSWERING = """
import os, sys, time
sys.path.insert(0, {programs!r})
import answering

seen = open({seen!r}, "ab", buffering=0)
print("a library is loaded")
def step():
    seen.write(os.environ["SIDE"].encode() + b" ")
    time.sleep(0.002)
answering.answer({{"wait": step}}, lambda: seen.write(b"| "))
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write what stands for `phos-gpu`, which says on which side the program is; return the file of what was done."""
    launcher = tmp_path / "phos-gpu"
    launcher.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nSIDE=with exec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(process, "PHOS_GPU", str(launcher))
    monkeypatch.setenv("SIDE", "without")
    return tmp_path / "seen"


def program(tmp_path: Path, text: str) -> list[str]:
    """Return the command of a program with this text."""
    script = tmp_path / "program.py"
    script.write_text(text)
    return [sys.executable, str(script)]


def answering(tmp_path: Path) -> list[str]:
    """Return the command of a program that answers, and notes what it does."""
    programs = str(process.PROGRAMS)
    return program(tmp_path, ANSWERING.format(programs=programs, seen=str(tmp_path / "seen")))


def test_they_take_turns_and_the_first_alternates(tmp_path: Path, seen: Path) -> None:
    """Never both at once; each block has steps that are not timed before those that are, and waits at both ends."""
    with turns.Pair(answering(tmp_path), "nvidia", tmp_path) as pair:
        rounds = pair.rounds(["wait 4"], 2, lambda: True)
        pids = [one.pid for one in pair._both]
        assert pair.pid == pids[1]
    block = {side: f"{side} " * 3 + "| " + f"{side} " * 4 + "| " for side in ("without", "with")}
    assert seen.read_text() == block["without"] + block["with"] + block["with"] + block["without"]
    assert len(rounds) == 2
    assert all(2.0 <= answer[0] < 200.0 for answers in rounds for answer in answers[0])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.usefixtures("seen")
def test_both_keep_to_one_processor(tmp_path: Path) -> None:
    """If that is wished, to the same; this process stays where it was."""
    before = os.sched_getaffinity(0)
    with turns.Pair(answering(tmp_path), "nvidia", tmp_path, one_processor=True) as pair:
        kept = [os.sched_getaffinity(one.pid) for one in pair._both]
        assert kept == [{max(before)}] * 2
    with turns.Pair(answering(tmp_path), "nvidia", tmp_path) as pair:
        assert [os.sched_getaffinity(one.pid) for one in pair._both] == [before] * 2
    assert os.sched_getaffinity(0) == before


def test_without_time_one_round_is_made(tmp_path: Path, seen: Path) -> None:
    """Something is measured, whatever the budget."""
    with turns.Pair(answering(tmp_path), "nvidia", tmp_path) as pair:
        assert len(pair.rounds(["wait 1"], 5, lambda: False)) == 1
    assert seen.exists()


@pytest.mark.usefixtures("seen")
def test_a_program_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    """No time-out is sat out, and the other one of the pair is ended too."""
    dying = program(tmp_path, "import sys; print('READY', flush=True); input(); sys.exit('no luck')")
    began = time.monotonic()
    with turns.Pair(dying, "nvidia", tmp_path) as pair, pytest.raises(ProcessError, match=r"(?s)py` ended.*no luck"):
        pair.round(["wait 1"], 0)
    with pytest.raises(ProcessError, match=r"(?s)py` ended.*no way"):
        turns.Pair(program(tmp_path, "import sys; sys.exit('no way')"), "nvidia", tmp_path)
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("seen")
def test_what_is_no_answer_is_an_error(tmp_path: Path) -> None:
    """A program that is silent, or says something else."""
    silent = program(tmp_path, "print('READY', flush=True); input(); input()")
    with turns.Answering(silent, "nvidia", tmp_path / "errors", frontend=True) as one:
        one.ready()
        with pytest.raises(ProcessError, match="did not answer within 0 s"):
            one.ask("wait 1", timeout=0.1)
    talking = program(tmp_path, "print('READY', flush=True); input(); print('well', flush=True); input()")
    with turns.Answering(talking, "nvidia", tmp_path / "errors", frontend=False) as one:
        one.ready()
        with pytest.raises(ProcessError, match="answered 'well' to 'wait 1'"):
            one.ask("wait 1")
