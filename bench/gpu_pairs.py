#!/usr/bin/env python3
"""Which lists of GPUs the driver takes when it restores a process, and where the process is then; without PhOS.

Needs two GPUs. programs/holds_on_one_gpu.py has memory on the first GPU that it sees, and sees both or one of them
(CUDA_VISIBLE_DEVICES). The driver checkpoints it and restores it by a list of pairs, old GPU and new one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import driver_checkpoint
import harness
import process
from cuda.bindings import driver as cuda
from harness import Results
from process import Program

MOVED_BYTES = 400 << 20
"""Of 512 MiB and a context: a GPU that has become so much fuller holds the process."""

SEEN = {"both": "", "the first": "0", "the second": "1", "both, the second first": "1,0"}
Lists = dict[str, Callable[[list[str], str], dict[str, str]]]
LISTS: Lists = {
    "no list": lambda gpus, own: {},
    "its own, moved": lambda gpus, own: {own: _other(gpus, own)},
    "all, swapped": lambda gpus, own: {own: _other(gpus, own), _other(gpus, own): own},
    "all, as they were": lambda gpus, own: {gpu: gpu for gpu in gpus},
}


def _other(gpus: list[str], own: str) -> str:
    return next(gpu for gpu in gpus if gpu != own)


def used() -> dict[str, int]:
    """Bytes used of each GPU, by UUID."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {uuid.strip(): int(mib) << 20 for uuid, mib in (line.split(",") for line in lines)}


def restore(pid: int, pairs: dict[str, str]) -> str:
    """Have the driver restore a process by this list; return what it says against it, or nothing."""
    arguments = None
    if pairs:
        arguments = cuda.CUcheckpointRestoreArgs()
        arguments.gpuPairs = [_pair(old, new) for old, new in pairs.items()]
        arguments.gpuPairsCount = len(pairs)
    (status,) = cuda.cuCheckpointProcessRestore(pid, arguments)
    return "" if int(status) == 0 else str(status.name)


def _pair(old: str, new: str) -> cuda.CUcheckpointGpuPair:
    pair = cuda.CUcheckpointGpuPair()
    for name, text in (("oldUuid", old), ("newUuid", new)):
        uuid = cuda.CUuuid()
        ctypes.memmove(uuid.getPtr(), bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
        setattr(pair, name, uuid)
    return pair


def measure(chosen: argparse.Namespace, seen: str, told: str) -> dict[str, object]:
    """Return what came of one program and one list."""
    gpus = list(used())
    own = gpus[int(SEEN[seen][:1] or "0")]
    program = Program(
        process.python_program(process.PROGRAMS / "holds_on_one_gpu.py"),
        chosen.work,
        chosen.device,
        frontend=False,
        environment={"CUDA_VISIBLE_DEVICES": SEEN[seen]} if SEEN[seen] else {},
        name=f"{seen}-{told}".replace(" ", "-").replace(",", ""),
    )
    try:
        program.start()
        program.wait_for("^ITERATION 3$", 60)
        driver_checkpoint.suspend(program.pid)
        before = used()
        refused = restore(program.pid, LISTS[told](gpus, own))
        if refused:
            again = restore(program.pid, {})
            if again:
                return {"refused": refused, "restored_without": f"no: {again}"}
        after = used()
        (status,) = cuda.cuCheckpointProcessUnlock(program.pid, None)
        assert int(status) == 0, status.name
        program.wait_iterations(3)
        os.kill(program.pid, signal.SIGUSR1)
        lines = program.finish()
        holds = [gpus.index(gpu) for gpu in gpus if after[gpu] - before[gpu] > MOVED_BYTES]
        believes = [line.split()[1] for line in lines if line.startswith("BELIEVES")]
        plain = [gpu.removeprefix("GPU-").replace("-", "") for gpu in gpus]
        return {
            "refused": refused,
            "restored_without": "yes" if refused else None,
            "was_on": gpus.index(own),
            "is_on": ", ".join(map(str, holds)),
            "believes": ", ".join(str(plain.index(uuid)) for uuid in believes),
            "wrong_words": int(lines[-1].split()[1]),
        }
    finally:
        program.kill()


def main() -> None:
    """Run as a program."""
    chosen = harness.prepare(harness.options(__doc__ or "", budget=120))
    results = Results(chosen, "gpu-pairs", "Which lists of GPUs the driver takes when it restores a process")
    driver_checkpoint.start_driver(chosen.device)
    for seen in SEEN:
        for told in LISTS:
            if harness.time_left(chosen) < 5:
                results.note(f"Sees {seen}, {told}: no time left.")
                continue
            results.add(f"sees {seen}; list: {told}", **measure(chosen, seen, told))
    results.finish()


if __name__ == "__main__":
    main()
