"""What the machine itself can do, measured in the same run as the benchmark that is compared with it."""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import process

MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet in Python's mmap module
PIECE = 256 << 20


def meminfo(name: str) -> int:
    """Return a line of /proc/meminfo in bytes."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _touch(size: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    held = []
    stuck = 0
    while size > 0 and stuck < 200:
        # The hypervisor adds memory when it sees it run out; until it has, taking more would end in the OOM killer.
        if meminfo("MemAvailable") < 3 << 30:
            stuck += 1
            time.sleep(0.05)
            continue
        stuck = 0
        piece = mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece.madvise(MADV_POPULATE_WRITE)
        held.append(piece)
        size -= PIECE
    barrier.wait(timeout=300)  # nobody gives memory back before all have taken theirs


def touch_memory(size: int) -> float:
    """Make the hypervisor back `size` bytes of this machine's memory; returns the seconds it took.

    A virtual machine may get its memory only when it first touches it, at a few GB/s: that must not be timed.
    """
    start = time.perf_counter()
    workers = 4
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workers)
    children = [context.Process(target=_touch, args=(size // workers, barrier)) for _ in range(workers)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return time.perf_counter() - start


COPY_PROGRAM = r"""
import sys, time
from cuda.bindings import driver as cuda
size, rounds = int(sys.argv[1]), int(sys.argv[2])
def check(answer):
    if int(answer[0]): raise SystemExit(f"copying failed: {answer[0]}")
    return answer[1] if len(answer) > 1 else None
check(cuda.cuInit(0))
device = check(cuda.cuDeviceGet(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(device))))
host, where = check(cuda.cuMemHostAlloc(size, 0)), check(cuda.cuMemAlloc(size))
check(cuda.cuMemsetD8(where, 1, size))
copies = [lambda: cuda.cuMemcpyDtoHAsync(host, where, size, 0), lambda: cuda.cuMemcpyHtoDAsync(where, host, size, 0)]
for copy in copies:
    rates = []
    for _ in range(rounds):
        check(cuda.cuCtxSynchronize())
        start = time.perf_counter()
        for _ in range(4):
            check(copy())
        check(cuda.cuCtxSynchronize())
        rates.append(4 * size / (time.perf_counter() - start))
    print(sorted(rates)[len(rates) // 2])
"""


def copy_bandwidth(device: str, size: int = 256 << 20, rounds: int = 7) -> tuple[float, float]:
    """Return bytes a second from device to pinned host memory, and back. In a process of its own, gone afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", COPY_PROGRAM, str(size), str(rounds)],
        env=process.device_environment(device),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise process.ProcessError(f"Could not measure the copy bandwidth: {done.stderr[-1000:]}")
    down, up = (float(line) for line in done.stdout.split())
    return down, up


def disk_rate(folder: Path, size: int, writers: int) -> tuple[float, float]:
    """Return the folder's sequential write and read rates in bytes a second, past the page cache.

    `writers` threads write and then read one file each, `size` bytes in all, 8 MiB at a time. The data is random: a
    disk that compresses or drops zeros must not look faster than it is. The time to make it durable counts.
    """
    block = mmap.mmap(-1, 8 << 20)
    block.write(os.urandom(8 << 20))
    paths = [folder / f"phos-disk-rate-{index}" for index in range(writers)]
    each = size // writers // len(block)
    errors: list[BaseException] = []

    def write(path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
            try:
                for _ in range(each):
                    os.write(descriptor, block)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            errors.append(error)

    def read(path: Path) -> None:
        buffer = mmap.mmap(-1, len(block))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                for _ in range(each):
                    os.readv(descriptor, [buffer])
            finally:
                os.close(descriptor)
        except OSError as error:
            errors.append(error)

    rates = []
    try:
        for work in (write, read):
            threads = [threading.Thread(target=work, args=(path,)) for path in paths]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rates.append(each * writers * len(block) / (time.perf_counter() - start))
        if errors:
            raise errors[0]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    return rates[0], rates[1]


def enlarge_tmpfs(folder: Path, size: int) -> None:
    """Let a tmpfs hold `size` bytes.

    Its default limit is half of the memory that the machine had when it was mounted, and this one's memory has grown.
    Only what is too small is changed, and only the limit.
    """
    stat = os.statvfs(folder)
    if os.path.ismount(folder) and stat.f_blocks * stat.f_frsize < size:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=False)


def huge_tmpfs(size: int) -> Path:
    """Mount a tmpfs with pages of 2 MiB that can hold `size` bytes, until this process ends; return its folder.

    Raises subprocess.CalledProcessError where that is not allowed (it takes root).
    """
    folder = Path(tempfile.mkdtemp(prefix="phos-bench-huge-"))
    atexit.register(folder.rmdir)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"huge=always,size={size},mode=700", "phos", str(folder)], check=True)
    atexit.register(subprocess.run, ["umount", "-l", str(folder)], check=False)
    return folder


def drop_page_cache() -> bool:
    """Write everything out and forget what was read, so that a restore from disk reads the disk.

    Returns whether that was allowed: not if this is not root, or in a container.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def reset_peak(pid: int) -> None:
    """Let a process's peak resident size begin anew."""
    if pid:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_resident(pid: int) -> int:
    """Return a process's peak resident size in bytes since reset_peak(); 0 if there is no such process."""
    try:
        found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0
