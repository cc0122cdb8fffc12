"""How fast the image library writes, reads and verifies, without a GPU: memory to an image and back.

Each thread plays one slot of the daemon's ring: it writes the same 64 MiB of random bytes again and again, in calls of
--call MiB, to its own stripe. Also measured is what a call costs beside hashing and writing ('overhead'): calls of one
page, a million of which would otherwise hide in the copying.

With "reserve" the files' room is allocated first, with "place" huge pages are found for it and all is copied into
these, as GPUs do it (only in a file system in memory); that is timed apart. The image is read as soon as it has been
written: what a restore after a dump does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import machine
import process
from harness import Results

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine.landing import PLACE_BYTES, SEGMENT_BYTES
from phos.images.files import address_of, run_in_threads
from phos.images.mapping import unmap_memory
from phos.images.reader import Image
from phos.images.writer import ImageWriter

ROOMS = ("none", "reserve", "place")

SESSION = bytes(16)
SLOT = 64 << 20


def in_threads(count: int, action) -> float:  # type: ignore[no-untyped-def]
    """Seconds until `action(i)` has returned in all of `count` threads; an exception in one ends the program."""
    failures: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            action(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.monotonic() - began


def random_slot() -> mmap.mmap:
    slot = mmap.mmap(-1, SLOT)
    for at in range(0, SLOT, 1 << 20):
        slot[at : at + (1 << 20)] = random.randbytes(1 << 20)
    return slot


def inventory(sizes: list[int]) -> pb.Inventory:
    result = pb.Inventory(protocol="stop")
    process = result.processes.add(pid=1, session=SESSION, under_frontend=True)
    for number, size in enumerate(sizes, 1):
        process.blocks.add(block=number, size=size)
    return result


def overhead(directory: Path) -> float:
    """Microseconds of a write() of one page to memory, hash and system call included."""
    calls = 20_000
    fd = os.open(directory, os.O_RDONLY)
    page = mmap.mmap(-1, 4096)
    page.write(random.randbytes(4096))
    view = memoryview(page)
    with ImageWriter(fd, stripes=1, chunk_size=4096, direct=False) as writer:
        began = time.monotonic()
        for i in range(calls):
            writer.write(0, (SESSION, 1), i * 4096, view)
        return (time.monotonic() - began) / calls * 1e6


def find_room(writer: ImageWriter, room: str, total: int, threads: int) -> int:
    """Where the memory is that is written to, with room "place"; else 0."""
    if room == "reserve" and not writer.reserve(total):
        raise process.ProcessError(f"there is no room for {total} bytes")
    if room != "place":
        return 0
    address = writer.map_data(total, SEGMENT_BYTES, PLACE_BYTES)
    if not address:
        raise process.ProcessError("there are no places in this file system, which keeps its data on a disk")
    size = writer.mapped_bytes
    run_in_threads(
        [partial(writer.populate_data, at, min(SEGMENT_BYTES, size - at)) for at in range(0, size, SEGMENT_BYTES)],
        threads,
    )
    return address


def measure(
    directory: Path, threads: int, total: int, call: int, chunk: int, direct: bool | None, room: str
) -> dict[str, float]:
    """Seconds and GB/s of one image."""
    call = min(call, PLACE_BYTES) if room == "place" else call
    each = total // threads // SLOT * SLOT
    slots = [random_slot() for _ in range(threads)]
    fd = os.open(directory, os.O_RDONLY)
    with ImageWriter(fd, stripes=threads, chunk_size=chunk, direct=direct) as writer:
        began = time.monotonic()
        address = find_room(writer, room, each * threads, threads)
        found = time.monotonic() - began

        def write(i: int) -> None:
            view = memoryview(slots[i])
            source = address_of(view)
            for at in range(0, each, call):
                begin = at % SLOT
                if not address:
                    writer.write(i, (SESSION, i + 1), at, view[begin : begin + call])
                else:
                    to = address + i * each + at
                    ctypes.memmove(to, source + begin, call)
                    writer.write_placed((SESSION, i + 1), at, call, to, None)

        written = in_threads(threads, write)
        if address:
            writer.return_room(threads * each)
        began = time.monotonic()
        writer.commit(inventory([each] * threads))
        commit = time.monotonic() - began
        if address:
            unmap_memory(address, writer.mapped_bytes)

    def read(i: int) -> None:
        view = memoryview(slots[i])
        for extent in image.extents((SESSION, i + 1)):
            image.read_into(extent, view)

    with Image.open(directory, direct=direct) as image:
        took = in_threads(threads, read)
        began = time.monotonic()
        problems = image.verify(threads=threads)
        verified = time.monotonic() - began
        if problems:
            raise SystemExit("\n".join(problems))
    size = each * threads
    return {
        "room_s": found,
        "write_GB_s": size / written / 1e9,
        "commit_s": commit,
        "read_GB_s": size / took / 1e9,
        "verify_GB_s": size / verified / 1e9,
    }


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "")
    harness.add_image_option(parser)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    parser.add_argument("--gigabytes", type=float, default=4.0, metavar="G", help="(%(default)s)")
    parser.add_argument("--call", type=int, default=32, metavar="M", help="MiB a write() gets (%(default)s)")
    parser.add_argument("--chunk", type=int, default=4, metavar="M", help="MiB (%(default)s)")
    parser.add_argument("--direct", choices=["auto", "yes", "no"], default="auto")
    parser.add_argument("--rooms", type=harness.words, default=list(ROOMS), metavar="LIST")
    parser.add_argument(
        "--touch-gib", type=int, default=0, metavar="G", help="have the machine find so much memory first"
    )
    chosen = harness.prepare(parser)
    harness.refuse_unknown(parser, chosen.rooms, ROOMS)
    total = 2 * SLOT * chosen.threads if chosen.smoke else int(chosen.gigabytes * 1e9)
    if total // chosen.threads < SLOT:
        parser.error(f"--gigabytes is too small for {chosen.threads} threads of at least {SLOT} bytes each")
    results = Results(chosen, "image-io", "How fast images are written, read and verified")
    if chosen.touch_gib:
        machine.touch_memory(chosen.touch_gib << 30)
    place = getattr(chosen, "images_in", chosen.image)
    direct = {"auto": None, "yes": True, "no": False}[chosen.direct]

    def measure_room(room: str) -> None:
        runs = []
        for _ in range(chosen.repeats or (1 if chosen.smoke else 3)):
            folder = Path(tempfile.mkdtemp(prefix="phos-image-io-", dir=chosen.image))
            try:
                (folder / "a").mkdir()
                (folder / "b").mkdir()
                sizes = (chosen.call << 20, chosen.chunk << 20)
                runs.append(measure(folder / "a", chosen.threads, total, *sizes, direct, room))
                runs[-1]["overhead_us_per_call"] = overhead(folder / "b")
            finally:
                shutil.rmtree(folder)
        medians = {name: harness.median(run[name] for run in runs) for name in runs[0]}
        results.add(f"{room}, {place}", bytes=total, threads=chosen.threads, runs=runs, **medians)

    harness.measure_each(chosen, results, chosen.rooms, measure_room)


if __name__ == "__main__":
    main()
