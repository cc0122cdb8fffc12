"""Device files that CRIU is told to do without: criu_plugin/device_files.c under device_files_cases.c."""

from __future__ import annotations

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_hidden_pages import HEADER, ROOT

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
    pytest.mark.skipif(HEADER is None, reason="no criu-plugin.h"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("device_files") / "cases"
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = [f"-I{ROOT / 'criu_plugin'}", f"-I{ROOT / 'include'}", "-isystem", str(HEADER)]
    sources = [ROOT / "tests/unit/device_files_cases.c", ROOT / "criu_plugin/device_files.c"]
    subprocess.run(["gcc", *flags, *sanitize, *include, "-o", made, *sources], check=True)
    return made


def answers(program: Path, *begins: str) -> list[str]:
    # What a dump has noted lives as long as CRIU does.
    done = subprocess.run(
        [program, *begins], capture_output=True, text=True, check=True, env={"ASAN_OPTIONS": "detect_leaks=0"}
    )
    return done.stdout.splitlines()


NOT_OURS = str(-errno.ENOTSUP)


def test_those_that_phosd_names_are_left_out(program: Path) -> None:
    found = answers(program, "/dev/nvidia", "/dev/zer")
    assert found == [f"{NOT_OURS} {NOT_OURS} {NOT_OURS}", "0 0", "0", "1 0", "0", "1 1", "1"]


@pytest.mark.parametrize("begins", [(), ("/dev/nvidia",), ("/dev/zeros", "dev/zero")])
def test_all_others_are_for_criu_to_refuse(program: Path, begins: tuple[str, ...]) -> None:
    found = answers(program, *begins)
    assert found == [f"{NOT_OURS} {NOT_OURS} {NOT_OURS}", "0 0", NOT_OURS, "0 0", NOT_OURS, "0 0", "1"]
