#!/usr/bin/env python3
"""How fast the pages of a file in memory are locked for the GPU, and how fast it reads them then.

A restore reads an image's data through the ring, with a processor's copy, unless the image is pinned. Whether it had
better lock the image where it lies depends on this: the file is mapped anew, as a restore would, and threads lock parts
of it, one after the other, which are copied to the GPU as soon as they are locked. Uses no application and no phosd.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
from harness import GB, Results


@contextmanager
def image_file(folder: Path, size: int, huge: bool) -> Iterator[int]:
    """A file full of data, as an image has it; its descriptor."""
    from phos.images.mapping import HUGE_PAGE, MADV_COLLAPSE, advise, map_memory, unmap_memory

    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        os.posix_fallocate(descriptor, 0, size)
        address = map_memory(size, descriptor)
        try:
            if huge and (code := advise(address, size, MADV_COLLAPSE)):
                raise SystemExit(f"{folder} has no huge pages: {os.strerror(code)}")
        finally:
            unmap_memory(address, size)
        part = os.urandom(HUGE_PAGE)
        for at in range(0, size, HUGE_PAGE):
            os.pwrite(descriptor, part, at)
        yield descriptor


class Locked:
    """A file mapped anew, whose parts threads lock; each comes to the queue then."""

    def __init__(self, descriptor: int, size: int, part: int) -> None:
        from phos.images.mapping import map_memory

        self._size, self._part = size, part
        self.address = map_memory(size, descriptor)
        self.ready: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._left = queue.SimpleQueue[int]()
        for at in range(0, size, part):
            self._left.put(at)
        self.done: list[int] = []
        self.locked = 0.0  # when the last part was, by time.perf_counter()

    def start(self, threads: int) -> None:
        """Begin to lock."""
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        from phos.gpu_engine import driver

        try:
            driver.context(0).use()
            while True:
                try:
                    at = self._left.get_nowait()
                except queue.Empty:
                    return
                driver.register_host(self.address + at, min(self._part, self._size - at))
                self.locked = time.perf_counter()
                self.ready.put(at)
        except BaseException as error:
            self.ready.put(error)

    def following(self) -> int:
        """Where the next part is that has been locked."""
        at = self.ready.get()
        if isinstance(at, BaseException):
            raise at
        self.done.append(at)
        return at

    def release(self) -> None:
        """Unlock and unmap all."""
        from phos.gpu_engine import driver
        from phos.images.mapping import unmap_memory

        while self.done:
            driver.unregister_host(self.address + self.done.pop())
        unmap_memory(self.address, self._size)


def measure(descriptor: int, size: int, part: int, threads: int, target: int) -> dict[str, float]:
    """Seconds until all is locked, until all is in GPU memory, and to unlock it."""
    from cuda.bindings import driver as cuda

    from phos.gpu_engine import driver

    context = driver.context(0)
    context.use()
    stream = driver.Lane(context)
    began = time.perf_counter()
    locked = Locked(descriptor, size, part)
    locked.start(threads)
    try:
        for _ in range(0, size, part):
            at = locked.following()
            (status,) = cuda.cuMemcpyHtoDAsync(target + at, locked.address + at, min(part, size - at), stream.handle)
            if int(status):
                raise SystemExit(f"The driver refused a copy: {status.name}.")
        stream.synchronise()
        copied = time.perf_counter()
    finally:
        stream.synchronise()
        locked.release()
        released = time.perf_counter()
        stream.destroy()
    return {"locked_s": locked.locked - began, "copied_s": copied - began, "unlocked_s": released - copied}


def main() -> None:
    """Run as a program."""
    parser = harness.options(__doc__ or "", budget=120)
    parser.add_argument("--gib", type=int, default=16, help="of data (%(default)s)")
    parser.add_argument("--part", type=int, default=256, metavar="MIB", help="locked by one call (%(default)s)")
    harness.add_image_option(parser)
    chosen: argparse.Namespace = harness.prepare(parser)
    from phos.gpu_engine import driver
    from phos.gpu_engine.installation import load_driver

    load_driver(chosen.device)
    driver.initialise()
    results = Results(chosen, "page-lock", "Locking the pages of a file in memory, and copying from there to the GPU")
    size, part = (64 << 20, 16 << 20) if chosen.smoke else (chosen.gib << 30, chosen.part << 20)
    context = driver.context(0)
    context.use()
    mapping = context.map_block(context.create_block(size), size)
    for huge in (True, False):
        with image_file(chosen.image, size, huge) as descriptor:
            for threads in (1, 2, 4, 8):
                if harness.time_left(chosen) <= 0:
                    break
                each = [measure(descriptor, size, part, threads, mapping.address) for _ in range(chosen.repeats or 2)]
                rates = {
                    name.replace("_s", "_gb_s"): size / harness.median(one[name] for one in each) / GB
                    for name in each[0]
                }
                results.add(f"{'huge' if huge else 'small'} pages, {threads} threads", each=each, **rates)
    rows = [[key, row["locked_gb_s"], row["copied_gb_s"], row["unlocked_gb_s"]] for key, row in results.rows.items()]
    results.finish([harness.table(["", "locked, GB/s", "locked and copied, GB/s", "unlocked, GB/s"], rows)])


if __name__ == "__main__":
    main()
