"""What a checkpoint cost a training program, worked out from the times of its iterations."""

from __future__ import annotations

import random
import sys
from array import array
from pathlib import Path

import pytest

from phos.cli import guard_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import cow_correctness
import training
from training import Iteration, Span
from training_log import combine


def steady(ends: list[float]) -> list[Iteration]:
    """Iterations that end at these times, each beginning where the one before ended."""
    return [Iteration(n, begin, end) for n, (begin, end) in enumerate(zip([0.0, *ends], ends, strict=False), 1)]


def test_what_is_felt_is_what_is_more_than_usual() -> None:
    """The longest gap less the median before it; all of them added up."""
    done = steady([1.0, 2.0, 3.0, 4.0, 5.5, 6.7, 7.7, 8.7])
    found = training.felt(done, begin=4.2, end=6.0)
    assert found.normal == pytest.approx(1.0)
    assert found.longest == pytest.approx(0.5)
    assert found.total == pytest.approx(0.7)


def test_iterations_in_the_window_leave_the_standstill_out() -> None:
    """Of the iteration that was stopped, the standstill is taken off; those mostly outside the window do not count."""
    done = steady([1.0, 2.5, 3.6, 4.7, 5.7])
    spans = [Span("stall", 1.2, 1.6), Span("GPU data", 1.4, 4.7)]
    assert training.window_iterations(done, spans) == pytest.approx([1.1, 1.1, 1.1])
    assert training.window_iterations(done, [Span("stall", 2.6, 3.0), Span("GPU data", 2.7, 3.1)]) == pytest.approx(
        [0.7]
    )
    assert training.window_iterations(done, []) == []


def test_the_formulas_are_those_of_the_guard() -> None:
    """A benchmark runs where PhOS's packages are not, so it has them a second time."""
    for gpus, rate, overhead in ((1, 1.0, 0.6), (8, 0.01, 3.2)):
        best = training.optimal_frequency(gpus, rate, overhead)
        assert best == pytest.approx(guard_policy.optimal_frequency(gpus, rate, overhead))
        assert training.wasted_share(gpus, rate, overhead, best) == pytest.approx(
            guard_policy.wasted_share(gpus, rate, overhead, best)
        )
        for other in (0.9 * best, 1.1 * best):
            assert training.wasted_share(gpus, rate, overhead, other) > training.wasted_share(
                gpus, rate, overhead, best
            )


def test_tracing_costs_what_is_not_waiting() -> None:
    """Per call, in microseconds."""
    assert training.tracing_microseconds({"calls": 4, "call_ns": 10_000, "wait_ns": 2_000}) == pytest.approx(2.0)
    assert training.tracing_microseconds({}) == 0.0


def test_the_checksum_is_that_of_the_program(tmp_path: Path) -> None:
    """Every word counts with its place, whichever way it is summed up."""
    source = random.Random(3)
    lengths = [4 * 7, 4 * 1000, 4]
    tensors = [array("i", [source.randrange(-(1 << 31), 1 << 31) for _ in range(length // 4)]) for length in lengths]
    file = tmp_path / "state"
    file.write_bytes(b"".join(tensor.tobytes() for tensor in tensors))
    expected = combine([sum(word * (2 * i + 1) for i, word in enumerate(tensor)) for tensor in tensors])
    assert cow_correctness.checksum(file, lengths) == expected
    tensors[1][500], tensors[1][501] = tensors[1][501], tensors[1][500]
    file.write_bytes(b"".join(tensor.tobytes() for tensor in tensors))
    assert cow_correctness.checksum(file, lengths) != expected
