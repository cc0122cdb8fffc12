"""What stays with the driver is counted with its size, and not any more once it is gone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.frontend_fake import BUILD, ROOT

CUDA = Path(os.environ.get("CUDA_INCLUDE", BUILD / "cuda" / "include"))
GENERATED = BUILD / "gen" / "phos_api.h"


@pytest.mark.timeout(60)
@pytest.mark.skipif(not ((CUDA / "cuda.h").exists() and GENERATED.exists()), reason="not built")
def test_arrays_and_memory_nodes_are_counted_with_their_sizes(tmp_path: Path) -> None:
    program = tmp_path / "uncarried_counts"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    folders = [f"-I{ROOT / 'frontend'}", f"-I{GENERATED.parent}", "-isystem", str(CUDA)]
    sources = [ROOT / "tests/unit/uncarried_counts.c", ROOT / "frontend/uncarried.c"]
    subprocess.run(["gcc", *flags, *folders, "-o", program, *sources], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
