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
