"""Programs that would have an io_uring, which CRIU cannot dump, do without it: frontend/io_uring.c."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from tests.integration.site import Site, wait_until

PROGRAM = Path(__file__).parent / "programs" / "io_uring.py"


def kernel_has_any() -> bool:
    return bool(ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120)) >= 0)


pytestmark = pytest.mark.skipif(not kernel_has_any(), reason="the kernel lets nobody have an io_uring")


def test_there_is_none_and_all_other_calls_are_as_ever(site: Site) -> None:
    program = site.start(sys.executable, str(PROGRAM), str(site.folder / "file"), str(site.folder / "go"))
    wait_until(lambda: "READY" in program.lines(), "the program")
    assert "io_uring: Function not implemented" in program.lines()
    image = site.image()
    site.dump(program, image)
    site.restore(image)
    (site.folder / "go").touch()
    assert program.wait_result() == "right"


def test_there_is_one_if_that_is_asked_for(site: Site) -> None:
    """And where the frontend is not: neither can be dumped."""
    # Each has a file of its own: both write to it, and read it again, at the same time.
    first, second = ((sys.executable, str(PROGRAM), str(site.folder / name), str(site.folder / "go")) for name in "ab")
    programs = [site.start(*first, PHOS_IO_URING="on"), site.start(*second, under=False)]
    for number, program in enumerate(programs):
        wait_until(lambda: "READY" in program.lines(), "the program")  # noqa: B023
        assert "io_uring: Success" in program.lines()
        image = site.image(str(number))
        assert site.dump(program, image, check=False).returncode != 0
        assert not (image / "phos-commit.img").exists()
    (site.folder / "go").touch()
    assert [program.wait_result() for program in programs] == ["right", "right"]
