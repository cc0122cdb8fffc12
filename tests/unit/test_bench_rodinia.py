"""The programs in the manner of Rodinia compute on the software GPU what plain Python computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOFTWARE_GPU = ROOT / "build" / "softgpu"
RUNNER = ROOT / "bench" / "programs" / "audited_rodinia.py"
PROGRAMS = sorted(path.stem for path in (ROOT / "bench" / "rodinia_like").glob("*.py") if path.stem != "common")

pytestmark = pytest.mark.skipif(
    not (SOFTWARE_GPU / "libcuda.so.1").exists(), reason="the software GPU is not built: make softgpu"
)


def run(*words: str, runner: Path = RUNNER) -> subprocess.CompletedProcess[str]:
    """Run the programs without PhOS."""
    pytest.importorskip("cuda.bindings.nvrtc")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(SOFTWARE_GPU)}
    command = [sys.executable, str(runner), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_result_is_that_of_plain_python(name: str) -> None:
    done = run(name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: right")


def test_all_of_them_run_in_one_process() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-1]] == PROGRAMS
    assert done.stdout.splitlines()[-1] == "RESULT right"


def test_a_wrong_result_is_said(tmp_path: Path) -> None:
    """The comparison is one: with another kernel, the program fails."""
    folder = tmp_path / "bench" / "rodinia_like"
    folder.mkdir(parents=True)
    for source in (ROOT / "bench" / "rodinia_like").glob("*.py"):
        text = source.read_text()
        if source.stem == "pathfinder":
            text = text.replace("to[x] = best + wall", "to[x] = best - wall")
        (folder / source.name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bench" / "programs").mkdir()
    runner = tmp_path / "bench" / "programs" / RUNNER.name
    runner.write_text(RUNNER.read_text())
    done = run("pathfinder", "bfs", runner=runner)
    assert done.returncode != 0
    assert "pathfinder: the cost of a way" in done.stdout
    assert "bfs: right" in done.stdout
    assert "The result is wrong: pathfinder" in done.stderr
