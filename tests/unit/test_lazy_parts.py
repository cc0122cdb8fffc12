"""Parts of a lazy restore: its windows, the order in which memory is touched, and the settings."""

from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phos.gpu_engine.cow.chunk_table import STRICT, WindowTable
from phos.gpu_engine.errors import UsageError
from phos.gpu_engine.restore.settings import LazySettings
from phos.gpu_engine.touch_order import TouchOrder, from_messages, read_beside, to_messages, write_beside
from phos.images import formats

CHUNK = 4 << 20
A, B = (b"a" * 16, 1), (b"b" * 16, 2)


def test_a_new_window_says_nothing() -> None:
    table = WindowTable(3, [(7, 2 * CHUNK, 0)], [], 2, prioritise=False, mode=STRICT, order=2)
    assert table.next_touched() is None
    assert table.next_wanted() is None
    loading = table.loading()
    assert (loading.fault, loading.launches, loading.last_kernels()) == (0, 0, [])
    table.close()


def test_orders_of_processes_are_merged_and_kept() -> None:
    order = TouchOrder()
    order.learn(b"one", [(A, 3), (A, 1)], [A])
    order.learn(b"two", [(B, 0)], [B])
    order.learn(b"one", [(A, 1), (A, 2)], [A])
    order.learn(b"one", [], [A])
    assert order.of([b"one", b"two", b"three"]) == [(A, 1), (B, 0), (A, 2), (A, 3)]
    order.learn(b"two", [(A, 7)], [A])  # its other block is not there any more
    assert order.of([b"two"]) == [(A, 7)]
    order.learn(b"two", [(B, 0)], [B])
    order.forget(b"one")
    assert order.of([b"one", b"two"]) == [(B, 0)]


def test_an_order_survives_in_an_image_and_beside_it(tmp_path: Path) -> None:
    touched = [(A, 1), (A, 0), (B, 5), (A, 2)]
    assert len(to_messages(touched)) == 3
    assert from_messages(to_messages(touched)) == touched
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_beside(directory, b"i" * 16) == []
        assert write_beside(directory, b"i" * 16, touched)
        assert read_beside(directory, b"i" * 16) == touched
        assert read_beside(directory, b"j" * 16) == []
        path = tmp_path / formats.ORDER_FILE
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert read_beside(directory, b"i" * 16) in ([], touched)
            path.write_bytes(whole[:at])
            assert read_beside(directory, b"i" * 16) == []
        assert formats.decode(whole, "x")["magic"] == "PHOS_ORDER"
    finally:
        os.close(directory)


@pytest.mark.parametrize("kind", ["device", "pipe", "large"])
def test_what_lies_in_place_of_an_order_does_no_harm(tmp_path: Path, kind: str) -> None:
    """No commit record says what it is: a directory's owner may have put anything there, and root reads it."""
    path = tmp_path / formats.ORDER_FILE
    writer = -1
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR)
    else:
        with open(path, "wb") as file:
            file.truncate(64 << 30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    directory = os.open(tmp_path, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, before[1]))
    try:
        assert read_beside(directory, b"i" * 16) == []
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        os.close(directory)
        if writer >= 0:
            os.close(writer)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_lies_where_an_order_is_written_is_neither_waited_for_nor_followed(tmp_path: Path, kind: str) -> None:
    """A phosd of root's writes into a directory of a user's."""
    other, image = tmp_path / "other", tmp_path / "image"
    image.mkdir()
    other.write_text("somebody's")
    if kind == "pipe":
        os.mkfifo(image / formats.ORDER_TEMPORARY)
    else:
        os.link(other, image / formats.ORDER_TEMPORARY)
    directory = os.open(image, os.O_RDONLY)
    written: list[bool] = []
    writing = threading.Thread(target=lambda: written.append(write_beside(directory, b"i" * 16, [(A, 1)])), daemon=True)
    writing.start()
    writing.join(5.0)
    assert written == [True]
    assert read_beside(directory, b"i" * 16) == [(A, 1)]
    assert other.read_text() == "somebody's"
    os.close(directory)


def test_two_restores_of_an_image_may_end_at_once(tmp_path: Path) -> None:
    """What was touched first in one of them is beside it afterwards, and not some of each."""
    directory = os.open(tmp_path, os.O_RDONLY)
    orders = [[(A, chunk) for chunk in range(begin, begin + 3000)] for begin in (0, 5000)]

    def write(order: list[tuple[tuple[bytes, int], int]]) -> bool:
        return write_beside(directory, b"i" * 16, order)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            assert list(pool.map(write, orders)) == [True, True]
            assert read_beside(directory, b"i" * 16) in orders
    os.close(directory)


def test_settings_have_a_meaning() -> None:
    assert LazySettings.from_environment({}) == LazySettings(strict=True, order="recorded")
    assert LazySettings.from_environment({"PHOS_LAZY": "fast", "PHOS_PREFETCH": "random"}) == LazySettings(
        False, "random"
    )
    with pytest.raises(UsageError, match="neither strict nor fast"):
        LazySettings().changed(lazy="quick")
    with pytest.raises(UsageError, match="PHOS_PREFETCH=x"):
        LazySettings().changed(order="x")
