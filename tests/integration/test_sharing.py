"""Memory shared between processes stays shared through detach, dump and restore."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.integration.site import Site, wait_until

PROGRAM = Path(__file__).parent / "programs" / "shared_memory.py"


def test_shared_buffer_survives_dump_kill_and_restore(site: Site) -> None:
    program = site.start(sys.executable, str(PROGRAM), "parent", "60", str(site.folder / "handle"))
    program.wait_iterations(10)
    image = site.image()
    site.dump(program, image)
    summary = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert len(summary["processes"]) == 2
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    assert program.wait_result() == "120"
    wait_until(lambda: site.gpu_memory() == 0, "all GPU memory to be free")


def test_shared_buffer_survives_generations_that_run_on(site: Site) -> None:
    program = site.start(sys.executable, str(PROGRAM), "parent", "100", str(site.folder / "handle"))
    program.wait_iterations(5)
    for generation in range(3):
        site.dump(program, site.image(f"generation-{generation}"), "--leave-running")
        program.wait_progress(3)
    assert program.wait_result() == "200"
