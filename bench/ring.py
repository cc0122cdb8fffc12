#!/usr/bin/env python3
"""How many copying threads, and how large a slot of the pinned ring: the rate of GPU memory into an image in memory.

Uses phosd's own copier and image writer on blocks of its own, without any application. This is where the numbers of
threads and the slot size in gpu_engine/copier.py come from.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import machine
from harness import GB, Results


def fill(blocks: int, size: int) -> list[Any]:
    """Make blocks whose bytes are no zeros."""
    from cuda.bindings import driver as cuda

    from phos.gpu_engine import driver
    from phos.gpu_engine.blocks import Block

    context = driver.context(0)
    made = []
    for number in range(blocks):
        descriptor = context.create_block(size)
        mapping = context.map_block(descriptor, size)
        cuda.cuMemsetD32(mapping.address, 0x1234567 + number, size // 4)
        cuda.cuCtxSynchronize()
        mapping.unmap()
        made.append(Block((b"ring" * 4, number + 1), size, 0, descriptor))
    return made


def rate(blocks: list[Any], folder: Path, threads: int, slot: int, reserve: bool) -> float:
    """GB/s of one save."""
    from phos.gpu_engine.copier import Copier
    from phos.gpu_engine.copy_work import Progress
    from phos.images.writer import ImageWriter

    copier = Copier(threads, 2 * threads * slot)
    copier.prepare(0)
    total = sum(block.size for block in blocks)
    image = Path(tempfile.mkdtemp(dir=folder))
    directory = os.open(image, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with ImageWriter(directory, stripes=copier.threads) as writer:
            if reserve:
                writer.reserve(total)
            began = time.perf_counter()
            copier.save(blocks, writer, Progress(total, [0] * copier.threads), threading.Event())
            return total / (time.perf_counter() - began) / GB
    finally:
        os.close(directory)
        shutil.rmtree(image)
        copier.release()


def main() -> None:
    """Run as a program."""
    parser = harness.options(__doc__ or "", budget=200)
    parser.add_argument("--gib", type=int, default=16, help="of GPU memory (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the images go (%(default)s)")
    chosen: argparse.Namespace = harness.prepare(parser)
    from phos.gpu_engine import driver
    from phos.gpu_engine.installation import load_driver

    load_driver("software" if chosen.smoke else "nvidia")
    driver.initialise()
    results = Results(chosen, "ring", "Copying threads and slot sizes, image in memory")
    if not chosen.smoke:
        machine.touch_memory(2 * chosen.gib << 30)
    blocks = fill(2, 8 << 20) if chosen.smoke else fill(chosen.gib, 1 << 30)
    sys.setswitchinterval(0.0002)
    cores = os.cpu_count() or 2
    for threads in sorted({max(1, cores // 2), max(1, cores - 4), max(1, cores - 2), cores}):
        for slot in (4 << 20, 8 << 20, 16 << 20):
            for reserve in (True, False):
                if harness.time_left(chosen) <= 0:
                    break
                value = rate(blocks, chosen.folder, threads, slot, reserve)
                key = f"{threads} threads, {slot >> 20} MiB, {'reserved' if reserve else 'not reserved'}"
                results.add(key, threads=threads, slot_mib=slot >> 20, reserved=reserve, gb_s=value)
    results.finish()


if __name__ == "__main__":
    main()
