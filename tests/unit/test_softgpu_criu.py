"""The software GPU under the real CRIU: refused with its GPU open, dumped and restored once it is checkpointed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .softgpu_host import environment, needs_softgpu, program, run
from .test_softgpu_checkpoint import CALLER, WORKER

CRIU = os.environ.get("PHOS_CRIU") or shutil.which("criu") or ""
pytestmark = [
    needs_softgpu,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root"),
    pytest.mark.skipif(not CRIU and not os.environ.get("PHOS_NO_SKIP"), reason="no criu on the PATH"),
]

# The worker with files for its input and output: CRIU cannot carry a pipe to the test.
FILES = """
lines = open("commands", "r")
def input():
    while not (line := lines.readline()):
        time.sleep(0.01)
    return line.strip()
"""


def wait_for(path: Path, text: str) -> None:
    for _ in range(1000):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} did not appear: {path.read_text()}")


def criu(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CRIU, *map(str, arguments)], check=False, capture_output=True, text=True, timeout=60)


def test_criu_refuses_an_open_gpu_and_carries_a_checkpointed_one(tmp_path: Path) -> None:
    images, output = tmp_path / "images", tmp_path / "output"
    images.mkdir()
    commands = tmp_path / "commands"
    commands.touch()
    with output.open("wb") as out:
        worker = subprocess.Popen(
            program(FILES + WORKER), env=environment(), cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    pid = worker.pid

    def tell(line: str, answer: str) -> None:
        with commands.open("a") as file:
            file.write(line + "\n")
        wait_for(output, answer)

    def call(text: str) -> None:
        run(CALLER + text, TARGET=pid)

    try:
        wait_for(output, "ready")
        tell("", "step 1 0")
        refused = criu("dump", "-t", pid, "-D", images, "-o", "refused.log", "--leave-running")
        assert refused.returncode != 0
        log = (images / "refused.log").read_text()
        assert "Can't dump file" in log
        assert "userfaultfd" in log or "perf_event" in log
        tell("", "step 2 0")  # and it goes on

        call("assert lock() == checkpoint() == GOOD")
        dumped = criu("dump", "-t", pid, "-D", images, "-o", "dump.log")
        assert dumped.returncode == 0, (images / "dump.log").read_text()[-2000:]
        worker.wait()
        restored = criu("restore", "-D", images, "-o", "restore.log", "-d")
        assert restored.returncode == 0, (images / "restore.log").read_text()[-2000:]
        call("assert state() == 'CHECKPOINTED' and restore() == unlock() == GOOD")
        tell("", "step 3 0")
        tell("end", "end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        worker.wait()
