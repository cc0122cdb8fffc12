"""The examples on a real GPU: their digits, and a dump, kill and restore in the middle."""

from __future__ import annotations

from pathlib import Path

import process
import pytest
from gpu_support import Starter, example, reference, without_repeats

EXAMPLES = ("mlp", "pointer_chase", "struct_argument", "device_pointer", "stencil")


@pytest.mark.parametrize("frontend", [False, True], ids=["alone", "frontend"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_prints_the_reference(name: str, frontend: bool, start: Starter) -> None:
    """A real GPU computes the digits that the host oracle computed, with the frontend and without."""
    assert start(example(name), frontend=frontend).finish() == reference(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_survives_dump_kill_and_restore(name: str, start: Starter, image: Path) -> None:
    """The result is that of a run left alone."""
    program = start(example(name, "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 5 ")
    process.criu_dump(program, image)
    assert not program.alive()
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == reference(name)


def test_pointers_hold_at_a_larger_size(start: Starter, image: Path) -> None:
    """64 MiB of nodes that point at each other across four buffers."""
    options = ("--size", "22", "--walkers", "1024", "--steps", "100", "--iterations", "12")
    wanted = start(example("pointer_chase", *options), frontend=False, name="alone").finish()
    program = start(example("pointer_chase", *options, "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 4 ", 300)
    process.criu_dump(program, image)
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == wanted
