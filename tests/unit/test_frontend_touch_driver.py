"""Handles, graphs and tensor maps over a driver of our own: touch_cases.c with touch_driver.c, with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.frontend_fake import BUILD, CUDA_INCLUDE, ROOT

GENERATED = BUILD / "gen"
PARTS = (
    "access arguments functions functions_tell functions_touch graph_nodes graphs handles ranges tensor_maps touch "
    "touch_copy touch_launch touch_set"
)

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not ((CUDA_INCLUDE / "cuda.h").exists() and (GENERATED / "phos_api.h").exists() and shutil.which("gcc")),
        reason="not built",
    ),
]


def _build(folder: Path, *flags: str) -> Path:
    program = folder / "touch_cases"
    own = [ROOT / "tests/unit" / name for name in ("touch_cases.c", "touch_driver.c")]
    sources = [*own, *(ROOT / "frontend" / f"{part}.c" for part in PARTS.split())]
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    include = [f"-I{ROOT / 'frontend'}", f"-I{GENERATED}", "-isystem", str(CUDA_INCLUDE)]
    subprocess.run([*command, *include, "-o", program, *sources], check=True)
    return program


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("plain"), "-O2")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("asan"), "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("tsan"), "-g", "-fsanitize=thread")


def _run(*command: str | Path) -> str:
    environment = dict(os.environ, ASAN_OPTIONS="detect_leaks=0")
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("scenario", ["kernels", "graphs", "tensors", "storm"])
def test_touches(checked: Path, scenario: str) -> None:
    _run(checked, scenario)


def test_touches_have_no_data_race(raced: Path) -> None:
    # Address randomisation of newer kernels is more than this ThreadSanitizer takes.
    _run("setarch", "-R", raced, "storm")


def test_a_launch_is_looked_up_in_well_under_a_microsecond(plain: Path) -> None:
    spent = float(_run(plain, "cost"))
    assert spent < 500, f"{spent} ns"
