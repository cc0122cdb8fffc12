"""What bench/ungated.py makes of the moments at which a question was asked and answered."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import ungated

MS = 1_000_000
AWAYS = [ungated.Away(200 * MS, 700 * MS), ungated.Away(1100 * MS, 1600 * MS)]


def judged(*asked: tuple[float, float, int]) -> tuple[int, int, int]:
    told = {
        "answers": ["as ever", "another"],
        "asked": [(int(began * MS), int(ended * MS), answer) for began, ended, answer in asked],
    }
    row = ungated.judged(told, AWAYS)
    assert row["asked"] == len(asked)
    return row["answered_meanwhile"], row["waited"], row["wrong"]


def test_answers_before_after_and_as_it_goes_are_none_meanwhile() -> None:
    assert judged((10, 11, 0), (150, 199, 0), (190, 201, 0), (720, 730, 0), (800, 801, 0)) == (0, 0, 0)


def test_answers_meanwhile() -> None:
    assert judged((200, 201, 0), (650, 700, 0), (1300, 1301, 0)) == (3, 0, 0)


def test_who_waits_is_answered_as_it_comes_back() -> None:
    assert judged((150, 745, 0), (1200, 1700, 0)) == (0, 2, 0)
    assert judged((699, 701, 0)) == (0, 0, 0)  # it was asked right before


def test_another_answer_is_wrong_at_any_time() -> None:
    assert judged((10, 11, 0), (300, 301, 1), (800, 801, 1)) == (1, 0, 2)


def test_what_passes_no_gate_is_read_from_the_list() -> None:
    never = ungated.ungated()
    assert {"cuCtxGetCurrent", "cuDeviceTotalMem", "cuCtxPopCurrent", "cuStreamIsCapturing"} <= never
    assert not {"cuLaunchKernel", "cuMemAlloc", "cuCtxSynchronize", "cuStreamQuery", "cuDeviceGetName"} & never


def test_a_thread_s_own_stream_passes_the_gate() -> None:
    never = {"cuStreamGetCtx"}
    asked = ["cuStreamGetCtx", "cuStreamGetCtx (default)", "cuStreamGetCtx (own)", "cuStreamQuery"]
    assert [ungated.is_gated(question, never) for question in asked] == [False, False, True, True]


def test_entry_points_of_questions() -> None:
    asked = ["cuCtxPushCurrent, cuCtxPopCurrent", "cuStreamGetCtx (own)"]
    assert ungated.entry_points(asked) == {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuStreamGetCtx"}
