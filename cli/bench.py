"""``phos-gpu bench``: list the benchmarks, or run one."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from phos.cli.run import become
from phos.gpu_engine.errors import Unsupported, UsageError
from phos.gpu_engine.installation import launcher
from phos.images.native import home

BENCHMARKS = {
    "dump_restore": "Whole dumps and restores of gigabytes of buffers, against the driver's own checkpoint.",
    "steady_state": "What the frontend costs while no checkpoint is taken.",
    "correctness": "Training interrupted at random moments prints the same losses, bit for bit.",
    "cow": "The stall of a concurrent checkpoint of training, by size; shadows, timing, transfers.",
    "cow_correctness": "Concurrent checkpoints in a row: each image is the state of its one moment.",
    "restore": "A server restored with a request waiting: eager, lazy, from a pool, and by the driver with CRIU.",
    "serverless": "One request to a function that does not run yet, by every way to start it.",
    "soak": "Checkpoints and restores of one program in a row: nothing grows with their number.",
    "lazy_correctness": "Lazy restores in a row, some interrupted by the next checkpoint: every answer is the same.",
    "audit": "How often the guesses of what kernels write are right, by the source of the guess.",
    "jobs": "Jobs as people run them (JAX, DataLoader's workers, NVML, shared tensors), dumped and restored.",
    "toggle": "The stall of a dump that leaves the program running, by toggle reducer.",
}


def folder() -> Path:
    """Return the folder of the scripts: the clone's, or the one that was installed.

    Raises:
        Unsupported: this installation has none.
    """
    for candidate in (home() / "bench", home().parent / "bench"):
        if (candidate / "harness.py").exists():
            return candidate
    raise Unsupported("This installation has no benchmarks: run `phos-gpu bench` from a clone of the source.")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--python", metavar="PROGRAM", help="The Python that has PyTorch. Default: python3 on the PATH.")
@click.argument("name", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def bench(python: str | None, name: str | None, options: tuple[str, ...]) -> None:
    """Run the benchmark NAME with its own OPTIONS; without a name, list them.

    `phos-gpu bench NAME --help` shows a benchmark's options. `--smoke` runs it in seconds on the software GPU, to see
    that it works; the numbers then mean nothing. Exit status: the benchmark's own.
    """
    if name is None:
        click.echo("\n".join(f"{known:16} {text}" for known, text in BENCHMARKS.items()))
        return
    script = name.replace("-", "_")
    if script not in BENCHMARKS:
        raise UsageError(f"There is no benchmark '{name}'. There are: {', '.join(BENCHMARKS)}.")
    # The venv of PhOS has no PyTorch, but it has all that a smoke run needs.
    program = python or (sys.executable if "--smoke" in options else shutil.which("python3") or sys.executable)
    found = shutil.which(program)
    if found is None:
        raise UsageError(f"There is no program '{program}' for --python.")
    # The commands of this installation, whatever the PATH has.
    os.environ.setdefault("PHOS_BENCH_CRIU", str(launcher("criu")))
    os.environ.setdefault("PHOS_BENCH_PHOS_GPU", str(launcher("phos-gpu")))
    become(found, [program, str(folder() / f"{script}.py"), *options])  # it ends itself what it has started
