"""Copied pages in what CRIU itself dumped: put together again (images/criu_pages.py), and restored from."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from phos.images.criu_pages import PE_LAZY, PE_PRESENT, Run
from phos.images.native import launcher
from tests.unit import criu_pages_files as files
from tests.unit.criu_pages_files import (
    PAGE,
    Pages,
    bodies_of,
    call,
    content,
    entries_of,
    joined,
    pages_number,
    pages_of,
    runs_of,
    split,
    write_image,
    write_pair,
)
from tests.unit.image_sets import skip

pytest_generate_tests, form = files.in_each_form, files.form

PROGRAM = """
import ctypes, mmap, os, sys, threading, time, zlib
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
def fill(memory, pages):
    for i in pages:
        memory[i * page : (i + 1) * page] = os.urandom(page)
def address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
dense = mmap.mmap(-1, 1200 * page, flags=private)
fill(dense, range(1200))
holes = mmap.mmap(-1, 400 * page, flags=private)
fill(holes, [i for i in range(400) if i % 7 in (1, 2, 5)])
locked = mmap.mmap(-1, 40 * page, flags=private)
fill(locked, range(40))
assert libc.mlock(ctypes.c_void_p(address(locked) + 8 * page), 16 * page) == 0
with open("file", "wb+") as file:
    file.write(os.urandom(64 * page))
    file.flush()
    written = mmap.mmap(file.fileno(), 64 * page, flags=mmap.MAP_PRIVATE)
fill(written, range(3, 64, 5))
wait = threading.Event()
for _ in range(3):
    threading.Thread(target=wait.wait, daemon=True).start()
out = os.open("sums", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
number = 0
while True:
    total = 0
    for memory in (dense, holes, locked, written):
        total = zlib.crc32(memory, total)
    os.write(out, f"{number} {total}\\n".encode())
    number += 1
    time.sleep(0.05)
"""


def criu(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [launcher("criu"), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def needs_criu() -> None:
    if os.geteuid() != 0:
        skip("CRIU needs root")
    version = criu("--version")
    if version.returncode:
        skip(f"no CRIU here: {version.stderr.strip()}")


def sums(folder: Path) -> list[tuple[int, str]]:
    path = folder / "sums"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), total) for number, total in (line.split() for line in lines)]


def wait_for_sums(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(sums(folder)) < count:
        assert time.monotonic() < deadline, f"only {len(sums(folder))} of {count} checksums"
        time.sleep(0.02)


@dataclass(frozen=True)
class Dumped:
    """A dump by CRIU alone, of a process that has ended since."""

    images: Path
    task: int
    work: Path


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    needs_criu()
    for _ in range(5):
        made = dump(tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("images"))
        if any(flags & PE_LAZY for _, _, flags in entries_of(made.images / f"pagemap-{made.task}.img")):
            return made
        # A stack pointer that is a multiple of the page size, one of 256 is: see the module's description.
    raise AssertionError("CRIU lets no page be restored lazily")


def dump(work: Path, images: Path) -> Dumped:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PROGRAM], cwd=work, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_sums(work, 3)
        done = criu("dump", "-t", process.pid, "-D", images, "--leave-running", "-o", "dump.log")
        if done.returncode:
            log = images / "dump.log"
            skip(f"CRIU cannot dump here: {done.stderr}{log.read_text()[-500:] if log.exists() else ''}")
    finally:
        process.kill()
        process.wait()
    return Dumped(images, process.pid, work)


def split_dump(dumped: Dumped, folder: Path, seed: int, shift: int) -> tuple[Pages, list[Run], list[tuple[int, int]]]:
    """The dump in another folder, as if a random part of its pages had been copied beside CRIU."""
    shutil.copytree(dumped.images, folder, dirs_exist_ok=True)
    pages = pages_of(folder, dumped.task)
    chance = random.Random(seed)
    chosen: set[int] = set()
    for first, count in runs_of(pages):  # runs of all lengths, some to the end of their memory and the next one's start
        start = first
        while start < first + count:
            length = chance.choice([1, 1, 2, 5, 60, 2000])
            if chance.random() < 0.6:
                chosen.update(range(start, min(start + length, first + count)))
            start += length
    number = pages_number(folder, dumped.task)
    runs = split(folder, pages, chosen, shift)
    write_pair(folder, dumped.task, number, {n: page for n, page in pages.items() if n not in chosen})
    return pages, runs, [(first * PAGE, (first + count) * PAGE) for first, count in runs_of(chosen)]


@pytest.mark.root
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_real_dump_is_put_together_again(dumped: Dumped, tmp_path: Path, seed: int, shift: int) -> None:
    original = entries_of(dumped.images / f"pagemap-{dumped.task}.img")
    flags = {flags for _, _, flags in original}
    assert flags == {PE_PRESENT, PE_PRESENT | PE_LAZY}  # else it would prove little
    pages, runs, wanted = split_dump(dumped, tmp_path, seed, shift)
    assert len(runs) > 20
    assert call(tmp_path, runs, wanted, dumped.task) == (shift == 0)
    assert pages_of(tmp_path, dumped.task) == pages
    assert joined(entries_of(tmp_path / f"pagemap-{dumped.task}.img")) == joined(original)
    before = content(dumped.images)
    after = content(tmp_path)
    assert {name for name in after if after[name] != before[name]} <= {f"pagemap-{dumped.task}.img"}
    assert set(after) == set(before)


@pytest.mark.root
def test_a_real_dump_of_which_everything_was_copied_is_put_together_again(dumped: Dumped, tmp_path: Path) -> None:
    """All flags are ours then."""
    shutil.copytree(dumped.images, tmp_path, dirs_exist_ok=True)
    pages = pages_of(tmp_path, dumped.task)
    runs = split(tmp_path, pages, pages)
    head = bodies_of(tmp_path / f"pagemap-{dumped.task}.img")[0]
    write_image(tmp_path / f"pagemap-{dumped.task}.img", "PAGEMAP", [head])
    (tmp_path / f"pages-{pages_number(tmp_path, dumped.task)}.img").write_bytes(b"")
    wanted = [(first * PAGE, (first + count) * PAGE) for first, count in runs_of(pages)]
    assert call(tmp_path, runs, wanted, dumped.task) is True
    assert pages_of(tmp_path, dumped.task) == pages
    original = entries_of(dumped.images / f"pagemap-{dumped.task}.img")
    assert entries_of(tmp_path / f"pagemap-{dumped.task}.img") == joined(original)


@pytest.mark.root
def test_a_process_goes_on_from_what_was_put_together(dumped: Dumped, tmp_path: Path) -> None:
    _, runs, wanted = split_dump(dumped, tmp_path, 99, 0)
    assert call(tmp_path, runs, wanted, dumped.task) is True
    before = sums(dumped.work)
    done = criu("restore", "-D", tmp_path, "-d", "-o", "restore.log")
    assert done.returncode == 0, (tmp_path / "restore.log").read_text()[-2000:]
    try:
        wait_for_sums(dumped.work, len(before) + 3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(dumped.task, signal.SIGKILL)
    after = sums(dumped.work)
    assert {total for _, total in after} == {before[0][1]}
    # It had gone on for a moment after the dump, so it says some numbers again.
    numbers = [number for number, _ in after[len(before) :]]
    assert 3 <= numbers[0] <= len(before)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
