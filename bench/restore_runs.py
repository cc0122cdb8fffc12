"""A server that is brought back while a request is waiting: what the benchmarks of restores have in common.

The server (programs/llama_serve.py) answers requests that are files. Its image is made while it waits for the next one;
after each restore it finds that request already there, and says by the machine's clock when it launched its first
kernel and when it had its first and its last token. Everything is counted from the moment at which the restore command
is started.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driver_checkpoint
import harness
import machine
import process
from harness import GB
from process import ProcessError, Program

HOST_RESERVE = 6 << 30  # left free for everybody else
PROGRAM_BYTES = 4 << 30  # host memory of the server itself, as CRIU sees it
WARM_REQUESTS = 2

VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    # What `phos-gpu restore` is told, and its environment. The first lazy one writes the order of first use beside the
    # image: those that follow it may have it.
    "eager": ([], {"PHOS_RESTORE": "eager"}),
    "lazy, allocation order": (["--lazy"], {"PHOS_LAZY": "strict", "PHOS_PREFETCH": "allocation"}),
    "lazy, random order": (["--lazy"], {"PHOS_LAZY": "strict", "PHOS_PREFETCH": "random"}),
    "lazy": (["--lazy"], {"PHOS_LAZY": "strict", "PHOS_PREFETCH": "recorded"}),
    "lazy, fast": (["--lazy"], {"PHOS_LAZY": "fast", "PHOS_PREFETCH": "recorded"}),
    "eager, pinned": ([], {"PHOS_RESTORE": "eager"}),
    "lazy, pinned": (["--lazy"], {"PHOS_LAZY": "strict", "PHOS_PREFETCH": "recorded"}),
}

POOLS: dict[str, dict[str, str]] = {
    # What phosd finds in its environment; one of its own is started where that is not what there is.
    "pool, allocation order": {"PHOS_PREFETCH": "allocation"},
    "pool, random order": {"PHOS_PREFETCH": "random"},
    "pool, not pinned": {"PHOS_PIN_LIMIT": "0"},
    "pool": {},
}


class Unavailable(ProcessError):
    """This installation has no such command, or no room: nothing has failed."""


@dataclass(frozen=True)
class Answer:
    """What the server said of one request; times are seconds since 1970."""

    number: int
    received: float
    launched: float
    first: float
    last: float
    tokens: tuple[int, ...]

    @staticmethod
    def parse(line: str) -> Answer:
        """Return the content of an ANSWER line."""
        _, number, received, launched, first, last, tokens = line.split()
        times = (float(received), float(launched), float(first), float(last))
        return Answer(int(number), *times, tuple(int(token) for token in tokens.split(",")))

    def since(self, moment: float) -> dict[str, float]:
        """Return when things were, counted from a moment."""
        return {
            "first_kernel_s": self.launched - moment,
            "first_token_s": self.first - moment,
            "last_token_s": self.last - moment,
        }


def prompt(number: int, length: int) -> list[int]:
    """Return the prompt of a request."""
    source = random.Random(number)
    return [source.randrange(1, 500) for _ in range(length)]


class Server:
    """The server and its requests."""

    def __init__(
        self,
        chosen: argparse.Namespace,
        size: int,
        *,
        frontend: bool = True,
        models: int = 1,
        name: str = "server",
        options: Sequence[str] = (),
    ) -> None:
        """`size`: bytes of weights, of all models."""
        self.chosen = chosen
        self.size = size
        self.frontend = frontend
        self.options = list(options)
        self.models = models
        self.folder: Path = chosen.work / f"{name}-requests"
        self.program = self._program(name)
        self.weights = 0
        self.kernels_pending = 0
        """When its image was made: those of which nothing was known yet."""

    def _program(self, name: str) -> Program:
        chosen = self.chosen
        script = process.PROGRAMS / ("llama_small.py" if chosen.device == "software" else "llama_serve.py")
        words = ["--requests", str(self.folder), "--bytes", str(self.size), "--build-order", chosen.build_order]
        words += ["--models", str(self.models)]
        command = process.python_program(script, *words, *self.options)
        return Program(command, chosen.work, chosen.device, self.frontend, name=name)

    def share(self, other: Server) -> None:
        """Answer the requests of another server. Before it is started."""
        self.folder = other.folder
        self.program = self._program(self.program.name)

    def prepare(self) -> None:
        """Make the folder of its requests, empty."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def start(self) -> Server:
        """Start it and wait until it is ready and has answered the first requests. Returns itself."""
        self.prepare()
        try:
            self.program.start()
            self.weights = int(self.program.wait_for("^READY", 300).split()[1])
            for number in range(WARM_REQUESTS):
                self.ask(number)
                self.answer(number)
        except BaseException:
            self.program.kill()
            raise
        return self

    def ask(self, number: int) -> None:
        """Let a request appear. The first go round the models; all later ones are for the model made last."""
        model = number % self.models if number < WARM_REQUESTS else self.models - 1
        words = [self.chosen.tokens, model, *prompt(number, self.chosen.prompt)]
        scratch = self.folder / f".{number}"
        scratch.write_text(" ".join(map(str, words)) + "\n")
        scratch.rename(self.folder / str(number))

    def forget(self, number: int) -> None:
        """Take a request away, so that nobody else answers it."""
        (self.folder / str(number)).unlink(missing_ok=True)

    def answer(self, number: int, after: int = 0, timeout: float = 180.0) -> Answer:
        """Wait for the answer to a request, in a line from number `after` on."""
        return Answer.parse(self.program.wait_for(f"^ANSWER {number} ", timeout, after))

    def image(self, folder: Path) -> tuple[float, Answer]:
        """Make an image of the server while it waits for its next request, and let it answer that one.

        Returns the seconds that the checkpoint took, and the answer of the process that nothing has interrupted. The
        server is gone afterwards.
        """
        number = WARM_REQUESTS
        self.kernels_pending = process.settle(self.program.pid, self.chosen.settle)
        words = [process.PHOS_GPU, "checkpoint", str(self.program.pid), str(folder), "--leave-running", "--protocol"]
        self.program.before_dump()
        seconds, _ = process.command([*words, "stop", "--json"], 300)
        self.program.dumped(killed=False)
        self.ask(number)
        found = self.answer(number)
        self.forget(number)
        self.program.kill()
        return seconds, found


# Restores.


def wait_memory_free(timeout: float = 30.0) -> None:
    """Wait until phosd holds no memory of a process any more: what was killed must not be in a restore's way."""
    end = time.monotonic() + timeout
    while True:
        said = process.status()
        if not any(gpu["held"] for gpu in said["gpus"]):
            return
        if time.monotonic() > end:
            left = ", ".join(f"{entry['pid']} ({entry['state']})" for entry in said["processes"]) or "nobody"
            raise ProcessError(f"phosd holds GPU memory {timeout:.0f} s after its processes were ended, for {left}.")
        time.sleep(0.02)


def restore_job(folder: Path) -> dict[str, Any]:
    """Return phosd's newest restore from an image; empty if it knows of none."""
    where = str(folder.resolve())
    jobs = [job for job in process.status()["jobs"] if job["kind"] == "restore" and job["image"] == where]
    return jobs[-1] if jobs else {}


def studied(job: Mapping[str, Any], began: float, data_bytes: int) -> dict[str, Any]:
    """Return what phosd knows of a restore whose command was started at `began`.

    `data_bytes`: what the image holds, without the zeros that are read from nowhere.
    """
    if not job or job["since"] < began:
        return {}
    spans = {phase["name"]: phase for phase in job["phases"]}
    row: dict[str, Any] = {"mode": job["mode"], "begin_s": job["since"] - began}
    row["phases"] = {name: phase["seconds"] for name, phase in spans.items()}
    offset = job["since"] - began
    row["at"] = {name: offset + phase["start"] for name, phase in spans.items()}
    if data := spans.get("GPU data"):
        row["last_byte_s"] = offset + data["start"] + data["seconds"]
        row["data_gb_s"] = data_bytes / data["seconds"] / GB if data["seconds"] > 0 else 0.0
    if attach := spans.get("attach"):
        row["attached_s"] = offset + attach["start"] + attach["seconds"]
    window = job.get("window") or {}
    if window:
        row |= {
            "on_demand_gb": window.get("on_demand_bytes", 0) / GB,
            "waits": window.get("waits", 0) + window.get("anything", 0),
            "waited_s": window.get("wait_ns", 0) / 1e9,
            "traced_calls": window.get("calls", 0),
            "opened": window.get("opened", 0),
            "open_s": window.get("open_ns", 0) / 1e9,
        }
        if first := window.get("first_launch_ns", 0):
            row["phosd_first_kernel_s"] = first / 1e9 - began
    return row


class Restored:
    """One way after the other to bring a server back from one image, always with the same request waiting."""

    def __init__(self, chosen: argparse.Namespace, server: Server, folder: Path, expected: Answer) -> None:
        self.chosen = chosen
        self.server = server
        self.folder = folder
        self.expected = expected
        said = process.inspect(folder)["gpu_data"]
        self.data_bytes = int(said["written_bytes"])
        self.total_bytes = int(said["total_bytes"])

    def _row(self, answer: Answer, began: float, job: Mapping[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {**answer.since(began), "tokens_equal": answer.tokens == self.expected.tokens}
        return row | studied(job, began, self.data_bytes)

    def command(self, options: Sequence[str], changes: Mapping[str, str]) -> dict[str, Any]:
        """Restore with `phos-gpu restore`, let the server answer, and end it."""
        program, number = self.server.program, self.expected.number
        wait_memory_free()
        program.before_restore()
        lines = len(program.lines())
        self.server.ask(number)
        words = [process.PHOS_GPU, "restore", *options, "--json", str(self.folder)]
        try:
            began = time.time()
            returned, text = process.command(words, 180, {**os.environ, **changes})
            said = json.loads(text)
            answer = self.server.answer(number, lines)
            job = restore_job(self.folder)
        finally:
            self.server.forget(number)
            program.kill()
        row = self._row(answer, began, job)
        if "--lazy" in options and said.get("mode") != "lazy":
            raise ProcessError(f"The lazy restore became {said.get('mode')}: a guess was wrong, or it was refused.")
        return {**row, "returned_s": returned}

    def variant(self, name: str) -> dict[str, Any]:
        """Restore in one of the ways of VARIANTS."""
        options, changes = VARIANTS[name]
        return self.command(options, changes)

    def pin(self) -> float:
        """Let phosd pin the image; returns the seconds it took. Raises Unavailable."""
        if not has_command("image"):
            raise Unavailable("this phos-gpu has no command `image`")
        try:
            seconds, _ = process.command([process.PHOS_GPU, "image", "pin", str(self.folder)], 120)
        except ProcessError as error:  # phosd has a limit
            raise Unavailable(f"it could not be pinned: {str(error).splitlines()[-1].rstrip('.')}") from error
        return seconds

    def unpin(self) -> None:
        """Undo that."""
        process.command([process.PHOS_GPU, "image", "unpin", str(self.folder)], 60)


class Pool:
    """A pool of one process that is ready. Use it in a `with` block."""

    NAME = "bench"

    def __init__(self, restored: Restored, system: str = "pool") -> None:
        """`system`: one of POOLS. Raises Unavailable if there are no pools here."""
        if not has_command("pool"):
            raise Unavailable("this phos-gpu has no command `pool`")
        self._restored = restored
        self._changes = POOLS[system]
        self.ready_s = 0.0
        self.gpu_bytes = self.host_bytes = 0
        self.said: dict[str, Any] = {}

    def __enter__(self) -> Pool:
        wait_memory_free()
        self._restored.server.program.before_restore()
        if self._changes:
            process.restart_daemon(self._changes)
        words = [process.PHOS_GPU, "pool", "create", str(self._restored.folder), "--size", "1", "--name", self.NAME]
        self.ready_s, text = process.command([*words, "--json"], 120)
        parked = json.loads(text).get("parked", [])
        self.gpu_bytes = sum(entry.get("gpu_bytes", 0) for entry in parked)
        self.host_bytes = sum(entry.get("host_bytes", 0) for entry in parked)
        return self

    def __exit__(self, *_: object) -> None:
        process.command([process.PHOS_GPU, "pool", "drop", self.NAME], 60)
        if self._changes:
            process.restart_daemon({})

    def take(self) -> dict[str, Any]:
        """Take the process out; it answers and is ended."""
        server, number = self._restored.server, self._restored.expected.number
        program, pid = server.program, server.program.pid
        lines = len(program.lines())
        words = [process.PHOS_GPU, "pool", "take", self.NAME, "--json"]
        try:
            # Parked processes are stopped; should one run all the same, it must not find the request before the others.
            server.ask(number)
            began = time.time()
            returned, text = process.command(words, 120)
            self.said = json.loads(text)
            program.pid = taken_pid(self.said) or program.pid
            answer = server.answer(number, lines)
        finally:
            server.forget(number)
            program.kill()
            program.pid = pid  # under which other restores bring it back
        row = self._restored._row(answer, began, {})
        return {**row, **taken(self.said, began, self._restored.data_bytes), "returned_s": returned}


def taken(said: Mapping[str, Any], began: float, data_bytes: int) -> dict[str, Any]:
    """Return what `phos-gpu pool take --json` says, counted from `began`: its own times begin with phosd's answer."""
    offset = float(said.get("began") or began) - began
    row: dict[str, Any] = {"begin_s": offset}
    for name, known in (
        ("attached", "attached_s"),
        ("last_byte", "last_byte_s"),
        ("first_kernel", "phosd_first_kernel_s"),
    ):
        if said.get(name) is not None:
            row[known] = offset + float(said[name])
    if said.get("last_byte"):
        row["data_gb_s"] = data_bytes / float(said["last_byte"]) / GB
    if "waits" in said:
        row |= {"waits": said["waits"], "waited_s": float(said["waited"])}
        row["on_demand_gb"] = said["on_demand_bytes"] / GB
    return row


def taken_pid(said: Any) -> int:
    """Return the pid of the process that a pool has handed out; 0 if its answer names none."""
    found = process.find_key(said, "pids") or process.find_key(said, "pid") or 0
    return int(found[0] if isinstance(found, list) else found)


def has_command(name: str) -> bool:
    """Say whether phos-gpu has this command."""
    try:
        process.command([process.PHOS_GPU, name, "--help"], 30)
    except ProcessError:
        return False
    return True


# The peer.


def peer(chosen: argparse.Namespace, server: Server, folder: Path, expected: Answer, *, alone: bool) -> dict[str, Any]:
    """The driver's own checkpoint and CRIU without a plugin, and back; `alone`: the driver's part only, without a kill.

    `server` has been started without the frontend; it is gone afterwards.
    """
    program, number = server.program, expected.number
    steps: dict[str, float] = {}
    try:
        driver_checkpoint.start_driver(chosen.device)
        steps |= {f"{name}, suspending": seconds for name, seconds in driver_checkpoint.suspend(program.pid).items()}
        if not alone:
            steps["CRIU dump"] = process.criu_dump(program, folder, plugin=False)
        lines = len(program.lines())
        server.ask(number)
        began = time.time()
        if not alone:
            steps["CRIU restore"], _ = process.criu_restore(program, folder, plugin=False)
        steps.update(driver_checkpoint.resume(program.pid))
        answer = server.answer(number, lines)
    finally:
        program.kill()
    return {
        **answer.since(began),
        "tokens_equal": answer.tokens == expected.tokens,
        "driver_only": alone,
        "phases": steps,
    }


# The machine.


def host_room(chosen: argparse.Namespace, needed: int) -> str:
    """Say why so much host memory beside what is in use cannot be had; empty if it can."""
    # Memory may still be growing: what counts is what the machine was told it has.
    in_use = machine.meminfo("MemTotal") - machine.meminfo("MemAvailable")
    available = max(machine.meminfo("MemAvailable"), (chosen.touch_gib << 30) - in_use) - HOST_RESERVE
    if needed > available:
        return f"it needs {needed / GB:.0f} GB of host memory and {available / GB:.0f} GB are there"
    return ""


def image_folder(chosen: argparse.Namespace, name: str) -> Path:
    """Return an empty folder for an image."""
    folder = Path(chosen.image) / f"phos-restore-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


COPY_RATE = "copy pinned host to device, GB/s"


def measure_copies(chosen: argparse.Namespace, results: harness.Results, *, again: bool = False) -> float:
    """Measure copies from pinned host memory to the GPU; returns the most that was found, in GB/s.

    ``again``: this run has measured them before.

    They are slow at times, on a host that others use too: what is compared with them must not gain by that.
    """
    _, up = machine.copy_bandwidth(chosen.device, 1 << 20 if chosen.smoke else 256 << 20)
    most: float = max(up / GB, results.summary[COPY_RATE] if again else 0.0)
    results.summary[COPY_RATE] = most
    return most


def prepare_machine(chosen: argparse.Namespace, results: harness.Results, largest: int) -> None:
    """Touch host memory, and measure copies."""
    # An image in memory is pinned where it lies, which takes no more.
    os.environ.setdefault("PHOS_PIN_LIMIT", f"{chosen.touch_gib}G")
    if not chosen.smoke:
        wanted = min(int(1.2 * largest) + (16 << 30), chosen.touch_gib << 30)
        seconds = machine.touch_memory(wanted)
        machine.enlarge_tmpfs(Path(chosen.image), chosen.touch_gib << 30)
        results.environment["memory_gib"] = round(machine.meminfo("MemTotal") / 2**30, 1)
        print(f"Touched {wanted >> 30} GiB of host memory in {seconds:.1f} s.", flush=True)
    measure_copies(chosen, results)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that these benchmarks have in common."""
    harness.add_image_option(parser)
    parser.add_argument("--touch-gib", type=int, default=112, metavar="N", help="host memory to touch before timing")
    parser.add_argument("--tokens", type=int, metavar="N", help="in an answer (16, or 8)")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens in a prompt (64)")
    harness.add_settle_option(parser)
    parser.add_argument(
        "--build-order",
        choices=("files", "layers"),
        default="files",
        help="in which weights are allocated: as in files of weights, by name, or as they are used (%(default)s)",
    )


def settle_options(chosen: argparse.Namespace, tokens: int = 16) -> None:
    """Fill in what depends on whether this is a smoke run."""
    if chosen.smoke:  # copies that take a while, so that there is something to wait for
        os.environ.setdefault("SOFTGPU_COPY_BANDWIDTH", str(64 << 20))
    chosen.tokens = chosen.tokens or (min(4, tokens) if chosen.smoke else tokens)
    chosen.prompt = chosen.prompt or (2 if chosen.smoke else 64)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of what several runs measured; what must hold must hold in each."""
    row: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run[name] for run in runs if name in run]
        if isinstance(values[0], bool):
            row[name] = all(values)
        elif isinstance(values[0], int | float):
            row[name] = harness.median(values)
        elif isinstance(values[0], dict):
            row[name] = {part: harness.median(value.get(part, 0.0) for value in values) for part in values[0]}
        else:
            row[name] = ", ".join(sorted({str(value) for value in values}))
    return row
