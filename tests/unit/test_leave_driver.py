"""criu_plugin/leave_driver.c: a tracer stops programs as CRIU does; a library of ours is taken for the driver."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLUGIN = HERE.parents[1] / "criu_plugin"
ROUNDS = 60

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracer, the program, its driver, and a library with another malloc()."""
    folder = tmp_path_factory.mktemp("leave a driver")  # with blanks, as people have
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]

    def gcc(name: str, *words: str | Path) -> None:
        subprocess.run(["gcc", *flags, "-o", folder / name, *words], check=True)

    gcc("libcuda.so.1", "-shared", "-fPIC", HERE / "leave_driver_driver.c")
    gcc("libmalloc.so", "-shared", "-fPIC", HERE / "leave_driver_malloc.c")
    gcc("program", HERE / "leave_driver_program.c", folder / "libcuda.so.1", f"-Wl,-rpath,{folder}")
    (folder / "criu-plugin.h").touch()  # nothing of it is used here
    sources = [
        HERE / "leave_driver_tracer.c",
        *(PLUGIN / f"{name}.c" for name in ("leave_driver", "code_map", "proc")),
    ]
    gcc("tracer", f"-I{PLUGIN}", f"-I{folder}", *sources)
    return folder


@dataclass
class Counts:
    """What the tracer prints."""

    rounds: int
    held: int
    held_after: int
    started: int
    longest_ms: int


class Program:
    """One that is stopped."""

    def __init__(self, folder: Path, what: str, **environment: str) -> None:
        self.folder = folder
        self.output = folder / f"{what}.{time.monotonic_ns()}"
        with open(self.output, "wb") as output:
            command = [folder / "program", what]
            self.child = subprocess.Popen(command, stdout=output, env={**os.environ, **environment})
        while "\n" not in self.output.read_text():
            time.sleep(0.01)
        self.address = self.lines()[0]
        time.sleep(0.1)

    def lines(self) -> list[str]:
        return self.output.read_text().splitlines()

    def trace(self, rounds: int, *more: str) -> subprocess.Popen[str]:
        command = [str(self.folder / "tracer"), str(self.child.pid), str(rounds), self.address, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def traced(self, rounds: int) -> Counts:
        tracer = self.trace(rounds)
        output, errors = tracer.communicate(timeout=100)
        assert tracer.returncode == 0, errors
        return Counts(*(int(word) for word in output.split()))


Start = Callable[..., Program]


@pytest.fixture
def programs(built: Path) -> Iterator[Start]:
    """Starts programs, which are killed in the end."""
    with ExitStack() as stack:

        def start(what: str, **environment: str) -> Program:
            program = Program(built, what, **environment)
            stack.callback(program.child.wait)
            stack.callback(program.child.kill)
            return program

        yield start


def wait_for(program: Program, line: str, times: int = 1) -> None:
    deadline = time.monotonic() + 30
    while program.lines().count(line) < times:
        assert program.child.poll() is None
        assert time.monotonic() < deadline, program.lines()
        time.sleep(0.02)


def test_nobody_is_left_in_the_driver(programs: Start) -> None:
    counts = programs("ask").traced(ROUNDS)
    assert counts.held > ROUNDS / 4, "it was hardly ever met inside"
    assert counts.held_after == 0


def test_the_driver_may_call_another_malloc(programs: Start, built: Path) -> None:
    """A thread that is stopped in libc or in the driver is not taken for one that is out when it comes to malloc()."""
    counts = programs("ask", LD_PRELOAD=str(built / "libmalloc.so")).traced(ROUNDS)
    assert counts.held > ROUNDS / 4
    assert counts.held_after < counts.held / 2, "who is stopped in it is not seen, and few are"


def test_no_thread_is_started_and_no_signal_stays_blocked(programs: Start) -> None:
    """Wherever one that starts threads is stopped; the program looks at what is blocked itself."""
    program = programs("start")
    counts = program.traced(ROUNDS * 4)
    assert counts.started == 0
    time.sleep(0.3)
    assert program.child.poll() is None, program.lines()
    program.child.terminate()
    assert program.child.wait(10) == -signal.SIGTERM


def test_one_that_only_looks_so_holds_nobody_up(programs: Start) -> None:
    """A long copy in libc: a step for each of its parts would take seconds."""
    assert programs("outside").traced(5).longest_ms < 3000  # 200 by themselves


def test_signals_that_arrive_meanwhile_arrive_afterwards(programs: Start) -> None:
    """One with a handler, and one that stops it."""
    program = programs("long")
    wait_for(program, "asked")
    tracer = program.trace(1)
    time.sleep(0.3)
    program.child.send_signal(signal.SIGUSR1)
    program.child.send_signal(signal.SIGSTOP)
    assert tracer.wait(30) == 0
    stat = Path(f"/proc/{program.child.pid}/stat")
    deadline = time.monotonic() + 10
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "it was not stopped"
        time.sleep(0.02)
    program.child.send_signal(signal.SIGCONT)
    wait_for(program, "signal")
    wait_for(program, "asked", 2)


def test_a_tracer_that_is_ended_kills_nobody(programs: Start) -> None:
    """Not before all threads stand where the kernel may let them go."""
    program = programs("long")
    wait_for(program, "asked")
    tracer = program.trace(1, "die")
    assert tracer.wait(30) == -signal.SIGTERM
    wait_for(program, "asked", 3)


def test_a_process_that_is_killed_is_not_waited_for(programs: Start) -> None:
    """Its first thread walks, and others that do not are never waited for."""
    program = programs("long")
    wait_for(program, "asked")
    tracer = program.trace(1)
    time.sleep(0.3)
    program.child.kill()
    began = time.monotonic()
    assert tracer.wait(30) == 1
    assert time.monotonic() - began < 5
