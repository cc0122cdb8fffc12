"""What a concurrent dump does before its processes are quiesced."""

from __future__ import annotations

import time

import pytest

from phos.gpu_engine.cow import dump

PATIENCE = 0.2


class Slow:
    """A process whose kernels are never analysed to the end."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def describe_kernels(self, timeout: float) -> None:
        self.asked.append(timeout)
        time.sleep(timeout)


def test_analysis_is_waited_for_once_and_not_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "DESCRIBE_SECONDS", PATIENCE)
    processes = [Slow() for _ in range(8)]
    began = time.monotonic()
    dump.describe(processes)
    assert time.monotonic() - began < 2 * PATIENCE
    assert processes[0].asked[0] > PATIENCE / 2
    assert [process.asked for process in processes[1:]] == [[0.0]] * 7
