"""Files and shared memory that are copied beside CRIU: what arrives, and what is said when something does not."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gpu_engine import shared_files
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.shared_files import SharedFiles
from phos.images import criu_files, criu_pages
from phos.images.errors import ImageError
from tests.unit.test_hidden_pages import HEADER, ROOT

MIB, PAGE = 1 << 20, 4096


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def files(directory: int) -> Iterator[SharedFiles]:
    made = SharedFiles(directory)
    yield made
    made.discard()


def memory(size: int, *places: tuple[int, int]) -> tuple[int, bytes]:
    """A memfd of random bytes at these places (all if there are none), and what it holds."""
    descriptor = os.memfd_create("memory")
    os.ftruncate(descriptor, size)
    for at, length in places or ((0, size),):
        assert os.pwrite(descriptor, random.randbytes(length), at) == length
    return descriptor, os.pread(descriptor, size, 0)


def as_criu_leaves_it(folder: Path, inode: int, number: int = 3, size: int = 1 << 30) -> None:
    """CRIU's images of memory of which it was told that there is no data; it is as large as it says in another."""
    from pycriu.images.memfd_pb2 import memfd_inode_entry
    from pycriu.images.pagemap_pb2 import pagemap_head

    entry = memfd_inode_entry(name="x", uid=0, gid=0, size=size, shmid=inode, seals=0, inode_id=number)
    beginning = b"" if (folder / "memfd.img").exists() else criu_files.header("MEMFD_INODE")
    with open(folder / "memfd.img", "ab") as memfds:
        memfds.write(beginning + criu_files.framed(entry.SerializeToString()))
    head = criu_files.framed(pagemap_head(pages_id=number).SerializeToString())
    (folder / f"pagemap-shmem-{inode}.img").write_bytes(criu_files.header("PAGEMAP") + head)
    (folder / f"pages-{number}.img").write_bytes(b"")


def held(folder: Path, inode: int, size: int) -> bytes:
    """What these images say that the memory holds."""
    from pycriu.images import images

    with open(folder / f"pagemap-shmem-{inode}.img", "rb") as file:
        head, *entries = images.load(file)["entries"]
    found = bytearray(-(-size // PAGE) * PAGE)
    with open(folder / f"pages-{head['pages_id']}.img", "rb") as pages:
        for entry in entries:
            at, length = int(str(entry["vaddr"]), 0), PAGE * entry["nr_pages"]
            found[at : at + length] = pages.read(length)
        assert not pages.read(1)
    assert not any(found[size:])
    return bytes(found[:size])


@pytest.mark.parametrize(
    ("size", "places"),
    [
        (9 * MIB, ()),
        (5 * MIB + 123, ()),
        (64 * MIB, ((0, PAGE), (7 * MIB, 6 * MIB), (64 * MIB - PAGE, PAGE))),
        (8 * MIB, ((0, 0),)),
    ],
    ids=["whole", "odd", "holes", "empty"],
)
def test_memory_becomes_criu_s_pages(
    files: SharedFiles, tmp_path: Path, size: int, places: tuple[tuple[int, int], ...]
) -> None:
    source, wanted = memory(size, *places)
    files.take_memory(77, source)
    os.close(source)  # ours is the caller's: what is copied is held
    files.wait()
    assert files.unmerged
    as_criu_leaves_it(tmp_path, 77)
    files.merge()
    assert not files.unmerged
    assert held(tmp_path, 77, size) == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"memfd.img", "pages-3.img", "pagemap-shmem-77.img"}
    if places:  # holes are not copied
        assert (tmp_path / "pages-3.img").stat().st_size == sum(length for _, length in places)


def test_many_at_once(files: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "SHARE_BYTES", 64 << 10)
    wanted = {}
    for number in range(2 * shared_files.OPEN_MOST):
        source, wanted[number] = memory(MIB + number)
        files.take_memory(number, source)
        os.close(source)
        as_criu_leaves_it(tmp_path, number, number)
    files.merge()
    for number, content in wanted.items():
        assert held(tmp_path, number, len(content)) == content


def refuse(*_: int) -> int:
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


@pytest.mark.parametrize("maps", [True, False], ids=["mapped", "written"])
def test_ranges_lie_where_criu_would_have_written_them(
    files: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: bool
) -> None:
    """Behind what it has written, at no boundary; what lies between them is its own. Not every file can be mapped."""
    if not maps:
        monkeypatch.setattr(shared_files, "map_memory", refuse)
    source, content = memory(11 * MIB)
    target = os.open(tmp_path / "ghost", os.O_WRONLY | os.O_CREAT)
    os.write(target, b"head")
    os.ftruncate(target, 4 + 6 * MIB)
    files.take_range(source, target, PAGE, 4, 6 * MIB)
    os.lseek(target, 0, os.SEEK_END)
    os.write(target, b"between")
    os.ftruncate(target, 11 + 8 * MIB + 5)
    files.take_range(source, target, 8 * MIB, 11 + 6 * MIB, 2 * MIB + 5)
    os.close(target)
    files.wait()
    files.merge()
    parts = b"head", content[PAGE : PAGE + 6 * MIB], b"between", content[8 * MIB : 10 * MIB + 5]
    assert (tmp_path / "ghost").read_bytes() == b"".join(parts)
    os.close(source)


def test_what_was_not_opened_to_be_written_is_not_written_to(files: SharedFiles, tmp_path: Path) -> None:
    """phosd could: it is root."""
    source, _ = memory(2 * MIB)
    (tmp_path / "theirs").write_bytes(bytes(2 * MIB))
    with open(tmp_path / "theirs", "rb") as theirs:
        files.take_range(source, theirs.fileno(), 0, 0, 2 * MIB)
    with pytest.raises(CheckpointFailed, match="not opened to be written"):
        files.wait()
    assert not any((tmp_path / "theirs").read_bytes())
    os.close(source)


def test_a_source_that_is_cut_off(files: SharedFiles, tmp_path: Path) -> None:
    source, _ = memory(2 * MIB)
    with open(tmp_path / "ghost", "wb") as target:
        os.ftruncate(target.fileno(), 3 * MIB)
        files.take_range(source, target.fileno(), 0, 0, 3 * MIB)
        for _ in range(2):  # whoever asks later is told, too
            with pytest.raises(CheckpointFailed, match=r"without a name into .* failed: the file was cut off"):
                files.wait()
    assert files.unmerged
    with pytest.raises(CheckpointFailed):
        files.merge()
    os.close(source)


def test_what_criu_has_dumped_as_well_is_refused(files: SharedFiles, tmp_path: Path) -> None:
    source, content = memory(2 * MIB)
    files.take_memory(7, source)
    as_criu_leaves_it(tmp_path, 7)
    other = SharedFiles(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    files.merge()
    other.take_memory(7, source)
    with pytest.raises(ImageError, match="holds pages"):
        other.merge()
    assert other.unmerged
    other.discard()
    assert held(tmp_path, 7, 2 * MIB) == content
    assert {path.name for path in tmp_path.iterdir()} == {"memfd.img", "pages-3.img", "pagemap-shmem-7.img"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6M", "tmpfs", str(tmp_path)], check=True)
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files = SharedFiles(directory)
        source, _ = memory(20 * MIB)
        files.take_memory(1, source)
        with pytest.raises(CheckpointFailed, match="No space left on device"):
            files.wait()
        files.discard()
        assert not list(tmp_path.iterdir())
        os.close(source)
    finally:
        os.close(directory)
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_machine_without_another_thread(files: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    source, content = memory(9 * MIB)
    files.take_memory(1, source)
    os.close(source)
    as_criu_leaves_it(tmp_path, 1)
    files.merge()
    assert held(tmp_path, 1, 9 * MIB) == content


@pytest.mark.parametrize("size", [MIB, 2 * MIB, 2 * MIB + 123, 4 * MIB + 1, 6 * MIB])
def test_what_grew_when_criu_had_looked_is_cut_off(files: SharedFiles, tmp_path: Path, size: int) -> None:
    """It takes an entry that reaches over the end for the end of all, and says nothing (criu/shmem.c)."""
    source, content = memory(6 * MIB, (0, 2 * MIB), (3 * MIB, 3 * MIB))
    files.take_memory(7, source)
    os.close(source)
    as_criu_leaves_it(tmp_path, 7, size=size)
    files.merge()
    end = -(-size // PAGE) * PAGE
    assert held(tmp_path, 7, end) == content[:end]


def test_what_criu_does_not_know_is_refused(files: SharedFiles, tmp_path: Path) -> None:
    source, _ = memory(2 * MIB)
    files.take_memory(7, source)
    os.close(source)
    as_criu_leaves_it(tmp_path, 8)
    (tmp_path / "pagemap-shmem-8.img").rename(tmp_path / "pagemap-shmem-7.img")
    with pytest.raises(ImageError, match=r"memfd\.img does not know shared memory 7"):
        files.merge()


def test_what_is_given_up_is_not_copied(files: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it has asked for the end, or the image is withdrawn: the rest is left."""
    copied, goes_on = [], threading.Event()

    def slowly(_copy: shared_files._FileCopy, share: object, **_: bool) -> None:
        copied.append(share)
        assert goes_on.wait(30)

    def interrupted() -> None:
        raise CheckpointFailed("It was interrupted.")

    monkeypatch.setattr(shared_files, "SHARE_BYTES", 64 << 10)
    monkeypatch.setattr(shared_files._FileCopy, "run", slowly)
    source, _ = memory(16 * MIB)
    files.take_memory(7, source)
    os.close(source)
    with pytest.raises(CheckpointFailed, match="It was interrupted"):
        files.wait(interrupted)
    threading.Timer(0.2, goes_on.set).start()
    files.discard()
    assert len(copied) <= shared_files.THREADS
    assert not list(tmp_path.iterdir())


def test_a_dump_that_has_failed_is_not_waited_for(files: SharedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU holds the tasks until it is answered."""
    goes_on = threading.Event()
    monkeypatch.setattr(shared_files._FileCopy, "run", lambda *_, **__: goes_on.wait(30))
    source, _ = memory(2 * MIB)
    files.take_memory(7, source)
    os.close(source)
    files.give_up()
    goes_on.set()
    with pytest.raises(CheckpointFailed, match="given up"):
        files.merge()


def test_many_small_runs_are_few_jobs(files: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(at, PAGE) for at in range(0, 32 * MIB, 2 * PAGE)]
    source, content = memory(32 * MIB, *places)
    run, sizes = shared_files._FileCopy.run, []

    def counted(copy: shared_files._FileCopy, share: list[shared_files._Piece], **named: bool) -> None:
        sizes.append(sum(piece.size for piece in share))
        run(copy, share, **named)

    monkeypatch.setattr(shared_files._FileCopy, "run", counted)
    files.take_memory(7, source)
    os.close(source)
    as_criu_leaves_it(tmp_path, 7)
    files.merge()
    assert sizes == [shared_files.SHARE_BYTES] * 4
    assert held(tmp_path, 7, len(content)) == content


def test_closing_that_fails_is_done_once(files: SharedFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with file systems that say only then what went wrong: the number may be another file's by the next time."""
    source, _ = memory(2 * MIB)
    files.take_memory(7, source)
    files.wait()
    close, closed = os.close, []

    def failing(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", failing)
    for _ in range(2):
        files.discard()
    monkeypatch.undo()
    assert len(closed) == 1
    assert not list(tmp_path.iterdir())
    os.close(source)


def test_no_descriptor_is_left(directory: int, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    files = SharedFiles(directory)
    source, _ = memory(9 * MIB)
    empty, _ = memory(MIB, (0, 0))
    for number, descriptor in enumerate((source, empty)):
        files.take_memory(number, descriptor)
        as_criu_leaves_it(tmp_path, number, number)
    files.take_memory(0, source)  # there is a file of that name
    with open(tmp_path / "ghost", "wb") as target:
        os.ftruncate(target.fileno(), 2 * MIB)
        files.take_range(source, target.fileno(), 0, 0, 2 * MIB)
        files.take_range(source, target.fileno(), 0, MIB, 0)
    with pytest.raises(CheckpointFailed, match="File exists"):
        files.merge()
    files.discard()
    for _ in range(shared_files.OPEN_MOST):  # nobody who begins another has to wait
        assert files._open.acquire(blocking=False)
    os.close(source)
    os.close(empty)
    assert set(os.listdir("/proc/self/fd")) == before


def test_runs_need_not_be_in_order(directory: int, tmp_path: Path) -> None:
    """merge_shared() itself: a file whose runs lie elsewhere than in the pages file is written anew."""
    content = random.randbytes(3 * PAGE)
    (tmp_path / "phos-pages-shared-5.raw").write_bytes(content)
    as_criu_leaves_it(tmp_path, 5)
    file = os.open(tmp_path / "phos-pages-shared-5.raw", os.O_RDWR)
    runs = [criu_pages.Run(8 * PAGE, PAGE, 0), criu_pages.Run(0, 2 * PAGE, PAGE)]
    sizes = criu_pages.shared_sizes(directory)
    assert sizes == {5: 1 << 30}
    assert not criu_pages.merge_shared(directory, 5, "phos-pages-shared-5.raw", file, runs, sizes)
    os.close(file)
    assert held(tmp_path, 5, 9 * PAGE) == content[PAGE:] + bytes(6 * PAGE) + content[:PAGE]
    assert {path.name for path in tmp_path.iterdir()} == {"memfd.img", "pages-3.img", "pagemap-shmem-5.img"}


@pytest.mark.skipif(shutil.which("gcc") is None or HEADER is None, reason="no C compiler, or no criu-plugin.h")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root opens /proc/PID/map_files")
def test_what_the_plugin_gives_and_what_it_leaves_to_criu(tmp_path: Path) -> None:
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-rdynamic"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = [f"-I{ROOT / 'criu_plugin'}", f"-I{ROOT / 'include'}", "-isystem", str(HEADER)]
    sources = [ROOT / "tests/unit/shared_file_calls.c", ROOT / "criu_plugin/shared_files.c"]
    subprocess.run(["gcc", *flags, *sanitize, *include, "-o", tmp_path / "calls", *sources], check=True)
    done = subprocess.run([tmp_path / "calls", tmp_path / "file"], capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr
