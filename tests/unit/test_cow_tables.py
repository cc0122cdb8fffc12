"""The tables of a window: their layout in C and Python, their states, and many who claim at once."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phos.gpu_engine.cow import chunk_table
from phos.gpu_engine.cow.chunk_table import (
    NO_SLOT,
    POOL_FLAGS,
    SAVED,
    SAVING,
    SHADOWED,
    TRANSFERS,
    UNSAVED,
    ChunkTable,
    Counts,
    PoolShape,
    WindowTable,
)

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 4 << 20

LAYOUT = r"""
#include "window_table.h"
#include <stddef.h>
#include <stdio.h>
#define SHOW(name, value) printf("%s %llu\n", name, (unsigned long long)(value))
int main(void)
{
    SHOW("unsaved", PHOS_CHUNK_UNSAVED);
    SHOW("saving", PHOS_CHUNK_SAVING);
    SHOW("saved", PHOS_CHUNK_SAVED);
    SHOW("shadowed", PHOS_CHUNK_SHADOWED);
    SHOW("no slot", PHOS_SLOT_NONE);
    SHOW("flags", PHOS_POOL_FLAGS);
    SHOW("transfers", PHOS_TRANSFERS);
    SHOW("counts", sizeof(struct phos_window_counts));
    SHOW("states at", offsetof(struct phos_chunk_table, state));
    SHOW("closed at", offsetof(struct phos_chunk_table, closed));
    SHOW("counts at", offsetof(struct phos_window_table, counts));
    SHOW("tail at", offsetof(struct phos_window_table, tail));
    SHOW("transferring at", offsetof(struct phos_window_table, transferring));
    SHOW("slots at", offsetof(struct phos_window_table, slots_at));
    SHOW("transfers at", offsetof(struct phos_window_table, transfers_at));
    SHOW("queue at", offsetof(struct phos_window_table, queue_at));
    SHOW("pools at", offsetof(struct phos_window_table, pools_at));
    SHOW("queue", offsetof(struct phos_window_table, queue));
    SHOW("order", offsetof(struct phos_window_table, order));
    SHOW("culprit at", offsetof(struct phos_window_table, culprit));
    SHOW("culprit bytes", sizeof((struct phos_window_table){0}.culprit));
    SHOW("touched at", offsetof(struct phos_window_table, touched));
    SHOW("order at", offsetof(struct phos_window_table, order_at));
    SHOW("faulted", offsetof(struct phos_window_table, faulted));
    SHOW("touch writes", PHOS_TOUCH_WRITES);
#define COUNT(field) SHOW("count " #field, offsetof(struct phos_window_counts, field))
    COUNT(calls), COUNT(call_ns), COUNT(shadowed), COUNT(waits), COUNT(wait_ns), COUNT(anything), COUNT(stream_waits);
    COUNT(failures);
    return 0;
}
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The numbers of window_table.h."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.c").write_text(LAYOUT)
    program = folder / "layout"
    subprocess.run(["gcc", f"-I{ROOT / 'frontend'}", "-o", program, folder / "layout.c"], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: int(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def read(descriptor: int, form: str, offset: int) -> int:
    """A number in a table, by the descriptor that a frontend gets."""
    (value,) = struct.unpack(form, os.pread(descriptor, struct.calcsize(form), offset))
    return int(value)


def write(descriptor: int, form: str, offset: int, value: int) -> None:
    """What a frontend writes."""
    os.pwrite(descriptor, struct.pack(form, value), offset)


class Side:
    """The frontend's part of a window table."""

    def __init__(self, table: WindowTable, layout: dict[str, int]) -> None:
        self.fd = table.descriptor
        self.layout = layout
        self.slots = read(self.fd, "<Q", layout["slots at"])
        self.transfers = read(self.fd, "<Q", layout["transfers at"])
        self.queue = read(self.fd, "<Q", layout["queue at"])

    def want(self, *chunks: int) -> None:
        """Put chunks in the queue."""
        tail = read(self.fd, "<I", self.layout["tail at"])
        for chunk in chunks:
            write(self.fd, "<I", self.queue + 4 * tail, chunk)
            tail += 1
        write(self.fd, "<I", self.layout["tail at"], tail)

    def take_slot(self, slot: int, ticket: int) -> None:
        """A copy into a slot has been queued."""
        write(self.fd, "<I", self.slots + 8 * slot, ticket)

    def transfer(self, record: int, ticket: int, pool: int = 0) -> None:
        """A host copy has been queued."""
        write(self.fd, "<I", self.transfers + 8 * record + 4, pool)
        write(self.fd, "<I", self.transfers + 8 * record, ticket)


@pytest.fixture
def table() -> ChunkTable:
    return ChunkTable(CHUNK, 50)


def window(pools: tuple[int, ...] = (4,), queue: int = 16) -> WindowTable:
    shapes = [PoolShape(i, slots, POOL_FLAGS + slots * CHUNK) for i, slots in enumerate(pools)]
    return WindowTable(3, [(1, CHUNK, 0), (9, 6 << 20, 1)], shapes, queue, prioritise=True)


def test_python_and_c_mean_the_same(layout: dict[str, int]) -> None:
    assert [layout[name] for name in ("unsaved", "saving", "saved", "shadowed")] == [UNSAVED, SAVING, SAVED, SHADOWED]
    assert layout["no slot"] == NO_SLOT
    assert layout["flags"] == POOL_FLAGS
    assert layout["transfers"] == TRANSFERS
    assert layout["counts"] == ctypes.sizeof(Counts)
    for name, *_ in Counts._fields_:
        assert layout[f"count {name}"] == getattr(Counts, name).offset


def test_chunks_begin_unsaved_and_are_claimed_once(table: ChunkTable) -> None:
    assert {table.state(chunk) for chunk in range(50)} == {UNSAVED}
    assert table.claim(7) == UNSAVED
    assert table.claim(7) == SAVING
    table.saved(7)
    assert table.claim(7) == SAVED


def test_closing_is_seen_by_the_frontend(table: ChunkTable, layout: dict[str, int]) -> None:
    assert read(table.descriptor, "<I", layout["closed at"]) == 0
    table.close_window()
    assert read(table.descriptor, "<I", layout["closed at"]) == 1


def test_each_chunk_is_claimed_by_one_of_many_threads() -> None:
    table = ChunkTable(CHUNK, 20000)
    claimed: list[list[int]] = [[] for _ in range(6)]

    def one_by_one(mine: list[int], seed: int) -> None:
        for chunk in random.Random(seed).sample(range(20000), 20000):
            if table.claim(chunk) == UNSAVED:
                mine.append(chunk)
                table.saved(chunk)

    threads = [threading.Thread(target=one_by_one, args=(claimed[i], i)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(chunk for mine in claimed for chunk in mine) == list(range(20000))


def test_a_queue_gives_what_was_put_in_and_no_more_than_it_holds(layout: dict[str, int]) -> None:
    table = window(queue=4)
    side = Side(table, layout)
    assert table.next_wanted() is None
    side.want(8, 9)
    assert [table.next_wanted() for _ in range(3)] == [8, 9, None]
    side.want(10, 11)
    assert [table.next_wanted() for _ in range(3)] == [10, 11, None]
    write(table.descriptor, "<I", layout["tail at"], 0xFFFFFFFF)  # nonsense
    assert table.next_wanted() is None


def test_slots_and_tickets(layout: dict[str, int]) -> None:
    table = window()
    side = Side(table, layout)
    assert [table.ticket(slot) for slot in range(4)] == [0] * 4
    side.take_slot(2, 77)
    assert table.ticket(2) == 77
    table.free_slot(2)
    assert table.ticket(2) == 0


def test_transfers_end_when_their_flag_is_set(layout: dict[str, int]) -> None:
    table = window((2, 3))
    side = Side(table, layout)
    flags = [(ctypes.c_uint32 * (slots + TRANSFERS))() for slots in (2, 3)]

    def ask(pool: int) -> int:
        return table.transferring(pool, ctypes.addressof(flags[pool]))

    assert [ask(0), ask(1)] == [0, 0]
    write(table.descriptor, "<I", layout["transferring at"], 1)
    assert [ask(0), ask(1)] == [1, 1]
    write(table.descriptor, "<I", layout["transferring at"], 0)
    side.transfer(5, 1234, pool=1)
    assert [ask(0), ask(1)] == [0, 2]
    flags[1][3 + 5] = 1233
    assert ask(1) == 2
    flags[1][3 + 5] = 1234
    assert ask(1) == 0
    assert read(table.descriptor, "<I", side.transfers + 8 * 5) == 0, "the record is free again"


def test_what_a_process_writes_there_leads_phosd_nowhere_else(layout: dict[str, int]) -> None:
    """It has the table in its hands: offsets and lengths in it are for itself alone."""
    table = window()
    side = Side(table, layout)
    side.want(2, 3)
    side.take_slot(1, 77)
    flags = (ctypes.c_uint32 * (4 + TRANSFERS))()
    for name in ("slots at", "transfers at", "queue at", "order at", "pools at"):
        write(table.descriptor, "<Q", layout[name], 1 << 60)
    for name in ("queue", "order"):
        write(table.descriptor, "<I", layout[name], 0xFFFFFFFF)
    write(table.descriptor, "<I", layout["tail at"], 0xFFFFFFF0)
    write(table.descriptor, "<I", layout["touched at"], 0xFFFFFFF0)
    os.pwrite(table.descriptor, b"x" * layout["culprit bytes"], layout["culprit at"])
    assert [table.next_wanted() for _ in range(17)] == [2, 3] + [0] * 14 + [None]
    assert table.next_touched() is None
    assert table.ticket(1) == 77
    table.free_slot(1)
    assert table.ticket(1) == 0
    assert table.transferring(0, ctypes.addressof(flags)) == 0
    assert table.culprit() == "x" * (layout["culprit bytes"] - 1)


def test_counts_come_by_name(layout: dict[str, int]) -> None:
    table = window()
    for index, (name, *_) in enumerate(Counts._fields_):
        write(table.descriptor, "<Q", layout["counts at"] + layout[f"count {name}"], index + 1)
    assert table.counts().as_dict() == {name: i + 1 for i, (name, *_) in enumerate(Counts._fields_)}


def test_a_closed_table_holds_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    table, other = ChunkTable(CHUNK, 3), window()
    assert len(os.listdir("/proc/self/fd")) > before
    for _ in range(2):
        table.close()
        other.close()
    assert len(os.listdir("/proc/self/fd")) == before


# The states of chunks, as both sides may change them.


class Chunks(RuleBasedStateMachine):
    """A model of the chunk table: who has which chunk."""

    @initialize(count=st.integers(1, 12))
    def begin(self, count: int) -> None:
        self.table = ChunkTable(CHUNK, count)
        self.count = count
        self.model = [UNSAVED] * count

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()

    def _state_at(self, chunk: int) -> int:
        return 64 + 4 * chunk

    @rule(which=st.integers(0, 11))
    def claim(self, which: int) -> None:
        chunk = which % self.count
        assert self.table.claim(chunk) == self.model[chunk]
        if self.model[chunk] == UNSAVED:
            self.model[chunk] = SAVING

    @precondition(lambda self: UNSAVED in self.model)
    @rule(process=st.integers(0, 0x7FFD), slot=st.one_of(st.just(NO_SLOT), st.integers(0, 0xFFFE)))
    def frontend_takes(self, process: int, slot: int) -> None:
        chunk = self.model.index(UNSAVED)
        self.model[chunk] = SHADOWED + process * SHADOWED + slot
        write(self.table.descriptor, "<I", self._state_at(chunk), self.model[chunk])
        assert divmod(self.table.state(chunk) - SHADOWED, SHADOWED) == (process, slot)

    @precondition(lambda self: any(state >= SHADOWED for state in self.model))
    @rule()
    def frontend_gives_back(self) -> None:
        chunk = next(i for i, state in enumerate(self.model) if state >= SHADOWED)
        self.model[chunk] = UNSAVED
        write(self.table.descriptor, "<I", self._state_at(chunk), UNSAVED)

    @precondition(lambda self: any(state not in (UNSAVED, SAVED) for state in self.model))
    @rule()
    def save(self) -> None:
        chunk = next(i for i, state in enumerate(self.model) if state not in (UNSAVED, SAVED))
        self.table.saved(chunk)
        self.model[chunk] = SAVED

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "table"):
            assert [self.table.state(chunk) for chunk in range(self.count)] == self.model


TestChunks = Chunks.TestCase
TestChunks.settings = settings(max_examples=60, stateful_step_count=30)


def test_tables_are_as_tests_write_them(layout: dict[str, int]) -> None:
    from tests.unit import cow_scene as scene

    assert layout["states at"] == scene.STATES == 64
    written = {
        "tail at": scene.TAIL,
        "transferring at": scene.TRANSFERRING,
        "slots at": scene.SLOTS_AT,
        "transfers at": scene.TRANSFERS_AT,
        "queue at": scene.QUEUE_AT,
        "order": scene.ORDER,
        "touched at": scene.TOUCHED,
        "order at": scene.ORDER_AT,
        "faulted": scene.FAULTED,
        "touch writes": chunk_table.TOUCH_WRITES,
    }
    assert {name: layout[name] for name in written} == written
    assert chunk_table.library().phos_chunks_size(0) == 64
