"""Pinned images without a GPU: what is mapped and what is copied, what is noticed, what is refused, what is freed."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine import driver, pinned
from phos.gpu_engine.daemon import pinned_images, wire
from phos.gpu_engine.daemon.pinned_images import PinnedImages, available_memory, limit_from
from phos.gpu_engine.errors import DriverError, PhosError, UsageError
from phos.gpu_engine.pinned import PinnedMemory, data_bytes
from phos.images.errors import ImageError
from phos.images.extents import EXTENT_LIMIT, BlockTable, Extent
from phos.images.mapping import HUGE_PAGE
from phos.images.reader import Image
from tests.unit.image_sets import CONTENT, aligned, write_small

REGISTERED: dict[int, int] = {}  # address → size: what the driver has page-locked


class _Context:
    def use(self) -> None:
        """There is no GPU."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    REGISTERED.clear()
    monkeypatch.setattr(driver, "context", lambda ordinal: _Context())
    monkeypatch.setattr(driver, "register_host", REGISTERED.__setitem__)
    monkeypatch.setattr(driver, "unregister_host", REGISTERED.__delitem__)
    yield
    assert REGISTERED == {}  # everything has been let go


@pytest.fixture
def shared() -> Iterator[Path]:
    """An image in memory."""
    folder = Path(tempfile.mkdtemp(prefix="phos-test-", dir="/dev/shm"))
    write_small(folder)
    for file in folder.iterdir():
        file.chmod(0o600)
    yield folder
    shutil.rmtree(folder)


def no_limit(size: int) -> None:
    """There is room for anything."""


def load(folder: Path, *, copy: bool = False, room: Callable[[int], None] = no_limit) -> PinnedMemory:
    memory = PinnedMemory()
    try:
        with Image.open(folder) as image:
            memory.load(image, copy=copy, room=room)
    except BaseException:
        memory.release()
        raise
    return memory


def content(memory: PinnedMemory, folder: Path) -> dict[tuple[bytes, int], bytes]:
    found: dict[tuple[bytes, int], bytes] = {}
    with Image.open_damaged(folder) as image:
        for key, table in image.blocks.items():
            found[key] = b""
            for e in table.extents():
                found[key] += (
                    bytes(e.length) if e.stripe is None else bytes(memory.view(e.stripe, e.file_offset, e.length))
                )
                if e.stripe is not None:
                    begin = next(a for a, size in REGISTERED.items() if a <= memory.address_of(e) < a + size)
                    assert memory.address_of(e) + e.length <= begin + REGISTERED[begin]
    return found


@pytest.mark.parametrize("copy", [True, False])
def test_all_data_is_page_locked_and_as_it_was(shared: Path, copy: bool) -> None:
    memory = load(shared, copy=copy)
    assert content(memory, shared) == {key: b"".join(chunks) for key, chunks in CONTENT.items()}
    with Image.open(shared) as image:
        assert memory.bytes == sum(REGISTERED.values()) == data_bytes(image)
    assert memory.copied == (memory.bytes if copy else 0)
    assert not copy or all(address % HUGE_PAGE == 0 for address in REGISTERED)
    memory.release()


def test_what_others_may_write_to_or_has_a_disk_is_copied(shared: Path, tmp_path: Path) -> None:
    first = shared / "phos-data-0.raw"
    for mode, mapped in ((0o600, True), (0o644, True), (0o660, False), (0o602, False)):
        first.chmod(mode)
        memory = load(shared)
        assert (memory.copied < first.stat().st_size) == mapped
        memory.release()
    first.chmod(0o600)
    with open(first, "r+b") as data:  # somebody may write to it although
        memory = load(shared)
        assert memory.copied >= first.stat().st_size
        memory.release()
        with mmap.mmap(data.fileno(), 4096):
            data.close()
            memory = load(shared)
            assert memory.copied >= first.stat().st_size
            memory.release()
    os.chown(first, 12345, 12345)
    memory = load(shared)
    assert memory.copied >= first.stat().st_size
    memory.release()
    os.chown(first, os.geteuid(), os.getegid())
    first.symlink_to(shutil.move(first, tmp_path / "elsewhere"))
    memory = load(shared)
    assert memory.copied >= first.stat().st_size
    memory.release()


def test_what_nobody_may_write_to_cannot_be_locked_where_it_lies(shared: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "--bind", "-o", "ro", shared, tmp_path], check=True)
    try:
        memory = load(tmp_path)
        assert memory.copied == memory.bytes > 0
        memory.release()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def alter(file: Path) -> None:
    with open(file, "r+b") as data:
        data.write(b"x")


def store(file: Path) -> None:
    with open(file, "r+b") as data, mmap.mmap(data.fileno(), 4096) as mapped:
        mapped[0] ^= 1


def punch(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)


@pytest.mark.parametrize("change", [alter, store, punch, lambda file: os.truncate(file, 4096)])
def test_a_change_is_noticed_where_it_matters(shared: Path, change: Callable[[Path], None]) -> None:
    mapped, copied = load(shared), load(shared, copy=True)
    before = content(copied, shared)
    change(shared / "phos-data-0.raw")
    assert mapped.changed() == ["phos-data-0.raw"]
    with pytest.raises(ImageError, match=r"phos-data-0\.raw was changed while phosd had it pinned"):
        mapped.confirm(shared)
    assert copied.changed() == []
    copied.confirm(shared)
    assert content(copied, shared) == before
    mapped.release()
    copied.release()


def test_reading_removing_and_renaming_are_no_changes(shared: Path) -> None:
    memory = load(shared)
    before = content(memory, shared)
    (shared / "phos-data-0.raw").read_bytes()
    (shared / "phos-data-0.raw").rename(shared / "other")
    (shared / "other").unlink()
    assert memory.changed() == []
    assert content(memory, shared) == before
    memory.release()


def test_no_other_image_is_pinned_that_has_come_to_its_place(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hashes would be those of the one that was opened, and its data the other's."""
    memory = load(shared, copy=True)
    expected = content(memory, shared)
    memory.release()
    other = Path(tempfile.mkdtemp(prefix="phos-test-", dir="/dev/shm"))
    away = other.with_name(f"{other.name}-away")
    shutil.copytree(shared, other, dirs_exist_ok=True)
    for file in other.glob("phos-data-*"):
        alter(file)

    class Swapping(pinned._Watcher):
        def __init__(self) -> None:
            super().__init__()
            shared.rename(away)
            other.rename(shared)

    monkeypatch.setattr(pinned, "_Watcher", Swapping)
    try:
        memory = load(shared)
        assert memory.copied == 0
        assert content(memory, away) == expected
        memory.release()
    finally:
        shared.rename(other)
        away.rename(shared)
        shutil.rmtree(other)


@pytest.mark.parametrize("copy", [True, False])
def test_damaged_data_is_not_pinned(shared: Path, copy: bool) -> None:
    store(shared / "phos-data-0.raw")
    with pytest.raises(ImageError, match="is damaged"):
        load(shared, copy=copy)


@pytest.mark.parametrize("copy", [False, True], ids=["mapped", "copied"])
def test_zeros_without_end_take_no_time_to_pin(shared: Path, monkeypatch: pytest.MonkeyPatch, copy: bool) -> None:
    extents = BlockTable.extents

    def with_many(table: BlockTable, limit: int = EXTENT_LIMIT, *, zeros: bool = True) -> Iterator[Extent]:
        assert not zeros, "they are not even counted"
        return extents(table, limit, zeros=zeros)

    monkeypatch.setattr(BlockTable, "extents", with_many)
    load(shared, copy=copy).release()


def test_a_change_during_the_check_is_noticed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = PinnedMemory._check

    def slowly(memory: PinnedMemory, image: Image) -> None:
        check(memory, image)
        store(shared / "phos-data-0.raw")

    monkeypatch.setattr(PinnedMemory, "_check", slowly)
    with pytest.raises(ImageError, match="was changed while phosd had it pinned"):
        load(shared)


def test_what_cannot_be_locked_or_finds_no_room_leaves_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def no_room(size: int) -> None:
        asked.append(size)
        if size:
            raise PhosError("no room")

    load(shared, room=no_room).release()  # nothing is copied
    with pytest.raises(PhosError, match="no room"):
        load(shared, copy=True, room=no_room)
    assert asked[0] == 0 < asked[1]

    def refuse(address: int, size: int) -> None:
        if REGISTERED:
            raise DriverError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        REGISTERED[address] = size

    monkeypatch.setattr(driver, "register_host", refuse)
    before = len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("phos-data")
    with pytest.raises(DriverError):
        load(shared)
    assert (len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("phos-data")) == before


# The table.


def test_memory_is_freed_by_the_last_that_uses_it(shared: Path) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    entry = table.pin(directory, "small")
    assert table.find(directory) is None  # it is being loaded
    table.load(entry, directory, copy=True)
    first, second = table.find(directory), table.find(directory)
    assert first is not None
    assert second is not None
    assert table.report()[0].users == 2
    first.close()
    first.close()  # a second time is no other user's
    assert table.report()[0].users == 1
    table.unpin("", directory)
    assert table.find(directory) is None
    assert REGISTERED
    with Image.open(shared) as image, aligned(bytes(64 << 10)) as view:
        extent = next(e for t in image.blocks.values() for e in t.extents() if e.stripe is not None)
        image.read_into(extent, view)
        assert ctypes.string_at(second.lies_at(extent), extent.length) == bytes(view[: extent.length])
    second.close()
    assert not REGISTERED
    os.close(directory)


def test_another_image_in_the_same_directory_is_not_it(shared: Path) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    table.load(table.pin(directory, ""), directory, copy=True)
    for file in shared.iterdir():
        file.unlink()
    assert table.find(directory) is None  # and whoever opens it next says why
    time.sleep(0.01)
    write_small(shared)
    assert table.find(directory) is None
    table.unpin(str(shared), None)
    os.close(directory)


def test_what_is_not_pinned_has_to_be_there(shared: Path) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    table.load(table.pin(directory, ""), directory, copy=True)
    (shared / "phos-data-0.raw").unlink()
    image = table.find(directory)
    assert image is not None
    image.close()
    (shared / "core-100.img").unlink()
    with pytest.raises(ImageError, match=r"core-100\.img is missing"):
        table.find(directory)
    table.unpin("", directory)
    os.close(directory)


def test_what_is_being_mapped_can_be_asked_after() -> None:
    """phos-gpu status does, while another thread maps one file after the other."""
    memory = PinnedMemory()

    class Mapped:
        length, descriptor = 3, -1

    class First(Mapped):
        @property
        def length(self) -> int:  # type: ignore[override]
            memory._regions[len(memory._regions)] = Mapped()  # type: ignore[assignment]
            return 2

    memory._regions[0] = First()  # type: ignore[assignment]
    assert memory.copied == 2


def test_limits(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_from({"PHOS_PIN_LIMIT": "2G"}) == 2 << 30
    assert limit_from({"PHOS_PIN_LIMIT": "0"}) == 0
    assert limit_from({}) > 1 << 30
    with pytest.raises(UsageError, match="PHOS_PIN_LIMIT=x is no size"):
        limit_from({"PHOS_PIN_LIMIT": "x"})
    assert 0 < available_memory() < limit_from({}) * 2 + 1
    directory = os.open(shared, os.O_RDONLY)
    with pytest.raises(PhosError, match=r"phosd may pin 0\.00 GB, of which 0\.00 GB are in use"):
        PinnedImages(0).pin(directory, "")
    monkeypatch.setattr(pinned_images, "available_memory", lambda: 1)
    table = PinnedImages(1 << 30)
    with pytest.raises(PhosError, match=r"of memory to be copied into; 0\.00 GB are available"):
        table.load(table.pin(directory, ""), directory, copy=True)
    assert table.report() == []
    table.load(table.pin(directory, ""), directory, copy=False)  # takes none
    table.unpin("", directory)
    os.close(directory)


@pytest.mark.parametrize("copy", [False, True], ids=["mapped", "copied"])
def test_one_that_is_being_loaded_is_unpinned(shared: Path, monkeypatch: pytest.MonkeyPatch, copy: bool) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    check = PinnedMemory._check

    def interrupted(memory: PinnedMemory, image: Image) -> None:
        table.unpin("", directory)
        assert table.report() == []
        check(memory, image)

    monkeypatch.setattr(PinnedMemory, "_check", interrupted)
    with pytest.raises(PhosError, match="was unpinned before all of it was loaded"):
        table.load(table.pin(directory, "name"), directory, copy=copy)
    assert not REGISTERED
    assert "phos-data" not in Path("/proc/self/maps").read_text()
    monkeypatch.setattr(PinnedMemory, "_check", check)
    table.load(table.pin(directory, "name"), directory, copy=copy)
    table.unpin("name", None)
    os.close(directory)


def test_one_that_is_unpinned_at_the_last_moment_leaves_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    monkeypatch.setattr(PinnedMemory, "confirm", lambda *_: table.unpin("", directory))
    with pytest.raises(PhosError, match="was unpinned before all of it was loaded"):
        table.load(table.pin(directory, ""), directory, copy=False)
    assert not REGISTERED
    os.close(directory)


def test_pools_hold_what_takes_no_memory_until_the_last_has_left(shared: Path) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    table.hold(directory, 1, "one")
    table.hold(directory, 2, "two")
    (shown,) = table.report()
    assert (shown.state, shown.copied, list(shown.pools)) == ("pinned", 0, ["one", "two"])
    with pytest.raises(PhosError, match="is pinned already, for as long as there is pool one, two"):
        table.pin(directory, "name")
    table.leave(1)
    table.leave(1)
    (shown,) = table.report()
    assert list(shown.pools) == ["two"]
    table.leave(3)
    assert REGISTERED
    table.leave(2)
    assert not REGISTERED
    assert table.report() == []
    os.close(directory)


def test_what_somebody_has_pinned_stays_when_a_pool_leaves(shared: Path) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    table.load(table.pin(directory, "name"), directory, copy=True)
    table.hold(directory, 1, "pool")
    table.leave(1)
    (shown,) = table.report()
    assert (shown.name, shown.state, list(shown.pools)) == ("name", "pinned", [])
    table.unpin("name", None)
    os.close(directory)


def test_a_pool_whose_image_would_be_copied_holds_nothing(shared: Path, tmp_path: Path) -> None:
    table = PinnedImages(1 << 30)
    (shared / "phos-data-0.raw").symlink_to(shutil.move(shared / "phos-data-0.raw", tmp_path))
    directory = os.open(shared, os.O_RDONLY)
    with pytest.raises(PhosError, match="does not lie in memory, or somebody else may write to it"):
        table.hold(directory, 1, "pool")
    assert table.report() == []
    with pytest.raises(PhosError, match=r"phosd may pin 0\.00 GB"):
        PinnedImages(0).hold(directory, 1, "pool")
    os.close(directory)


def test_a_pool_that_leaves_while_its_image_is_loaded_ends_that(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PinnedImages(1 << 30)
    directory = os.open(shared, os.O_RDONLY)
    check = PinnedMemory._check

    def interrupted(memory: PinnedMemory, image: Image) -> None:
        table.leave(1)
        check(memory, image)

    monkeypatch.setattr(PinnedMemory, "_check", interrupted)
    with pytest.raises(PhosError, match="was unpinned before all of it was loaded"):
        table.hold(directory, 1, "pool")
    assert table.report() == []
    os.close(directory)


@pytest.mark.parametrize("quick", [False, True])
def test_who_asked_and_is_gone_has_nothing_pinned(shared: Path, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    """Of a command that is interrupted."""
    table = PinnedImages(1 << 30)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.close()
    directory = os.open(shared, os.O_RDONLY)
    request = wire_pb2.Envelope(id=1, pin_image=wire_pb2.PinImage(name="name"))
    if quick:  # all is there before anybody is told how far it is
        start = threading.Thread.start

        def to_its_end(thread: threading.Thread) -> None:
            start(thread)
            if thread.name == "pin":
                thread.join()

        monkeypatch.setattr(threading.Thread, "start", to_its_end)
    with closing(ours):
        table.serve(wire.Connection(ours), request, [directory])
    assert table.report() == []
    assert not REGISTERED
    os.close(directory)


def test_what_no_thread_can_load_is_not_in_the_table(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PinnedImages(1 << 30)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    directory = os.open(shared, os.O_RDONLY)
    request = wire_pb2.Envelope(id=1, pin_image=wire_pb2.PinImage(name="name"))

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with closing(ours), closing(theirs):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            table.serve(wire.Connection(ours), request, [directory])
        answer = wire.receive(theirs)
        assert answer is not None
        assert "phosd can start no new thread" in answer[0].done.error
    assert table.report() == []
    table.load(table.pin(directory, "name"), directory, copy=False)
    table.unpin("name", None)
    os.close(directory)
