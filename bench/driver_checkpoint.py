#!/usr/bin/env python3
"""The peer: NVIDIA's driver checkpoint of one process, called the way the public cuda-checkpoint utility calls it.

As a program: `driver_checkpoint.py lock|checkpoint|restore|unlock PID`. The benchmarks call the functions from a
process that has started the driver already, which favours the peer: the utility starts it each time.
"""

from __future__ import annotations

import sys
import time

from cuda.bindings import driver


class DriverCheckpointError(RuntimeError):
    """The driver refused a step: the message names the step and the driver's error."""


def _call(step: str, pid: int) -> float:
    function = getattr(driver, f"cuCheckpointProcess{step.capitalize()}")
    start = time.perf_counter()
    (status,) = function(pid, None)
    if int(status) != 0:
        raise DriverCheckpointError(f"The driver could not {step} process {pid}: {status.name}.")
    return time.perf_counter() - start


def start_driver() -> None:
    """Start the driver in this process; makes no context."""
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
