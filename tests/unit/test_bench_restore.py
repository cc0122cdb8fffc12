"""What the benchmarks of restores make of a server's lines, of phosd's status, and of goals."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "programs"))
import harness
import lazy_correctness
import restore_runs
import restore_tables
import serving
from report import Report
from restore_runs import Answer


class Counting(serving.Decoder):
    """Answers with numbers one above what it was given last."""

    layers = 2

    def __init__(self, step: int) -> None:
        self.step = step
        self.last = 0

    def begin(self, prompt: Sequence[int], layered: serving.Layered) -> None:
        self.go_on(prompt[-1], layered)

    def token(self) -> int:
        return self.last + self.step

    def go_on(self, token: int, layered: serving.Layered) -> None:
        self.last = token
        for layer in range(-1, self.layers):
            layered(layer)


def serve(folder: Path, requests: dict[int, str], *words: str) -> list[str]:
    """The lines of a server of two models that finds these requests, and no more."""
    parser = argparse.ArgumentParser()
    serving.add_options(parser)
    report = folder / "report"
    options = parser.parse_args(["--requests", str(folder), "--report", str(report), *words])
    for number, text in requests.items():
        (folder / str(number)).write_text(text)
    (folder / "end").touch()
    serving.serve([Counting(1), Counting(10)], options, Report(options))
    return report.read_text().splitlines()


def test_requests_are_answered_in_turn(tmp_path: Path) -> None:
    """By the model that each names, with as many tokens as it wants; times never go back."""
    lines = serve(tmp_path, {0: "3 0 5 7", 1: "2 1 1"})
    answers = [Answer.parse(line) for line in lines]
    assert [(answer.number, answer.tokens) for answer in answers] == [(0, (8, 9, 10)), (1, (11, 21))]
    for answer in answers:
        assert answer.received <= answer.launched <= answer.first <= answer.last
    assert answers[0].since(answers[0].received - 1)["first_kernel_s"] == pytest.approx(
        1 + answers[0].launched - answers[0].received
    )


def test_layers_are_told_of_when_wanted(tmp_path: Path) -> None:
    """One line for each layer of each token, in order, before the answer; and where a program was at its last line."""
    lines = serve(tmp_path, {4: "2 0 1"}, "--first", "4", "--log-layers")
    assert [line for line in lines if line.startswith("LAYER")] == [
        "LAYER 4 0 0",
        "LAYER 4 0 1",
        "LAYER 4 1 0",
        "LAYER 4 1 1",
    ]
    assert lines[-1].startswith("ANSWER 4 ")
    assert lazy_correctness.moment(lines) == "4/end"
    assert lazy_correctness.moment(lines[:3]) == "4/1/0"
    assert lazy_correctness.moment([]) == ""
    assert [answer.tokens for answer in lazy_correctness.answers(lines)] == [(2, 3)]


def test_weights_do_not_depend_on_the_order_in_which_they_are_made() -> None:
    """By name as in files, or as they are used; each has a seed of its own."""
    names = [f"layers.{number}" for number in range(11)]
    assert serving.file_order(names, "layers") == names
    assert serving.file_order(names, "files")[:3] == ["layers.0", "layers.1", "layers.10"]
    assert len({serving.weight_seed(1, name) for name in names} | {serving.weight_seed(2, names[0])}) == 12


JOB = {
    "since": 1000.5,
    "mode": "lazy",
    "phases": [
        {"name": "GPU data", "start": 0.1, "seconds": 2.0},
        {"name": "attach", "start": 0.4, "seconds": 0.1},
    ],
    "window": {"waits": 3, "anything": 1, "wait_ns": 250_000_000, "first_launch_ns": 1001_200_000_000},
}


def test_phosds_times_count_from_the_command() -> None:
    """Begin, attach and last byte on one clock; the rate is of what the image holds."""
    row = restore_runs.studied(JOB, 1000.0, 8 * harness.GB)
    assert row["begin_s"] == pytest.approx(0.5)
    assert row["attached_s"] == pytest.approx(1.0)
    assert row["last_byte_s"] == pytest.approx(2.6)
    assert row["data_gb_s"] == pytest.approx(4.0)
    assert row["phosd_first_kernel_s"] == pytest.approx(1.2)
    assert (row["waits"], row["waited_s"]) == (4, pytest.approx(0.25))
    assert lazy_correctness.spans(JOB, "GPU data") == pytest.approx((1000.6, 1002.6))
    assert lazy_correctness.spans(JOB, "residue") is None


def test_an_older_restore_of_the_same_image_does_not_count() -> None:
    """phosd's newest may be from before the command."""
    assert restore_runs.studied(JOB, 1000.6, 1) == {}
    assert restore_runs.studied({}, 0.0, 1) == {}


def test_times_of_a_pool_count_from_the_command() -> None:
    """What `pool take` prints begins when phosd is asked."""
    said = {"began": 1000.2, "pids": [7], "attached": 0.01, "first_kernel": None, "last_byte": 2.0}
    row = restore_runs.taken(said, 1000.0, 10 * harness.GB)
    assert row == {
        "begin_s": pytest.approx(0.2),
        "attached_s": pytest.approx(0.21),
        "last_byte_s": pytest.approx(2.2),
        "data_gb_s": pytest.approx(5.0),
    }
    assert restore_runs.taken_pid(said) == 7
    assert restore_runs.taken_pid({"pid": 8}) == 8
    assert restore_runs.taken_pid({}) == 0


def results(folder: Path, rows: list[dict[str, Any]]) -> harness.Results:
    """Results with these rows."""
    made = harness.Results(argparse.Namespace(device="software", smoke=True, results=folder), "restore", "Title")
    usual = {"bytes": 32 * harness.GB, "models": 1, "tokens_equal": True, "driver_only": False}
    for row in [{**usual, **row} for row in rows]:
        made.add(f"{restore_tables.label(row)} {row['system']}", **row)
    return made


def test_the_rate_of_copies_is_the_higher_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with it does not gain by a slow moment, before or after."""
    chosen = argparse.Namespace(device="software", smoke=True)
    for rates in ([44e9, 55e9], [55e9, 44e9]):
        made, left = results(tmp_path, []), iter(rates)
        monkeypatch.setattr(restore_runs.machine, "copy_bandwidth", lambda *_, left=left: (1.0, next(left)))
        most = [restore_runs.measure_copies(chosen, made, again=again) for again in (False, True)]
        assert (most[-1], made.summary[restore_runs.COPY_RATE]) == (55.0, 55.0)


def test_goals_are_those_of_the_issue(tmp_path: Path) -> None:
    """Each is judged by what was measured; what was not measured is not mentioned."""
    times = {"last_token_s": 9.0}
    found = results(
        tmp_path,
        [
            {
                "system": "lazy",
                "first_kernel_s": 0.7,
                "first_token_s": 1.5,
                "waited_s": 0.1,
                "percent_of_copy": 80,
                **times,
            },
            {"system": "lazy", "first_kernel_s": 0.9, "first_token_s": 2.0, "bytes": 64 * harness.GB, **times},
            {"system": "lazy, random order", "first_kernel_s": 0.7, "first_token_s": 1.6, "waited_s": 0.4, **times},
            {
                "system": "pool",
                "first_kernel_s": 0.05,
                "first_token_s": 0.9,
                "waited_s": 0.3,
                "percent_of_copy": 86,
                **times,
            },
            {
                "system": "pool, allocation order",
                "first_kernel_s": 0.05,
                "first_token_s": 0.9,
                "waited_s": 0.4,
                **times,
            },
            {"system": "peer", "first_kernel_s": 17.0, "first_token_s": 18.0, **times},
        ],
    )
    goals = {what: (round(value, 3), reached) for what, value, _, reached in restore_tables.goals(found)}
    assert goals == {
        "32 GB: lazy, first kernel, s": (0.7, True),
        "64 GB: lazy, first kernel, s": (0.9, True),
        "lazy, first kernel: slowest size over fastest, %": (28.571, False),
        "32 GB: pool, first kernel, s": (0.05, True),
        "32 GB: first token, lazy, times sooner than the peer": (12.0, True),
        "32 GB: first token, pool, times sooner than the peer": (20.0, True),
        "32 GB: lazy, GPU data, % of copying": (80, False),
        "32 GB: pool, GPU data, % of copying": (86, True),
        "32 GB: lazy, waiting, recorded order over random order": (0.25, True),
        "32 GB: pool, waiting, recorded order over allocation order": (0.75, False),
    }
    restore_tables.summarise(found)
    found.finish(restore_tables.tables(found))
    assert "| 32 GB pool | 0.05 | 0.9 |" in found.path.with_suffix(".md").read_text()


def test_a_median_of_runs_hides_no_wrong_answer() -> None:
    """Numbers are medians; what must hold must hold in each; words are listed."""
    runs = [
        {"a": 1.0, "tokens_equal": True, "mode": "lazy", "phases": {"x": 1.0}},
        {"a": 3.0, "tokens_equal": False, "mode": "eager", "phases": {"x": 3.0, "y": 1.0}},
        {"a": 2.0, "tokens_equal": True, "mode": "lazy", "phases": {"x": 2.0}},
    ]
    row = restore_runs.medians(runs)
    assert row == {"a": 2.0, "tokens_equal": False, "mode": "eager, lazy", "phases": {"x": 2.0}}
