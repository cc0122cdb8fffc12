"""Concurrent checkpoints of programs that PhOS could stop for ever, on a real GPU."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import process
import pytest
from gpu_support import DEVICE, PROGRAMS, Starter, without_repeats
from process import PHOS_GPU

MOST_SHADOWED = 300
"""Chunks of 4 MiB that pytorch_shards.py writes to in three windows, and more: some twenty in each iteration, two a
second. What is not saved yet when it runs on has some seven hundred in each window."""


def checkpointed_in_windows(program: process.Program, images: Path, times: int) -> tuple[Path, dict[str, int]]:
    """The last of several concurrent checkpoints of a program, and what happened in the windows of all.

    A GPU's data is in memory before the program runs on: onto a disk there is a window.
    """
    counts = {"shadowed": 0, "anything": 0}
    for number in range(times):
        folder = images / str(number)
        folder.mkdir(parents=True)
        process.command([PHOS_GPU, "checkpoint", "--leave-running", str(program.pid), str(folder)], 120)
        found = process.inspect(folder)
        assert process.find_key(found, "protocol") == "cow"
        for name in counts:
            counts[name] += int(process.find_key(found, name) or 0)
        program.wait_iterations(2)
        if number < times - 1:
            shutil.rmtree(folder)
    assert counts["shadowed"] > 0, "nothing was written while it was saved"
    return folder, counts


def test_no_stream_is_made_to_wait_for_one_that_waits_for_the_host(start: Starter, image: Path, tmp_path: Path) -> None:
    """Both write to the chunks that the checkpoint saves; it goes on in every one of them, and the image restores."""
    size, images = (1024, tmp_path / "images") if DEVICE == "nvidia" else (64, image)
    command = process.python_program(PROGRAMS / "waiting_streams.py", "--size", str(size))
    undisturbed = start(command, name="undisturbed").finish()
    end = image.parent / "end"
    program = start([*command, "--iteration-seconds", "0.2", "--until", str(end)])
    program.wait_for("^ITERATION 3 ")
    folder, _ = checkpointed_in_windows(program, images, 5)
    program.kill()
    process.criu_restore(program, folder)
    end.touch()
    assert without_repeats(program.finish()) == undisturbed


@pytest.mark.nvidia_only
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"], ids=["segments", "expandable"])
def test_shards_are_copied_while_an_image_is_written(
    start: Starter, image: Path, tmp_path: Path, allocator: str
) -> None:
    """Kernels that find in arrays in GPU memory where they write: only what these name is waited for.

    Of a segment that is all of the program's memory these are the parts that PyTorch has handed out.
    """
    environment = {"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    command = process.python_program(PROGRAMS / "pytorch_shards.py", "--size", "4096")
    undisturbed = start(command, frontend=False, name="undisturbed").finish()
    end = image.parent / "end"
    program = start([*command, "--iteration-seconds", "0.5", "--until", str(end)], environment=environment)
    program.wait_for("^ITERATION 3 ", 120)
    folder, counts = checkpointed_in_windows(program, tmp_path / "images", 3)
    assert counts["anything"] == 0
    assert counts["shadowed"] < MOST_SHADOWED
    program.kill()
    process.criu_restore(program, folder)
    end.touch()
    assert without_repeats(program.finish()) == undisturbed
