"""Who has a pid that an image needs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.gpu_engine.restore import ids
from tests.unit.criu_pages_files import write_image

from pycriu.images import pstree_pb2  # isort: skip (criu_pages_files.py skips these tests where there is none)


@contextmanager
def image(folder: Path, *names: str) -> Iterator[int]:
    for name in names:
        (folder / name).touch()
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


def ended() -> subprocess.Popen[bytes]:
    """A process that has ended and that nobody has waited for."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


def test_processes_and_threads_have_a_file_each(tmp_path: Path) -> None:
    names = ("core-20.img", "core-7.img", "core-x.img", "core-9.img.tmp", "pages-1.img", "core-0.img", "ids-5.img")
    with image(tmp_path, *names) as directory:
        assert ids.of_image(directory) == [7, 20]


def test_what_a_dump_that_failed_has_left_in_the_folder_is_not_of_the_image(tmp_path: Path) -> None:
    """CRIU dumps into the same folder again, and replaces only what is called alike: a thread may have ended since."""
    task = pstree_pb2.pstree_entry(pid=7, ppid=0, pgid=7, sid=7, threads=[7, 20])
    zombie = pstree_pb2.pstree_entry(pid=30, ppid=7, pgid=7, sid=7)
    write_image(tmp_path / "pstree.img", "PSTREE", [task, zombie])
    with image(tmp_path, *(f"core-{number}.img" for number in (7, 20, 21, 30, 99))) as directory:
        assert ids.of_image(directory) == [7, 20, 30]


def test_an_image_with_the_first_process_of_a_namespace_needs_no_pid_of_ours(tmp_path: Path) -> None:
    with image(tmp_path, "core-1.img", "core-20.img") as directory:
        assert ids.of_image(directory) == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "PATIENCE_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_pid_that_a_process_has() -> None:
    said = ids.in_the_way([os.getpid()], os.getpid())
    assert said.startswith(f"The image needs the pid {os.getpid()}, and process {os.getpid()} (")
    assert os.path.basename(os.path.realpath(sys.executable)) in said


@pytest.mark.usefixtures("impatient")
def test_a_pid_that_a_thread_has() -> None:
    number: list[int] = []
    known, end = threading.Event(), threading.Event()

    def run() -> None:
        number.append(threading.get_native_id())
        known.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        known.wait()
        assert f"the pid {number[0]}, and a thread of process {os.getpid()} (" in ids.in_the_way(number, os.getpid())
    finally:
        end.set()
        thread.join()


@pytest.mark.usefixtures("impatient")
def test_a_pid_that_a_zombie_has() -> None:
    child = ended()
    try:
        assert "which has ended and which its parent has not waited for" in ids.in_the_way([child.pid], os.getpid())
    finally:
        child.wait()


def test_a_pid_that_is_soon_free() -> None:
    child = ended()
    timer = threading.Timer(0.3, child.wait)
    timer.start()
    try:
        assert ids.in_the_way([child.pid], os.getpid()) == ""
        assert child.returncode == 0
    finally:
        timer.join()


def test_no_pids_at_all() -> None:
    assert ids.in_the_way([], os.getpid()) == ""


def meets(last: int, pids: set[int], end: int) -> int:
    """How many new ones there are until one would get one of these pids."""
    number, made = last, 0
    while True:
        number = number + 1 if number + 1 < end else ids.FIRST
        if number in pids:
            return made
        made += 1


@pytest.mark.parametrize(
    ("last", "pids", "expected"),
    [
        (1000, {500, 600}, 1000),  # behind it already
        (1000, {1000}, 1000),
        (1000, {1001, 1003, 2000, 9000}, 2000),
        (1000, {1001, 5096}, 5096),
        (1000, {1001, 5098}, 1001),
        (32000, {32100, 400}, 400),  # it begins anew in between
        (32000, set(range(300, 32768, 3000)), 300),
    ],
)
def test_the_kernel_goes_on_behind_an_image_s_pids(last: int, pids: set[int], expected: int) -> None:
    found = ids.after(last, pids, 32768)
    assert found == expected
    assert found == last or meets(found, pids, 32768) >= meets(last, pids, 32768)


@given(st.integers(ids.FIRST, 32767), st.sets(st.integers(ids.FIRST, 32767), min_size=1, max_size=30))
def test_it_leaves_as_much_room_as_there_is(last: int, pids: set[int]) -> None:
    found = ids.after(last, pids, 32768)
    made = meets(found, pids, 32768)
    assert made >= ids.AHEAD - 1 or made == max(meets(pid, pids, 32768) for pid in {last, *pids})


@pytest.mark.skipif(os.geteuid() != 0 or not os.access(ids.LAST_PID, os.W_OK), reason="the number is not ours to set")
def test_nobody_new_gets_one_of_them() -> None:
    end = int(ids.PID_MAX.read_text())
    for _ in range(3):
        last = int(ids.LAST_PID.read_text())
        pids = {ids.FIRST + (last - ids.FIRST + number) % (end - ids.FIRST) for number in range(20, 200, 7)}
        ids.keep_away(pids, os.getpid())
        children = [subprocess.Popen(["true"]) for _ in range(40)]
        assert not pids & {child.pid for child in children}
        for child in children:
            child.wait()
