"""The ways a process can go through dumps and restores, on a real GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import process
import pytest
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


def blocked_signals(pid: int) -> str:
    """Those of the first thread."""
    return Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_threads_that_are_stopped_inside_the_driver(start: Starter, image: Path, tmp_path: Path) -> None:
    """They hold what the driver's own thread needs to save the process, and to bring it back."""
    spins = tmp_path / "spins"
    source = Path(__file__).parent / "programs" / "spins.c"
    subprocess.run(["gcc", "-O2", "-pthread", "-o", spins, source, "-ldl"], check=True)
    end = tmp_path / "end"
    command = [str(spins), "--iterations", "600", "--until", str(end)]
    wanted = start(command, frontend=False, name="alone")
    program = start(command, frontend=False)
    program.wait_for("^ITERATION 5 ")
    blocked = blocked_signals(program.pid)
    for number in range(12):
        folder = image / str(number)
        folder.mkdir()
        process.criu_dump(program, folder, leave_running=number < 11)
        if number < 11:
            assert blocked_signals(program.pid) == blocked
    process.criu_restore(program, folder)
    assert blocked_signals(program.pid) == blocked
    end.touch()
    assert without_repeats(program.finish()) == wanted.finish()


TREE = Path(__file__).parent / "programs" / "tree.py"


class Tree:
    """A parent without CUDA, children that train, and children that poll and are not under the frontend."""

    def __init__(self, start: Starter, tmp_path: Path, training: int, polling: int, iteration: float) -> None:
        self.results = ["mlp"] * training + ["stencil"] * polling
        self.reports = [tmp_path / f"program.report.{index}" for index in range(training + polling)]
        options = ["--training", str(training), "--polling", str(polling), "--iteration-seconds", str(iteration)]
        self.program = start(process.python_program(TREE, *options))
        self.all_compute(4)

    def iterations(self) -> list[int]:
        """How many each child has printed."""
        return [
            sum(line.startswith("ITERATION ") for line in report.read_text().splitlines()) if report.exists() else 0
            for report in self.reports
        ]

    def all_compute(self, more: int) -> None:
        """Wait until each child has printed so many more."""
        wanted = [count + more for count in self.iterations()]

        def printed() -> bool:
            assert self.program.alive(), "the parent has ended"
            return all(count >= least for count, least in zip(self.iterations(), wanted, strict=True))

        process.wait_until(printed, 60, f"all children to print {more} more iterations: {self.iterations()}")

    def finish(self) -> None:
        """Wait for its end; each child has printed what a run alone prints."""
        assert self.program.finish()[-1] == f"RESULT {[0] * len(self.results)}"
        for report, name in zip(self.reports, self.results, strict=True):
            lines = [line for line in report.read_text().splitlines() if not line.startswith("#")]
            assert without_repeats(lines) == reference(name)


def test_a_tree_of_processes_comes_back_whole(start: Starter, image: Path, tmp_path: Path) -> None:
    """Two children that train, all in one image."""
    tree = Tree(start, tmp_path, 2, 0, 0.1)
    process.criu_dump(tree.program, image)
    process.criu_restore(tree.program, image)
    tree.finish()


def test_several_without_the_frontend_are_saved_beside_one_under_it(
    start: Starter, image: Path, tmp_path: Path
) -> None:
    """Twice while they run on, and once killed and restored: none that polls is disturbed."""
    tree = Tree(start, tmp_path, 1, 2, 0.4)
    for number in range(3):
        folder = image / str(number)
        folder.mkdir()
        process.criu_dump(tree.program, folder, leave_running=number < 2)
        if number < 2:
            tree.all_compute(2)
    process.criu_restore(tree.program, folder)
    tree.finish()


def test_phosd_is_killed_at_every_step_of_a_dump(start: Starter, image: Path, tmp_path: Path) -> None:
    """The dump fails, or is done already; all processes compute on, those that poll, too."""
    tree = Tree(start, tmp_path, 1, 2, 1.0)
    folder = image / "whole"
    folder.mkdir()
    whole = process.criu_dump(tree.program, folder, leave_running=True)
    steps = 6
    results = []
    for number in range(steps):
        tree.all_compute(1)
        daemon = process.daemon_pid()
        folder = image / str(number)
        folder.mkdir()
        command = [process.CRIU, "dump", "--lib", "phos", "-t", str(tree.program.pid), "-D", str(folder)]
        dump = subprocess.Popen([*command, "--leave-running", "-o", "dump.log", "-v4"], stdin=subprocess.DEVNULL)
        time.sleep(whole * (number + 0.5) / steps)
        os.kill(daemon, signal.SIGKILL)
        results.append(dump.wait(120) == 0)
        committed = subprocess.run([PHOS_GPU, "verify", str(folder)], capture_output=True, timeout=60, check=False)
        assert (committed.returncode == 0) == results[-1]
    tree.all_compute(1)
    assert not all(results), "no dump was disturbed"
    tree.finish()


def test_one_that_is_only_locked_goes_on(start: Starter) -> None:
    """What a phosd does that follows one that was killed before the driver saved a process."""
    program = start(example("stencil", "--iteration-seconds", "0.2"), frontend=False)
    program.wait_for("^ITERATION 4 ")
    command = process.phos_python(Path(__file__).parent / "programs" / "lock.py", str(program.pid))
    environment = process.device_environment(DEVICE)
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL, env=environment)
    assert program.finish() == reference("stencil")


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
