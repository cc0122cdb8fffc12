#!/usr/bin/env python3
"""The peer: NVIDIA's driver checkpoint of one process, called the way the public cuda-checkpoint utility calls it.

As a program: `driver_checkpoint.py lock|checkpoint|restore|unlock PID`. The benchmarks call the functions from a
process that has started the driver already, which favours the peer: the utility starts it each time.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from cuda.bindings import driver

sys.path.insert(0, str(Path(__file__).resolve().parent))
import process


class DriverCheckpointError(RuntimeError):
    """The driver refused a step: the message names the step and the driver's error."""


def _call(step: str, pid: int) -> float:
    function = getattr(driver, f"cuCheckpointProcess{step.capitalize()}")
    start = time.perf_counter()
    (status,) = function(pid, None)
    if int(status) != 0:
        raise DriverCheckpointError(f"The driver could not {step} process {pid}: {status.name}.")
    return time.perf_counter() - start


def start_driver(device: str = "nvidia") -> None:
    """Start the driver of that device in this process; makes no context."""
    if device == "software":
        # The search path is read when a process starts; a library that is loaded answers to its name.
        ctypes.CDLL(str(process.software_gpu_folder() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    (status,) = driver.cuInit(0)
    if int(status) != 0:
        raise DriverCheckpointError(f"The driver did not start: {status.name}.")


def suspend(pid: int) -> dict[str, float]:
    """Lock a process and bring its GPU state into its host memory; returns the seconds of each step."""
    return {"lock": _call("lock", pid), "checkpoint": _call("checkpoint", pid)}


def resume(pid: int) -> dict[str, float]:
    """Bring a process's state back to the GPU and unlock it; returns the seconds of each step."""
    return {"restore": _call("restore", pid), "unlock": _call("unlock", pid)}


if __name__ == "__main__":
    start_driver()
    print(f"{_call(sys.argv[1], int(sys.argv[2])):.6f}")
