"""Processes that are watched while their first concurrent checkpoint is prepared, with the real CRIU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from phos.images.reader import Image
from tests.integration.site import Program, Site, wait_until
from tests.integration.test_cow import dump_concurrently
from tests.integration.test_cow_window import come_back, end, start
from tests.windows import windows

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]


@pytest.fixture
def slow_site(site: Site, tmp_path: Path) -> Site:
    """A site where preparing a checkpoint takes two seconds."""
    site.environment["PHOS_PROTOCOL"] = "cow"
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="unhurried")
    windows.build(tmp_path)
    return site


def seen(site: Site) -> list[tuple[int, int, int]]:
    """How many chunks were touched, how many there are, and how many were written to, for each process watched."""
    log = (site.folder / "run" / "phosd.log").read_text()
    found = re.findall(r"touched (\d+) of (\d+) chunks while it was watched, and wrote to (\d+)", log)
    return [(int(touched), int(chunks), int(written)) for touched, chunks, written in found]


def begin_to_watch(site: Site, program: Program, image: Path) -> None:
    """A dump in the background, which returns once the program is watched, or soon will be."""
    site.begin_dump(program, image, "--leave-running")
    wait_until(lambda: any(job["state"] == "writing" for job in site.status()["jobs"]), "the dump to begin")
    time.sleep(0.3)


def test_the_first_image_has_the_order_of_what_was_seen(slow_site: Site) -> None:
    program = start(slow_site, 61)
    image = dump_concurrently(slow_site, program, "first")
    ((touched, chunks, written),) = seen(slow_site)
    assert 0 < written <= touched <= chunks
    with Image.open(image) as opened:
        assert any(part.chunks for part in opened.inventory.order)
    dump_concurrently(slow_site, program, "second")
    assert len(seen(slow_site)) == 1, "what is known need not be found out again"
    end(program)
    come_back(slow_site, program, image)


def test_a_checkpoint_that_is_prepared_for_nothing(slow_site: Site) -> None:
    program = start(slow_site, 62)
    dump = slow_site.begin_dump(program, slow_site.image("refused"), "--leave-running")
    assert dump.wait(60) != 0
    assert seen(slow_site) == []
    image = dump_concurrently(slow_site, program, "next")
    assert seen(slow_site)[0][2] > 0
    end(program)
    come_back(slow_site, program, image)


def test_a_program_that_ends_while_it_is_watched(slow_site: Site) -> None:
    program = start(slow_site, 63)
    begin_to_watch(slow_site, program, slow_site.image())
    end(program)
    slow_site.wait_no_gpu_memory()


def test_phosd_is_killed_while_a_program_is_watched(slow_site: Site) -> None:
    program = start(slow_site, 64)
    begin_to_watch(slow_site, program, slow_site.image())
    os.kill(slow_site.daemon_pid(), signal.SIGKILL)
    slow_site.run("phosd", "--ensure")
    image = dump_concurrently(slow_site, program, "next")
    end(program)
    come_back(slow_site, program, image)
