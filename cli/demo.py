"""``phos-gpu demo``: the main job, end to end, on the machine's GPU or the software GPU.

A program trains a small network. It is run once without interruption; then again, dumped by CRIU in the middle, killed,
inspected, restored, and run to its end. Both results must be the same to the last bit.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import psutil

from phos.cli import demo_protocols, demo_restore
from phos.cli.console import Console
from phos.cli.launched import ENDING, Interrupted, handle_as_before, heed
from phos.cli.run import device_option
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import CheckpointFailed, PhosError, Unsupported, UsageError
from phos.gpu_engine.installation import device_kind, examples_folder, launcher

EXAMPLES = ("mlp", "pointer_chase", "struct_argument", "device_pointer", "stencil")

ITERATIONS = 40
PROGRAM_SECONDS = 300.0

END_SECONDS = 10.0
"""How long what is killed may take to end."""

PACE = 0.05
"""Seconds that the program which is going to be interrupted sleeps at least after each iteration. Its result does not
depend on it."""


def pace(start_seconds: float, iterations: int) -> float:
    """Seconds to sleep after each iteration, so that half of them take longer than a dump takes to begin.

    However fast the GPU and however slow the machine: a dump begins with the start of a Python that talks to phosd, and
    so did ``start_seconds``, with the start of phosd itself on top.
    """
    return max(PACE, 2 * start_seconds / iterations)


class Demo:
    """One run of the demo; every step prints what it does and how long it took."""

    def __init__(self, device: str, example: str, iterations: int, folder: Path) -> None:
        self.device = device
        self.example = example
        self.iterations = iterations
        self.folder = folder
        self.image = folder / "image"
        self.console = Console(highlight=False, soft_wrap=True)
        self.step = 0
        self.pace = PACE
        self.start_seconds = 0.0
        self.inherited = psutil.Process().children(recursive=True)
        self.environment = {**os.environ, "PHOS_SOCKET": str(folder / "phosd.sock"), "PHOS_DEVICE": device}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """A step: its text at once, its time when it is done."""
        self.step += 1
        self.console.print(f"{self.step}. {what} ...", end=" ")
        began = time.perf_counter()
        yield
        self.console.print(f"{time.perf_counter() - began:.2f} s")

    def command(self, *words: str, **changes: str) -> str:
        """Run one of our commands and return what it printed. ``changes``: of its environment.

        Raises:
            CheckpointFailed: it failed.
        """
        result = subprocess.run(
            [str(launcher(words[0])), *words[1:]],
            env={**self.environment, **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise CheckpointFailed(f"'{' '.join(words)}' failed:\n{result.stdout}{result.stderr}")
        return result.stdout

    def criu(self, action: str, *options: str, **changes: str) -> None:
        """``criu dump`` or ``criu restore`` with our plugin.

        Raises:
            CheckpointFailed: it failed; the message has the error lines of CRIU's log, where CRIU puts them.
        """
        log = f"{action}.log"
        try:
            self.command("criu", action, "--lib", "phos", "-D", str(self.image), "-o", log, *options, **changes)
        except CheckpointFailed as error:
            written = self.image / log
            lines = written.read_text(errors="replace").splitlines() if written.exists() else []
            said = "\n".join(f"   {line}" for line in lines if "Error" in line)
            raise CheckpointFailed(f"{str(error).rstrip()}\n{log} says:\n{said or '   no error'}") from error

    def start(self, output: Path, pace: float = 0.0, until: Path | None = None) -> subprocess.Popen[bytes]:
        """Start the example under the frontend, with nothing of this terminal in it (CRIU would have to save that).

        ``until``: it sleeps, and does not end, before there is this file.
        """
        program = [sys.executable, str(examples_folder() / f"{self.example}.py"), "--iterations", str(self.iterations)]
        program += ["--iteration-seconds", str(pace), *(["--until", str(until)] if until else [])]
        with open(output, "wb") as file:
            return subprocess.Popen(
                [str(launcher("phos-gpu")), "run", "--", *program],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=self.folder,
            )

    def result(self, output: Path) -> str:
        """The program's RESULT line.

        Raises:
            CheckpointFailed: it has none.
        """
        lines = output.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith("RESULT"):
                return line.split()[1]
        raise CheckpointFailed(f"The program printed no result; its last lines: {' | '.join(lines[-5:])}")

    def wait_iteration(self, output: Path, wanted: int, process: subprocess.Popen[bytes]) -> int:
        """Wait until the program has done ``wanted`` iterations; returns how many it has."""
        deadline = time.monotonic() + PROGRAM_SECONDS
        while time.monotonic() < deadline:
            done = sum(line.startswith("ITERATION") for line in output.read_text(errors="replace").splitlines())
            if done >= wanted:
                return done
            if process.poll() is not None:
                break
            time.sleep(0.005)
        raise CheckpointFailed(f"The program did not get to iteration {wanted}: {output.read_text()[-500:]}")

    def wait_end(self, pid: int) -> None:
        """Wait for the process that CRIU restored."""
        _wait_end(pid)

    def begin(self, software_bandwidth: int = 0) -> str:
        """Say what is run on what, start phosd, and run the program without interruption; its result.

        ``software_bandwidth``: bytes per second that the software GPU copies at most unless somebody chose; 0: any.
        """
        kind = "NVIDIA's GPU" if self.device == "nvidia" else "the software GPU (a stand-in that runs PTX on the CPU)"
        self.console.print(f"Example '{self.example}', {self.iterations} iterations, on {kind}.")
        if software_bandwidth and self.device == "software" and not self.environment.get("SOFTGPU_COPY_BANDWIDTH"):
            self.environment["SOFTGPU_COPY_BANDWIDTH"] = str(software_bandwidth)
            speed = f"{software_bandwidth >> 20} MiB/s"
            self.console.print(f"Its copies are slowed down to {speed}: they should take a while.")
        with self.timed("Start phosd, the daemon that will hold the GPU memory"):
            began = time.perf_counter()
            self.command("phosd", "--ensure")
            self.start_seconds = time.perf_counter() - began
            self.pace = pace(self.start_seconds, self.iterations)
        whole = self.folder / "whole.log"
        with self.timed("Run the program without interruption"):
            self.start(whole).wait(PROGRAM_SECONDS)
        return self.result(whole)

    def dump_half_way(self, output: Path) -> subprocess.Popen[bytes]:
        """Start the program and dump it in the middle of its work; the process, which is gone."""
        with self.timed("Start it again and let it compute half of the way"):
            dumped = self.folder / "dumped"
            process = self.start(output, self.pace, dumped)  # however late the dump comes, something is left to do
            self.wait_iteration(output, self.iterations // 2, process)
        self.image.mkdir()
        with self.timed(f"criu dump --lib phos -t {process.pid} -D image/"):
            self.criu("dump", "-t", str(process.pid))
            process.wait(60)  # and so its pid is free: the restored one has the same
        dumped.touch()
        return process

    def run(self) -> None:
        """All steps.

        Raises:
            PhosError: one failed.
        """
        interrupted = self.folder / "interrupted.log"
        expected = self.begin()
        process = self.dump_half_way(interrupted)
        done = sum(line.startswith("ITERATION") for line in interrupted.read_text().splitlines())
        self.console.print(f"   The process is gone; it had done {done} of {self.iterations} iterations.")
        with self.timed("phos-gpu inspect image/"):
            summary = self.command("phos-gpu", "inspect", str(self.image))
        self.console.print("\n".join(f"   {line}" for line in summary.splitlines()))
        with self.timed("phos-gpu verify image/"):
            self.command("phos-gpu", "verify", str(self.image))
        with self.timed("criu restore --lib phos -d -D image/"):
            self.criu("restore", "-d")
        with self.timed("Let it compute to its end"):
            _wait_end(process.pid)
        found = self.result(interrupted)
        if found != expected:
            raise CheckpointFailed(f"The results differ: {expected} without interruption, {found} after the restore.")
        self.console.print(f"Both runs end with the same result, {found}: nothing was lost.")

    def clean_up(self) -> None:
        """End what the demo started: all our descendants but those we were born with, for orphans come to us."""
        deadline = time.monotonic() + END_SECONDS
        while mine := [child for child in psutil.Process().children(recursive=True) if child not in self.inherited]:
            for process in mine:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(mine, max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                break  # those that it started meanwhile are as stubborn


class Interruption:
    """What a signal does that would end the command: it raises Interrupted, between :meth:`begin` and the first one."""

    def __init__(self) -> None:
        self._number = 0
        self.raises = False

    def received(self, number: int, _frame: object) -> None:
        """The handler."""
        self._number = self._number or number
        if self.raises:
            self.begin()

    def begin(self) -> None:
        """
        Raises:
            Interrupted: by a signal that has come already.
        """
        self.raises = not self._number
        if self._number:
            raise Interrupted(self._number, "Interrupted: what it had started is ended.")


def _become_reaper() -> None:
    """What CRIU restores becomes our child, and so do orphans: in a container nobody else may free their pids."""
    pr_set_child_subreaper = 36
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _wait_end(pid: int) -> None:
    """Wait for the process that CRIU restored."""
    try:
        psutil.Process(pid).wait(PROGRAM_SECONDS)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired as error:
        raise CheckpointFailed(f"The restored process {pid} did not end within {PROGRAM_SECONDS:.0f} s.") from error


@click.command()
@device_option
@click.option("--example", type=click.Choice(EXAMPLES), default="mlp", show_default=True)
@click.option(
    "--protocol",
    type=click.Choice(["stop", "cow", "both"]),
    help="Instead: checkpoint it with this protocol while it computes on, and measure; both: side by side.",
)
@click.option(
    "--restore",
    type=click.Choice([*demo_restore.MODES, "all"]),
    help="Instead: restore it in this way, and measure how soon it computes; all: side by side.",
)
@click.option("--iterations", type=click.IntRange(4), help="Default: 40, with --protocol 160.")
@click.option("--keep", is_flag=True, help="Keep the image and the programs' output.")
def demo(
    device: str | None, example: str, protocol: str | None, restore: str | None, iterations: int | None, keep: bool
) -> None:
    """Start a GPU program, dump it with CRIU, kill it, inspect the image, restore it, and compare the results.

    Uses a phosd of its own; what runs under the machine's phosd is not touched. Needs root.
    """
    if os.geteuid() != 0:
        raise Unsupported("The demo needs root, because CRIU does. Run it with sudo.")
    if protocol and restore:
        raise UsageError("--protocol and --restore are two demonstrations: choose one.")
    _become_reaper()
    interruption = Interruption()
    former: list[tuple[int, Any]] = []
    heed(ENDING, interruption.received, former)
    folder = Path(tempfile.mkdtemp(prefix="phos-demo-"))
    usual = demo_protocols.ITERATIONS if protocol else ITERATIONS
    run = Demo(device_kind(device), example, iterations or usual, folder)
    try:
        try:
            interruption.begin()
            if protocol:
                demo_protocols.compare(run, ["stop", "cow"] if protocol == "both" else [protocol])
            elif restore:
                demo_restore.compare(run, demo_restore.MODES if restore == "all" else [restore])
            else:
                run.run()
        finally:
            interruption.raises = False  # what follows is done whatever comes
    except (PhosError, subprocess.TimeoutExpired) as error:
        keep = True
        click.echo()
        if isinstance(error, subprocess.TimeoutExpired):
            raise CheckpointFailed(f"A program of the demo has not ended within {error.timeout:g} s.") from error
        raise
    except Interrupted:
        with suppress(OSError):  # of a terminal that is gone
            click.echo()
        raise
    finally:
        with suppress(PhosError, OSError):
            client.shutdown(folder / "phosd.sock")
        run.clean_up()
        if keep:
            click.echo(f"Kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        handle_as_before(former)
