"""The Makefile: one run is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.frontend_fake import CUDA_INCLUDE, ROOT


@pytest.mark.timeout(120)
@pytest.mark.skipif(not (CUDA_INCLUDE / "cuda.h").exists() or not shutil.which("protoc-c"), reason="not built")
def test_what_a_generator_writes_anew_is_compiled_in_the_same_run(tmp_path: Path) -> None:
    """And what it writes as before is not. In a clone with one source of the frontend's, so as to take seconds."""
    for folder in ("frontend", "packaging", "proto"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=lambda _, names: {n for n in names if n.endswith(".c")}
        )
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "frontend" / "intercept.c", tmp_path / "frontend")
    wanted = "build/obj/frontend/intercept.o"
    # Side by side: make looked at what is generated while the generator still ran. Not optimised: nobody runs it.
    variables = [f"PYTHON={sys.executable}", f"CUDA_INCLUDE={CUDA_INCLUDE}", "CFLAGS=-O0"]
    command = ["make", "-j2", "-C", tmp_path, *variables, wanted]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "BUILD")}

    def compiled() -> bool:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return f"-o {wanted}" in done.stdout

    assert compiled()
    assert not compiled()
    code = tmp_path / "frontend" / "own_code.py"
    code.write_text(code.read_text() + "\n# nothing else\n")
    assert not compiled()
    code.write_text(code.read_text().replace('        "cuMemcpyAsync",\n', ""))
    assert compiled()
    assert not compiled()
