"""How fast the image library writes, reads and verifies, without a GPU: memory to an image and back.

    python bench/image_io.py DIRECTORY [--threads N] [--gigabytes G] [--json]

Each thread plays one slot of the daemon's ring: it writes the same 64 MiB of random bytes again and again, in calls of
--call MiB, to its own stripe. Also measured is what a call costs beside hashing and writing ('overhead'): calls of one
page, a million of which would otherwise hide in the copying.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from phos.gen import phos_image_pb2 as pb
from phos.images.reader import Image
from phos.images.writer import ImageWriter

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


def measure(
    directory: Path, threads: int, total: int, call: int, chunk: int, direct: bool | None, reserve: bool
) -> dict[str, object]:
    each = total // threads // SLOT * SLOT
    slots = [random_slot() for _ in range(threads)]
    fd = os.open(directory, os.O_RDONLY)
    with ImageWriter(fd, stripes=threads, chunk_size=chunk, direct=direct) as writer:
        began = time.monotonic()
        if reserve and not writer.reserve(each * threads):
            raise SystemExit(f"there is no room for {each * threads} bytes in {directory}")
        reserved = time.monotonic() - began

        def write(i: int) -> None:
            view = memoryview(slots[i])
            for at in range(0, each, call):
                begin = at % SLOT
                writer.write(i, (SESSION, i + 1), at, view[begin : begin + call])

        written = in_threads(threads, write)
        began = time.monotonic()
        writer.commit(inventory([each] * threads))
        commit = time.monotonic() - began

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
        was_direct = image.inventory.data.direct
    size = each * threads
    return {
        "bytes": size,
        "threads": threads,
        "call_bytes": call,
        "chunk_bytes": chunk,
        "direct": was_direct,
        "reserve_s": round(reserved, 3) if reserve else None,
        "write_GB_s": round(size / written / 1e9, 2),
        "commit_s": round(commit, 3),
        "write_and_commit_GB_s": round(size / (written + commit) / 1e9, 2),
        "read_GB_s": round(size / took / 1e9, 2),
        "verify_GB_s": round(size / verified / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the images are written (and removed again)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--call", type=int, default=32, help="MiB a write() gets")
    parser.add_argument("--chunk", type=int, default=4, help="MiB")
    parser.add_argument("--direct", choices=["auto", "yes", "no"], default="auto")
    parser.add_argument("--reserve", action="store_true", help="allocate the files' room first, timed apart")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    direct = {"auto": None, "yes": True, "no": False}[args.direct]
    total = int(args.gigabytes * 1e9)
    if total // args.threads < SLOT:
        parser.error(f"--gigabytes is too small for {args.threads} threads of at least {SLOT} bytes each")
    folder = Path(tempfile.mkdtemp(prefix="phos-image-io-", dir=args.directory))
    try:
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        result = measure(folder / "a", args.threads, total, args.call << 20, args.chunk << 20, direct, args.reserve)
        result["overhead_us_per_call"] = round(overhead(folder / "b"), 1)
    finally:
        shutil.rmtree(folder)
    if args.json:
        json.dump(result, sys.stdout)
        print()
    else:
        for key, value in result.items():
            print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
