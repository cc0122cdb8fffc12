"""Data files that are written through memory: huge pages wherever a tmpfs is, and small ones where there are none."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phos.gpu_engine import landing
from phos.gpu_engine.landing import Landing
from phos.images import files, mapping
from phos.images.formats import align_up
from phos.images.mapping import HUGE_PAGE, MADV_COLLAPSE, has_huge_pages, map_memory, unmap_memory, view_of
from phos.images.reader import Image
from phos.images.writer import ImageWriter
from tests.unit.image_sets import SESSION, inventory_of, read_block, skip
from tests.unit.smaps import mapped_huge

CHUNK = 1 << 20
SEGMENT = 8 << 20
MOST = 4 << 20
TOTAL = 20 << 20

Mount = Callable[[str, str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a tmpfs with these pages, of this size."""
    mounted: list[Path] = []

    def make(huge: str, size: str) -> Path:
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        options = f"huge={huge},size={size},mode=700"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)


@pytest.mark.parametrize("huge", ["never", "always"])
def test_what_is_placed_in_huge_pages_is_in_the_image(mount: Mount, huge: str) -> None:
    folder = mount(huge, "64m")
    directory = opened(folder)
    content = random.Random(1).randbytes(TOTAL - 2 * CHUNK) + bytes(CHUNK) + b"end"
    with ImageWriter(directory, stripes=2, chunk_size=CHUNK) as writer:
        address = writer.map_data(len(content), SEGMENT, MOST)
        with open(max(folder.glob("phos-data-*"))) as file:
            assert has_huge_pages(file.fileno()) is (huge == "always")
        assert address % HUGE_PAGE == 0 < address
        for at in range(0, writer.mapped_bytes, SEGMENT):
            writer.populate_data(at, min(SEGMENT, writer.mapped_bytes - at))
        assert mapped_huge(address) == writer.mapped_bytes
        assert not any(view_of(address, writer.mapped_bytes))
        room = writer.take_room()
        assert room == (address, writer.mapped_bytes, SEGMENT, 0)
        end = CHUNK  # what is left free is nowhere in the image
        for at in range(0, len(content), MOST):
            piece = content[at : at + MOST]
            if end // SEGMENT != (end + len(piece) - 1) // SEGMENT:
                end = (end // SEGMENT + 1) * SEGMENT
            view_of(address + end, len(piece))[:] = piece
            writer.write_placed((SESSION, 1), at, len(piece), address + end, None)
            end = align_up(end + len(piece))
        writer.return_room(end)
        size = writer.mapped_bytes
        writer.commit(inventory_of({(SESSION, 1): len(content)}))
        unmap_memory(address, size)
    os.close(directory)
    directory = opened(folder)
    with Image.open(directory) as image:
        assert read_block(image, (SESSION, 1)) == content
        zeros = [extent.offset for extent in image.blocks[SESSION, 1].extents(CHUNK) if extent.stripe is None]
        assert zeros == [len(content) - 3 - CHUNK]
    os.close(directory)


def test_without_room_there_are_none_and_nothing_is_left(mount: Mount) -> None:
    folder = mount("never", "8m")
    directory = opened(folder)
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as writer:
        address, size = writer.map_data(TOTAL, SEGMENT, MOST), writer.mapped_bytes
        with pytest.raises(OSError, match="huge pages"):
            writer.populate_data(0, size)
        unmap_memory(address, size)
        writer.unmap_data()
        room = os.fstatvfs(directory)
        assert room.f_bavail * room.f_frsize > 7 << 20
        writer.write(0, (SESSION, 1), 0, memoryview(bytearray(b"x" * CHUNK)))
        writer.commit(inventory_of({(SESSION, 1): CHUNK}))
    os.close(directory)


@pytest.mark.parametrize(("times", "fails"), [(2, False), (3, True)])
def test_pages_that_are_held_for_a_moment_are_tried_again(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, times: int, fails: bool
) -> None:
    refusals = [errno.EAGAIN] * times
    advise = mapping.advise

    def refuse(address: int, size: int, advice: int) -> int:
        assert advice == MADV_COLLAPSE
        return refusals.pop() if refusals else advise(address, size, advice)

    monkeypatch.setattr(mapping, "advise", refuse)
    directory = opened(mount("never", "32m"))
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as writer:
        address, size = writer.map_data(CHUNK, SEGMENT, MOST), writer.mapped_bytes
        if fails:
            with pytest.raises(OSError, match="temporarily"):
                writer.populate_data(0, size)
        else:
            writer.populate_data(0, size)
            assert mapped_huge(address) == size
        unmap_memory(address, size)
    os.close(directory)


@pytest.mark.parametrize("reason", ["old kernel", "takes too long"])
def test_where_there_are_none_the_image_is_written_as_ever(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "old kernel":
        monkeypatch.setattr(files, "collapse", lambda *_: errno.EINVAL)
    else:
        monkeypatch.setattr(landing, "SLOWEST", -1.0)  # long over
    folder = mount("never", "64m")
    directory = opened(folder)
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as writer:
        assert Landing.prepare(writer, TOTAL, 2 * TOTAL) is None
        assert not writer.placeable
        assert [path.name for path in folder.glob("phos-data-*")] == ["phos-data-0.raw"]
    os.close(directory)


def test_without_room_for_what_is_left_free_between_places_nothing_is_populated(mount: Mount) -> None:
    folder = mount("never", "64m")
    directory = opened(folder)
    free = os.fstatvfs(directory).f_bfree
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as writer:
        assert Landing.prepare(writer, TOTAL, TOTAL - 1) is None
        assert os.fstatvfs(directory).f_bfree == free
    os.close(directory)


def test_room_that_is_given_up_is_there_again(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing.driver, "context", lambda _: SimpleNamespace(use=lambda: None))
    monkeypatch.setattr(landing.driver, "register_host", lambda *_: None)
    monkeypatch.setattr(landing.driver, "unregister_host", lambda *_: None)
    directory = opened(mount("never", "64m"))
    free = os.fstatvfs(directory).f_bfree
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as writer:
        made = Landing.prepare(writer, TOTAL, 2 * TOTAL)
        assert made is not None
        assert writer.placeable == TOTAL
        assert os.fstatvfs(directory).f_bfree <= free - TOTAL // mmap.PAGESIZE
        made.give_up()
        assert not writer.placeable
        landing.wait_released()
        assert os.fstatvfs(directory).f_bfree == free
        writer.write(0, (SESSION, 1), 0, memoryview(bytearray(b"x" * CHUNK)))
        writer.commit(inventory_of({(SESSION, 1): CHUNK}))
    os.close(directory)


def test_the_first_failure_ends_the_others(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(landing, "SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(landing, "PLACE_BYTES", MOST)
    monkeypatch.setattr(landing, "STEP_BYTES", HUGE_PAGE)
    monkeypatch.setattr(files, "collapse", lambda address, *_: asked.append(address) or errno.ENOMEM)
    directory = opened(mount("never", "1g"))
    with ImageWriter(directory, stripes=1, chunk_size=CHUNK) as writer:
        assert Landing.prepare(writer, 50 * SEGMENT, 1 << 30) is None
    assert 1 <= len(asked) <= landing.THREADS
    os.close(directory)


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE])
@pytest.mark.parametrize("descriptor", [-1, 0])
def test_mappings_lie_right_and_go_away_whole(tmp_path: Path, size: int, descriptor: int) -> None:
    def mappings() -> list[str]:
        return [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines()]

    with open(tmp_path / "file", "w+b") as file:
        file.truncate(size)
        held = [map_memory(size, -1 if descriptor else file.fileno()) for _ in range(3)]
        before = mappings()
        address = map_memory(size, file.fileno() if descriptor == 0 else -1)
        view_of(address, size)[size - 1] = 7
        assert address % HUGE_PAGE == 0
        unmap_memory(address, size)
        assert mappings() == before
        for other in held:
            unmap_memory(other, size)


def test_what_cannot_be_mapped_leaves_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:  # not to be read
        file.truncate(4 * HUGE_PAGE)
        before = Path("/proc/self/maps").read_text()
        with pytest.raises(PermissionError):
            map_memory(4 * HUGE_PAGE, file.fileno())
        assert Path("/proc/self/maps").read_text() == before
