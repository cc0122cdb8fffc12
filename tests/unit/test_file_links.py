"""Links that CRIU is kept from making in /dev/shm: criu_plugin/file_links.c under file_links_cases.c."""

from __future__ import annotations

import errno
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
def shared() -> Iterator[Path]:
    """A file in /dev/shm with two names, of which one is a link of CRIU's."""
    path = SHARED_MEMORY / f"phos-test-{uuid.uuid4().hex}"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def link() -> Iterator[Path]:
    """Called as CRIU's are, but for the number."""
    path = SHARED_MEMORY / f"link_remap.{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def answers(program: Path, names: bool, file: Path, link: Path, links: str = "") -> list[str]:
    words = [program, str(int(names)), file, f".{link}"]
    environment = {"ASAN_OPTIONS": "detect_leaks=0", **({"PHOS_LINKS": links} if links else {})}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines()


MADE = ["1", "0 0"]
REFUSED = [os.strerror(errno.ENOTSUP)]


@pytest.mark.parametrize("links", ["", "ours"])
def test_a_link_in_shared_memory_is_neither_made_nor_removed(
    program: Path, shared: Path, link: Path, links: str
) -> None:
    """But noted, with the file that it would have been to."""
    noted = f"{link} {shared.stat().st_ino}"
    assert answers(program, True, shared, link, links) == ["0", "0 0", noted]
    link.write_text("another dump's")
    assert answers(program, True, shared, link, links) == ["1", "0 1", noted]
    assert link.read_text() == "another dump's"


def test_where_phosd_does_not_name_files_all_is_criu_s_to_do(program: Path, shared: Path, link: Path) -> None:
    assert answers(program, False, shared, link) == MADE
    assert answers(program, False, shared, link, "ours") == REFUSED  # nobody asked CRIU for links
    link.write_text("another dump's")
    assert answers(program, False, shared, link) == [os.strerror(errno.EEXIST)]


def test_a_file_that_has_no_name_there_gets_its_link(program: Path, shared: Path, link: Path) -> None:
    """It is in a folder, or has a link of CRIU's only."""
    folder = shared.with_name(f"{shared.name}-folder")
    folder.mkdir()
    try:
        moved = shared.rename(folder / "file")
        assert answers(program, True, moved, link) == MADE
        assert answers(program, True, moved, link, "ours") == REFUSED
        other = SHARED_MEMORY / f"{link.name}1"
        os.link(moved, other)
        assert answers(program, True, moved, link) == MADE
        other.unlink()
    finally:
        shutil.rmtree(folder)


def test_elsewhere_and_by_other_names_links_are_made(program: Path, tmp_path: Path, shared: Path, link: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert answers(program, True, file, tmp_path / "link_remap.3") == MADE
    assert answers(program, True, file, tmp_path / "link_remap.3", "ours") == REFUSED
    assert answers(program, True, file, tmp_path / "link", "ours") == MADE
    assert answers(program, True, shared, link.with_name(f"{shared.name}-link"), "ours") == MADE
