"""Processes that only look at GPUs, by NVML: the driver has as much to do with them, though they do not use CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.site import Program, Site, software_gpu_folder

LOOKS = Path(__file__).parent / "programs" / "looks_on.py"


def start(site: Site, *options: str, alone: bool = False, under: bool = True) -> Program:
    library = software_gpu_folder() / "libcuda.so.1"
    words = [str(LOOKS), *(["alone"] if alone else []), str(library), *options, "--until"]
    return site.until_awaited(sys.executable, *words, under=under)


def answers(program: Program) -> set[str]:
    """What the child found, in all iterations."""
    return {line.partition(" digest ")[2].partition(" ")[2] for line in program.lines() if line.startswith("ITERATION")}


@pytest.mark.parametrize("under", [True, False], ids=["frontend", "driver-alone"])
def test_a_child_that_only_looks_is_dumped_with_its_parent(site: Site, under: bool) -> None:
    """Under the frontend it has the frontend's library, and never connects: nobody waits for that."""
    options = ("--iterations", "300")
    expected = start(site, *options).wait_result()
    program = start(site, *options, "--iteration-seconds", "0.03", under=under)
    program.wait_iterations(3)
    running = site.image("running")
    site.dump(program, running, "--leave-running")
    warnings = (running / "dump.log").read_text()
    assert ("told phosd of no GPU memory" in warnings) == under
    assert warnings.count("was not started under 'phos-gpu run'") == (0 if under else 2)
    program.wait_progress()
    image = site.image()
    site.dump(program, image)
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    program.wait_progress()
    assert program.wait_result() == expected
    assert answers(program) == {"0 1"}


@pytest.mark.parametrize("under", [True, False], ids=["frontend", "driver-alone"])
def test_one_that_only_looks_is_dumped_by_itself(site: Site, under: bool) -> None:
    options = ("--iterations", "300", "--iteration-seconds", "0.03")
    program = start(site, *options, alone=True, under=under)
    program.wait_iterations(3)
    image = site.image()
    site.dump(program, image)
    assert ("told phosd of no GPU memory" in (image / "dump.log").read_text()) == under
    site.restore(image)
    program.wait_progress()
    assert program.wait_result() == start(site, *options[:2], alone=True).wait_result()
    assert answers(program) == {"0 1"}
