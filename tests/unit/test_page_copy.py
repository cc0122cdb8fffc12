"""Finding and copying a frozen task's pages: page_copy.c and page_find.c under page_copy_cases.c, with sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.page_scan import needs_page_scan

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [needs_page_scan, pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")]

CASES = [
    "whole",
    "unprepared",
    "grown",
    "early",
    "not-early",
    "search-fails",
    "search-fails-later",
    "unreadable",
    "copy-fails",
    "dropped",
    "dropped-while-searched",
    "too-few-threads",
    "several",
    "ended",
]


def _build(folder: Path, *sanitize: str) -> Path:
    made = folder / "cases"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *sanitize]
    include = [f"-I{ROOT / 'gpu_engine'}", f"-I{ROOT / 'include'}"]
    wrap = [f"-Wl,--wrap={name}" for name in ("ioctl", "process_vm_readv", "pthread_create")]
    sources = [
        ROOT / "tests/unit/page_copy_cases.c",
        *(ROOT / "gpu_engine" / f"page_{it}.c" for it in ("copy", "find")),
    ]
    subprocess.run(["gcc", *flags, *include, "-o", made, *sources, *wrap], check=True)
    return made


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("tsan"), "-fsanitize=thread")


@pytest.fixture(scope="module")
def bounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("asan"), "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.parametrize("case", CASES)
def test_with_no_access_out_of_bounds_and_no_leak(bounds: Path, case: str) -> None:
    assert subprocess.run([bounds, case], capture_output=True, text=True, check=True, timeout=60).stdout == "ok\n"


@pytest.mark.parametrize("case", CASES)
def test_with_no_data_race(races: Path, case: str) -> None:
    command = ["setarch", "-R", races, case]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "ok\n"
