"""A program that computes on two GPUs at once: checkpointed while it does, restored, and compared word by word."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.site import Site, wait_until
from tests.windows.builds import HERE, build

SEED, THREADS, MEGABYTES, NAP_US, RARE = 3, 4, 32, 1500, 0


@pytest.mark.parametrize("how", ["eager", "lazy"])
@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_what_two_gpus_hold_is_there_again(site: Site, tmp_path: Path, protocol: str, how: str) -> None:
    site.environment |= {"SOFTGPU_DEVICES": "2", "NO_FORK": "1"}
    numbers = map(str, (SEED, THREADS, MEGABYTES, NAP_US, RARE))
    program = site.start(str(build(tmp_path)), str(HERE / "kernels.ptx"), *numbers)
    wait_until(lambda: "READY" in program.lines() or not program.alive(), "the program to begin")
    image = site.image()
    command = ("phos-gpu", "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol)
    site.run(*command)
    said = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert len(said["gpus"]) == 2, said
    site.run("phos-gpu", "verify", str(image))
    os.kill(program.pid, signal.SIGKILL)
    site.gone(program)
    site.restore(image, PHOS_RESTORE=how)
    os.kill(program.pid, signal.SIGUSR1)
    wait_until(lambda: not program.alive(), "the end of the program")
    assert program.lines()[-1] == "GOOD"


@pytest.mark.parametrize("how", ["eager", "lazy"])
def test_on_another_gpu_it_is_that_one_s_process_from_then_on(site: Site, how: str) -> None:
    """It sees one of two GPUs. Its memory stays where it computes, over generations and phosds."""
    site.environment |= {"SOFTGPU_DEVICES": "2"}
    first, second = site.image("first"), site.image("second")
    site.run("phosd", "--ensure")
    program = site.example("mlp", "--iterations", "100000", SOFTGPU_DEVICES="1")
    program.wait_iterations(2)
    wait_until(lambda: (devices(site), held(site)) == ([0], [True, False]), "phosd to know of its memory")
    site.dump(program, first)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="swapped")
    site.restore(first, PHOS_RESTORE=how)
    program.wait_progress()
    assert (devices(site), held(site)) == ([1], [False, True])
    site.stop_phosd()
    site.run("phosd", "--ensure")
    wait_until(lambda: devices(site) == [1], "the program to connect anew")
    site.dump(program, second)
    site.restore(second, PHOS_RESTORE=how)
    program.wait_progress()
    assert (devices(site), held(site)) == ([1], [False, True])


def devices(site: Site) -> list[int]:
    """The GPUs that the one program sees, by phosd's numbers."""
    return [device for process in site.status()["processes"] for device in process["devices"]]


def held(site: Site) -> list[bool]:
    """Whether phosd holds memory of it, on each GPU."""
    return [bool(gpu["held"]) for gpu in site.status()["gpus"]]
