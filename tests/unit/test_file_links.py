"""Links that CRIU is kept from making in /dev/shm: criu_plugin/file_links.c under file_links_cases.c."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_hidden_pages import HEADER, ROOT

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
    pytest.mark.skipif(HEADER is None, reason="no criu-plugin.h"),
    pytest.mark.skipif(os.geteuid() != 0, reason="links to what is open are root's to make"),
]

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("file_links") / "cases"
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = [f"-I{ROOT / 'criu_plugin'}", f"-I{ROOT / 'include'}", "-isystem", str(HEADER)]
    sources = [ROOT / "tests/unit/file_links_cases.c", ROOT / "criu_plugin/file_links.c"]
    subprocess.run(["gcc", *flags, *sanitize, *include, "-o", made, *sources], check=True)
    return made


@pytest.fixture
def link() -> Iterator[Path]:
    """Called as CRIU's are, but for the number."""
    path = SHARED_MEMORY / f"link_remap.{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def answers(program: Path, names: bool, folder: Path, link: Path) -> list[str]:
    words = [program, str(int(names)), folder, f".{link}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={"ASAN_OPTIONS": "detect_leaks=0"})
    return done.stdout.splitlines()


def test_a_link_in_shared_memory_is_neither_made_nor_removed(program: Path, link: Path) -> None:
    assert answers(program, True, SHARED_MEMORY, link) == ["0", "0 0"]
    link.write_text("another dump's")
    assert answers(program, True, SHARED_MEMORY, link) == ["1", "0 1"]
    assert link.read_text() == "another dump's"


def test_where_phosd_does_not_name_files_all_is_criu_s_to_do(program: Path, link: Path) -> None:
    assert answers(program, False, SHARED_MEMORY, link) == ["1", "0 0"]
    link.write_text("another dump's")
    assert answers(program, False, SHARED_MEMORY, link) == ["exists"]


@pytest.mark.parametrize("name", ["link_remap.3", "link"])
def test_elsewhere_and_by_other_names_links_are_made(program: Path, tmp_path: Path, link: Path, name: str) -> None:
    assert answers(program, True, tmp_path, tmp_path / name) == ["1", "0 0"]
    other = link.with_name(link.name.replace("link_remap", "link"))
    assert answers(program, True, SHARED_MEMORY, other) == ["1", "0 0"]
