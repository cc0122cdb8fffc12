"""PyTorch's jobs of several processes: dumped while they run on, killed, restored, compared with a run left alone.

PyTorch computes on its GPU, or, on the software GPU, on the CPU beside memory of that: processes, files, shared memory
and connections are the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import process
import pytest
from gpu_support import CONNECTED, DEVICE, PROGRAMS, Starter, connections_are_forgotten, without_repeats
from process import PHOS_GPU

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")

PACED = ("--iteration-seconds", "0.05")
ENOUGH = ("--iterations", "150")
"""They do not come to their end while an image is made."""
MANY = ("--iterations", "600")
"""Nor while four are."""


def interrupted_is_the_same(command: list[str], start: Starter, image: Path, *options: str) -> None:
    """An image is made while the job runs on; it is killed later, and comes back to where the image is of."""
    wanted = start(command, frontend=False, name="alone").finish()
    assert any(line.startswith("ITERATION") for line in wanted)
    program = start([*command, *PACED])
    program.wait_for("^ITERATION 8 ", 180)
    process.criu_dump(program, image, *options, leave_running=True)
    program.wait_iterations(4)
    program.kill()
    if options:
        process.wait_until(connections_are_forgotten, 90, "the kernel to forget closed connections")
    process.criu_restore(program, image, *options)
    assert without_repeats(program.finish()) == wanted


@pytest.mark.parametrize("sharing", ["file_descriptor", "file_system"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loader(method: str, sharing: str, start: Starter, image: Path) -> None:
    """Workers however they are started, and however their tensors come."""
    options = ("--start", method, "--sharing", sharing)
    interrupted_is_the_same(process.python_program(PROGRAMS / "pytorch_loader.py", *ENOUGH, *options), start, image)


def torchrun(*options: str) -> list[str]:
    """Two ranks, of which rank 0 reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    return [*agent, str(PROGRAMS / "pytorch_ranks.py"), *options]


def test_torchrun(start: Starter, image: Path) -> None:
    """Its agent, the store of that, which is libuv's, and two ranks that gloo connects."""
    interrupted_is_the_same(torchrun(*ENOUGH), start, image, *CONNECTED)


def test_guarded_torchrun(start: Starter, image: Path, tmp_path: Path) -> None:
    """A rank is killed twice: each time the whole job goes on from its newest image, and comes to its result.

    Not while an image is made: one of a job whose agent has not noticed yet would come back to fail at once.
    """
    wanted = start(torchrun(*MANY), frontend=False, name="alone").finish()
    settings, report, said = tmp_path / "criu.conf", tmp_path / "report", tmp_path / "guard"
    settings.write_text("tcp-established\nnetwork-lock skip\n")
    job = torchrun(*MANY, *PACED, "--report", str(report))
    images = image.parent / "images"
    command = [PHOS_GPU, "guard", "--images", str(images), "--interval", "5", "--json", "--", *job]

    def events(name: str) -> list[dict[str, object]]:
        found = [json.loads(line) for line in said.read_text().splitlines() if line.startswith("{")]
        return [event for event in found if event["event"] == name]

    with open(said, "wb") as output:
        environment = {**os.environ, "CRIU_CONFIG_FILE": str(settings), "PHOS_DEVICE": DEVICE}
        guard = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        for times in (1, 2):
            before = len(events("checkpoint"))
            process.wait_until(lambda n=before: len(events("checkpoint")) >= n + 2, 120, "two checkpoints")  # type: ignore[misc]
            agent = int(json.loads((images / "job.json").read_text())["pid"])
            os.kill(process.descendants(agent)[0], 9)
            process.wait_until(lambda n=times: len(events("restored")) >= n, 120, "the job to be restored")  # type: ignore[misc]
        assert guard.wait(120) == 0, said.read_text()[-3000:]
    finally:
        left = process.descendants(guard.pid)
        guard.kill()  # it ends nothing then, and keeps nothing from being said
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        guard.wait(60)
    lines = [line for line in report.read_text().splitlines() if not line.startswith("#")]
    assert without_repeats(lines) == wanted
