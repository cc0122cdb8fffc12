"""A private PhOS for a test: its own phosd, software GPU, programs and images; nothing of it survives the test."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from phos.cli.status import plain
from phos.gpu_engine.daemon import client
from phos.gpu_engine.errors import DaemonUnavailable
from phos.gpu_engine.installation import examples_folder, launcher, software_gpu_folder

PATIENCE = 90.0
"""Seconds after which something that should have happened has not."""

CAP_SYS_RESOURCE = 24
"""Without it CRIU cannot dump another user's process."""


ROOMS = re.compile(r"bytes for hashes, at (0x[0-9a-f]+)")
"""As arrival_rooms.py says it."""

SMALL: dict[str, tuple[str, ...]] = {
    "mlp": ("--size", "32", "--batch", "32"),
    "stencil": ("--size", "48"),
    "pointer_chase": ("--size", "12", "--walkers", "64"),
    "struct_argument": ("--size", "4096"),
    "device_pointer": ("--size", "4096"),
}
"""Options of the examples with which each kernel still has several blocks, and costs a fraction of its time.

What most tests promise does not depend on how much is computed; and a test that waits for an iteration, or for a
program's end, waits for a processor that other tests have at that time.
"""


def example_words(name: str, *, small: bool = True) -> tuple[str, ...]:
    """The command line of an example."""
    return (sys.executable, str(examples_folder() / f"{name}.py"), *(SMALL[name] if small else ()))


def end_file(output: Path) -> Path:
    """The file for which a program with this output waits before it ends."""
    return output.with_suffix(".end")


@dataclass
class Program:
    """A program under test, with its output in a file."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self) -> list[str]:
        return self.output.read_text(errors="replace").splitlines()

    def iterations(self) -> int:
        return sum(line.startswith("ITERATION") for line in self.lines())

    def result(self) -> str | None:
        return next((line.split()[1] for line in self.lines() if line.startswith("RESULT")), None)

    def alive(self) -> bool:
        """Whether it runs; once it does not, its pid is free for CRIU to restore it."""
        if self.pid in _started:
            if self.process.poll() is None:
                return True
            _started.discard(self.pid)
        reap()
        return psutil.pid_exists(self.pid)

    def wait_iterations(self, wanted: int) -> int:
        """Wait until so many iterations are done."""
        wait_until(lambda: self.iterations() >= wanted or not self.alive(), f"iteration {wanted} of {self.output}")
        assert self.iterations() >= wanted, f"the program ended early: {self.lines()[-10:]}"
        return self.iterations()

    def wait_progress(self, more: int = 2) -> None:
        """Wait until it has computed ``more`` iterations from now on, or ended with a result."""
        before = self.iterations()
        wait_until(
            lambda: self.iterations() >= before + more or self.result() is not None or not self.alive(),
            f"progress of {self.output}",
        )
        assert self.iterations() >= before + more or self.result() is not None, self.lines()[-10:]

    def let_end(self) -> None:
        """Let it go on to its end; an example does that without sleeping after its iterations."""
        end_file(self.output).touch()

    def hold(self) -> None:
        """Have it wait again before it ends, once it is restored from when it had not."""
        end_file(self.output).unlink(missing_ok=True)

    def wait_end(self) -> None:
        """Let it come to its end, and wait for that (also when CRIU restored it, so that it is not our child)."""
        self.let_end()
        wait_until(lambda: not self.alive(), f"the end of {self.output}")

    def wait_result(self) -> str:
        """Let it come to its end, and return its result."""
        self.wait_end()
        found = self.result()
        assert found is not None, f"no result: {self.lines()[-10:]}"
        return found


def become_reaper() -> None:
    """What CRIU restores, and what loses its parent, becomes this process's child, so that its end frees its pid."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def children() -> list[int]:
    """Our own, the ended ones as well. Asked for while one waits: psutil would look at each process of the machine."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # that thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def reap() -> None:
    """Collect ended children that no Popen object waits for."""
    for pid in children():
        if pid not in _started:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def opened(pid: int) -> list[tuple[str, os.stat_result]]:
    """What a process has open, but for what it closes meanwhile.

    Raises:
        OSError: the process is gone.
    """
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            found.append((os.readlink(entry), entry.stat()))
    return found


def has_capability(number: int) -> bool:
    """Whether we have a capability of the kernel's (linux/capability.h)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> number & 1)


_started: set[int] = set()
"""Pids of Popen objects that have not been waited for; of this process's one thread."""


def words(process: psutil.Process) -> list[str]:
    """A process's command line; nothing if it has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class _Held(NamedTuple):
    """Software GPU memory (by its memfd's inode), and a process that has it mapped at an address, or open (0)."""

    process: psutil.Process
    inode: int
    size: int
    address: int


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition; fail with its description."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.01)


@dataclass
class Site:
    """Everything of one test; see conftest.py for its life."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Those in the background."""
    references: Path | None = None
    """A folder where the tests of one run of pytest share what references have come to; without, its own."""

    def __post_init__(self) -> None:
        self.environment = {
            **os.environ,
            "PHOS_SOCKET": str(self.folder / "run" / "phosd.sock"),
            "PHOS_DEVICE": "software",
            "PHOS_PYTHON": sys.executable,
            "PHOS_TEST_SITE": str(self.folder),
            "PYTHONUNBUFFERED": "",  # with it a line is written in pieces, and programs are killed between them
            "SOFTGPU_MEMORY": "2G",
            # Tests run beside each other; and threads of every launch take the pids that CRIU wants to restore under.
            "SOFTGPU_THREADS": "1",
            "SOFTGPU_MACHINE": f"{self.folder.name}-{os.getpid()}",  # accounts of its own
            **self.environment,
        }

    # Commands.

    def run(self, *words: str, check: bool = True, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run one of our commands; ``changes`` go into its environment."""
        command = [str(launcher(words[0])), *words[1:]]
        result = subprocess.run(
            command,
            env={**self.environment, **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if check:
            assert result.returncode == 0, f"{' '.join(words)}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def start(self, *command: str, under: bool = True, **changes: str) -> Program:
        """Start a program in a session of its own; ``under`` the frontend or on the software GPU alone."""
        output = self.folder / f"program-{len(self.programs)}.log"
        environment = {**self.environment, **changes}
        if under:
            command = (str(launcher("phos-gpu")), "run", "--", *command)
        else:
            environment["LD_LIBRARY_PATH"] = str(software_gpu_folder())
        with open(output, "ab") as file:  # CRIU wants other files to be as long as they were
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=self.folder,
            )
        _started.add(process.pid)
        program = Program(process, output)
        self.programs.append(program)
        return program

    def until_awaited(self, *command: str, under: bool = True, **changes: str) -> Program:
        """Start a program whose last argument is still to come: the file for which it waits before it ends.

        It cannot have ended before one waits for its end, however slow the machine is.
        """
        end = end_file(self.folder / f"program-{len(self.programs)}.log")
        return self.start(*command, str(end), under=under, **changes)

    def example(self, name: str, *options: str, under: bool = True, small: bool = True, **changes: str) -> Program:
        """Start one of the examples, small unless it is compared with one that is not; see :meth:`until_awaited`."""
        return self.until_awaited(*example_words(name, small=small), *options, "--until", under=under, **changes)

    def reference(self, name: str, *options: str, small: bool = True) -> str:
        """The result of one of the examples; see :meth:`reference_of`."""
        return self.reference_of(*example_words(name, small=small), *options, "--until")

    def reference_of(self, *command: str, **changes: str) -> str:
        """The result of a run that nothing disturbs, without PhOS in the process; see :meth:`until_awaited`.

        It is run once for all tests that share :attr:`references`, whatever they have in their environments: it is to
        say what is right, and so depends on the command alone.
        """
        folder = self.references or self.folder
        key = hashlib.sha256(repr((command, sorted(changes.items()))).encode()).hexdigest()[:16]
        with open(folder / f"reference-{key}", "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: who comes meanwhile waits for the result
            file.seek(0)
            result = file.read()
            if not result:
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    alone = Site(Path(own))
                    try:
                        result = alone.until_awaited(*command, under=False, **changes).wait_result()
                    finally:
                        alone.close()
                file.write(result)
            return result

    def image(self, name: str = "image") -> Path:
        """A new, empty image directory."""
        path = self.folder / name
        path.mkdir()
        return path

    def dump(
        self, program: Program, image: Path, *options: str, check: bool = True, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """``criu dump --lib phos``; without --leave-running the program is reaped, so that its pid is free."""
        result = self.run(*self._dump(program, image), *options, check=False, **changes)
        if check:
            assert result.returncode == 0, f"{result.stdout}{result.stderr}{self.errors(image / 'dump.log')}"
            if "--leave-running" not in options:
                self.gone(program)
        return result

    def begin_dump(self, program: Program, image: Path, *options: str, **changes: str) -> subprocess.Popen[bytes]:
        """The same in the background."""
        return self.background(*self._dump(program, image), *options, **changes)

    @staticmethod
    def _dump(program: Program, image: Path) -> list[str]:
        return ["criu", "dump", "--lib", "phos", "-t", str(program.pid), "-D", str(image), "-o", "dump.log", "-v4"]

    def gone(self, program: Program) -> None:
        """Wait until a program and its children have ended and their pids are free: CRIU restores under the same."""
        program.process.poll()
        _started.discard(program.pid)
        wait_until(lambda: not program.alive() and not self._zombies(), f"the end of process {program.pid}")

    @staticmethod
    def freed(pid: int) -> None:
        """Wait until there is no process with this pid, a zombie neither: it may end any time after it was killed."""

        def free() -> bool:
            reap()
            return not psutil.pid_exists(pid)

        wait_until(free, f"pid {pid} to be free")

    @staticmethod
    def _zombies() -> bool:
        reap()
        return any(pid not in _started and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in children())

    def background(self, *words: str, **changes: str) -> subprocess.Popen[bytes]:
        """Start one of our commands and go on."""
        process = subprocess.Popen(
            [str(launcher(words[0])), *words[1:]],
            env={**self.environment, **changes},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _started.add(process.pid)
        self.commands.append(process)
        return process

    def restore(
        self, image: Path, *options: str, check: bool = True, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """``criu restore --lib phos -d``."""
        words = ["criu", "restore", "--lib", "phos", "-d", "-D", str(image), "-o", "restore.log", "-v4"]
        result = self.run(*words, *options, check=False, **changes)
        if result.returncode:  # those that CRIU has killed may be its parent's to collect, which is this process then
            wait_until(lambda: not self._zombies(), "the end of what CRIU had begun to restore")
        if check:
            assert result.returncode == 0, f"{result.stdout}{result.stderr}{self.errors(image / 'restore.log')}"
        return result

    @staticmethod
    def errors(log: Path) -> str:
        """The error lines of a CRIU log."""
        if not log.exists():
            return "(no log)"
        return "\n".join(line for line in log.read_text(errors="replace").splitlines() if "Error" in line)

    def status(self) -> dict[str, Any]:
        """What ``phos-gpu status --json`` prints. Asked over and over, so that no process is started for it."""
        return plain(client.status(Path(self.environment["PHOS_SOCKET"])))

    def answers(self) -> bool:
        """Whether phosd does."""
        try:
            self.status()
        except DaemonUnavailable:
            return False
        return True

    def daemon_pid(self) -> int:
        return int(self.status()["pid"])

    def stop_phosd(self, *, check: bool = True) -> None:
        """As ``phosd --stop``, but that no process is started for it; without ``check`` there may be none to stop."""
        try:
            client.shutdown(Path(self.environment["PHOS_SOCKET"]))
        except DaemonUnavailable:
            if check:
                raise

    def serve(self, module: str, **changes: str) -> None:
        """Run this module as phosd in place of the one that runs, with the environment's PYTHONPATH.

        The installed phosd takes no notice of that variable.
        """
        self.stop_phosd(check=False)
        path = [self.environment.get("PYTHONPATH"), str(Path(__file__).resolve().parents[2])]
        environment = {
            **self.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "LD_LIBRARY_PATH": str(software_gpu_folder()),
            **changes,
        }
        log_file = self.folder / "run" / "phosd.log"
        log_file.parent.mkdir(mode=0o700, exist_ok=True)
        with open(log_file, "ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", module, "--socket", self.environment["PHOS_SOCKET"]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self.answers, f"phosd from {module}")

    # What is left.

    def processes(self) -> list[psutil.Process]:
        """Every process that belongs to this site."""
        mine = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PHOS_TEST_SITE") == str(self.folder) and process.pid != os.getpid():
                    mine.append(process)
            except psutil.Error:
                pass
        return mine

    def gpu_memory(self) -> int:
        """Bytes of software GPU memory that any process of the site holds, counted once (by memfd inode).

        Without phosd's own, for hashes: what it maps where its log says that they are (arrival_rooms.py).
        """
        found: dict[int, int] = {}
        own: set[int] = set()
        rooms = self._rooms()
        for held in self._holders():
            found[held.inode] = max(held.size, found.get(held.inode, 0))
            if held.address in rooms and "--socket" in words(held.process):  # phosd, or an altered one
                own.add(held.inode)
        return sum(size for inode, size in found.items() if inode not in own)

    def _rooms(self) -> set[int]:
        """Where each phosd of the site has had memory for hashes."""
        logs = [
            Path(folder, name).read_text(errors="replace")
            for folder, _, names in os.walk(self.folder)
            for name in names
            if name.startswith("phosd.log")
        ]
        return {int(address, 16) for log in logs for address in ROOMS.findall(log)}

    def _holders(self) -> Iterator[_Held]:
        """Who holds which software GPU memory of which size."""
        for process in self.processes():
            try:
                for name, status in opened(process.pid):
                    if "memfd:softgpu-" in name:
                        yield _Held(process, status.st_ino, status.st_size, 0)
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if "memfd:softgpu-" in line:
                        fields = line.split()
                        begin, end = (int(x, 16) for x in fields[0].split("-"))
                        yield _Held(process, int(fields[4]), end - begin, begin)
            except (OSError, psutil.Error):
                pass

    def wait_no_gpu_memory(self, seconds: float = PATIENCE) -> None:
        """Wait until no process of the site holds software GPU memory any more."""
        deadline = time.monotonic() + seconds
        while self.gpu_memory():
            holders = {f"{' '.join(words(held.process))} ({held.process.pid})" for held in self._holders()}
            assert time.monotonic() < deadline, f"GPU memory is still held after {seconds:.0f} s, by {sorted(holders)}"
            time.sleep(0.01)

    def close(self) -> None:
        """End everything, also what something that is about to end still starts."""
        found_none = 0
        while found_none < 2:  # in the middle of an exec a process has no environment to be known by
            mine = self.processes()
            found_none = 0 if mine else found_none + 1
            for process in mine:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.Error:
                    pass
            time.sleep(0.01)
        for process in [*(program.process for program in self.programs), *self.commands]:
            process.poll()
            _started.discard(process.pid)
        reap()


class Toggles:
    """The driver's checkpoints (or restores) of programs that are started with :attr:`environment`: none ends before
    :meth:`let_go`, however slow the test is."""

    def __init__(self, site: Site, kind: str) -> None:
        """``kind``: checkpoint or restore."""
        hold = site.folder / "toggles"
        self.environment = {"SOFTGPU_TOGGLE_HOLD": str(hold)}
        self._file = hold.with_name(f"{hold.name}.{kind}")
        self._file.touch()

    def wait(self, *pids: int) -> None:
        """Wait until those of these processes have begun."""
        files = [self._file.with_name(f"{self._file.name}.{pid}") for pid in pids]
        wait_until(lambda: all(file.exists() for file in files), f"{self._file.suffix} of {pids}")

    def let_go(self) -> None:
        """Let them end, and all that come."""
        self._file.unlink(missing_ok=True)
