"""Children forked after CUDA had been initialised: they have their parent's files of the driver, and no CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.site import Program, Site, opened, wait_until

WORKERS = Path(__file__).parent / "programs" / "forked_workers.py"
OPTIONS = ("--iterations", "400", "--iteration-seconds", "0.03", "--until")


@pytest.fixture
def expected(site: Site) -> str:
    return site.reference_of(sys.executable, str(WORKERS), *OPTIONS[:2], "--until")


def working(site: Site, *, under: bool = True, **changes: str) -> Program:
    program = site.until_awaited(sys.executable, str(WORKERS), *OPTIONS, under=under, **changes)
    program.wait_iterations(5)
    return program


def workers(program: Program) -> list[psutil.Process]:
    return psutil.Process(program.pid).children()


def kill(site: Site, program: Program) -> None:
    """The workers as well, which wait for ever for a parent that was killed."""
    killed = [*workers(program), psutil.Process(program.pid)]
    for process in killed:
        process.kill()
    site.gone(program)
    for process in killed:
        site.freed(process.pid)


def refused_files(process: psutil.Process) -> list[str]:
    """The descriptors of a process that CRIU does not dump; on the software GPU they stand for the driver's files."""
    refused = ("anon_inode:[userfaultfd]", "anon_inode:[perf_event]")
    return [name for name, _ in opened(process.pid) if name.startswith(refused)]


@pytest.mark.parametrize("under", [True, False], ids=["frontend", "driver-alone"])
@pytest.mark.parametrize("lazily", [False, True], ids=["eager", "lazy"])
def test_a_program_with_workers_is_dumped_and_restored(site: Site, expected: str, under: bool, lazily: bool) -> None:
    """Twice from one image, and from the image of what was restored."""
    program = working(site, under=under)
    before = sorted(worker.pid for worker in workers(program))
    assert len(before) == 2
    assert all(len(refused_files(worker)) == 1 for worker in workers(program))
    image = site.image()
    site.dump(program, image)
    site.run("phos-gpu", "verify", str(image))
    for time in range(2):
        if lazily:
            site.run("phos-gpu", "restore", "--lazy", str(image))
        else:
            site.restore(image)
        program.wait_progress()
        assert sorted(worker.pid for worker in workers(program)) == before
        assert not any(refused_files(worker) for worker in workers(program))
        if not time:
            kill(site, program)
    again = site.image("again")
    site.dump(program, again)
    site.restore(again)
    assert program.wait_result() == expected


@pytest.mark.parametrize("protocol", ["cow", "stop"])
def test_a_program_with_workers_runs_on(site: Site, expected: str, protocol: str) -> None:
    """Nothing of the workers' is changed by a dump."""
    program = working(site)
    for number in range(3):
        site.dump(program, site.image(f"image-{number}"), "--leave-running", PHOS_PROTOCOL=protocol)
        program.wait_progress()
        assert all(len(refused_files(worker)) == 1 for worker in workers(program))
    kill(site, program)
    site.restore(site.folder / "image-2")
    assert program.wait_result() == expected


HOLDS_ON = f"""
import os, sys
sys.path.insert(0, {str(WORKERS.parents[3] / "examples")!r})
import cuda_program, stencil
made = cuda_program.Device.__init__
def make(self, *words):
    made(self, *words)
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink("/proc/self/fd/" + entry)
        except OSError:
            continue
        if name.startswith(("anon_inode:[userfaultfd]", "anon_inode:[perf_event]")):
            os.dup(int(entry))
            print("HOLDS", name, flush=True)
cuda_program.Device.__init__ = make
stencil.main()
"""


def test_a_file_that_the_driver_has_not_closed_is_refused(site: Site) -> None:
    """A second driver library's, say: the process itself, which has CUDA, must not lose it in a restore."""
    script = site.folder / "holds_on.py"
    script.write_text(HOLDS_ON)
    options = ("--size", "32", "--iterations", "200")
    expected = site.reference("stencil", *options)
    program = site.until_awaited(sys.executable, str(script), *options, "--iteration-seconds", "0.03", "--until")
    wait_until(lambda: any(line.startswith("HOLDS") for line in program.lines()), "its descriptor")
    program.wait_iterations(3)
    image = site.image()
    result = site.dump(program, image, check=False)
    assert result.returncode != 0
    log = (image / "dump.log").read_text()
    assert f"Process {program.pid} (" in log
    assert "open, though the driver has saved it" in log
    assert not (image / "phos-commit.img").exists()
    assert program.wait_result() == expected


BESIDE = """
import ctypes, subprocess, sys
if len(sys.argv) == 2:
    kept = ctypes.CDLL(None).syscall(323, 1)  # userfaultfd(UFFD_USER_MODE_ONLY)
    assert kept >= 0
    print("HOLDS", flush=True)
    sys.stdin.read()
    sys.exit()
with subprocess.Popen([sys.executable, sys.argv[1], "child"], stdin=subprocess.PIPE) as child:
    sys.exit(subprocess.run([sys.executable, *sys.argv[2:]]).returncode)
"""


def test_a_file_of_one_without_cuda_is_refused(site: Site) -> None:
    """It was forked from nobody who has CUDA: graphics, say. Nobody knows how it would go on without."""
    script = site.folder / "beside.py"
    script.write_text(BESIDE)
    stencil = str(WORKERS.parents[3] / "examples" / "stencil.py")
    options = ("--size", "32", "--iterations", "200")
    expected = site.reference("stencil", *options)
    words = (str(script), stencil, *options, "--iteration-seconds", "0.03", "--until")
    program = site.until_awaited(sys.executable, str(script), *words)
    wait_until(lambda: "HOLDS" in program.lines(), "its descriptor")
    program.wait_iterations(3)
    image = site.image()
    assert site.dump(program, image, check=False).returncode != 0
    assert "open, and not from a process with CUDA that it was forked from" in (image / "dump.log").read_text()
    assert not (image / "phos-commit.img").exists()
    assert program.wait_result() == expected
