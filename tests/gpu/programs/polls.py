#!/usr/bin/env python3
"""The stencil of the examples, and beside it threads that poll all the time.

They ask for the state of a stream and of an event, as NCCL's watchdog and PyTorch's allocator of pinned memory do, and
about the own streams of threads that have none yet. Without the frontend no gate keeps them from the driver. Takes
the stencil's options.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import stencil
from cuda.bindings import driver
from cuda_program import check

PAUSE = 0.0005
"""Seconds between two questions of a thread; ten times as many where each has a thread of its own.

A restored process needs its number, and threads use numbers up.
"""


def poll(context: object, question: Callable[[], object], *, anew: bool = False) -> None:
    """Ask for ever, each time in a thread of its own if so told."""
    check(driver.cuCtxSetCurrent(context), "set a context")
    while True:
        if anew:
            thread = threading.Thread(target=ask, args=(context, question))
            thread.start()
            thread.join()
        else:
            ask(context, question)
        time.sleep(PAUSE * 10 if anew else PAUSE)


def ask(context: object, question: Callable[[], object]) -> None:
    """Ask once; a wrong answer ends the program."""
    driver.cuCtxSetCurrent(context)
    answer = question()
    if int(answer[0]) != 0:  # type: ignore[index]
        print("a poll was answered with", answer, file=sys.stderr, flush=True)
        os._exit(3)


def main() -> None:
    """Run the program."""
    check(driver.cuInit(0), "start the driver")
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(0), "find a GPU")), "retain a context")
    check(driver.cuCtxSetCurrent(context), "set a context")
    stream, event = (
        check(driver.cuStreamCreate(1), "create a stream"),
        check(driver.cuEventCreate(0), "create an event"),
    )
    check(driver.cuEventRecord(event, stream), "record an event")
    check(driver.cuStreamSynchronize(stream), "wait for a stream")
    own = driver.CUstream(driver.CU_STREAM_PER_THREAD)
    questions: list[tuple[Callable[[], object], bool]] = [
        (lambda: driver.cuStreamQuery(stream), False),
        (lambda: driver.cuEventQuery(event), False),
        (lambda: driver.cuStreamGetFlags(own), True),
    ]
    for question, anew in questions:
        threading.Thread(target=poll, args=(context, question), kwargs={"anew": anew}, daemon=True).start()
    stencil.main()


if __name__ == "__main__":
    main()
