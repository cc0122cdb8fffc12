"""Programs under test: started, watched through their report file, dumped, killed and restored.

Used by the benchmarks and by tests/gpu, with the installed commands. A program is started in a session of its own, its
stdin and stdout on /dev/null (CRIU refuses a terminal it does not own) and its stderr in a file. Its lines come through
a report file that it opens for each line, because CRIU compares the size of a file that is open at the dump with the
one it finds at restore.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PROGRAMS = ROOT / "bench" / "programs"
TEST_PROGRAMS = ROOT / "tests" / "gpu" / "programs"
CRIU = os.environ.get("PHOS_BENCH_CRIU", "criu")
PHOS_GPU = os.environ.get("PHOS_BENCH_PHOS_GPU", "phos-gpu")
POLL_SECONDS = 0.0005


VERBOSITY = os.environ.get("PHOS_CRIU_VERBOSITY", "2")
"""Of CRIU's log of a dump, which it writes while the program is frozen: errors and warnings, as phos-gpu does it."""


class ProcessError(RuntimeError):
    """A program or a command did not do what it should: the message says which, and holds the end of its output."""


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants.

    A process that `criu restore -d` left behind must be reaped by somebody, or its pid stays taken and the next restore
    fails with 'File exists'. In a container nobody may be there to do it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(36, 1, 0, 0, 0) != 0:  # PR_SET_CHILD_SUBREAPER
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll until the condition holds. Raises ProcessError, naming `what`, after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise ProcessError(f"Waited {timeout:.0f} s in vain for {what}.")
        time.sleep(POLL_SECONDS)


def software_gpu_folder() -> Path:
    """Return the folder of the software GPU's libcuda.so.1: of the installation if there is one, else of the build."""
    given = os.environ.get("PHOS_BENCH_SOFTGPU")
    candidates = [Path(given)] if given else []
    command = shutil.which(PHOS_GPU)
    if command:
        candidates.append(Path(command).resolve().parents[1] / "softgpu")  # PREFIX/lib/phos/{bin,softgpu}
    candidates.append(ROOT / "build" / "softgpu" / "libcuda.so.1")
    for candidate in candidates:
        folder = candidate if candidate.is_dir() else candidate.parent
        if (folder / "libcuda.so.1").exists():
            return folder
    raise ProcessError("Found no software GPU: build it with `make`, or name its folder in PHOS_BENCH_SOFTGPU.")


def device_environment(device: str) -> dict[str, str]:
    """Return the environment in which CUDA programs find the given device ("nvidia" or "software")."""
    environment = dict(os.environ)
    if device == "software":
        rest = environment.get("LD_LIBRARY_PATH")
        folder = str(software_gpu_folder())
        environment["LD_LIBRARY_PATH"] = f"{folder}:{rest}" if rest else folder
    environment["PHOS_DEVICE"] = device
    return environment


@dataclass
class Program:
    """A program that writes ITERATION lines to a report file."""

    command: Sequence[str]
    folder: Path
    device: str = "nvidia"
    frontend: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    name: str = "program"

    def __post_init__(self) -> None:
        self.report = self.folder / f"{self.name}.report"
        self.errors = self.folder / f"{self.name}.stderr"
        self._child: subprocess.Popen[bytes] | None = None
        self.errors_size = 0
        self._tree: list[int] = []
        self.pid = 0

    def start(self) -> Program:
        """Start it, under the frontend if so chosen. Returns itself."""
        self.report.unlink(missing_ok=True)
        command = [*self.command, "--report", str(self.report)]
        environment = dict(os.environ) if self.frontend else device_environment(self.device)
        if self.frontend:
            command = [PHOS_GPU, "run", "--device", self.device, "--", *command]
        self.errors.unlink(missing_ok=True)
        with open(self.errors, "ab") as errors:  # CRIU restores other files only where they have not grown
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                env={**environment, **self.environment},
                close_fds=True,
            )
        self.pid = self._child.pid
        return self

    def lines(self) -> list[str]:
        """Return the complete lines of the report so far."""
        try:
            return self.report.read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []

    def alive(self) -> bool:
        """Say whether the process exists and is no zombie."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX"

    def wait_for(self, pattern: str, timeout: float = 120.0, after: int = 0) -> str:
        """Return the first line from number `after` on that matches. Raises ProcessError if it ends without one."""
        size = -1
        end = time.monotonic() + timeout
        while True:
            alive = self.alive()
            try:
                now = os.stat(self.report).st_size
            except FileNotFoundError:
                now = -1
            if now != size or not alive:
                size = now
                for line in self.lines()[after:]:
                    if re.search(pattern, line):
                        return line
            if not alive:
                raise ProcessError(f"{self.name} (pid {self.pid}) ended before it printed {pattern!r}.{self._tail()}")
            if time.monotonic() > end:
                raise ProcessError(f"{self.name} did not print {pattern!r} within {timeout:.0f} s.{self._tail()}")
            time.sleep(POLL_SECONDS)

    def _tail(self) -> str:
        errors = self.errors.read_text(errors="replace")[-2000:] if self.errors.exists() else ""
        return f" Its last lines: {self.lines()[-3:]}. Its stderr ends:\n{errors}"

    def iterations(self) -> int:
        """Return the number in the last ITERATION line, 0 if there is none."""
        numbers = [int(line.split()[1]) for line in self.lines() if line.startswith("ITERATION")]
        return numbers[-1] if numbers else 0

    def wait_iterations(self, count: int, timeout: float = 120.0) -> None:
        """Wait until `count` more iterations have been printed."""
        start = len(self.lines())
        wait_until(lambda: len(self.lines()) >= start + count or not self.alive(), timeout, f"{self.name} to compute")
        if len(self.lines()) < start + count:
            raise ProcessError(f"{self.name} ended instead of computing on.{self._tail()}")

    def before_dump(self) -> None:
        """Note which processes belong to it: once the dump has killed them, nobody can tell."""
        self._tree = descendants(self.pid)

    def dumped(self, killed: bool) -> None:
        """Note that the process has been dumped; reap it and its descendants if the dump killed them."""
        self.errors_size = self.errors.stat().st_size
        if killed:
            self.reap()

    def before_restore(self) -> None:
        """Cut the stderr file to the size that CRIU remembers; the report is not open and may stay."""
        os.truncate(self.errors, self.errors_size)

    def kill(self) -> None:
        """End the process, if it is there, and reap it."""
        if self.pid:
            self._tree = descendants(self.pid)
            for pid in (self.pid, *self._tree):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.reap()

    def reap(self, timeout: float = 60.0) -> None:
        """Wait until the process is gone and its pid free again."""
        end = time.monotonic() + timeout
        while self.pid:
            if self._child is not None and self._child.pid == self.pid and self._child.returncode is None:
                if self._child.poll() is None and not self.alive():
                    continue
            else:
                reap_orphan(self.pid)
            for pid in self._tree:
                reap_orphan(pid)
            if not any(os.path.exists(f"/proc/{pid}") for pid in (self.pid, *self._tree)):
                self._tree = []
                return
            if time.monotonic() > end:
                raise ProcessError(f"Process {self.pid} ({self.name}) did not go away within {timeout:.0f} s.")
            time.sleep(POLL_SECONDS)

    def finish(self, timeout: float = 300.0) -> list[str]:
        """Wait for the RESULT line and the end; return the report's lines without those that describe the machine."""
        self.wait_for("^RESULT", timeout)
        wait_until(lambda: not self.alive(), 60, f"{self.name} to exit")
        self.reap()
        return [line for line in self.lines() if not line.startswith("#")]


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in listing.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def reap_orphan(pid: int) -> None:
    """Collect the end of a process that became our child (see adopt_orphans), if it is one and has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def log_errors(folder: Path, name: str) -> str:
    """Return the error lines of one of CRIU's logs."""
    try:
        text = (folder / name).read_text(errors="replace")
    except FileNotFoundError:
        return "(no log)"
    found = [line for line in text.splitlines() if "Error" in line or "error" in line.lower().split(":")[0]]
    return "\n".join(found[-12:] or text.splitlines()[-12:])


def command(arguments: Sequence[str], timeout: float, environment: dict[str, str] | None = None) -> tuple[float, str]:
    """Run a command to its end; return its wall-clock seconds and its standard output.

    Output goes to files: a daemon that the command started and that kept a pipe open would keep us waiting for its end.
    Raises ProcessError, with what the command said, if it fails or takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        child = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment, close_fds=True
        )
        try:
            child.wait(timeout)
        except subprocess.TimeoutExpired as expired:
            child.kill()
            child.wait()
            raise ProcessError(f"`{' '.join(arguments)}` took more than {timeout:.0f} s.") from expired
        seconds = time.perf_counter() - start
        output.seek(0)
        errors.seek(0)
        text = output.read().decode(errors="replace")
        if child.returncode != 0:
            said = (text + errors.read().decode(errors="replace"))[-3000:]
            raise ProcessError(f"`{' '.join(arguments)}` failed with status {child.returncode}:\n{said}")
    return seconds, text


def status() -> dict[str, Any]:
    """Return what `phos-gpu status --json` says."""
    _, text = command([PHOS_GPU, "status", "--json"], 60)
    return dict(json.loads(text))


def settle(pid: int, seconds: float) -> int:
    """Wait until phosd has analysed all kernels of a process, so many seconds at most; return how many are left.

    As in any program that has run for a while. The analysis takes several processors, which what is measured wants.
    """
    end = time.monotonic() + seconds
    while True:
        pending = sum(entry["kernels_pending"] for entry in status()["processes"] if entry["pid"] == pid)
        if not pending or time.monotonic() >= end:
            return int(pending)
        time.sleep(0.1)


def criu_dump(
    program: Program,
    folder: Path,
    *options: str,
    leave_running: bool = False,
    plugin: bool = True,
    timeout: float = 300.0,
) -> float:
    """Dump a program; return how many seconds the command took. With `plugin` false, CRIU runs without any plugin."""
    arguments = [CRIU, "dump", *_library(plugin, program.folder), "-t", str(program.pid), "-D", str(folder)]
    arguments += ["-o", "dump.log", f"-v{VERBOSITY}", *options]
    if not plugin:
        arguments += ["--timeout", "600"]  # with ours the plugin stops that alarm while the GPU is at work
    if leave_running:
        arguments.append("--leave-running")
    program.before_dump()
    try:
        seconds, _ = command(arguments, timeout)
    except ProcessError as error:
        raise ProcessError(f"{error}\n{log_errors(folder, 'dump.log')}") from error
    program.dumped(killed=not leave_running)
    return seconds


def criu_restore(
    program: Program, folder: Path, *options: str, plugin: bool = True, timeout: float = 120.0
) -> tuple[float, float]:
    """Restore a program, detached.

    Returns the seconds until the command returned, and until the program had computed and printed its next iteration
    (without the plugin the GPU is still the caller's to restore: the second number is 0).
    """
    program.before_restore()
    before = len(program.lines())
    arguments = [CRIU, "restore", "-d", *_library(plugin, program.folder), "-D", str(folder), "-v4"]
    arguments += ["-o", "restore.log", *options]
    start = time.perf_counter()
    with open(program.folder / "restore.output", "wb") as output:
        child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    computing = returned = 0.0
    while not returned or (plugin and not computing):
        now = time.perf_counter() - start
        if not returned and child.poll() is not None:
            returned = now
            if child.returncode != 0:
                said = (program.folder / "restore.output").read_text(errors="replace")[-2000:]
                raise ProcessError(
                    f"`{' '.join(arguments)}` failed with status {child.returncode}:\n{said}\n"
                    f"{log_errors(folder, 'restore.log')}"
                )
        if plugin and not computing and len(program.lines()) > before:
            computing = now
        if now > timeout:
            child.kill()
            child.wait()
            state = "did not return" if not returned else "returned, but the program does not compute"
            raise ProcessError(
                f"`{' '.join(arguments)}` {state} after {timeout:.0f} s.\n{log_errors(folder, 'restore.log')}"
            )
        if returned and not program.alive():
            raise ProcessError(f"The restored {program.name} ended.{program._tail()}")
        time.sleep(POLL_SECONDS)
    return returned, computing


def _library(plugin: bool, folder: Path) -> list[str]:
    if plugin:
        return ["--lib", "phos"]
    empty = folder / "no-plugins"
    empty.mkdir(exist_ok=True)
    return ["--libdir", str(empty)]


def inspect(folder: Path) -> dict[str, Any]:
    """Return what `phos-gpu inspect --json` says of an image."""
    _, text = command([PHOS_GPU, "inspect", "--json", str(folder)], 120)
    return dict(json.loads(text))


def find_key(tree: Any, key: str) -> Any:
    """Return the first value stored under a key anywhere in decoded JSON; None if there is none."""
    if isinstance(tree, dict):
        if key in tree:
            return tree[key]
        tree = list(tree.values())
    if isinstance(tree, list):
        for branch in tree:
            found = find_key(branch, key)
            if found is not None:
                return found
    return None


def timings(folder: Path) -> dict[str, float]:
    """Return the phases of a dump in seconds, in order, as the image's inventory holds them."""
    found = find_key(inspect(folder), "timings") or []
    if isinstance(found, dict):
        found = found.get("phases", [])
    return {entry["phase"]: float(entry["seconds"]) for entry in found}


def restore_timings() -> dict[str, float]:
    """Return the seconds of each phase of phosd's newest restore."""
    _, text = command([PHOS_GPU, "status", "--json"], 30)
    jobs = [job for job in json.loads(text)["jobs"] if job["kind"] == "restore"]
    return {phase["name"]: phase["seconds"] for phase in jobs[-1]["phases"]} if jobs else {}


def daemon_pid() -> int:
    """Return phosd's pid; 0 if none answers."""
    try:
        _, text = command([PHOS_GPU, "status", "--json"], 30)
    except (ProcessError, FileNotFoundError):
        return 0
    return int(find_key(json.loads(text or "{}"), "pid") or 0)


def stop_daemon() -> None:
    """End phosd, so that the next command starts a fresh one."""
    pid = daemon_pid()
    if not pid:
        return
    os.kill(pid, signal.SIGTERM)

    def gone() -> bool:
        reap_orphan(pid)
        return not os.path.exists(f"/proc/{pid}")

    wait_until(gone, 30, "phosd to end")


def restart_daemon(changes: Mapping[str, str]) -> None:
    """A fresh phosd, with these variables in its environment."""
    stop_daemon()
    command([PHOS_GPU, "run", "--", "true"], 60, {**os.environ, **changes})


def kept_by_jax(folder: Path) -> dict[str, str]:
    """Return the environment in which JAX keeps what it compiles in this folder, and takes it from there.

    Compiled anew, a program may come to other last digits, whatever XLA_FLAGS says (two of six did, H200, JAX 0.11.2).
    """
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def python_program(path: Path, *options: str) -> list[str]:
    """Return the command that runs one of our Python programs."""
    return [sys.executable, "-u", str(path), *options]


def phos_python(script: Path, *options: str) -> list[str]:
    """Return the command that runs one of our programs in the Python that has PhOS's own packages."""
    found = shutil.which(PHOS_GPU)
    if found is None:
        raise ProcessError(f"There is no command {PHOS_GPU}.")
    launcher = Path(found).resolve()
    enter = f'self=$1; shift; . "{launcher.parent}/layout.sh"; exec_python "$@"'
    return ["sh", "-c", enter, "sh", str(launcher), str(script), *options]


def folder_size(folder: Path) -> int:
    """Return how many bytes the files of a folder occupy."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
