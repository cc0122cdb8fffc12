"""The two sides of a window against each other: window_shadow.c and chunk_table.c under cow_stress.c."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.frontend_fake import CUDA_INCLUDE, ROOT

BUILD = Path(os.environ.get("PHOS_HOME", ROOT / "build"))
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
    pytest.mark.skipif(not (CUDA_INCLUDE / "cuda.h").exists(), reason=f"no cuda.h in {CUDA_INCLUDE}"),
]


def _build(folder: Path, *flags: str) -> Path:
    program = folder / "cow_stress"
    names = [
        "tests/unit/cow_stress.c",
        "frontend/window_shadow.c",
        "frontend/window_ranges.c",
        "frontend/parts.c",
        "frontend/part_reports.c",
        "frontend/ranges.c",
        "gpu_engine/cow/chunk_table.c",
    ]
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    include = [f"-I{ROOT / 'frontend'}", f"-I{BUILD / 'gen'}", "-isystem", str(CUDA_INCLUDE)]
    subprocess.run([*command, *include, "-o", program, *(ROOT / name for name in names)], check=True)
    return program


def _run(*command: str | Path) -> dict[str, int]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", done.stdout)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("tsan"), "-fsanitize=thread")


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("asan"), "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.parametrize("slots", [0, 1, 4, 200])
def test_what_is_saved_is_what_was_there(plain: Path, slots: int) -> None:
    met = _run(plain, "40", str(slots), "1", "0")
    assert met["launches"] > 0
    assert (met["shadowed"] > 0) == (slots > 0)
    if slots < 10:
        assert met["waits"] > 0
    if slots > 1:
        assert met["stream_waits"] > 0


def test_copies_that_the_driver_refuses(plain: Path) -> None:
    met = _run(plain, "60", "60", "2", "4")
    assert met["failures"] > 0
    assert met["shadowed"] > 0


@pytest.mark.parametrize("slots", [0, 3, 60])
def test_no_data_race(raced: Path, slots: int) -> None:
    # Address randomisation of newer kernels is more than this ThreadSanitizer takes.
    _run("setarch", "-R", raced, "20", str(slots), "3", "0")


def test_no_access_out_of_bounds(bounded: Path) -> None:
    _run("setarch", "-R", bounded, "20", "20", "4", "4")


@pytest.mark.parametrize("one_in", [3, 4, 8, 12, 14])
def test_an_event_that_could_not_be_made_is_not_waited_for(bounded: Path, one_in: int) -> None:
    """Few slots are taken again and again, and one copy in so many is refused."""
    _run("setarch", "-R", bounded, "20", "4", "1", str(one_in))
