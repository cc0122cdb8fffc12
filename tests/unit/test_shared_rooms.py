"""Room that is made for shared memory before it is copied: how much, who takes it, and what becomes of the rest."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gpu_engine import shared_rooms
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.shared_files import SharedFiles
from phos.gpu_engine.shared_rooms import Room, SharedRooms
from phos.images import formats
from tests.unit.test_shared_files import MIB, as_criu_leaves_it, held, memory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root looks at others' map_files")

PROGRAM = """
import mmap, os, sys, tempfile
def filled(map, size):
    map[:size] = os.urandom(size)
    return map
MIB = 1 << 20
held = [filled(mmap.mmap(-1, 24 * MIB), 24 * MIB), filled(mmap.mmap(-1, 30 * MIB), 9 * MIB), mmap.mmap(-1, 64 * MIB)]
held.append(filled(mmap.mmap(-1, 40 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 40 * MIB))
for size, named, linked in ((12, False, False), (1, False, False), (20, True, False), (16, False, True)):
    file = tempfile.NamedTemporaryFile(dir=sys.argv[1], delete=not named)
    if linked:
        os.link(file.name, sys.argv[1] + "/other (deleted)")
    os.ftruncate(file.fileno(), size * MIB)
    held += [filled(mmap.mmap(file.fileno(), size * MIB), size * MIB), mmap.mmap(file.fileno(), size * MIB)]
    file.close()
own = os.memfd_create("phos-own")
os.ftruncate(own, 16 * MIB)
held.append(filled(mmap.mmap(own, 16 * MIB), 16 * MIB))
print("READY", flush=True)
sys.stdin.readline()
"""

HAD = [24, 12, 9]
"""MiB of what that program shares, has written to, and is neither small nor ours nor somebody's by a name."""


@pytest.fixture
def sharer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    command = [sys.executable, "-S", "-c", PROGRAM, str(tmp_path_factory.mktemp("files"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "READY\n"
        yield process.pid
        process.kill()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: elsewhere there are no rooms."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


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


def rooms_in(folder: Path) -> list[int]:
    """Their sizes, in MiB, without what they are larger by than what they are for."""
    sizes = sorted((path.stat().st_size for path in folder.glob("phos-pages-room-*")), reverse=True)
    return [round((size - max(shared_rooms.LARGER_BYTES, size // 17)) / MIB) for size in sizes]


def test_there_is_one_for_each_large_file_without_a_name(sharer: int, directory: int, tmp_path: Path) -> None:
    rooms = SharedRooms(directory)
    rooms.prepare([sharer, sharer, 1 << 22], 0, 2)  # twice, as a forked process has the same; and one that has ended
    assert rooms_in(tmp_path) == HAD
    for path in tmp_path.iterdir():
        assert formats.is_ours(path.name)
        assert path.stat().st_blocks * 512 >= path.stat().st_size
    rooms.discard()
    assert not list(tmp_path.iterdir())
    assert rooms.take(9 * MIB) is None


def test_each_is_taken_once_by_what_fits_best(sharer: int, directory: int) -> None:
    rooms = SharedRooms(directory)
    rooms.prepare([sharer], 0, 2)
    taken = [rooms.take(size * MIB) for size in (1, 9, 9, 9, 26, 24, 24)]
    assert [room and room.size // MIB for room in taken] == [None, 10, 13, None, None, 25, None]
    for room in taken:
        if room is not None:
            room.close()
    rooms.discard()


def test_no_room_is_made_where_there_is_little(
    sharer: int, directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image needs it for other things as well."""
    monkeypatch.setattr(shared_rooms, "free_bytes", lambda _directory: 55 * MIB)
    rooms = SharedRooms(directory)
    rooms.prepare([sharer], 0, 2)
    assert rooms_in(tmp_path) == [24]
    rooms.discard()
    rooms.prepare([sharer], 28 * MIB, 2)
    assert rooms_in(tmp_path) == [12]
    rooms.discard()
    rooms.prepare([sharer], 55 * MIB, 2)
    assert rooms_in(tmp_path) == []
    monkeypatch.setattr(shared_rooms, "allocate", lambda *_: False)
    monkeypatch.setattr(shared_rooms, "free_bytes", lambda _directory: 1 << 40)
    rooms.prepare([sharer], 0, 2)
    assert not list(tmp_path.iterdir())


def test_none_is_made_on_a_disk(sharer: int, directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made there may be written, and then written again with what is copied into it."""
    monkeypatch.setattr(shared_rooms, "lives_in_memory", lambda _directory: False)
    SharedRooms(directory).prepare([sharer], 0, 2)
    assert not list(tmp_path.iterdir())


def test_those_that_fit_nothing_make_way(
    sharer: int, files: SharedFiles, directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is little room: what is copied has grown, or is another file."""
    files.prepare([sharer])
    source, wanted = memory(60 * MIB)
    monkeypatch.setattr(shared_rooms, "free_bytes", lambda _directory: 200 * MIB - MIB * sum(rooms_in(tmp_path)))
    files.take_memory(5, source)
    os.close(source)
    files.wait()
    assert rooms_in(tmp_path) == HAD, "there is room enough"
    as_criu_leaves_it(tmp_path, 5)
    files.merge()
    assert held(tmp_path, 5, 60 * MIB) == wanted
    files.discard()

    files.prepare([sharer])
    source, wanted = memory(60 * MIB)
    monkeypatch.setattr(shared_rooms, "free_bytes", lambda _directory: 150 * MIB - MIB * sum(rooms_in(tmp_path)))
    files.take_memory(6, source)
    os.close(source)
    files.wait()
    assert rooms_in(tmp_path) == [12, 9]
    as_criu_leaves_it(tmp_path, 6, 4)
    files.merge()
    assert held(tmp_path, 6, 60 * MIB) == wanted


def test_a_machine_without_another_thread(
    sharer: int, directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there, and have their pages later."""

    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = open_files()
    rooms = SharedRooms(directory)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        rooms.prepare([sharer], 0, 2)
    assert rooms_in(tmp_path) == HAD
    rooms.discard()
    assert not list(tmp_path.iterdir())
    assert open_files() == before


def test_there_are_so_many_at_most(
    sharer: int, directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rooms, "ROOMS_MOST", 2)
    rooms = SharedRooms(directory)
    rooms.prepare([sharer], 0, 2)
    assert rooms_in(tmp_path) == HAD[:2]
    rooms.discard()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [9 * MIB + 5, 12 * MIB, 24 * MIB], ids=["less", "as much", "other"])
def test_memory_is_copied_into_it(sharer: int, files: SharedFiles, directory: int, tmp_path: Path, size: int) -> None:
    before = open_files()
    files.prepare([sharer])
    source, wanted = memory(size)
    files.take_memory(77, source)
    os.close(source)
    files.wait()
    assert not list(tmp_path.glob("phos-pages-shared-*"))
    as_criu_leaves_it(tmp_path, 77)
    files.merge()
    assert held(tmp_path, 77, size) == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"memfd.img", "pages-3.img", "pagemap-shmem-77.img"}
    assert (tmp_path / "pages-3.img").stat().st_size == -(-size // 4096) * 4096
    files.discard()
    assert open_files() == before


def ghost(folder: Path, *parts: bytes | int) -> tuple[int, list[int]]:
    """A file as CRIU writes it, the data of some parts (sizes) left out: their places."""
    target = os.open(folder / "ghost-file-1.img", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    places = []
    for part in parts:
        end = os.lseek(target, 0, os.SEEK_END)
        if isinstance(part, bytes):
            os.write(target, part)
        else:
            places.append(end)
            os.ftruncate(target, end + part)
    return target, places


@pytest.mark.parametrize("second", [MIB // 2, 20 * MIB], ids=["fits", "does not fit"])
def test_a_file_is_replaced_by_it_with_all_that_criu_wrote(
    sharer: int, files: SharedFiles, tmp_path: Path, second: int
) -> None:
    files.prepare([sharer])
    source, content = memory(9 * MIB)
    larger, more = memory(9 * MIB + second)  # it has grown
    target, (first_place, second_place) = ghost(tmp_path, b"head", 9 * MIB, b"between", second, b"end")
    files.take_range(source, target, 0, first_place, 9 * MIB)
    files.take_range(larger, target, 9 * MIB, second_place, second)
    for descriptor in (target, source, larger):
        os.close(descriptor)
    theirs = (tmp_path / "ghost-file-1.img").stat()
    files.merge()
    now = (tmp_path / "ghost-file-1.img").stat()
    assert now.st_ino != theirs.st_ino
    assert stat.S_IMODE(now.st_mode) == stat.S_IMODE(theirs.st_mode)
    whole = b"head" + content + b"between" + more[9 * MIB :] + b"end"
    assert (tmp_path / "ghost-file-1.img").read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["ghost-file-1.img"]


def test_a_file_elsewhere_stays_where_it_is(sharer: int, files: SharedFiles, tmp_path: Path) -> None:
    files.prepare([sharer])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    source, content = memory(9 * MIB)
    target, (place,) = ghost(elsewhere, b"head", 9 * MIB)
    (tmp_path / "ghost-file-1.img").write_bytes(b"another of that name")
    files.take_range(source, target, 0, place, 9 * MIB)
    os.close(target)
    os.close(source)
    files.merge()
    assert (elsewhere / "ghost-file-1.img").read_bytes() == b"head" + content
    assert (tmp_path / "ghost-file-1.img").read_bytes() == b"another of that name"


def test_a_file_that_comes_piece_by_piece_gets_a_room_for_all(sharer: int, files: SharedFiles, tmp_path: Path) -> None:
    """CRIU gives one with holes so, and a very large one."""
    files.prepare([sharer])
    source, content = memory(40 * MIB, *((at * MIB, 5 * MIB) for at in (0, 8, 16, 30)))
    target, places = ghost(tmp_path, b"head", 5 * MIB, b"1", 5 * MIB, b"2", 5 * MIB, b"3", 5 * MIB)
    for at, place in zip((0, 8, 16, 30), places, strict=True):
        files.take_range(source, target, at * MIB, place, 5 * MIB)
    os.close(target)
    os.close(source)
    files.wait()
    assert (tmp_path / "ghost-file-1.img").stat().st_blocks * 512 < MIB, "all of it is in the room"
    files.merge()
    pieces = [content[at * MIB : (at + 5) * MIB] for at in (0, 8, 16, 30)]
    whole = b"head" + pieces[0] + b"1" + pieces[1] + b"2" + pieces[2] + b"3" + pieces[3]
    assert (tmp_path / "ghost-file-1.img").read_bytes() == whole


@pytest.mark.parametrize("becomes", ["another", "nothing", "a pipe", "shorter", "shorter in between"])
def test_a_file_that_is_not_criu_s_any_more_is_not_replaced(
    sharer: int, directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    files = SharedFiles(directory)
    files.prepare([sharer])
    source, _ = memory(9 * MIB)
    target, (place,) = ghost(tmp_path, b"head", 9 * MIB)
    files.take_range(source, target, 0, place, 9 * MIB)
    if becomes == "shorter":
        os.ftruncate(target, 5 * MIB)
    elif becomes == "shorter in between":
        monkeypatch.setattr(os, "pread", lambda *_: b"")
    else:
        os.rename(tmp_path / "ghost-file-1.img", tmp_path / "away")
    os.close(target)
    os.close(source)
    if becomes == "another":
        (tmp_path / "ghost-file-1.img").write_bytes(bytes(9 * MIB + 4))
    elif becomes == "a pipe":
        os.mkfifo(tmp_path / "ghost-file-1.img")
    with pytest.raises(OSError, match=r"ghost-file-1\.img"):
        files.merge()
    files.discard()
    assert {path.name for path in tmp_path.iterdir()} <= {"ghost-file-1.img", "away"}


def test_what_is_let_go_late_touches_no_other_image(sharer: int, tmp_path: Path) -> None:
    """The directory is closed by then, and its number may be another's."""
    (tmp_path / "image").mkdir()
    directory = os.open(tmp_path / "image", os.O_RDONLY | os.O_DIRECTORY)
    files = SharedFiles(directory)
    files.prepare([sharer])
    source, _ = memory(9 * MIB)
    files.take_memory(77, source)
    os.close(source)
    as_criu_leaves_it(tmp_path / "image", 77)
    files.merge()
    os.close(directory)
    (tmp_path / "other").mkdir()
    names = [formats.shared_room_file(number) for number in range(4)]
    for name in names:
        (tmp_path / "other" / name).touch()
    assert os.open(tmp_path / "other", os.O_RDONLY | os.O_DIRECTORY) == directory
    files.discard()
    os.close(directory)
    assert sorted(os.listdir(tmp_path / "other")) == names


def test_nothing_is_left_of_a_dump_that_is_given_up(sharer: int, directory: int, tmp_path: Path) -> None:
    before = open_files()
    files = SharedFiles(directory)
    files.prepare([sharer])
    source, _ = memory(9 * MIB)
    target, (place,) = ghost(tmp_path, b"head", 9 * MIB)
    files.take_range(source, target, 0, place, 9 * MIB)
    files.take_memory(5, source)
    files.give_up()
    with pytest.raises(CheckpointFailed):
        files.wait()
    files.discard()
    os.close(target)
    os.close(source)
    assert [path.name for path in tmp_path.iterdir()] == ["ghost-file-1.img"]
    assert open_files() == before


def test_what_cannot_be_mapped_is_no_room(directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(random.choice((12, 19)), "refused")

    monkeypatch.setattr(shared_rooms, "map_memory", refuse)
    with pytest.raises(OSError, match="refused"):
        Room(directory, "phos-pages-room-0.raw", MIB)
    assert not list(tmp_path.iterdir())
