"""The end of a program that computes only when it is told to: bench/turns.py has the other one.

A line on standard input is a task's name and how many steps to time; the answer is a line with milliseconds a step.
Between lines the program waits for its input and does nothing, so that another one has the GPU and the processors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

LEAD = 3
"""Steps before the timed ones: the GPU and its caches were somebody else's."""


def answer(tasks: Mapping[str, Callable[[], object]], synchronize: Callable[[], object]) -> None:
    """Answer until the input ends. ``synchronize`` waits until the GPU has done all that it was given."""
    print("READY", flush=True)
    for line in sys.stdin:
        name, count = line.split()
        step = tasks[name]
        for _ in range(LEAD):
            step()
        synchronize()
        start = time.perf_counter()
        for _ in range(int(count)):
            step()
        synchronize()
        print(f"{1000 * (time.perf_counter() - start) / int(count):.6f}", flush=True)
