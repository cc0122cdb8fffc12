"""Random programs under phosd, and checkpoints of them by copy-on-write, one after the other.

The plugin's part is played here, without CRIU: a process that is to run on cannot tell the difference, since CRIU only
looks at it. ``python -m tests.windows.windows --windows 5000 --jobs 2`` runs as many as wanted and says what it met
with (many.py).
"""

from __future__ import annotations

import argparse
import ctypes
import io
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import client, reach, wire
from phos.gpu_engine.installation import application_environment
from phos.images.reader import EXTENT_LIMIT, Extent, Image
from tests.windows import many
from tests.windows.builds import (
    HERE,
    PATIENCE,
    RACE_OF_A_LIE,
    ROOT,
    THREADS_LEFT,
    Sanitizer,
    Wrong,
    build,
    gpus,
    of_socket,
    start_phosd,
)
from tests.windows.many import Kind
from tests.windows.watched_phosd import truth_file

POOLS = ("0", "16M", "2G", "2G", "64M")
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
KIND = Kind("tests.windows.windows", "windows", "--windows", batch=50)


@dataclass
class Options:
    """What a run is like."""

    seed: int = 0
    bandwidth: str = "120M"
    per_program: int = 12
    megabytes: int = 8
    nap: int = 150
    rare: int = 150
    lies: float = 0.0
    exits: float = 0.5
    sanitize: str = ""
    sanitized: Path = ROOT / "build"
    """Where what ``sanitize`` says was built."""
    executable: Path | None = None
    """The program, if it has been built."""
    environment: dict[str, str] = field(default_factory=dict)


class Workshop:
    """A phosd, a program, and images that come and go."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.options = options
        self.random = random.Random(options.seed)
        self.met: Counter[str] = Counter()
        self.truth = folder / "truth"
        self.truth.mkdir()
        self.lies = folder / "lies"
        self.socket = folder / "run" / "phosd.sock"
        self.sanitizer = Sanitizer(options.sanitize, folder, options.sanitized)
        self.executable = options.executable or build(folder, *self.sanitizer.flags)
        self.program: subprocess.Popen[bytes] | None = None
        self.output = folder / "program.log"
        self._buffers = (mmap.mmap(-1, EXTENT_LIMIT), mmap.mmap(-1, EXTENT_LIMIT))
        self._programs = 0
        self._environment = {
            **os.environ,
            "PHOS_SOCKET": str(self.socket),
            "PHOS_DEVICE": "software",
            "PYTHONPATH": str(ROOT),
            "SOFTGPU_MEMORY": "2G",
            "SOFTGPU_MACHINE": folder.name,
            "SOFTGPU_DEVICES": str(gpus(options.seed)),
            "WATCH_TRUTH": str(self.truth),
            "WATCH_LIES": str(self.lies),
        }
        self.log = folder / "phosd.log"
        self.phosd = self._start_phosd()

    def _start_phosd(self) -> subprocess.Popen[bytes]:
        environment = {
            **self._environment,
            "SOFTGPU_COPY_BANDWIDTH": self.options.bandwidth,
            "PHOS_RING_BYTES": str(64 << 20),
        }
        return start_phosd("tests.windows.watched_phosd", self.socket, self.log, environment, self.sanitizer)

    # The program.

    def start_program(self) -> None:
        """A new one, with a seed of its own."""
        self._programs += 1
        self.met["programs"] += 1
        self.met["programs on two GPUs"] += gpus(self.options.seed) == 2
        options = self.options
        seed = options.seed * 100000 + self._programs
        numbers = (seed, self.random.randint(1, 4), options.megabytes, options.nap, options.rare)
        environment = {
            **self._environment,
            **application_environment("software", self.socket),
            **self.sanitizer.program(),
            **options.environment,
        }
        command = [*self.sanitizer.prefix, str(self.executable), str(HERE / "kernels.ptx"), *map(str, numbers)]
        self.output.unlink(missing_ok=True)
        with open(self.output, "ab") as output:
            self.program = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        deadline = time.monotonic() + PATIENCE
        while "READY" not in self.said():
            if self.program.poll() is not None or time.monotonic() > deadline:
                raise Wrong(f"program {seed} did not start: {self.said()[-3000:]}")
            time.sleep(0.01)

    def said(self) -> str:
        """What the program has written so far."""
        return self.output.read_text(errors="replace")

    def end_program(self, *expected: tuple[str, str]) -> None:
        """It compares all of its memory with what must be in it. ``expected``: see :meth:`Sanitizer.complain`."""
        assert self.program is not None
        self.program.send_signal(signal.SIGUSR1)
        status = self.program.wait(PATIENCE)
        self.program = None
        self._forget_truth()
        self.sanitizer.complain(*expected)
        if status != 0 or "GOOD" not in self.said():
            raise Wrong(f"the program was harmed: status {status}, {self.said()[-3000:]}")

    def _forget_truth(self) -> None:
        for file in self.truth.iterdir():
            file.unlink()

    # Checkpoints.

    def window(self, number: int) -> str:
        """One checkpoint; returns the state of its image, which has been compared with the memory of *t1*."""
        if self.program is None:
            self.start_program()
        assert self.program is not None
        image = self.folder / f"image-{number}"
        image.mkdir()
        lying = self.random.random() < self.options.lies
        self.lies.touch() if lying else self.lies.unlink(missing_ok=True)
        ends = self.random.random() < self.options.exits / self.options.per_program
        pool = self.random.choice(POOLS)
        time.sleep(self.random.random() * 0.1)
        late = threading.Timer(self.random.random() * 0.1, self.program.send_signal, [signal.SIGUSR2])
        state = self._checkpoint(image, pool, late if ends else None, lying)
        self.met[f"images {state.state}"] += 1
        if state.state == "committed":
            self._compare(image)
        elif not lying:
            raise Wrong(f"no image: {state.state}, {state.error}")
        elif "wrote where no guess said" not in state.error:
            raise Wrong(f"the error does not say what was wrong: {state.error}")
        if ends:
            late.join()
            status = self.program.wait(PATIENCE)
            self.program = None
            self.met["exits in the window"] += 1
            if status not in (0, -signal.SIGKILL):
                raise Wrong(f"the program ended with {status}: {self.said()[-3000:]}")
        elif self.program.poll() is not None:
            raise Wrong(f"the program ended with {self.program.returncode}: {self.said()[-3000:]}")
        expected = [kind for kind, may_be in ((RACE_OF_A_LIE, lying), (THREADS_LEFT, ends)) if may_be]
        self.sanitizer.complain(*expected)
        shutil.rmtree(image)
        if lying and self.sanitizer.kind == "thread" and self.program is not None:
            self.end_program(RACE_OF_A_LIE)  # it may come out after the window
        if self.program is None:
            self._forget_truth()
        return state.state

    def _checkpoint(self, image: Path, pool: str, late: threading.Timer | None, lying: bool) -> wire_pb2.ImageState:
        assert self.program is not None
        directory = os.open(image, os.O_RDONLY | os.O_DIRECTORY)
        with reach.connect(self.socket) as connection:
            begin = wire_pb2.DumpBegin(pid=self.program.pid, criu_pid=os.getpid(), criu_version="none", protocol="cow")
            begin.cow.pool = pool
            begin.cow.prioritise = self.random.choice(("on", "off"))
            # The comparison with the memory of t1 is the test's; phosd's own takes most of the time.
            begin.cow.validate = "on" if lying or self.random.random() < 0.25 else "off"
            try:
                _ask(connection, [directory], dump_begin=begin)
            finally:
                os.close(directory)
            _ask(connection, [], task_frozen=wire_pb2.TaskFrozen(pid=self.program.pid))
            _ask(connection, [], dump_end=wire_pb2.DumpEnd(result=0))
        if late is not None:
            late.start()
        return client.wait_image(image, timeout=PATIENCE, path=self.socket)

    def _compare(self, image: Path) -> None:
        with Image.open(image) as opened:
            for name, value in opened.inventory.window.items():
                if name != "pool_bytes":
                    self.met[name] += value
            keys = {
                key
                for process in opened.inventory.processes
                for key in ((process.session, b.block) for b in process.blocks)
            }
            if missing := [key for key in keys if key not in opened.blocks]:
                raise Wrong(f"the image lacks blocks {missing}")
            for key in opened.blocks:
                with open(truth_file(self.truth, *key), "rb", buffering=0) as truth:
                    for extent in opened.extents(key):
                        self._compare_extent(opened, extent, key[1], truth)

    def _compare_extent(self, image: Image, extent: Extent, block: int, truth: io.FileIO) -> None:
        # The same two buffers every time: a page that a process touches first costs more than comparing a hundred.
        found, expected = (memoryview(buffer)[: extent.length] for buffer in self._buffers)
        image.read_into(extent, found)
        truth.seek(extent.offset)
        if truth.readinto(expected) != extent.length:
            raise Wrong(f"block {block} is longer than it was at t1")
        self.met["bytes compared"] += extent.length
        if _memcmp(*(ctypes.byref(ctypes.c_char.from_buffer(b)) for b in (found, expected)), extent.length):
            first = next(i for i in range(extent.length) if found[i] != expected[i])
            raise Wrong(f"block {block} differs from t1 at {extent.offset + first}")

    def run(self, windows: int) -> None:
        """So many checkpoints; each program has a few of them."""
        for number in range(windows):
            self.window(number)
            if self.program is not None and self.random.random() < 1 / self.options.per_program:
                self.end_program()
        if self.program is not None:
            self.end_program()
        self.sanitizer.complain()

    def close(self) -> None:
        """End everything."""
        for process in (self.program, self.phosd):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        for pid in of_socket(self.socket):
            os.kill(pid, signal.SIGKILL)


def _ask(connection: object, descriptors: list[int], **body: object) -> None:
    envelope = wire_pb2.Envelope(id=1, **body)  # type: ignore[arg-type]
    wire.send(connection, envelope, descriptors)  # type: ignore[arg-type]
    answer = wire.receive(connection)  # type: ignore[arg-type]
    if answer is None:
        raise Wrong("phosd is gone")
    if answer[0].done.error:
        raise Wrong(f"phosd refused: {answer[0].done.error}")


@contextmanager
def workshop(folder: Path, options: Options) -> Iterator[Workshop]:
    """With everything ended afterwards."""
    made = Workshop(folder, options)
    try:
        yield made
    finally:
        made.close()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    many.options(parser, KIND)
    parser.add_argument("--lies", type=float, default=0.05, help="how often phosd is made to guess wrong (%(default)s)")
    parser.add_argument("--bandwidth", default="120M", help="of phosd's copies, bytes per second (%(default)s)")
    chosen = parser.parse_args()
    if chosen.report is None:
        return many.many(chosen, KIND, ["--lies", str(chosen.lies), "--bandwidth", chosen.bandwidth])
    options = Options(
        seed=chosen.seed,
        lies=chosen.lies,
        bandwidth=chosen.bandwidth,
        sanitize=chosen.sanitize,
        sanitized=chosen.build,
        executable=chosen.program,
    )

    def run(folder: Path, met: Counter[str]) -> None:
        with workshop(folder, options) as made:
            made.met = met
            made.run(chosen.runs)

    return many.one(chosen, run)


if __name__ == "__main__":
    sys.exit(main())
