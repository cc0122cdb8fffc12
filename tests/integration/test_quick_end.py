"""Programs that end as soon as they compute again: no failure, however slow phosd is to notice that they computed."""

from __future__ import annotations

import sys

import pytest

from tests.integration.dumped import LAYERS_PROGRAM, LAYERS_SUM, Dumped
from tests.integration.site import Site, wait_until


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_under_the_frontend(site: Site, mode: str) -> None:
    dumped = Dumped(site, site.folder)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="tardy")
    assert dumped.restore(mode) == LAYERS_SUM
    job = site.status()["jobs"][-1]
    assert (job["kind"], job["state"], job["error"]) == ("restore", "attached", "")
    site.wait_no_gpu_memory()


def test_while_the_driver_s_part_is_not_known_to_be_back(site: Site) -> None:
    dumped = Dumped(site, site.folder)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="crossed")
    assert dumped.restore() == LAYERS_SUM
    assert site.status()["jobs"][-1]["state"] == "attached"


def test_whoever_cannot_be_watched_has_not_ended(site: Site) -> None:
    """His memory is loaded to the end, and his end is noticed all the same."""
    dumped = Dumped(site, site.folder)
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(16 << 20)
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="no pidfd")
    assert dumped.restore("lazy") == LAYERS_SUM
    assert site.status()["jobs"][-1]["state"] == "attached"
    site.wait_no_gpu_memory()


@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_a_connection_that_breaks_before_a_lazy_restore_s_window_is_open(site: Site, mode: str) -> None:
    """The program would compute with memory that is not there: it is ended, and can be restored again."""
    dumped = Dumped(site, site.folder)
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(16 << 20)
    site.environment["PHOS_LAZY"] = mode
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="cut off lazily")
    said = dumped.restore("lazy", check=False)  # CRIU's own part has succeeded
    assert f"Process {dumped.program.pid} ended before its GPU state was back." in said
    wait_until(lambda: not dumped.program.alive(), "its end")
    assert any("still being restored" in line for line in dumped.program.lines())
    assert dumped.program.result() is None
    assert site.status()["jobs"][-1]["state"] == "failed"
    site.stop_phosd()
    assert dumped.restore("lazy") == LAYERS_SUM


def test_not_under_the_frontend(site: Site) -> None:
    go = site.folder / "go"
    program = site.start(sys.executable, str(LAYERS_PROGRAM), "last", "3", str(go), under=False)
    program.wait_iterations(1)
    image = site.image()
    site.dump(program, image)
    go.touch()
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="tardy")
    site.restore(image)
    assert program.wait_result() == "3"
    assert site.status()["jobs"][-1]["state"] == "attached"


def test_taken_from_a_pool(site: Site) -> None:
    dumped = Dumped(site, site.folder)
    dumped.go.unlink()
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="tardy")
    site.run("phos-gpu", "pool", "create", str(dumped.image), "--size", "1", "--name", "p")
    dumped.program.output.write_bytes(dumped.output)
    dumped.go.touch()
    site.run("phos-gpu", "pool", "take", "p")
    wait_until(lambda: dumped.program.result() is not None, "its result")
    assert dumped.program.result() == LAYERS_SUM


def test_left_running_after_a_dump(site: Site) -> None:
    """It waits for the dump to end it, or for a file that is there as soon as the dump has begun."""
    site.environment["SOFTGPU_TOGGLE_MS"] = "300"
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="tardy")
    go = site.folder / "go"
    program = site.start(sys.executable, str(LAYERS_PROGRAM), "last", "3", str(go))
    program.wait_iterations(1)
    image = site.image()
    dump = site.begin_dump(program, image, "--leave-running", PHOS_PROTOCOL="stop")
    log = site.folder / "run" / "phosd.log"
    wait_until(lambda: "are detached" in log.read_text(), "the dump to begin")
    go.touch()
    assert program.wait_result() == "3"
    assert dump.wait() == 0
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    assert program.wait_result() == "3"
