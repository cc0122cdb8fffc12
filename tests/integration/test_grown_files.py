"""A file that a program writes to has grown since it was dumped: gpu_engine/restore/grown_files.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.site import Site, example_words, wait_until

OPTIONS = ("--iterations", "100", "--iteration-seconds", "0.03")


class Logging:
    """A program with a log, dumped while it ran on, and killed since."""

    def __init__(self, site: Site) -> None:
        self.site, self.log = site, site.folder / "train.log"
        end = site.folder / "end"
        words = ("sh", "-c", 'log=$1; shift; exec "$@" >"$log"', "sh", str(self.log), *example_words("mlp"), *OPTIONS)
        self.program = site.start(*words, "--until", str(end))
        self._reach(10)
        self.image = site.image()
        site.dump(self.program, self.image, "--leave-running")
        self._reach(self.text().count("ITERATION") + 5)
        os.kill(self.program.pid, signal.SIGKILL)
        site.gone(self.program)
        end.touch()

    def _reach(self, iteration: int) -> None:
        wait_until(lambda: self.log.exists() and self.text().count("ITERATION") >= iteration, "output")

    def text(self) -> str:
        return self.log.read_text()

    def kept(self) -> list[Path]:
        return list(self.log.parent.glob("train.log.cut-*"))

    def result(self) -> str:
        wait_until(lambda: "RESULT" in self.text(), "the result")
        wait_until(lambda: not self.program.alive(), "its end")
        lines = self.text().splitlines()
        assert [line.split()[1] for line in lines if line.startswith("ITERATION")] == [str(i + 1) for i in range(100)]
        (result,) = (line.split()[1] for line in lines if line.startswith("RESULT"))
        return result


@pytest.fixture
def expected(site: Site) -> str:
    return site.reference("mlp", *OPTIONS[:2])


def test_it_is_cut_if_that_is_asked_for(site: Site, expected: str) -> None:
    logging = Logging(site)
    before = logging.text()
    refused = site.restore(logging.image, check=False)
    assert refused.returncode != 0
    assert "has bad size" in site.errors(logging.image / "restore.log")
    told = site.run("phos-gpu", "restore", str(logging.image), check=False)
    assert "With PHOS_GROWN_FILES=cut in this command's environment" in told.stderr
    assert logging.text() == before
    refused = site.restore(logging.image, check=False, PHOS_GROWN_FILES="yes")
    assert "PHOS_GROWN_FILES=yes means nothing" in site.errors(logging.image / "restore.log")
    assert not logging.kept()
    site.restore(logging.image, PHOS_GROWN_FILES="cut")
    assert logging.result() == expected
    (kept,) = logging.kept()
    assert before.endswith(kept.read_text())


def test_it_is_not_where_the_restore_is_refused(site: Site) -> None:
    logging = Logging(site)
    before = logging.text()
    with logging.log.open("a"):
        refused = site.restore(logging.image, check=False, PHOS_GROWN_FILES="cut")
        assert refused.returncode != 0
        assert f"process {os.getpid()}" in refused.stdout + refused.stderr + site.errors(logging.image / "restore.log")
    (logging.image / "phos-commit.img").rename(logging.image / "away")
    assert site.restore(logging.image, check=False, PHOS_GROWN_FILES="cut").returncode != 0
    assert logging.text() == before
    assert not logging.kept()
    (logging.image / "away").rename(logging.image / "phos-commit.img")
    site.restore(logging.image, PHOS_GROWN_FILES="cut")
    assert logging.kept()


MAPS = """
import ctypes, mmap, runpy, sys
with open(sys.argv[1], "rb") as library:  # as the dynamic linker does it: mmap.mmap() would keep it open
    size = ctypes.c_size_t(8192)
    ctypes.CDLL(None).mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, library.fileno(), ctypes.c_long(0))
sys.argv[:2] = []
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_library_that_was_replaced_is_no_log(site: Site) -> None:
    """To cut it would be the wrong thing to do, and is not advised."""
    library = site.folder / "library.so"
    library.write_bytes(b"1" * 8192)
    python, *words = example_words("mlp")
    program = site.until_awaited(python, "-c", MAPS, str(library), *words, *OPTIONS, "--until")
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image)
    library.write_bytes(b"2" * 9000)
    told = site.run("phos-gpu", "restore", str(image), check=False)
    assert "has bad size 9000 (expect 8192)" in told.stderr
    assert "A file that they have mapped, a library mostly, is another one than at the dump" in told.stderr
    assert "PHOS_GROWN_FILES" not in told.stderr
    library.write_bytes(b"1" * 8192)
    site.restore(image)
    assert program.wait_result() == site.reference("mlp", *OPTIONS[:2])
