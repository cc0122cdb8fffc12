"""The feed of a lazy restore, the order in which memory is touched, and the settings."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.copy_work import Load, NothingYet
from phos.gpu_engine.cow.chunk_table import SAVED, STRICT, UNSAVED, ChunkTable, WindowTable
from phos.gpu_engine.errors import DriverError, UsageError
from phos.gpu_engine.restore.feed import ZEROS_AT_ONCE, LoadFeed, LoadPlace
from phos.gpu_engine.restore.settings import LazySettings
from phos.gpu_engine.touch_order import TouchOrder, from_messages, read_beside, to_messages, write_beside
from phos.images import formats
from phos.images.reader import Extent
from tests.unit.cow_scene import Process

CHUNK = 4 << 20
A, B = (b"a" * 16, 1), (b"b" * 16, 2)


def place(number: int, *, zero: bool = False, stripe: int = 0) -> LoadPlace:
    """The n-th chunk of block A, which lies in one file."""
    offset = number * CHUNK
    extent = None if zero else Extent(A, offset, CHUNK, stripe, offset, (bytes([number]) * 16,), CHUNK)
    return LoadPlace(A, offset, CHUNK, 0x1000_0000 + offset, 0, extent)


def feed_of(
    places: list[LoadPlace], order: list[int], slot: int = CHUNK, windows: Sequence[WindowTable] = (), **more: Any
) -> tuple[LoadFeed, ChunkTable]:
    table = ChunkTable(CHUNK, len(places))
    return LoadFeed(table, places, order, windows, slot, 4, **more), table


def drain(feed: LoadFeed) -> list[Load[Extent]]:
    loads = []
    while (load := feed.take()) is not None:
        loads.append(load)
    return loads


def test_every_chunk_comes_once_in_the_order() -> None:
    order = list(range(50))
    random.Random(1).shuffle(order)
    feed, table = feed_of([place(n) for n in range(50)], order)
    loads = drain(feed)
    assert [load.chunks[0] for load in loads] == order
    assert all(table.state(chunk) != SAVED for chunk in order)
    for load in loads:
        feed.arrived(load)
    assert all(table.state(chunk) == SAVED for chunk in order)


def test_neighbours_are_read_at_once_as_far_as_a_slot_reaches() -> None:
    feed, _ = feed_of([place(n) for n in range(7)], list(range(7)), 3 * CHUNK)
    loads = drain(feed)
    assert [list(load.chunks) for load in loads] == [[0, 1, 2], [3, 4, 5], [6]]
    assert loads[0].content is not None
    assert loads[0].content.length == loads[0].size == 3 * CHUNK
    assert loads[0].content.hashes == (b"\0" * 16, b"\1" * 16, b"\2" * 16)


def test_neighbours_in_different_files_are_read_apart() -> None:
    feed, _ = feed_of([place(0), place(1, stripe=1), place(2, zero=True), place(3, zero=True)], [0, 1, 2, 3], 8 * CHUNK)
    assert [list(load.chunks) for load in drain(feed)] == [[0], [1], [2, 3]]


def test_zeros_are_written_many_at_once() -> None:
    count = ZEROS_AT_ONCE + 3
    feed, _ = feed_of([place(n, zero=True) for n in range(count)], list(range(count)))
    assert [len(load.chunks) for load in drain(feed)] == [ZEROS_AT_ONCE, 3]


def test_a_block_that_is_wanted_goes_first() -> None:
    places = [place(0), place(1), LoadPlace(B, 0, CHUNK, 0, 0, None)]
    feed, table = feed_of(places, [0, 1, 2])
    assert not feed.want(B)
    first = feed.take()
    assert first is not None
    assert (list(first.chunks), first.urgent) == ([2], True)
    assert not feed.want(B)
    feed.arrived(first)
    assert feed.want(B)
    assert [list(load.chunks) for load in drain(feed)] == [[0], [1]]
    assert table.state(0) != UNSAVED


def test_nothing_is_given_before_it_is_mapped() -> None:
    mapped: set[BlockKey] = set()
    asked: list[BlockKey] = []

    def is_mapped(key: BlockKey) -> bool:
        asked.append(key)
        return key in mapped

    places = [place(0), place(1), LoadPlace(B, 0, CHUNK, 0, 0, None), place(2)]
    process = Process(0, ChunkTable(CHUNK, 4), (1,), queue=64)
    feed, table = feed_of(places, [2, 0, 1, 3], mapped=is_mapped, windows=[process.table])
    assert feed.blocks() == [B, A]
    with pytest.raises(NothingYet):
        feed.take()
    process.want(3)
    with pytest.raises(NothingYet):
        feed.take()
    assert asked == [B, A, B], "it has been said what is needed next"
    assert feed.urgent_at_once() == 1
    mapped.add(B)
    first = feed.take()
    assert first is not None
    assert (first.chunks[0], first.urgent) == (2, False), "what can be given is not held up"
    assert table.state(3) == UNSAVED
    mapped.add(A)
    assert [(load.chunks[0], load.urgent) for load in drain(feed)] == [(3, True), (0, False), (1, False)]

    def refuse(_: BlockKey) -> bool:
        raise DriverError("cuMemMap", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    feed, table = feed_of(places, [2, 0, 1, 3], mapped=refuse)
    with pytest.raises(DriverError):
        feed.take()
    assert table.state(2) == UNSAVED, "nobody has it"


def test_with_more_wanted_than_there_are_workers_each_takes_several() -> None:
    process = Process(0, ChunkTable(CHUNK, 20), (1,), queue=64)
    feed, _ = feed_of([place(n) for n in range(20)], list(range(20)), windows=[process.table])
    assert feed.urgent_at_once() == 1
    process.want(5, 6, 7)
    assert feed.urgent_at_once() == 1, "one for each of four workers"
    process.want(*range(8, 14))
    assert feed.urgent_at_once() == 3
    taken = [load.chunks[0] for load in (feed.take(), feed.take()) if load is not None]
    assert taken == [5, 6]
    assert feed.urgent_at_once() == 2
    feed.want(A)
    assert feed.urgent_at_once() == 1 + (7 + 18) // 4
    assert [load.urgent for load in drain(feed)] == [True] * 18


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


def test_settings_have_a_meaning() -> None:
    assert LazySettings.from_environment({}) == LazySettings(strict=True, order="recorded")
    assert LazySettings.from_environment({"PHOS_LAZY": "fast", "PHOS_PREFETCH": "random"}) == LazySettings(
        False, "random"
    )
    with pytest.raises(UsageError, match="neither strict nor fast"):
        LazySettings().changed(lazy="quick")
    with pytest.raises(UsageError, match="PHOS_PREFETCH=x"):
        LazySettings().changed(order="x")
