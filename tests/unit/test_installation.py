"""What a program gets in its environment, wherever PhOS and its socket are."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from phos.gpu_engine import installation
from phos.gpu_engine.errors import Unsupported

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["with a blank", "with:a colon"])
def test_no_program_is_started_without_the_frontend(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dynamic linker says so on stderr and goes on: the program would run, and be saved slowly."""
    library = tmp_path / name / "lib" / "libphos.so"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(installation, "home", lambda: tmp_path / name)
    with pytest.raises(Unsupported, match="takes a blank or a colon for the end of a library's name"):
        installation.application_environment("nvidia", tmp_path / "phosd.sock")
    words = [ROOT / "install.sh", "--prefix", tmp_path / name]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"{os.path.realpath(tmp_path / name)} has a blank, a colon or a semicolon in its name" in refused.stderr


@pytest.mark.parametrize("name", ["plain", "with a blank"])
def test_a_detached_program_finds_its_phosd(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontend takes PHOS_DAEMON_COMMAND for words with blanks between."""
    monkeypatch.setattr(installation, "frontend_library", lambda: Path("libphos.so"))
    socket = tmp_path / name / "phosd.sock"
    given = installation.application_environment("nvidia", socket)
    words = given["PHOS_DAEMON_COMMAND"].split(" ")
    assert words[1:] in (["--ensure"], ["--ensure", "--socket", str(socket)])
    assert given["PHOS_SOCKET"] == str(socket)


def test_the_version_is_the_one_that_the_package_s_metadata_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installation.version() == "source tree"
    (tmp_path / "phos-1.2.dist-info").mkdir()
    (tmp_path / "phos-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: phos\nVersion: 1.2\n")
    assert installation.version() == metadata.version("phos") == "1.2"
