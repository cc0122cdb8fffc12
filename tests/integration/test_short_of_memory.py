"""A program that runs out of GPU memory while it is checkpointed: it has what it would have without the checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.site import Site, wait_until

PROGRAM = Path(__file__).parent / "programs" / "reallocates.py"
FIRST, SECOND = 120, 160
"""MiB, of 200: there is no room for both."""


def test_what_it_frees_in_a_window_is_its_own_again_when_that_is_saved(site: Site) -> None:
    site.environment |= {"SOFTGPU_MEMORY": "200M", "SOFTGPU_COPY_BANDWIDTH": str(12 << 20)}
    site.run("phosd", "--ensure")  # its copies take ten seconds
    go = site.folder / "go"
    program = site.start(sys.executable, str(PROGRAM), str(go), str(FIRST), str(SECOND), SOFTGPU_COPY_BANDWIDTH="0")
    wait_until(lambda: "READY" in program.lines() or not program.alive(), "the program")
    image = site.image()
    dumping = site.begin_dump(program, image, "--leave-running", PHOS_PROTOCOL="cow")
    wait_until(lambda: attached(site), "the window")
    assert dumping.poll() is None
    go.touch()
    wait_until(lambda: not program.alive(), "its end")
    assert program.lines()[-1].startswith("GOT "), program.lines()
    assert float(program.lines()[-1].split()[1]) > 1, "all was saved already"
    assert dumping.wait() == 0
    site.run("phos-gpu", "verify", str(image))
    site.gone(program)
    site.restore(image, SOFTGPU_COPY_BANDWIDTH="0")
    wait_until(lambda: not program.alive(), "its second end")
    assert [line.split()[0] for line in program.lines()] == ["READY", "GOT", "GOT"]


def attached(site: Site) -> bool:
    dumps = [job for job in site.status()["jobs"] if job["kind"] == "dump"]
    return any(phase["name"] == "attach" for job in dumps for phase in job["phases"])
