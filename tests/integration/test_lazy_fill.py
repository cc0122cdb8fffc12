"""``criu lazy-pages`` with what is preloaded into it: all of a process's memory comes at once (lazy_fill/)."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.site import Program, Site, wait_until
from tests.integration.test_lazy import EXAMPLES

CHANGES = Path(__file__).parent / "programs" / "changes_memory.py"
FILLED = re.compile(r"phos: (\d+) bytes of process (\d+) are there")


def rounds(program: Program) -> int:
    """How many rounds the program has made. What it found wrong is no round."""
    wrong = [line for line in program.lines() if line.startswith("WRONG")]
    assert not wrong, wrong
    return sum(line.startswith("ROUND") for line in program.lines())


@pytest.fixture
def image() -> Iterator[Path]:
    """A directory in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("threads", ["0", "1", "3"])
def test_a_program_that_changes_its_memory_finds_it_right(site: Site, image: Path, threads: str) -> None:
    """With CRIU alone: a program that has nothing to do with GPUs is restored with it as well."""
    program = site.start(sys.executable, str(CHANGES), "48", under=False)
    wait_until(lambda: rounds(program) >= 2, "the program to change its memory")
    site.run("criu", "dump", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4")
    site.gone(program)
    before = rounds(program)
    options = "-D", str(image), "-v4"
    pages = site.background("criu", "lazy-pages", "-o", "pages.log", *options, PHOS_LAZY_FILL_THREADS=threads)
    wait_until((image / "lazy-pages.socket").exists, "criu lazy-pages")
    site.run("criu", "restore", "-d", "--lazy-pages", "-o", "restore.log", *options)
    wait_until(lambda: rounds(program) >= before + 5, "the program to go on")
    assert pages.wait() == 0
    found = FILLED.search((image / "pages.log").read_text())
    assert bool(found) == (threads != "0")
    if found:
        # Some of it may have been the program's to change by then.
        assert 1 << 20 <= int(found[1]) <= (image / "pages-1.img").stat().st_size


def test_phos_gpu_restore_waits_for_it(site: Site, image: Path) -> None:
    expected = site.example("mlp", *EXAMPLES["mlp"][:2], under=False).wait_result()
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    site.dump(program, image)
    said = site.run("phos-gpu", "restore", "--lazy", "--json", str(image), PHOS_LAZY_FILL_THREADS="2")
    assert json.loads(said.stdout)["mode"] == "lazy"
    assert program.wait_result() == expected


def test_another_criu_is_started_as_it_is(site: Site, tmp_path: Path) -> None:
    """A launcher of somebody else's stands for any CRIU that nothing may be preloaded into."""
    other = tmp_path / "criu"
    other.write_text('#!/bin/sh\necho "$@"\n')
    other.chmod(0o755)
    said = site.run("criu", "lazy-pages", "-D", str(tmp_path), PHOS_CRIU=str(other))
    assert said.stdout.split() == ["lazy-pages", "-D", str(tmp_path)]
