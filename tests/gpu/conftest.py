"""What the tests on a real GPU share. `PHOS_TEST_DEVICE=software` runs those that can on the software GPU instead."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import process
from gpu_support import DEVICE, Starter
from process import Program

HERE = Path(__file__).resolve().parent


def _missing() -> str:
    """Say what these tests need and do not find; empty if all is there."""
    if DEVICE == "nvidia" and not os.path.exists("/dev/nvidiactl"):
        return "there is no NVIDIA GPU"
    if os.geteuid() != 0:
        return "CRIU needs root"
    for command in (process.CRIU, process.PHOS_GPU):
        if shutil.which(command) is None:
            return f"{command} is not on the PATH: install PhOS first"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test here, and skip what cannot run; PHOS_REQUIRE_GPU=1 turns skips into failures."""
    missing = "" if os.environ.get("PHOS_REQUIRE_GPU") == "1" else _missing()
    for item in items:
        if HERE not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.serial)
        item.add_marker(pytest.mark.timeout(300))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif DEVICE == "software" and item.get_closest_marker("nvidia_only"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker that is only used here."""
    config.addinivalue_line("markers", "nvidia_only: cannot run on the software GPU")


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    process.adopt_orphans()
    os.environ["PHOS_DEVICE"] = DEVICE  # for phosd, whichever command starts it


@pytest.fixture
def image() -> Iterator[Path]:
    """Return an empty folder in memory for an image, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="phos-test-", dir="/dev/shm"))
    (folder / "image").mkdir()
    yield folder / "image"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Return a function that starts a program, under the frontend unless told otherwise; all are killed at the end."""
    started: list[Program] = []

    def starter(
        command: Sequence[str],
        *,
        frontend: bool = True,
        environment: dict[str, str] | None = None,
        name: str = "program",
    ) -> Program:
        program = Program(command, tmp_path, DEVICE, frontend, environment or {}, name)
        started.append(program)
        return program.start()

    yield starter
    for program in started:
        program.kill()
