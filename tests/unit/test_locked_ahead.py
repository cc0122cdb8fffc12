"""Locking an image's pages while it is loaded: what is read by whom, and that both ends meet."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gpu_engine import driver, locked_ahead, pinned
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.locked_ahead import LockedAhead
from phos.gpu_engine.pinned import PinnedMemory
from phos.images.extents import Extent
from phos.images.reader import Image
from tests.unit.image_sets import CHUNK, SESSION, aligned, page, write_small
from tests.unit.test_pinned import REGISTERED, no_gpu

__all__ = ["no_gpu"]

SEGMENT = 16 << 10

ALLOWED = [True]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LockedAhead, Image, list[Extent]]]:
    """An image whose file system is said to have huge pages, of several segments; how it will be read."""
    monkeypatch.setattr(pinned, "has_huge_pages", lambda descriptor: True)
    monkeypatch.setattr(locked_ahead, "SEGMENT_BYTES", SEGMENT)
    folder = Path(tempfile.mkdtemp(prefix="phos-test-", dir="/dev/shm"))
    write_small(folder, content={(SESSION, n): [page(100 * n + i) for i in range(24)] for n in (1, 2)})
    image = Image.open(folder)
    assert pinned.lies_in_huge_pages(image)
    memory = PinnedMemory()
    memory.map_in_place(image)
    assert memory.use()
    ahead = LockedAhead(image, memory, lambda: ALLOWED[0])
    extents = [e for table in image.blocks.values() for e in table.extents(CHUNK) if e.stripe is not None]
    yield ahead, image, extents
    ahead.close()
    ahead.join()
    memory.release()
    shutil.rmtree(folder)


def test_what_is_locked_is_named_and_the_rest_is_read(
    small: tuple[LockedAhead, Image, list[Extent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, image, extents = small
    go, register = threading.Semaphore(0), driver.register_host
    locked: list[int] = []

    def slowly(address: int, size: int) -> None:
        assert go.acquire(timeout=30)
        register(address, size)
        locked.append(address)

    monkeypatch.setattr(driver, "register_host", slowly)
    ahead.begin(extents)
    with aligned(bytes(1 << 20)) as view, aligned(bytes(1 << 20)) as expected:
        named = read = 0
        for extent in extents:
            image.read_into(extent, expected)
            address = ahead.read_unchecked(extent, view)
            if address is None:
                read += 1
                assert view[: extent.length] == expected[: extent.length]
                before = len(locked)
                go.release()
                while len(locked) == before and ahead._thread is not None and ahead._thread.is_alive():
                    pass
            else:
                named += 1
                assert any(a <= address and address + extent.length <= a + s for a, s in REGISTERED.items())
                assert bytes(pinned.view_of(address, extent.length)) == bytes(expected[: extent.length])
        assert named > 0
        assert read > 0
    go.release(100)


def test_what_has_been_read_is_not_locked_any_more(small: tuple[LockedAhead, Image, list[Extent]]) -> None:
    ahead, _, extents = small
    with aligned(bytes(1 << 20)) as view:
        for extent in extents:
            assert ahead.read_unchecked(extent, view) is None
    ahead.begin(extents)
    ahead.join()
    assert not REGISTERED


def test_all_is_locked_if_nobody_reads(small: tuple[LockedAhead, Image, list[Extent]]) -> None:
    ahead, _, extents = small
    ahead.begin(extents)
    ahead.join()
    assert len(REGISTERED) == len({(e.stripe, e.file_offset // SEGMENT) for e in extents}) == 12


def test_where_the_driver_refuses_all_is_read(
    small: tuple[LockedAhead, Image, list[Extent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, _, extents = small

    def refuse(address: int, size: int) -> None:
        raise DriverError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(driver, "register_host", refuse)
    ahead.begin(extents)
    ahead.join()
    with aligned(bytes(1 << 20)) as view:
        assert all(ahead.read_unchecked(extent, view) is None for extent in extents)


def test_nothing_is_locked_while_it_is_not_allowed(small: tuple[LockedAhead, Image, list[Extent]]) -> None:
    ahead, _, extents = small
    ALLOWED[0] = False
    try:
        ahead.begin(extents)
        time.sleep(0.05)
        assert not REGISTERED
    finally:
        ALLOWED[0] = True
    ahead.join()
    assert len(REGISTERED) == 12


def test_the_end_does_not_wait_for_permission(small: tuple[LockedAhead, Image, list[Extent]]) -> None:
    ahead, _, extents = small
    ALLOWED[0] = False
    try:
        ahead.begin(extents)
        ahead.close()
        ahead.join()
    finally:
        ALLOWED[0] = True
    assert not REGISTERED


def test_locking_may_change_the_files_times(small: tuple[LockedAhead, Image, list[Extent]]) -> None:
    ahead, image, extents = small
    for file in image.path.glob("phos-data-*.raw"):
        os.utime(file)
    ahead.begin(extents)
    ahead.join()
    ahead.confirm()
    assert REGISTERED


@pytest.mark.parametrize("why", ["pages", "mode", "missing"])
def test_where_an_image_cannot_be_mapped(
    small: tuple[LockedAhead, Image, list[Extent]], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    _, image, _ = small
    file = next(image.path.glob("phos-data-*.raw"))
    if why == "pages":
        monkeypatch.setattr(pinned, "has_huge_pages", lambda descriptor: False)
    elif why == "mode":
        file.chmod(0o666)
    else:
        file.rename(file.with_suffix(".away"))
    assert not pinned.lies_in_huge_pages(image)
    before = len(os.listdir("/proc/self/fd"))
    memory = PinnedMemory()
    with pytest.raises(OSError, match=r"huge pages|may write|No such file"):
        memory.map_in_place(image)
    memory.release()
    assert len(os.listdir("/proc/self/fd")) == before
