"""A program on two GPUs of one host: dumped, killed, restored, and compared with a run left alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import process
import pytest
from gpu_support import CONNECTED, PROGRAMS, Starter, connections_are_forgotten, without_repeats
from process import PHOS_GPU

pytestmark = pytest.mark.nvidia_only


def gpus() -> int:
    """How many a program sees. The driver is started in another process."""
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, check=False
    )
    return int(found.stdout) if found.returncode == 0 else 0


needs_two = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or gpus() < 2, reason="needs two GPUs and PyTorch"
)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The lines of a run that nothing interrupts, without the frontend."""
    program = process.Program(command(), tmp_path_factory.mktemp("alone"), "nvidia", False, {}, "alone").start()
    try:
        yield program.finish()
    finally:
        program.kill()


def command(*more: str) -> list[str]:
    """The program."""
    return process.python_program(PROGRAMS / "two_gpus.py", *more)


@needs_two
@pytest.mark.parametrize("how", ["eager", "lazy"])
@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_both_gpus_hold_what_they_held(protocol: str, how: str, wanted: list[str], start: Starter, image: Path) -> None:
    """All lines are those of the run left alone; the image is made while the program runs on, which is killed later."""
    program = start(command("--iteration-seconds", "0.05"))
    program.wait_for("^ITERATION 8 ", 180)
    program.before_dump()
    process.command(
        [PHOS_GPU, "checkpoint", str(program.pid), str(image), "--leave-running", "--protocol", protocol], 120
    )
    program.dumped(killed=False)
    _, text = process.command([PHOS_GPU, "inspect", "--json", str(image)], 60)
    said = json.loads(text)
    assert len(said["gpus"]) == 2
    assert said["protocol"] == protocol
    process.command([PHOS_GPU, "verify", str(image)], 120)
    program.wait_iterations(2)
    program.kill()
    os.environ["PHOS_RESTORE"] = how
    try:
        process.criu_restore(program, image)
    finally:
        del os.environ["PHOS_RESTORE"]
    assert without_repeats(program.finish()) == wanted


TRANSPORTS = {
    "nvlink": {},
    "host": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
}


@needs_two
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("protocol", "transport", "how"),
    [
        *((protocol, transport, "calls") for protocol in ("stop", "cow") for transport in TRANSPORTS),
        ("cow", "nvlink", "ddp"),
        ("cow", "nvlink", "fsdp"),
    ],
)
def test_ranks_that_train_with_nccl(protocol: str, transport: str, how: str, start: Starter, image: Path) -> None:
    """A checkpoint while they run on; then one that kills them, from which they come to the result of a run alone."""
    environment = {"NCCL_NVLS_ENABLE": "0", **TRANSPORTS[transport]}
    command = process.python_program(PROGRAMS / "nccl_ranks.py", "--how", how)
    alone = start(command, frontend=False, environment=environment, name="alone")
    wanted = alone.finish()
    program = start([*command, "--iteration-seconds", "0.05"], environment=environment)
    program.wait_for("^ITERATION 8 ", 180)
    os.environ["PHOS_PROTOCOL"] = protocol
    try:
        process.criu_dump(program, image, *CONNECTED, leave_running=True)
        program.wait_iterations(3)
        last = image.parent / "last"
        last.mkdir()
        process.criu_dump(program, last, *CONNECTED)
    finally:
        del os.environ["PHOS_PROTOCOL"]
    process.command([PHOS_GPU, "verify", str(image)], 120)
    process.wait_until(connections_are_forgotten, 90, "the kernel to forget closed connections")
    process.criu_restore(program, last, *CONNECTED)
    assert without_repeats(program.finish()) == wanted


@needs_two
@pytest.mark.timeout(240)
def test_collectives_while_the_image_is_written(start: Starter) -> None:
    """Gradients added up by NCCL in the window: onto a disk it is long. The image is that of *t1* all the same."""
    environment = {"NCCL_NVLS_ENABLE": "0"}
    command = process.python_program(PROGRAMS / "nccl_ranks.py", "--width", "4096", "--iterations", "250")
    alone = start(command, frontend=False, environment=environment, name="alone")
    wanted = alone.finish()
    program = start([*command, "--iteration-seconds", "0.05"], environment=environment)
    program.wait_for("^ITERATION 8 ", 180)
    with tempfile.TemporaryDirectory(prefix="phos-test-", dir="/var/tmp") as folder:
        image = Path(folder)
        os.environ["PHOS_PROTOCOL"] = "cow"
        try:
            process.criu_dump(program, image, *CONNECTED, leave_running=True)
        finally:
            del os.environ["PHOS_PROTOCOL"]
        _, text = process.command([PHOS_GPU, "inspect", "--json", str(image)], 60)
        said = json.loads(text)
        assert said["protocol"] == "cow"
        assert said["window"]["calls"] > 100
        assert said["window"]["shadowed"] > 0
        print("window:", said["window"], "phases:", said["timings"]["phases"])
        process.command([PHOS_GPU, "verify", str(image)], 120)
        program.kill()
        process.wait_until(connections_are_forgotten, 90, "the kernel to forget closed connections")
        process.criu_restore(program, image, *CONNECTED)
        assert without_repeats(program.finish()) == wanted


@needs_two
def test_host_memory_that_nccl_shares_is_refused(start: Starter, image: Path) -> None:
    """The driver could not restore it; the ranks go on, and end as they should."""
    environment = {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}
    program = start(
        [*process.python_program(PROGRAMS / "nccl_ranks.py"), "--iteration-seconds", "0.05"], environment=environment
    )
    program.wait_for("^ITERATION 8 ", 180)
    with pytest.raises(process.ProcessError, match="NCCL_CUMEM_HOST_ENABLE=0"):
        process.criu_dump(program, image, *CONNECTED, leave_running=True)
    program.wait_iterations(3)
    assert program.finish()[-1].startswith("RESULT ")
