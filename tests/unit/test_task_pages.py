"""Copies of a frozen task's pages: found, laid out and copied as CRIU's images need them, or given up cleanly."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from phos.gpu_engine import procfs, task_pages
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.task_pages import TaskPages
from phos.images import criu_pages
from tests.page_scan import needs_page_scan
from tests.unit.waiting import eventually

PAGE = 4096
MIB = 1 << 20

pytestmark = needs_page_scan

COPIED = 2
"""enum phos_mapping_kind of include/task_pages.h."""

RUNS = 700
"""Pages of the program that stand alone, in one mapping: two turns of the kernel's, of which the second is not full."""

PROGRAM = """
import mmap, os, sys
def fill(size, step):
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, size, 4096 * step):
        memory[at : at + 4096] = os.urandom(8) * 512
    return memory
held = [fill(6 << 20, 1), fill(int(sys.argv[1]) * 8192, 2)]
print("READY", flush=True)
sys.stdin.readline()
held.append(fill(9 << 20, 1))
print("GROWN", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def task() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", PROGRAM, str(RUNS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "READY\n"
        yield process
        process.kill()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def stop(task: subprocess.Popen[str]) -> None:
    os.kill(task.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(task.pid), "the stop")


def frozen(pages: TaskPages, pid: int, tracer: int = 0) -> list[tuple[int, int, int, int]]:
    """What phosd tells the plugin of a task: address, size, offset, whether it is copied."""
    table = os.memfd_create("table")
    pages.freeze(pid, pid, tracer)
    pages.tell(pid, table)
    raw = os.pread(table, os.fstat(table).st_size, 0)
    os.close(table)
    if not raw:
        return []
    runs, mappings = struct.unpack_from("=QQ", raw)
    assert len(raw) == 16 + 32 * runs + 24 * mappings
    assert_within(list(struct.iter_unpack("=QQQ", raw[16 + 32 * runs :])), raw[16 : 16 + 32 * runs])
    return list(struct.iter_unpack("=QQQQ", raw[16 : 16 + 32 * runs]))


def assert_within(mappings: list[tuple[int, int, int]], runs: bytes) -> None:
    """Every page that is copied is one of a mapping of which that is said."""
    assert mappings == sorted(mappings)
    copied = [(address, address + size) for address, size, kind in mappings if kind == COPIED]
    for address, size, _, is_copied in struct.iter_unpack("=QQQQ", runs):
        at = address if is_copied else address + size
        while at < address + size:
            at = next(stop for start, stop in copied if start <= at < stop)


def whole(task: subprocess.Popen[str], file: Path, runs: list[tuple[int, int, int, int]]) -> int:
    """How much was copied; all of it as it is in the task."""
    copied = 0
    with open(f"/proc/{task.pid}/mem", "rb", buffering=0) as memory, open(file, "rb") as data:
        for address, size, offset, is_copied in runs:
            if is_copied:
                memory.seek(address)
                data.seek(offset)
                assert data.read(size) == memory.read(size), hex(address)
                copied += size
    return copied


def rights(pid: int) -> dict[range, str]:
    areas = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        areas[range(start, end)] = line.split()[1]
    return areas


@pytest.mark.parametrize("found", [task_pages.FOUND, 3], ids=["room", "too little room"])
def test_all_is_copied_but_what_criu_changes(
    task: subprocess.Popen[str], directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    monkeypatch.setattr(task_pages, "FOUND", found)
    pages = TaskPages(directory)
    pages.prepare([task.pid])
    stop(task)
    runs = frozen(pages, task.pid)
    pages.wait()
    file = tmp_path / f"phos-pages-{task.pid}.raw"
    assert whole(task, file, runs) > 8 * MIB
    place, behind = 0, 0
    for address, size, offset, copied in runs:
        assert address >= behind
        assert offset == place
        assert size % PAGE == 0 < size
        behind, place = address + size, place + size
        if copied:
            within = {word for area, word in rights(task.pid).items() if area.start < behind and address < area.stop}
            assert {word[0] + word[2:] for word in within} <= {"r-p"}
    assert sum(size == PAGE and copied for _, size, _, copied in runs) >= RUNS - 2
    # Room for the page that CRIU writes its instructions into, and for the vDSO.
    left = [address for address, _, _, copied in runs if not copied]
    first = min(area.start for area, word in rights(task.pid).items() if word[2] == "x")
    assert first in left
    assert len(left) >= 2
    pages.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("growth", [task_pages.GROWTH_BYTES, 0], ids=["as expected", "more than expected"])
def test_a_task_that_grows_before_it_is_frozen(
    task: subprocess.Popen[str], directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, growth: int
) -> None:
    monkeypatch.setattr(task_pages, "GROWTH_BYTES", growth)
    pages = TaskPages(directory)
    pages.prepare([task.pid])
    assert task.stdin
    assert task.stdout
    task.stdin.write("\n")
    task.stdin.flush()
    assert task.stdout.readline() == "GROWN\n"
    stop(task)
    runs = frozen(pages, task.pid)
    pages.wait()
    assert whole(task, tmp_path / f"phos-pages-{task.pid}.raw", runs) > 17 * MIB
    pages.discard()


def test_a_task_that_nothing_was_prepared_for(task: subprocess.Popen[str], directory: int, tmp_path: Path) -> None:
    pages = TaskPages(directory)
    stop(task)
    runs = frozen(pages, task.pid)
    pages.wait()
    assert whole(task, tmp_path / f"phos-pages-{task.pid}.raw", runs) > 8 * MIB
    pages.discard()
    assert not list(tmp_path.iterdir())


def test_a_task_that_has_ended_is_left_to_criu(task: subprocess.Popen[str], directory: int, tmp_path: Path) -> None:
    pages = TaskPages(directory)
    pages.prepare([task.pid])
    task.kill()
    task.wait()
    assert frozen(pages, task.pid) == []
    pages.wait()
    pages.merge(b"")
    assert not list(tmp_path.iterdir())


class Altered:
    """The native library, but for some functions."""

    def __init__(self, **functions: Callable[..., int]) -> None:
        self._library = task_pages._library()
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = self._functions.get(name) or getattr(self._library, name)
        return function


def test_a_task_that_ends_while_it_is_copied(
    task: subprocess.Popen[str], directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = Altered(phos_page_copy_wait=lambda _copy, _failed_at: errno.ESRCH)
    monkeypatch.setattr(task_pages, "_library", lambda: altered)
    pages = TaskPages(directory)
    stop(task)
    assert frozen(pages, task.pid)
    for _ in range(2):  # whoever asks later is told, too
        with pytest.raises(CheckpointFailed, match=r"pages of process \d+ .* No such process\.$"):
            pages.wait()
    with pytest.raises(CheckpointFailed, match="No such process"):
        pages.merge(b"")
    pages.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_file_system_that_is_full(task: subprocess.Popen[str], tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", small], check=True)
    try:
        directory = os.open(small, os.O_RDONLY | os.O_DIRECTORY)
        pages = TaskPages(directory)
        pages.prepare([task.pid])
        stop(task)
        assert frozen(pages, task.pid)
        with pytest.raises(
            CheckpointFailed, match=r"No space left on device\. Make room, or choose another directory\.$"
        ):
            pages.wait()
        pages.discard()
        assert not list(small.iterdir())
        os.close(directory)
    finally:
        subprocess.run(["umount", small], check=True)


def test_what_the_plugin_cannot_have_hidden_is_refused(task: subprocess.Popen[str], directory: int) -> None:
    pages = TaskPages(directory)
    stop(task)
    runs = frozen(pages, task.pid)
    with pytest.raises(CheckpointFailed, match="in no known form"):
        pages.merge(b"short")
    with pytest.raises(CheckpointFailed, match=f"hid pages of process {os.getpid()}, which phosd has not copied"):
        pages.merge(struct.pack("=QQQ", os.getpid(), runs[0][0], runs[0][0] + PAGE))
    pages.discard()


def test_the_structures_are_those_of_the_headers(tmp_path: Path) -> None:
    """Sizes and offsets, by the compiler."""
    root = Path(__file__).resolve().parents[2]
    fields = {
        "phos_pages": (task_pages._Pages, ["address", "size", "offset", "copied"]),
        "phos_mapping": (task_pages._Mapping, ["address", "size", "kind"]),
    }
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "task_pages.h"', "int main(void) {"]
    expected = []
    for name, (kind, names) in fields.items():
        lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
        expected.append(ctypes.sizeof(kind))
        for field in names:
            lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field}));')
            expected.append(getattr(kind, field).offset)
        assert [field for field, *_ in kind._fields_] == names
    lines.append('printf("%zu\\n%zu\\n", sizeof(struct phos_hidden), sizeof(struct phos_task_table));')
    lines.append('printf("%d\\n", PHOS_COPIED); }')
    expected += [task_pages._HIDDEN.size, task_pages._TABLE.size, COPIED]
    source = tmp_path / "sizes.c"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-std=gnu11", f"-I{root / 'include'}", "-o", tmp_path / "sizes", source], check=True)
    done = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True)
    assert [int(word) for word in done.stdout.split()] == expected


def no_package() -> None:
    raise ImportError("No module named 'pycriu'")


@pytest.mark.parametrize(
    ("module", "name", "lacking"),
    [(criu_pages, "prepare", no_package), (procfs, "says_pages", lambda: False)],
    ids=["CRIU's package", "a kernel that says which pages there are"],
)
def test_without_it_the_pages_are_criu_s(
    task: subprocess.Popen[str],
    directory: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    lacking: Callable[[], bool | None],
) -> None:
    monkeypatch.setattr(module, name, lacking)
    pages = TaskPages(directory)
    pages.prepare([task.pid])
    stop(task)
    assert frozen(pages, task.pid) == []
    assert not list(tmp_path.iterdir())


def test_a_task_that_its_tracer_does_not_hold_is_left_to_criu(
    task: subprocess.Popen[str], directory: int, tmp_path: Path
) -> None:
    """It could become another user's program while it is read."""
    pages = TaskPages(directory)
    pages.prepare([task.pid])
    stop(task)
    assert frozen(pages, task.pid, tracer=os.getpid()) == []
    assert not pages.unmerged
    pages.discard()
    assert not list(tmp_path.iterdir())


def test_a_task_is_frozen_once(task: subprocess.Popen[str], directory: int, tmp_path: Path) -> None:
    """Asked for again, its file stays as it is: what was told of it holds."""
    pages = TaskPages(directory)
    stop(task)
    first = frozen(pages, task.pid)
    assert first
    assert frozen(pages, task.pid) == first
    pages.wait()
    task.kill()
    assert frozen(pages, task.pid) == first
    assert [path.name for path in tmp_path.iterdir()] == [f"phos-pages-{task.pid}.raw"]
    pages.discard()


def test_a_task_whose_tracer_goes_away_is_not_believed(
    task: subprocess.Popen[str], directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = TaskPages(directory)
    stop(task)
    assert frozen(pages, task.pid)
    assert pages.unmerged
    monkeypatch.setattr(procfs, "tracer", lambda _pid: 1)
    with pytest.raises(CheckpointFailed, match="No such process"):
        pages.wait()
    pages.discard()


def test_what_nobody_asked_about_and_was_not_found(
    task: subprocess.Popen[str], directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then CRIU has dumped it all."""
    altered = Altered(phos_page_copy_found=lambda *_: -errno.EPERM)
    monkeypatch.setattr(task_pages, "_library", lambda: altered)
    pages = TaskPages(directory)
    stop(task)
    pages.freeze(task.pid, task.pid, 0)
    pages.wait()
    pages.merge(b"")
    assert not list(tmp_path.iterdir())


def test_a_machine_without_another_thread(
    task: subprocess.Popen[str], directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = Altered(phos_page_pool_open=lambda _threads, _opened: -errno.EAGAIN)
    monkeypatch.setattr(task_pages, "_library", lambda: altered)
    pages = TaskPages(directory)
    pages.prepare([task.pid])
    stop(task)
    assert frozen(pages, task.pid) == []
    assert not pages.unmerged
    pages.discard()
    assert not list(tmp_path.iterdir())
