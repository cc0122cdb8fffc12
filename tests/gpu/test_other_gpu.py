"""A process that is restored onto another GPU of its machine than it was dumped from."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import process
import pytest
from gpu_support import Starter, example, reference, without_repeats
from process import PHOS_GPU

SEES = {"both": {}, "the first": {"CUDA_VISIBLE_DEVICES": "0"}}


def status() -> dict[str, Any]:
    """What phosd has, once it runs."""
    process.command(["phosd", "--ensure"], 60)
    _, text = process.command([PHOS_GPU, "status", "--json"], 60)
    said: dict[str, Any] = json.loads(text)
    return said


def held() -> list[bool]:
    """Whether phosd holds memory of programs, on each GPU."""
    return [bool(gpu["held"]) for gpu in status()["gpus"]]


@pytest.fixture
def two_gpus() -> None:
    if len(status()["gpus"]) != 2:
        pytest.skip("needs two GPUs (SOFTGPU_DEVICES=2)")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("how", ["eager", "lazy"])
def test_computes_on_the_other_gpu(how: str, sees: str, start: Starter, image: Path) -> None:
    """There and back again, by CRIU and by our own command; the result is that of a run left alone."""
    program = start(example("mlp", "--iteration-seconds", "0.1"), environment=SEES[sees])
    program.wait_for("^ITERATION 5 ")
    assert held() == [True, False]
    process.criu_dump(program, image)
    changes = {"PHOS_RESTORE": how, "PHOS_RESTORE_GPUS": "0=1"}
    os.environ.update(changes)
    try:
        process.criu_restore(program, image)
    finally:
        for name in changes:
            del os.environ[name]
    assert held() == [False, True]
    program.wait_iterations(2)
    back = image.parent / "back"
    back.mkdir()
    process.criu_dump(program, back)
    program.before_restore()
    process.command([PHOS_GPU, "restore", *(["--lazy"] if how == "lazy" else []), "--gpu", "1=0", str(back)], 120)
    assert held() == [True, False]
    assert without_repeats(program.finish()) == reference("mlp")


@pytest.mark.usefixtures("two_gpus")
def test_a_pool_for_each_gpu(start: Starter, image: Path) -> None:
    """Both of one image; a process of each computes at the same time, and phosd holds memory on both GPUs."""
    program = start(example("mlp", "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 5 ")
    process.criu_dump(program, image)
    taken: list[int] = []
    try:
        for gpu in ("0", "1"):
            words = ["--size", "1", "--name", f"on-{gpu}", "--gpu", f"0={gpu}"]
            process.command([PHOS_GPU, "pool", "create", *words, str(image)], 120)
            _, text = process.command([PHOS_GPU, "pool", "take", f"on-{gpu}", "--json"], 120)
            taken += json.loads(text)["pids"]
        assert held() == [True, True]
        found = {one["pid"]: one["devices"][:1] for one in status()["processes"] if one["pid"] in taken}
        assert [found[pid] for pid in taken] == [[0], [1]]
        wanted = [line for line in reference("mlp") if line.startswith("RESULT")]

        def results() -> list[str]:
            return [line for line in program.lines() if line.startswith("RESULT")]

        process.wait_until(lambda: len(results()) == 2, 120, "both to come to their end")
        assert results() == 2 * wanted
    finally:
        for gpu in ("0", "1"):
            process.command([PHOS_GPU, "pool", "drop", f"on-{gpu}"], 60)
        for pid in taken:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
