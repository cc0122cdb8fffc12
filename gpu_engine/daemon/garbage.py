"""Looking for garbage after a failure.

What goes well refers to itself nowhere in a circle, and is gone with its last reference. An exception that is kept
refers to the frames that raised it, and they to who keeps it: a job that has failed would stay, with all that it knew
of its image, until Python looks for garbage, for which phosd makes too few objects (startup.py).
"""

from __future__ import annotations

import gc
import threading
import time

LOOKS_SECONDS = (1.0, 4.0)
"""From the request to a look, and to another: a thread may still have what has failed in its hands at the first."""


class Garbage:
    """A thread that looks for garbage when it is asked to."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="garbage").start()

    def look_soon(self) -> None:
        """Something has failed. Waits for nothing."""
        self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()  # what fails from here on may still be in use at the looks below
            for seconds in LOOKS_SECONDS:
                time.sleep(seconds)
                gc.collect()
