"""The ways a process can go through dumps and restores, on a real GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import process
from gpu_support import DEVICE, Starter, example, reference, without_repeats
from process import PHOS_GPU


def test_leave_running_goes_on_and_its_image_restores(start: Starter, image: Path) -> None:
    """After `--leave-running` the program computes on; after its death the image brings back the earlier moment."""
    program = start(example("mlp", "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 4 ")
    process.criu_dump(program, image, leave_running=True)
    program.wait_iterations(3)
    assert program.alive()
    program.kill()
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == reference("mlp")


def test_leave_running_ends_with_the_right_result(start: Starter, image: Path) -> None:
    """The dumped program itself is not disturbed."""
    program = start(example("stencil", "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 4 ")
    process.criu_dump(program, image, leave_running=True)
    assert program.finish() == reference("stencil")


def test_restores_twice(start: Starter, image: Path) -> None:
    """One image, two lives."""
    program = start(example("device_pointer", "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 6 ")
    process.criu_dump(program, image)
    process.criu_restore(program, image)
    program.wait_iterations(2)
    program.kill()
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == reference("device_pointer")


def test_ten_generations(start: Starter, image: Path) -> None:
    """Dump, kill, restore, compute, and again, ten times."""
    program = start(example("mlp", "--iteration-seconds", "0.5"))
    program.wait_for("^ITERATION 2 ")
    for generation in range(10):
        folder = image / str(generation)
        folder.mkdir()
        process.criu_dump(program, folder)
        process.criu_restore(program, folder)
        shutil.rmtree(folder)
    assert without_repeats(program.finish()) == reference("mlp")


def test_restores_into_a_fresh_daemon(start: Starter, image: Path) -> None:
    """Nothing that phosd held is needed: it is ended between dump and restore."""
    program = start(example("pointer_chase", "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 3 ")
    process.criu_dump(program, image)
    process.stop_daemon()
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == reference("pointer_chase")


def test_a_killed_daemon_is_replaced(start: Starter, image: Path) -> None:
    """kill -9 of phosd while the program computes: it computes on, and can be dumped and restored afterwards."""
    program = start(example("mlp", "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 2 ")
    process.wait_until(lambda: process.daemon_pid() > 0, 30, "phosd to answer")
    os.kill(process.daemon_pid(), signal.SIGKILL)
    program.wait_iterations(3)
    process.criu_dump(program, image)
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == reference("mlp")


def test_the_phos_gpu_commands_do_the_same(start: Starter, image: Path) -> None:
    """`phos-gpu checkpoint` and `phos-gpu restore` in place of criu's command lines."""
    program = start(example("struct_argument", "--iteration-seconds", "0.1"))
    program.wait_for("^ITERATION 5 ")
    program.before_dump()
    process.command([PHOS_GPU, "checkpoint", str(program.pid), str(image)], 120)
    program.dumped(killed=True)
    subprocess.run([PHOS_GPU, "verify", str(image)], check=True, timeout=60, stdin=subprocess.DEVNULL)
    program.before_restore()
    process.command([PHOS_GPU, "restore", str(image)], 120)
    assert without_repeats(program.finish()) == reference("struct_argument")


def test_a_process_without_the_frontend_is_dumped_with_a_warning(start: Starter, image: Path) -> None:
    """The driver alone saves it; the image says so, and so does the command."""
    program = start(example("mlp", "--iteration-seconds", "0.1"), frontend=False)
    program.wait_for("^ITERATION 4 ")
    arguments = [PHOS_GPU, "checkpoint", str(program.pid), str(image)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    program.dumped(killed=True)
    assert "phos-gpu run" in done.stdout + done.stderr, "the warning names the remedy"
    summary = process.inspect(image)
    assert process.find_key(summary, "under_frontend") is False
    process.criu_restore(program, image)
    assert without_repeats(program.finish()) == reference("mlp")


def test_one_without_the_frontend_that_polls_is_not_disturbed(start: Starter, image: Path) -> None:
    """Its threads would crash if they ran while the driver has it checkpointed: during dumps and after a restore."""
    polls = process.python_program(Path(__file__).parent / "programs" / "polls.py")
    program = start([*polls, "--iteration-seconds", "0.3"], frontend=False)
    program.wait_for("^ITERATION 3 ")
    for number in range(3):
        folder = image / str(number)
        folder.mkdir()
        process.criu_dump(program, folder, leave_running=number < 2)
        if number < 2:
            program.wait_iterations(1)
    process.criu_restore(program, folder)
    assert without_repeats(program.finish()) == reference("stencil")


def test_a_tree_of_processes_comes_back_whole(start: Starter, image: Path, tmp_path: Path) -> None:
    """A parent without CUDA and two children that train, all in one image."""
    command = process.python_program(Path(__file__).parent / "programs" / "tree.py", "--children", "2")
    program = start([*command, "--iteration-seconds", "0.1"])
    reports = [tmp_path / f"program.report.{index}" for index in range(2)]

    def all_computing() -> bool:
        return all(report.exists() and "ITERATION 4 " in report.read_text() for report in reports)

    process.wait_until(all_computing, 60, "both children to compute")
    process.criu_dump(program, image)
    process.criu_restore(program, image)
    program.finish()
    for report in reports:
        lines = [line for line in report.read_text().splitlines() if not line.startswith("#")]
        assert without_repeats(lines) == reference("mlp")


def test_memory_is_free_again_after_a_dump_that_kills(start: Starter, image: Path) -> None:
    """Neither phosd nor anybody else keeps the dead process's GPU memory."""
    script = process.PROGRAMS / "buffers.py"
    size = 4e9 if DEVICE == "nvidia" else 64e6

    def held() -> int:
        _, text = process.command([PHOS_GPU, "status", "--json"], 30)
        gpus = process.find_key(json.loads(text), "gpus")
        return sum(int(gpu.get("held", 0)) for gpu in gpus)

    program = start(process.python_program(script, "--bytes", str(size)))
    program.wait_for("^READY")
    process.wait_until(lambda: held() >= size, 30, "phosd to know the buffers")
    process.criu_dump(program, image)
    process.wait_until(lambda: held() == 0, 30, "phosd to let the memory go")
