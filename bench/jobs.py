#!/usr/bin/env python3
"""Jobs as people run them: dumped while they run on, dumped and killed, restored, and compared with a run left alone.

JAX with its default settings, which takes most of the GPU's memory when it starts; PyTorch with a DataLoader whose
workers were forked after CUDA had been initialised; PyTorch beside processes and threads that ask NVML; and two
processes that share tensors. For each: how long the commands take, the stall of a concurrent checkpoint by phosd's own
phases, how much GPU memory there is and how much of it is stored.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results
from process import Program

GPU_PROGRAMS = process.ROOT / "tests" / "gpu" / "programs"
SMOKE_PROGRAMS = process.ROOT / "tests" / "integration" / "programs"
ITERATIONS = "400"
"""Enough that none comes to its last one before it is let go."""

PHASES = ("look for zeros", "reserve room", "prepare the window", "driver checkpoint", "driver restore")


@dataclass(frozen=True)
class Job:
    """A program, and what stands for it in a smoke run; none: it is left out there."""

    script: str
    smoke: str = ""


JOBS = {
    "JAX": Job("jax_train.py", "unused_memory.py"),
    "PyTorch, DataLoader": Job("pytorch_loader.py", "forked_workers.py"),
    "PyTorch, NVML": Job("pytorch_nvml.py"),
    "PyTorch, shared tensors": Job("pytorch_ipc.py", "spawned_workers.py"),
}


class Bench:
    """One run of the benchmark."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.results = Results(chosen, "jobs", "Jobs as people run them, dumped and restored")
        self.repeats = chosen.repeats or (1 if chosen.smoke else 3)

    def folder(self) -> Path:
        """Return an empty folder for an image."""
        folder = Path(self.chosen.image) / "phos-jobs"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def measure(self, key: str) -> None:
        """Run one job alone and under PhOS."""
        job, chosen = JOBS[key], self.chosen
        script = SMOKE_PROGRAMS / job.smoke if chosen.smoke else GPU_PROGRAMS / job.script
        command = process.python_program(script, "--iterations", ITERATIONS)
        compiled = process.kept_by_jax(chosen.work / "compiled")
        alone = Program(command, chosen.work, chosen.device, frontend=False, environment=compiled, name="alone")
        end = chosen.work / "end"  # it does not end before there is this file
        end.unlink(missing_ok=True)
        paced = [*command, "--iteration-seconds", "0.05", "--until", str(end)]
        program = Program(paced, chosen.work, chosen.device, environment=compiled, name="job")
        row: dict[str, Any] = {}
        try:
            wanted = alone.start().finish()
            program.start().wait_for("^ITERATION 6 ", 180)
            runs = [self.dump_running(program) for _ in range(self.repeats)]
            for number, run in enumerate(runs):
                self.results.add(f"{key}, {number + 1}", **run)
            folder = self.folder()
            row["command"] = process.criu_dump(program, folder)
            data = process.find_key(process.inspect(folder), "gpu_data")
            row |= {"gpu_gb": data["total_bytes"] / 1e9, "stored_gb": data["written_bytes"] / 1e9}
            row["restore"], row["next iteration"] = process.criu_restore(program, folder)
            end.touch()
            # What ran on after a dump, or was cut between computing and printing, prints an iteration again.
            row["identical"] = list(dict.fromkeys(program.finish())) == wanted
        finally:
            alone.kill()
            program.kill()
            shutil.rmtree(Path(chosen.image) / "phos-jobs", ignore_errors=True)
        self.results.add(f"{key}, killed", **row)
        if not row["identical"]:
            raise process.ProcessError(f"{key}: the restored job printed other lines than one left alone.")

    def dump_running(self, program: Program) -> dict[str, float]:
        """Checkpoint it once while it runs on; return seconds."""
        folder = self.folder()
        seconds = process.criu_dump(program, folder, leave_running=True)
        phases = process.timings(folder)
        return {"command": seconds, "stall": phases.get("stall", 0.0)} | {
            name: phases[name] for name in PHASES if name in phases
        }

    def run(self) -> None:
        """Measure every job."""
        jobs = [key for key, job in JOBS.items() if not self.chosen.smoke or job.smoke]
        harness.measure_each(self.chosen, self.results, jobs, self.measure)


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=240)
    harness.add_image_option(parser)
    Bench(harness.prepare(parser)).run()


if __name__ == "__main__":
    main()
