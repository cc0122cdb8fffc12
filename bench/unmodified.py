#!/usr/bin/env python3
"""Programs of others, as they are: what ends well alone has to end well under PhOS, and while it is checkpointed often.

A program is a folder with an executable called `program`. It is run in a copy of that folder, and ends well if it exits
with 0. `--samples` makes such folders of a checkout of NVIDIA's CUDA samples first: of each sample that nvcc builds
without more than CUDA's own libraries.

Exit status 1 if a program that ends well alone does not otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results
from process import PHOS_GPU

PROGRAM = "program"
LONGEST = 20.0
"""A program that takes more seconds alone is left out: it is API calls that are of interest here."""
SLOWER = 60.0
"""Seconds more than alone that it may take otherwise."""
LIBRARIES = ("cublas", "cublasLt", "cusolver", "cusparse", "cufft", "curand", "nvrtc", "nvJitLink", "nvjpeg", "cuda")
FOREIGN = ("GL", "EGL", "NvSci", "Vulkan", "D3D", "MPI", "OpenMP")
"""In the names of samples that want more than CUDA."""
WAYS = ("alone", "under PhOS", "guarded")


class Ended(NamedTuple):
    """How a run ended."""

    how: str
    """Empty: with 0."""
    seconds: float
    checkpoints: int = 0


def compiler_libraries() -> list[str]:
    """Return what to link with, of what comes with the compiler."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise process.ProcessError("There is no nvcc on the PATH to build the samples with.")
    folders = [Path(compiler).resolve().parents[1] / name for name in ("lib64", "lib64/stubs", "lib")]
    found = [name for name in LIBRARIES if any((folder / f"lib{name}.so").exists() for folder in folders)]
    return [*(f"-L{folder}" for folder in folders if folder.is_dir()), *(f"-l{name}" for name in found)]


def build(source: Path, common: Path, target: Path, libraries: Sequence[str]) -> bool:
    """Make a program's folder of a sample's; whether it could be built."""
    shutil.copytree(source, target)
    files = [path.name for kind in ("*.cu", "*.cpp", "*.c") for path in sorted(target.glob(kind))]
    command = ["nvcc", "-O2", "-w", "-std=c++17", "-arch=native", f"-I{common}", "-I.", "-o", PROGRAM, *files]
    for separate in ([], ["-rdc=true", "-lcudadevrt"]):  # those whose kernels launch kernels
        done = subprocess.run(
            [*command, *separate, *libraries], cwd=target, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode == 0:
            return True
    shutil.rmtree(target)
    return False


def build_all(samples: Path, programs: Path) -> tuple[int, int]:
    """Build all samples, as many at a time as there are processors; returns how many were built, and of how many."""
    sources = [
        folder
        for folder in sorted((samples / "Samples").glob("*/*"))
        if (any(folder.glob("*.cu")) or any(folder.glob("*.cpp"))) and not any(word in folder.name for word in FOREIGN)
    ]
    libraries, common = compiler_libraries(), (samples / "Common").resolve()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        built = list(pool.map(lambda source: build(source, common, programs / source.name, libraries), sources))
    return sum(built), len(built)


def run(command: Sequence[str], folder: Path, environment: dict[str, str], seconds: float) -> tuple[Ended, str]:
    """Run a program in a copy of its folder; also what it wrote."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(f"not after {seconds:.0f} s", seconds), ""
    took = time.monotonic() - began
    said = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode == 0:
        return Ended("", took), said
    last = (said.strip().splitlines() or [""])[-1]
    return Ended(f"status {done.returncode}: {last[:120]}", took), said


def in_each_way(chosen: argparse.Namespace, program: Path) -> dict[str, Ended]:
    """How a program ends alone and, if that is well and soon, how otherwise."""
    ended: dict[str, Ended] = {}
    images = Path(chosen.image) / f"phos-bench-{os.getpid()}-{program.name}"
    guard = ["guard", "--images", str(images), "--interval", str(chosen.interval), "--keep", "1", "--restarts", "0"]
    prefixes = {
        "alone": [],
        "under PhOS": [PHOS_GPU, "run", "--device", chosen.device, "--"],
        "guarded": [PHOS_GPU, *guard, "--json", "--"],
    }
    environment, limit = process.device_environment(chosen.device), LONGEST
    for way in WAYS:
        folder = chosen.work / f"{program.name}-{WAYS.index(way)}"
        # Not by this process, of which another thread may fork: what somebody has open to write cannot be started.
        subprocess.run(["cp", "-a", program, folder], check=True)
        try:
            ended[way], said = run([*prefixes[way], f"./{PROGRAM}"], folder, environment, limit)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(images, ignore_errors=True)
        if way == "guarded":
            ended[way] = ended[way]._replace(checkpoints=_checkpoints(said))
        if way == "alone" and ended[way].how:
            break
        limit = ended["alone"].seconds + SLOWER
    return ended


def _checkpoints(events: str) -> int:
    """How many images a guard says that it has."""
    count = 0
    for line in events.splitlines():
        try:
            count += json.loads(line).get("event") == "checkpoint"
        except (ValueError, AttributeError):  # the program's own
            continue
    return count


def main() -> None:
    """Run as a program."""
    parser = harness.options(__doc__ or "")
    harness.add_image_option(parser)
    parser.add_argument("--programs", type=Path, metavar="DIR", help="a folder of programs' folders")
    parser.add_argument("--samples", type=Path, metavar="DIR", help="a checkout of the CUDA samples, to be built first")
    parser.add_argument("--interval", type=float, default=0.5, metavar="S", help="between checkpoints (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="programs at a time (%(default)s)")
    chosen: argparse.Namespace = harness.prepare(parser)
    if (chosen.programs is None) == (chosen.samples is None):
        parser.error("name a folder of programs, or one of samples")
    results = Results(chosen, "unmodified", "Programs of others, alone, under PhOS, and checkpointed often")
    programs = chosen.programs or chosen.work / "programs"
    if chosen.samples:
        programs.mkdir()
        built, of = build_all(chosen.samples, programs)
        results.note(f"{built} of {of} samples could be built.")
    found = sorted(folder for folder in programs.iterdir() if os.access(folder / PROGRAM, os.X_OK))

    def measure(program: Path) -> dict[str, Ended]:
        return in_each_way(chosen, program) if harness.time_left(chosen) > 0 else {}

    with ThreadPoolExecutor(chosen.jobs) as pool:
        for program, ended in zip(found, pool.map(measure, found), strict=True):
            if not ended:
                results.note(f"{program.name}: no time left.")
            elif why := ended["alone"].how:
                results.note(f"{program.name}: left out, for alone it ends with {why}.")
            else:
                results.add(
                    program.name,
                    **{way: ended[way].how or "well" for way in WAYS[1:]},
                    **{f"{way}, s": ended[way].seconds for way in WAYS},
                    checkpoints=ended["guarded"].checkpoints,
                )
    process.stop_daemon()
    rows = list(results.rows.values())
    results.summary["programs that end well alone"] = len(rows)
    for way in WAYS[1:]:
        results.summary[f"of these {way}"] = sum(row[way] == "well" for row in rows)
    results.summary["checkpoints"] = sum(row["checkpoints"] for row in rows)
    results.finish()
    if any(row[way] != "well" for row in rows for way in WAYS[1:]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
