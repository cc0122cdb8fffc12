"""Checkpoints that a program asks for itself, from Python and from C, with the real CRIU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phos.gpu_engine.installation import application_environment
from phos.images.formats import COMMIT_FILE
from tests.integration.site import CAP_SYS_RESOURCE, Program, Site, Toggles, has_capability, wait_until, words

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "programs" / "asks_for_checkpoints.py"
NOBODY = 65534
C_PROGRAM = Path(__file__).parent / "programs" / "asks_for_checkpoints.c"


def start(site: Site, iterations: int, steps: str, *more: str, under: bool = True, **changes: str) -> Program:
    (site.folder / "images").mkdir(exist_ok=True)
    command = (sys.executable, str(PROGRAM), str(iterations), str(site.folder / "images"), steps, *more)
    return site.start(*command, under=under, **changes)


def outcomes(program: Program) -> dict[int, str]:
    """What the program was told of each of its checkpoints."""
    lines = [line.split(maxsplit=2) for line in program.lines() if line.startswith("CHECKPOINT")]
    return {int(step): said for _, step, said in lines}


def image(site: Site, step: int) -> Path:
    return site.folder / "images" / str(step)


def verify(site: Site, step: int) -> None:
    site.run("phos-gpu", "verify", str(image(site, step)))


@pytest.mark.serial  # it measures: beside other programs the call has taken 23 ms
def test_a_program_checkpoints_itself_and_runs_on(site: Site) -> None:
    program = start(site, 80, "10")
    assert program.wait_result() == "80"
    said = re.match(r"committed stall=(\S+) seconds=(\S+)", outcomes(program)[10])
    assert said
    assert 0 < float(said[1]) < float(said[2])
    verify(site, 10)
    asked = next(line for line in program.lines() if line.startswith("ASKED"))
    assert int(asked.split()[2]) < 20000  # the first call also loads the library; what later ones cost is a unit test's


def test_the_process_from_the_image_is_told_that_it_was_restored(site: Site) -> None:
    program = start(site, 80, "10", "--wait")
    wait_until(lambda: 10 in outcomes(program), "the first checkpoint")
    os.kill(program.pid, signal.SIGKILL)
    site.gone(program)
    told = len(program.lines())
    site.restore(image(site, 10))
    assert program.wait_result() == "80"
    assert [line for line in program.lines()[told:] if line.startswith("CHECKPOINT")] == ["CHECKPOINT 10 restored"]


def test_a_program_that_ends_itself_goes_on_from_its_image(site: Site) -> None:
    program = start(site, 60, "20", "--leave_running=False", "--wait")
    wait_until(lambda: not program.alive(), "the end of the program")
    assert program.iterations() == 20
    site.gone(program)
    verify(site, 20)
    site.restore(image(site, 20))
    assert program.wait_result() == "60"
    assert outcomes(program) == {20: "restored"}


def test_several_in_a_row(site: Site) -> None:
    program = start(site, 60, "5,10,15", "--if_busy=wait")
    assert program.wait_result() == "60"
    assert [said.split()[0] for said in outcomes(program).values()] == ["committed"] * 3
    for step in (5, 10, 15):
        verify(site, step)


def test_a_second_request_is_refused_as_asked(site: Site) -> None:
    program = start(site, 80, "10,10", "--if_busy=error")
    assert program.wait_result() == "80"
    said = [line for line in program.lines() if line.startswith("CHECKPOINT")]
    assert said[0].startswith("CHECKPOINT 10 busy: A checkpoint of this process is in progress")
    assert said[1].startswith("CHECKPOINT 10 committed")


def test_a_second_request_is_skipped_as_asked(site: Site) -> None:
    program = start(site, 80, "10,10", "--if_busy=skip")
    assert program.wait_result() == "80"
    said = [line for line in program.lines() if line.startswith("CHECKPOINT")]
    assert said[0].startswith("CHECKPOINT 10 skipped: Skipped: a checkpoint of this process is in progress")
    assert said[1].startswith("CHECKPOINT 10 committed")


def test_what_fails_is_told_and_the_program_runs_on(site: Site) -> None:
    (site.folder / "images" / "10").mkdir(parents=True)
    (site.folder / "images" / "10" / "something").touch()
    (site.folder / "images" / "20").touch()
    program = start(site, 60, "10,20", "--wait")
    assert program.wait_result() == "60"
    assert f"{site.folder}/images/10 is not empty" in outcomes(program)[10]
    assert "cannot be made or opened: Not a directory" in outcomes(program)[20]


def test_before_cuda_nothing_is_done(site: Site) -> None:
    program = start(site, 5, "-1", "--early")
    assert program.wait_result() == "5"
    assert any(
        line.startswith("EARLY skipped: Nothing was done: this process does not use CUDA") for line in program.lines()
    )


def test_without_phos_it_warns_once_and_does_nothing(site: Site) -> None:
    program = start(site, 5, "1,2,3", under=False, PYTHONPATH=str(ROOT))
    assert program.wait_result() == "5"
    assert sum("RuntimeWarning: phos.checkpoint does nothing" in line for line in program.lines()) == 1
    assert list((site.folder / "images").iterdir()) == []


def test_without_phosd_it_does_nothing(site: Site) -> None:
    program = start(site, 200, "100", PHOS_DAEMON_COMMAND="")
    program.wait_iterations(20)
    site.stop_phosd()
    assert program.wait_result() == "200"
    assert "phosd does not answer" in outcomes(program)[100]


@pytest.mark.parametrize(
    ("word", "delay"), [("checkpoint", 0.0), ("checkpoint", 0.1), ("dump", 0.0), ("dump", 0.1), ("dump", 0.3)]
)
def test_phosd_is_killed_meanwhile(site: Site, word: str, delay: float) -> None:
    """The program gets an answer and runs on, whichever it is; and it is the right one. The command that phosd started
    may go on with the next phosd."""
    toggles = Toggles(site, "checkpoint")  # no command is over before it has been seen
    program = start(site, 120, "10", SOFTGPU_TOGGLE_MS="200", **toggles.environment)
    wait_until(lambda: any(line.startswith("ASKED") for line in program.lines()), "the request")
    phosd = [p for p in site.processes() if "phos.gpu_engine.daemon" in words(p)]
    wait_until(lambda: any(word in words(p) for p in site.processes()), "the command, or CRIU")
    toggles.let_go()
    time.sleep(delay)
    for process in phosd:
        process.kill()
    site.run("phosd", "--ensure")
    assert program.wait_result() == "120"
    said = outcomes(program)[10]
    if said.startswith("committed"):
        verify(site, 10)
    else:
        assert said.startswith("failed: ")
        assert not (image(site, 10) / COMMIT_FILE).exists()


def build(site: Site, *options: str) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler
    program = site.folder / "asks"
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", str(C_PROGRAM), "-o"]
    subprocess.run([*command, str(program), *options, "-ldl"], check=True, capture_output=True, text=True)
    return program


@pytest.mark.parametrize(
    "options", [(), ("-no-pie",), ("-O2", "-fno-plt")], ids=lambda options: " ".join(options) or "usual"
)
def test_a_c_program_checkpoints_itself(site: Site, options: tuple[str, ...]) -> None:
    program = site.start(str(build(site, *options)), str(site.folder / "image"))
    assert program.wait_result() == "100"
    assert "ASKED done" in program.lines()
    assert any(line.startswith("CHECKPOINT committed") for line in program.lines())
    site.run("phos-gpu", "verify", str(site.folder / "image"))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.parametrize("allowed", [True, False], ids=["own directory", "root's directory"])
def test_a_user_without_rights_checkpoints_a_program(open_site: Site, allowed: bool) -> None:
    """phosd runs as root, the program does not; its image goes where the user may write, and nowhere else."""
    site = open_site
    image = site.folder / "image"
    image.mkdir()
    if allowed:
        os.chown(image, NOBODY, NOBODY)
    before = image.stat()
    site.run("phosd", "--ensure")
    become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
    under = application_environment("software", Path(site.environment["PHOS_SOCKET"]))
    program = site.start(*become, str(build(site)), str(image), under=False, **under)
    assert program.wait_result() == "100"
    said = next(line for line in program.lines() if line.startswith("CHECKPOINT"))
    after = image.stat()
    assert (after.st_uid, after.st_mode) == (before.st_uid, before.st_mode)  # it was root's meanwhile
    if allowed and has_capability(CAP_SYS_RESOURCE):
        assert said == "CHECKPOINT committed "
        site.run("phos-gpu", "verify", str(image))
    elif allowed:  # without it CRIU cannot dump another user's process, and fails
        assert "could not be checkpointed; it runs on as before" in said
        assert {path.stat().st_uid for path in image.iterdir()} == {0}
    else:
        assert f"not committed User {NOBODY} may not write to {image}" in said
        assert list(image.iterdir()) == []


def test_an_image_goes_where_a_descriptor_leads(site: Site) -> None:
    """As phosd names the directory of an ordinary user (custody.py): wherever its path has come to lead meanwhile."""
    program = start(site, 10000, "-1")
    program.wait_iterations(3)
    made, other = site.image("made"), site.image("other")
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    moved = made.rename(site.folder / "moved")
    made.symlink_to(other)
    named = f"/proc/{os.getpid()}/fd/{descriptor}"
    site.run("phos-gpu", "checkpoint", "--leave-running", str(program.pid), named)
    os.close(descriptor)
    assert list(other.iterdir()) == []
    site.run("phos-gpu", "verify", str(moved))


def test_a_c_program_runs_without_phos(site: Site) -> None:
    program = site.start(str(build(site)), str(site.folder / "image"), under=False)
    assert program.wait_result() == "100"
    assert "ASKED the program was not started by phos-gpu run" in program.lines()
