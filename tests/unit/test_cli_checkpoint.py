"""What ``phos-gpu checkpoint`` says when a signal comes at a moment at which there is nothing left to be undone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from phos.cli import checkpoint as module
from phos.cli.main import main

def asked(*_, **__):
    os.kill(os.getpid(), int(sys.argv[1]))
    raise AssertionError("the signal did not end it")

module._require_cuda = lambda pid: None
module.reach.ensure = lambda **_: None
module.needs_shell_job = lambda pid: False
module.run_dump = lambda *_: (0, "", 0)  # the image is whole
module.client.wait_image = asked
main(["checkpoint", sys.argv[2], "image"], prog_name="phos-gpu")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_dump_is_told_that_the_image_is_whole(tmp_path: Path, number: int) -> None:
    """Whoever saw its status alone would take the image for one that was given up, or the process for one that runs."""
    with subprocess.Popen(["sleep", "60"]) as other:
        command = [sys.executable, "-c", PROGRAM, str(int(number)), str(other.pid)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        other.kill()
    assert done.stderr == f"phos-gpu checkpoint: The interruption came too late: process {other.pid} is in image.\n"
    assert done.returncode == 128 + number
