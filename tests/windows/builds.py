"""What random programs are built and run with: their executable, phosd, and a sanitizer for both."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phos.gpu_engine.daemon import reach
from phos.gpu_engine.installation import software_gpu_folder

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PATIENCE = 120.0

KINDS = {"thread": ("tsan", "TSAN_OPTIONS", b"__tsan_"), "address,undefined": ("asan", "ASAN_OPTIONS", b"__asan_")}
"""By what -fsanitize= takes: its runtime library, the variable with its options, and what instrumented code calls."""

REPORTS = "sanitizer"
"""Begin of the names of the files that reports go to."""

RACE_OF_A_LIE = ("data race", "sg_copy_run softgpu/copy.c")
"""No guess said where a kernel writes: it races with the copy of a shadow. The content's hash is to find that."""

THREADS_LEFT = ("thread leak", "tests/windows/program.c")
"""A program that ends at once joins nobody."""


class Wrong(AssertionError):
    """Something is not as it must be."""


@dataclass(frozen=True)
class Sanitizer:
    """A sanitizer for the program, its frontend and software GPU, and for what phosd loads.

    The frontend, the chunk table and the software GPU of such a build are in ``build`` (docs/contributing.md). Reports
    go to files in ``folder``.
    """

    kind: str
    folder: Path
    build: Path = ROOT / "build"

    def __post_init__(self) -> None:
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"There is no sanitizer '{self.kind}' here: {', '.join(KINDS)}.")

    @property
    def flags(self) -> tuple[str, ...]:
        """For the compiler."""
        return (f"-fsanitize={self.kind}",) if self.kind else ()

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a program is started with: newer kernels randomise addresses more than ThreadSanitizer takes."""
        return ("setarch", "-R") if self.kind else ()

    def program(self) -> dict[str, str]:
        """The environment of the program. A child of a process with threads is more than sanitizers follow."""
        if not self.kind:
            return {}
        first = [] if self.kind == "thread" else [self._runtime()]  # it wants to come before what else is preloaded
        return {
            "NO_FORK": "1",
            "LD_PRELOAD": ":".join([*first, str(self.build / "lib" / "libphos.so")]),
            "LD_LIBRARY_PATH": str(self.build / "softgpu"),
            **self._options(),
        }

    def phosd(self) -> dict[str, str]:
        """The environment of phosd. Python itself is not instrumented, the libraries that it loads are."""
        if not self.kind:
            return {}
        return {
            "PHOS_HOME": str(self.build),
            "LD_PRELOAD": self._runtime(),
            **self._options("ignore_noninstrumented_modules=1", "die_after_fork=0", "detect_leaks=0"),
        }

    def _runtime(self) -> str:
        """The sanitizer's library."""
        name = KINDS[self.kind][0]
        runtime = subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
        return str(Path(runtime.stdout.strip()).resolve())

    def _options(self, *more: str) -> dict[str, str]:
        path = f"log_path={self.folder / REPORTS}"
        if self.kind == "thread":
            more = ("exitcode=0", *more)  # the files say what was found; some of it may be expected
        else:
            more = ("exitcode=66", *(m for m in more if m.startswith("detect_leaks")))
        return {KINDS[self.kind][1]: ":".join([path, *more])}

    def check_build(self) -> None:
        """
        Raises:
            Wrong: ``build`` is no such build: in plain libraries nothing would be found.
        """
        for name in ("lib/libphos.so", "lib/libphos_chunks.so", "softgpu/libcuda.so.1"):
            path = self.build / name
            if not path.exists() or KINDS[self.kind][2] not in path.read_bytes():
                raise Wrong(
                    f"{path} is not built with -fsanitize={self.kind}: `make frontend softgpu chunks SANITIZE=…`."
                )

    def complain(self, *expected: tuple[str, str]) -> None:
        """Look for reports. Those that are ``expected`` are thrown away: of that kind, and with that in them.

        Raises:
            Wrong: a sanitizer has reported something else.
        """
        for path in self.folder.glob(f"{REPORTS}.*"):
            said = path.read_text(errors="replace")
            reports = said.split("WARNING: ThreadSanitizer: ")[1:]
            if not reports or not all(_is_one_of(report, expected) for report in reports):
                raise Wrong(f"{path.name}: {said[:6000]}")
            path.unlink()


def _is_one_of(report: str, expected: tuple[tuple[str, str], ...]) -> bool:
    if THREADS_LEFT in expected and report.startswith(THREADS_LEFT[0]) and "#" not in report:
        return True  # two threads have ended the program at once, the second while the first reported
    return any(report.startswith(kind) and what in report for kind, what in expected)


def build(folder: Path, *flags: str) -> Path:
    """Compile the random program."""
    program = folder / "program"
    cuda = os.environ.get("CUDA_INCLUDE", str(ROOT / "build" / "cuda" / "include"))
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    sources = [str(HERE / name) for name in ("program.c", "program_parts.c")]
    library = ["-L", str(software_gpu_folder()), "-l:libcuda.so.1"]
    subprocess.run([*command, "-isystem", cuda, *sources, *library, "-o", str(program)], check=True)
    return program


def gpus(seed: int) -> int:
    """How many GPUs the programs of a batch compute on: every other batch has two."""
    return 1 + seed % 2


def start_phosd(
    module: str, socket: Path, log: Path, environment: Mapping[str, str], sanitizer: Sanitizer
) -> subprocess.Popen[bytes]:
    """Start phosd, from a Python module that is it or behaves as it, and wait until it answers."""
    command = [*sanitizer.prefix, sys.executable, "-m", module, "--socket", str(socket)]
    socket.parent.mkdir(exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            env={**environment, **sanitizer.phosd(), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            reach.connect(socket).close()
            return process
        except Exception:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def of_socket(socket: Path) -> Iterator[int]:
    """Processes of that phosd: its keeper, for one, outlives it."""
    wanted = f"PHOS_SOCKET={socket}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            pass
