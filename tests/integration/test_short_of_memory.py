"""A program that runs out of GPU memory while it is checkpointed: it has what it would have without the checkpoint."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.integration.site import Site, wait_until

PROGRAM = Path(__file__).parent / "programs" / "reallocates.py"
FILLS = PROGRAM.with_name("fills_memory.py")
FIRST, SECOND = 120, 160
"""MiB, of 200: there is no room for both."""


def test_what_it_frees_in_a_window_is_its_own_again_when_that_is_saved(site: Site) -> None:
    site.environment["SOFTGPU_MEMORY"] = "200M"
    hold = site.folder / "copies-held"
    site.run("phosd", "--ensure", SOFTGPU_COPY_HOLD=str(hold), SOFTGPU_COPY_HOLD_BYTES="64K")  # but for hashes
    go = site.folder / "go"
    program = site.start(sys.executable, str(PROGRAM), str(go), str(FIRST), str(SECOND))
    wait_until(lambda: "READY" in program.lines() or not program.alive(), "the program")
    image = site.image()
    hold.touch()
    dumping = site.begin_dump(program, image, "--leave-running", PHOS_PROTOCOL="cow")
    wait_until(lambda: attached(site), "the window")
    assert dumping.poll() is None
    go.touch()
    time.sleep(1)
    assert program.lines() == ["READY"]  # not before all is saved
    hold.unlink()
    wait_until(lambda: not program.alive(), "its end")
    assert program.lines()[-1].startswith("GOT "), program.lines()
    assert dumping.wait() == 0
    site.run("phos-gpu", "verify", str(image))
    site.gone(program)
    site.restore(image)
    wait_until(lambda: not program.alive(), "its second end")
    assert [line.split()[0] for line in program.lines()] == ["READY", "GOT", "GOT"]


@pytest.mark.parametrize("left", [0, 4])
def test_a_gpu_without_memory_for_phosd_is_checkpointed_all_the_same(site: Site, left: int) -> None:
    """With 4 MiB there is room for hashes, and for what the way back takes: a shadow pool takes nothing of these."""
    site.environment["SOFTGPU_MEMORY"] = "200M"
    site.run("phosd", "--ensure")
    program = site.start(sys.executable, str(FILLS), str(left))
    wait_until(lambda: "FULL" in program.lines() or not program.alive(), "the program")
    image = site.image()
    site.dump(program, image, "--leave-running", PHOS_PROTOCOL="cow")
    site.run("phos-gpu", "verify", str(image))
    summary = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert summary["protocol"] == "cow"
    assert summary["window"]["calls"] == 0
    log = (site.folder / "run" / "phosd.log").read_text()
    assert ("stand still until all is saved" in log) == (not left)
    assert (program.lines() == ["FULL"]) == bool(left), program.lines()


def attached(site: Site) -> bool:
    dumps = [job for job in site.status()["jobs"] if job["kind"] == "dump"]
    return any(phase["name"] == "attach" for job in dumps for phase in job["phases"])
