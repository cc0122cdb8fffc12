"""The end of a program that computes only when it is told to: bench/turns.py has the other one.

A line on standard input is a task's name and how many steps to time; the answer is a line with milliseconds a step.
With `both` before that it is two such numbers, of steps past the frontend (bypass.py) and of steps through it, of which
now one and now the other is timed first. Between lines the program waits for its input and does nothing, so that
another one has the GPU and the processors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from bypass import Bypass

LEAD = 3
"""Steps before the timed ones: the GPU and its caches were somebody else's."""


def answer(tasks: Mapping[str, Callable[[], object]], synchronize: Callable[[], object]) -> None:
    """Answer until the input ends. ``synchronize`` waits until the GPU has done all that it was given."""

    def timed(step: Callable[[], object], count: int) -> float:
        for _ in range(LEAD):
            step()
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return 1000 * (time.perf_counter() - start) / count

    print("READY", flush=True)
    bypass, past_first = None, False
    for line in sys.stdin:
        *both, name, count = line.split()
        if both:
            bypass = bypass or Bypass()
            past_first = not past_first
            numbers = {}
            for past in (past_first, not past_first):
                bypass.set(past)
                numbers[past] = timed(tasks[name], int(count))
            bypass.set(False)
            print(f"{numbers[True]:.6f} {numbers[False]:.6f}", flush=True)
        else:
            print(f"{timed(tasks[name], int(count)):.6f}", flush=True)
