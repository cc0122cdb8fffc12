"""Ctrl-C and SIGTERM while `phos-gpu checkpoint` or `restore` works: what it had begun is undone when it returns."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client
from phos.gpu_engine.installation import launcher
from tests.integration.dumped import LAYERS_SUM, Dumped
from tests.integration.site import PATIENCE, Program, Site, wait_until, words
from tests.integration.test_kills import criu_processes

OPTIONS = ("--iterations", "400", "--iteration-seconds", "0.05")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(name="hold")
def no_copy_of_phosd_ends_while_it_exists(site: Site) -> Path:
    hold = site.folder / "copies-held"
    # Hashes come from the GPU before anything stands still.
    site.run("phosd", "--ensure", SOFTGPU_COPY_HOLD=str(hold), SOFTGPU_COPY_HOLD_BYTES="64K")
    return hold


def job(site: Site) -> Any:
    """phosd's latest."""
    jobs = client.status(Path(site.environment["PHOS_SOCKET"])).jobs
    return jobs[-1] if jobs else wire_pb2.Status.Job()


def has(site: Site, kind: str, phase: str) -> bool:
    """Whether the latest job is of this kind, and has come so far."""
    latest = job(site)
    return latest.kind == kind and any(one.name == phase for one in latest.phases)


def alive(site: Site, what: str) -> bool:
    """Whether somebody of the site has this in its command line."""
    return any(what in " ".join(words(process)) for process in site.processes())


def told(site: Site) -> bool:
    """Whether phosd knows of the interruption."""
    return "is interrupted" in (site.folder / "run" / "phosd.log").read_text(errors="replace")


@contextmanager
def command(site: Site, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``phos-gpu`` as a shell starts it, in a process group of its own."""
    with subprocess.Popen(
        [str(launcher("phos-gpu")), *arguments],
        env=site.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupt(process: subprocess.Popen[str], number: int) -> None:
    """As a terminal does it, or somebody else."""
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)


def ends(process: subprocess.Popen[str], number: int) -> str:
    """It ends as what a signal has ended; what it says."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, f"{process.returncode}\n{output}\n{errors}"
    assert "Traceback" not in errors
    return errors


def runs_on(site: Site, program: Program, image: Path) -> None:
    """Nothing has become of the dump, and the next one is as good as ever."""
    program.wait_progress()
    assert not (image / "phos-commit.img").exists()
    assert not alive(site, "supervise.py")
    site.dump(program, site.image("next"))
    assert job(site).state == "committed"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_dump_whose_program_is_frozen_and_was_to_be_ended_is_undone(
    site: Site, hold: Path, number: signal.Signals
) -> None:
    program = site.example("stencil", *OPTIONS)
    program.wait_iterations(3)
    image = site.folder / "image"
    hold.touch()
    with command(site, "checkpoint", str(program.pid), str(image)) as checkpoint:
        wait_until(lambda: has(site, "dump", "wait for CPU pages"), "CRIU's part")
        interrupt(checkpoint, number)
        wait_until(lambda: told(site), "phosd to be asked")
        hold.unlink()
        said = ends(checkpoint, number)
    assert f"process {program.pid} runs on as before" in said
    assert (job(site).state, job(site).error) == ("failed", "It was interrupted.")
    runs_on(site, program, image)


def test_a_dump_that_criu_has_done_its_part_of_is_undone(site: Site, hold: Path) -> None:
    """phosd would bring the program back and make the image whole by itself."""
    program = site.example("stencil", *OPTIONS)
    program.wait_iterations(3)
    image = site.folder / "image"
    hold.touch()
    with command(site, "checkpoint", "--leave-running", str(program.pid), str(image)) as checkpoint:
        wait_until(lambda: has(site, "dump", "CRIU freeze and dump") and not criu_processes(site), "CRIU's end")
        interrupt(checkpoint, signal.SIGINT)
        wait_until(lambda: told(site), "phosd to be asked")
        hold.unlink()
        assert f"process {program.pid} runs on as before" in ends(checkpoint, signal.SIGINT)
    assert (job(site).state, job(site).error) == ("failed", "It was interrupted.")
    runs_on(site, program, image)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_dump_that_has_just_begun_is_undone(site: Site, hold: Path, number: signal.Signals) -> None:
    """Perhaps before phosd knows of it."""
    program = site.example("stencil", *OPTIONS, SOFTGPU_TOGGLE_MS="300")
    program.wait_iterations(3)
    image = site.folder / "image"
    hold.touch()
    with command(site, "checkpoint", str(program.pid), str(image)) as checkpoint:
        wait_until(lambda: alive(site, "criu"), "CRIU")
        interrupt(checkpoint, number)
        wait_until(lambda: told(site) or checkpoint.poll() is not None, "phosd to be asked")
        hold.unlink()
        ends(checkpoint, number)
    runs_on(site, program, image)


@pytest.mark.parametrize(("mode", "number"), [("eager", signal.SIGTERM), ("lazy", signal.SIGINT)])
def test_nothing_is_left_of_a_restore(site: Site, hold: Path, mode: str, number: signal.Signals) -> None:
    dumped = Dumped(site, site.folder)
    hold.touch()
    with command(site, "restore", *(["--lazy"] if mode == "lazy" else []), str(dumped.image)) as restore:
        reached = "attach" if mode == "lazy" else "driver restore"
        wait_until(lambda: has(site, "restore", reached), "the restored process")
        interrupt(restore, number)
        wait_until(lambda: told(site), "phosd to be asked")
        hold.unlink()
        assert "nothing of" in ends(restore, number)
    assert not dumped.program.alive()
    assert not alive(site, "lazy-pages")
    assert job(site).state == "failed"
    assert dumped.restore() == LAYERS_SUM
