"""Segments that are thousands of mappings long: where they begin and end is not looked for at every call."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.frontend_fake import CUDA_INCLUDE, ROOT

BUILD = Path(os.environ.get("PHOS_HOME", ROOT / "build"))

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


def test_calls_that_name_memory_of_several_segments(tmp_path: Path) -> None:
    """PyTorch has a segment for each of its pools, and most calls name memory of two."""
    made = tmp_path / "window_runs"
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]
    include = [f"-I{ROOT / 'frontend'}", f"-I{ROOT / 'include'}", f"-I{BUILD / 'gen'}", "-isystem", str(CUDA_INCLUDE)]
    sources = [ROOT / "tests/unit/window_runs.c", ROOT / "frontend/window_ranges.c", ROOT / "frontend/ranges.c"]
    subprocess.run(["gcc", *flags, *include, "-o", made, *sources], check=True)
    one, several = map(float, subprocess.run([made], check=True, capture_output=True, text=True).stdout.split())
    assert several < 5 * one + 200  # nanoseconds an address; usually less than twice as many
