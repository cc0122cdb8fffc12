#!/usr/bin/env python3
"""The stall of a concurrent checkpoint of training, by size: against the stop protocol and the driver with CRIU.

The program trains a transformer that fills the GPU memory asked for. What it feels of a checkpoint is taken from the
times of its own iterations; what phosd says is given beside it. Sections: `sizes` (the stall at every size, and all
three systems), `pools` (how much GPU memory shadows may take), `validate` (with and without the content hash),
`phases` (at the begin and at the end of an iteration, asked for through the SDK), `transfers` (the application's copies
first, or not, with batches that come from the host).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cow_tables
import driver_checkpoint
import harness
import machine
import process
import training
from harness import GB, Results
from process import ProcessError, Program

SECTIONS = ("sizes", "pools", "validate", "phases", "transfers")
HOST_RESERVE = 8 << 30  # for the programs, phosd's buffers and everybody else
POSITIONS = {"start": 0.03, "end": 0.93}  # where in an iteration the processes are to stand still
NOT_PHASES = ("stall", "GPU data", "content hash")  # beside the others, or all of them together
SCALARS = ("shadowed", "waits", "stream_waits", "anything", "failures", "calls")


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        name, title = "cow", "The stall of a concurrent checkpoint of training"
        if chosen.expandable:
            name, title = f"{name}-expandable", f"{title}, in expandable segments"
            os.environ[harness.ALLOCATOR] = "expandable_segments:True"
        self.results = Results(chosen, name, title)
        self.repeats = chosen.repeats or (1 if chosen.smoke else 3)
        self.ask_file = chosen.work / "ask"
        self.failed = False

    # Programs and images.

    def start(self, size: int, seconds: float, *, frontend: bool = True, host_batches: bool = False) -> Program:
        """Start training with buffers of `size` bytes and iterations of `seconds`; wait until it computes steadily."""
        options = ["--bytes", str(size), "--target-seconds", str(seconds), "--checkpoint-file", str(self.ask_file)]
        self.ask_file.unlink(missing_ok=True)
        if host_batches:
            options.append("--host-batches")
        name = "phos" if frontend else "peer"
        program = training.training_program(self.chosen.work, self.chosen.device, options, frontend=frontend, name=name)
        try:
            program.start().wait_for("^READY", 300)
            training.wait_iterations(program, 4)
        except BaseException:
            program.kill()
            raise
        return program

    def seconds_for(self, size: int) -> float:
        """Return how long an iteration is to take: the same tokens in each, so that it grows with the model."""
        if self.chosen.smoke:
            return 0.05
        given = self.chosen.iteration_seconds
        return float(given or min(2.0, max(0.3, 2.0 * size / (64 * GB))))

    def image(self) -> Path:
        """Return the directory of images, empty."""
        folder = Path(self.chosen.image) / "phos-cow"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def room(self, size: int, *, peer: bool = False) -> str:
        """Say why an image of this size does not fit into host memory; empty if it does."""
        free = shutil.disk_usage(self.chosen.image).free
        needed = size * 1.15 + 2 * GB
        if free < needed and not self.chosen.smoke:
            return f"the image may need {needed / GB:.0f} GB and {self.chosen.image} has {free / GB:.0f} GB free"
        if self.chosen.smoke:
            return ""
        if peer:
            needed *= 2  # the process holds its GPU's data in host memory as well
        available = max(machine.meminfo("MemAvailable"), self.chosen.touch_gib << 30) - HOST_RESERVE
        if needed > available:
            return f"it may need {needed / GB:.0f} GB of host memory and {available / GB:.0f} GB are there"
        return ""

    # One checkpoint.

    def study(
        self, program: Program, image: Path, begin: float, end: float, stall: float, *, verify: bool
    ) -> dict[str, Any]:
        """Return all that is known of a checkpoint that was asked for and committed at these moments.

        `stall`: for how long the program stood still, as phosd says.
        """
        training.wait_until_past(program, end)
        done = training.iterations(program.lines())
        spans = training.phase_spans(image)
        # What comes before costs the program nothing, and is longer than the rest.
        noticed = training.felt(done, min((span.begin for span in spans if span.name == "quiesce"), default=begin), end)
        said = process.inspect(image)
        phases: dict[str, float] = {}
        for phase in said["timings"]["phases"]:
            phases[phase["phase"]] = phases.get(phase["phase"], 0.0) + float(phase["seconds"])
        counts = said.get("window") or {}
        inside = training.window_iterations(done, spans)
        stalled = [span for span in spans if span.name == "stall"]
        quiesce = [span for span in spans if span.name == "quiesce"]
        data_end = max((span.end for span in spans if span.name == "GPU data"), default=0.0)
        window = max(0.0, data_end - stalled[-1].end) if stalled else 0.0
        size = int(said["gpu_data"]["total_bytes"])
        data = phases.get("GPU data", 0.0)
        row: dict[str, Any] = {
            "gpu_gb": size / GB,
            "felt_stall_s": noticed.longest,
            "felt_total_s": noticed.total,
            "phosd_stall_s": stall,
            "committed_s": end - begin,
            "data_gb_s": size / data / GB if data else 0.0,
            "iteration_s": noticed.normal,
            "window_s": window,
            "window_iteration_s": harness.median(inside),
            "window_worst_iteration_s": max(inside, default=0.0),
            "window_iterations": len(inside),
            "lost_in_window_s": noticed.total - stall if stalled else 0.0,
            "wait_s": counts.get("wait_ns", 0) / 1e9,
            "tracing_us": training.tracing_microseconds(counts),
            **{name: counts.get(name, 0) for name in SCALARS},
            "protocol": said["protocol"],
            "validated": bool(said.get("validated", False)),
            "criu_gb": said["saved_by"]["criu"]["bytes"] / GB,
            "phases": phases,
            "window": counts,
        }
        if quiesce:
            at = [step for step in done if step.begin <= quiesce[0].begin <= step.end]
            if at:
                row["stopped_at"] = min(1.0, (quiesce[0].begin - at[0].begin) / max(noticed.normal, 1e-9))
            row["until_quiesce_s"] = quiesce[0].begin - begin
        if verify:
            row["verify_s"], _ = process.command([process.PHOS_GPU, "verify", str(image)], 300)
        return row

    def command(
        self, program: Program, protocol: str, options: Sequence[str] = (), *, verify: bool = True, keep: bool = False
    ) -> dict[str, Any]:
        """Make one checkpoint with the command, study it, and remove it unless it is to be kept."""
        image = self.image()
        try:
            begin = time.monotonic()
            said = training.checkpoint(program, image, protocol, options)
            return self.study(program, image, begin, time.monotonic(), said["stall"] or 0.0, verify=verify)
        finally:
            if not keep:
                shutil.rmtree(image, ignore_errors=True)
                training.wait_iterations(program, 3)

    def add(self, key: str, system: str, size: int, runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Store the medians of several checkpoints, and each of them."""
        row: dict[str, Any] = {"system": system, "asked_gb": size / GB, "checkpoints": len(runs), **more}
        for name, value in runs[-1].items():
            values = [run[name] for run in runs if name in run]
            if isinstance(value, bool):
                row[name] = all(values)
            elif isinstance(value, int | float):
                row[name] = max(values) if "worst" in name else harness.median(values)
            elif isinstance(value, dict):
                row[name] = {part: harness.median(run[name].get(part, 0.0) for run in runs) for part in value}
            else:
                row[name] = value if len(set(values)) == 1 else ", ".join(sorted({str(found) for found in values}))
        row["runs"] = runs
        self.results.add(key, **row)
        return row

    def several(
        self,
        key: str,
        size: int,
        program: Program,
        protocol: str,
        options: Sequence[str] = (),
        *,
        repeats: int,
        **more: Any,
    ) -> None:
        """Make and store several checkpoints of one kind."""
        runs: list[dict[str, Any]] = []
        for number in range(repeats):
            if runs and harness.time_left(self.chosen) <= 0:
                break
            runs.append(self.command(program, protocol, options, verify=number == 0))
            self.add(key, protocol, size, runs, **more)

    # Sections.

    def sizes(self) -> None:
        """The stall at every size, for every system."""
        for size in self.chosen.sizes:
            self.attempt(f"{size / GB:g} GB, phos", lambda size=size: self.one_size(size))
        if "peer" not in self.chosen.systems:
            return
        for size in self.chosen.sizes:
            if size > self.chosen.peer_limit:
                self.results.note(f"{size / GB:g} GB, peer: not made (--peer-limit).")
                continue
            self.attempt(f"{size / GB:g} GB, peer", lambda size=size: self.peer(size))

    def one_size(self, size: int) -> None:
        """Checkpoints of one program by our protocols; at last it is killed, restored, and its losses compared."""
        reason = self.room(size)
        if reason:
            self.results.note(f"{size / GB:g} GB: not made, {reason}.")
            return
        program = self.start(size, self.seconds_for(size))
        try:
            if "cow" in self.chosen.systems:
                # It compiles phosd's kernels, fills its memory and learns what is written first: nobody's first stall.
                warm = self.command(program, "cow", verify=False)
                self.add(f"{size / GB:g} GB cow, first", "cow, first", size, [warm])
                if pending := process.settle(program.pid, self.chosen.settle):
                    self.results.note(f"{size / GB:g} GB: of {pending} kernels the analysis was not done.")
                self.several(f"{size / GB:g} GB cow", size, program, "cow", repeats=self.repeats)
            if "stop" in self.chosen.systems:
                self.several(f"{size / GB:g} GB stop", size, program, "stop", repeats=1)
            if "cow" in self.chosen.systems and self.chosen.restore and harness.time_left(self.chosen) > 0:
                self.restored(size, program)
        finally:
            program.kill()
            shutil.rmtree(Path(self.chosen.image) / "phos-cow", ignore_errors=True)

    def restored(self, size: int, program: Program) -> None:
        """Kill the program some iterations after a concurrent checkpoint; restored, it must repeat their losses."""
        self.command(program, "cow", verify=False, keep=True)
        training.wait_iterations(program, 3)
        program.kill()
        lines = [line for line in program.lines() if line.startswith("ITERATION")]
        _, seconds = process.criu_restore(program, Path(self.chosen.image) / "phos-cow", timeout=180)
        wanted = {line.split()[1]: line for line in lines}
        last = int(lines[-1].split()[1])
        program.wait_for(f"^ITERATION {last + 1} ", 120)
        again = [line for line in program.lines() if line.startswith("ITERATION")][len(lines) :]
        repeated = [line for line in again if line.split()[1] in wanted]
        same = bool(repeated) and all(wanted[line.split()[1]] == line for line in repeated)
        self.results.add(
            f"{size / GB:g} GB cow, restored",
            system="restore",
            asked_gb=size / GB,
            restore_s=seconds,
            iterations_repeated=len(repeated),
            losses_identical=same,
        )
        if not same:
            raise ProcessError(
                f"Restored from a concurrent checkpoint of {size / GB:g} GB, training went on differently."
            )

    def peer(self, size: int) -> None:
        """The driver's own checkpoint, CRIU without a plugin, and back: how long training stands still."""
        reason = self.room(size, peer=True)
        if reason:
            self.results.note(f"{size / GB:g} GB, peer: not made, {reason}.")
            return
        program = self.start(size, self.seconds_for(size), frontend=False)
        image = self.image()
        try:
            driver_checkpoint.start_driver(self.chosen.device)
            begin = time.monotonic()
            steps = driver_checkpoint.suspend(program.pid)
            steps["CRIU dump"] = process.criu_dump(program, image, leave_running=True, plugin=False)
            committed = time.monotonic()
            steps.update(driver_checkpoint.resume(program.pid))
            end = time.monotonic()
            training.wait_until_past(program, end)
            noticed = training.felt(training.iterations(program.lines()), begin, end)
            run = {
                "felt_stall_s": noticed.longest,
                "felt_total_s": noticed.total,
                "committed_s": committed - begin,
                "iteration_s": noticed.normal,
                "image_gb": process.folder_size(image) / GB,
                "phases": steps,
            }
            self.add(f"{size / GB:g} GB peer", "peer", size, [run])
        finally:
            program.kill()
            shutil.rmtree(image, ignore_errors=True)

    def with_options(self, section: str, choices: Mapping[str, Sequence[str]], *, host_batches: bool = False) -> None:
        """Checkpoints of one program with several settings, in turns."""
        size = self.chosen.variant_size
        program = self.start(size, self.seconds_for(size), host_batches=host_batches)
        try:
            self.command(program, "cow", verify=False)
            for name, options in choices.items():
                key = f"{size / GB:g} GB cow, {section} {name}"
                self.several(key, size, program, "cow", options, repeats=self.repeats, section=section, setting=name)
        finally:
            program.kill()

    def pools(self) -> None:
        """How much GPU memory shadows may take."""
        self.with_options("pool", {pool: ["--pool", pool] for pool in self.chosen.pools})

    def validate(self) -> None:
        """With and without the content hash."""
        self.with_options("validate", {"on": [], "off": ["--no-validate"]})

    def transfers(self) -> None:
        """The application's copies first or not, with batches that come from the host."""
        settings = {name: ["--no-prioritise"] if name == "off" else [] for name in self.chosen.prioritise}
        self.with_options("prioritise", settings, host_batches=True)

    def phases(self) -> None:
        """Checkpoints that the program asks for so that it stands still at a chosen place of an iteration."""
        size = self.chosen.variant_size
        seconds = 0.3 if self.chosen.smoke else self.chosen.phase_seconds
        program = self.start(size, seconds)
        try:
            lead = 0.0
            for number, name in enumerate(["", *self.chosen.phase]):
                # Between the request and the standstill passes the start of CRIU: the first checkpoint measures it.
                runs: list[dict[str, Any]] = []
                position = POSITIONS.get(name, 0.0)
                for _ in range(1 if number == 0 else self.repeats):
                    normal = training.felt(training.iterations(program.lines()), time.monotonic(), 0.0).normal
                    share = (position - lead / normal) % 1.0 if number else 0.0
                    image = self.image()
                    try:
                        asked, ended = training.ask(program, self.ask_file, image, share)
                        if " committed " not in ended:
                            raise ProcessError(f"The checkpoint that the program asked for: {ended}")
                        seconds, stall = (float(word) for word in ended.split()[3:5])
                        run = self.study(program, image, asked, asked + seconds, stall, verify=False)
                    finally:
                        shutil.rmtree(image, ignore_errors=True)
                    lead = run.get("until_quiesce_s", lead)
                    runs.append(run)
                    if number:
                        key = f"{size / GB:g} GB cow, phase {name}"
                        self.add(key, "cow", size, runs, section="phase", setting=name)
                    if harness.time_left(self.chosen) <= 0:
                        return
        finally:
            program.kill()

    # All of it.

    def attempt(self, what: str, work: Any) -> None:
        """Do a part if there is time; a failure is noted and does not end the others."""
        if harness.time_left(self.chosen) <= 0:
            self.results.note(f"{what}: no time left.")
            return
        try:
            work()
        except (ProcessError, driver_checkpoint.DriverCheckpointError) as error:
            self.failed = True
            print(error, file=sys.stderr, flush=True)
            self.results.note(f"{what}: failed. {str(error).splitlines()[0]}")

    def machine(self, largest: int) -> None:
        """Prepare host memory, and measure what copies can do by themselves."""
        chosen = self.chosen
        if not chosen.smoke:
            wanted = min(int(2.2 * largest) + (12 << 30), chosen.touch_gib << 30)
            seconds = machine.touch_memory(wanted) if wanted > 0 else 0.0
            machine.enlarge_tmpfs(Path(chosen.image), chosen.touch_gib << 30)
            print(f"Touched {wanted >> 30} GiB of host memory in {seconds:.1f} s.", flush=True)
        down, _ = machine.copy_bandwidth(chosen.device, 1 << 20 if chosen.smoke else 256 << 20)
        self.results.summary["copy device to pinned host, GB/s"] = down / GB
        if chosen.smoke:
            training.slow_copies()

    def run(self) -> None:
        """Measure every section that was asked for."""
        chosen = self.chosen
        largest = max([*(chosen.sizes if "sizes" in chosen.sections else []), chosen.variant_size])
        self.machine(largest)
        for section in SECTIONS:
            if section not in chosen.sections:
                continue
            if section == "sizes":
                self.sizes()
            else:
                self.attempt(section, getattr(self, section))
        process.stop_daemon()
        cow_tables.summarise(self.results, chosen.gpus, chosen.failure_rate)
        self.results.finish(cow_tables.tables(self.results, chosen.gpus, chosen.failure_rate))
        if self.failed:
            raise SystemExit(1)


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "")
    harness.add_settle_option(parser)
    parser.add_argument("--sections", type=harness.words, default=["sizes"], metavar="S,...", help=", ".join(SECTIONS))
    parser.add_argument("--sizes", type=harness.sizes, metavar="GB,...", help="of the GPU memory (8,32,64)")
    parser.add_argument(
        "--systems", type=harness.words, default=["cow", "stop", "peer"], metavar="S,...", help="cow, stop, peer"
    )
    parser.add_argument("--variant-size", type=float, metavar="GB", help="of all sections but `sizes` (32)")
    parser.add_argument("--pools", type=harness.words, default=["2G", "256M", "0"], metavar="SIZE,...")
    parser.add_argument("--phase", type=harness.words, default=["start", "end"], metavar="P,...", help="start, end")
    parser.add_argument("--prioritise", type=harness.words, default=["on", "off"], metavar="S,...", help="on, off")
    parser.add_argument(
        "--iteration-seconds", type=float, metavar="S", help="(2 at 64 GB, and in proportion; 0.3 at least)"
    )
    parser.add_argument(
        "--phase-seconds", type=float, default=4.0, metavar="S", help="an iteration of `phases` (%(default)s)"
    )
    parser.add_argument(
        "--peer-limit", type=float, default=32.0, metavar="GB", help="largest of the peer (%(default)s)"
    )
    parser.add_argument("--expandable", action="store_true", help="PyTorch maps its memory itself, 20 MiB at a time")
    parser.add_argument("--no-restore", dest="restore", action="store_false", help="do not restore the last image")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="of the job, for the optimal frequency")
    parser.add_argument("--failure-rate", type=float, default=1.0, metavar="F", help="of a GPU, an hour (%(default)s)")
    harness.add_image_option(parser)
    parser.add_argument("--touch-gib", type=int, default=112, metavar="N", help="host memory to touch before timing")
    chosen = harness.prepare(parser)
    unknown = set(chosen.sections) - set(SECTIONS)
    if unknown or set(chosen.phase) - set(POSITIONS):
        parser.error(f"there are the sections {', '.join(SECTIONS)}, and the phases {', '.join(POSITIONS)}")
    chosen.sizes = chosen.sizes or (harness.sizes("0.0002") if chosen.smoke else harness.sizes("8,32,64"))
    chosen.variant_size = int((chosen.variant_size or (0.0002 if chosen.smoke else 32)) * GB)
    chosen.peer_limit = int(chosen.peer_limit * GB)
    Bench(chosen).run()


if __name__ == "__main__":
    main()
