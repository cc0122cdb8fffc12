"""What the rounds that fill GPU memory have in common: what goes where, and who looks at it when it has arrived."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.content_hash import SPAN_BYTES
from phos.gpu_engine.copy_trace import FILE, HOST, ZEROS
from phos.gpu_engine.copy_work import HashRooms, Reading
from phos.gpu_engine.cow.chunk_table import SAVED, ChunkTable
from phos.gpu_engine.fill_plan import ALL_ZEROS, ELSEWHERE, IN_MEMORY, FillPlan
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.images.chunk_hash import chunk_hash
from tests.unit.copy_machine import HALF, PATIENCE, Machine, noise
from tests.unit.fill_places import FillPlace, packed

SIZES = (CHUNK, HALF, CHUNK - SPAN_BYTES, 2 * CHUNK + HALF)
"""Of the blocks, in turns."""

MIXED = [
    "file",
    "file",
    "zeros",
    "host",
    "file",
    "read",
    "file",
    "read",
    "read",
    "host",
    "zeros",
    "file",
    "file",
    "host",
]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it has not come to that"
        time.sleep(0.001)


@dataclass(frozen=True)
class Item:
    """A chunk's data, and how it is had."""

    kind: str
    """file, host or read."""
    at: int
    """The offset in the file, or the address."""
    data: bytes


class Store:
    """Contents in a file and in page-locked memory."""

    def __init__(self, folder: Path, room: int) -> None:
        self.descriptor = os.open(folder / "contents", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._end = 4096
        driver.context(0).use()
        self._pinned = driver.PinnedBuffer(room)
        self._used = 0
        self._lock = threading.Lock()  # guards reads
        self.reads = 0
        self.raised: tuple[Item, Exception] | None = None
        """What cannot be read, and what reading it fails with."""

    def put(self, kind: str, data: bytes) -> Item:
        """Behind what came before."""
        if kind == "host":
            at, self._used = self._pinned.address + self._used, self._used + len(data)
            assert self._used <= self._pinned.size
            ctypes.memmove(at, data, len(data))
            return Item(kind, at, data)
        at, self._end = self._end, self._end + len(data)
        os.pwrite(self.descriptor, data, at)
        return Item(kind, at, data)

    def leave_a_gap(self) -> None:
        """In the file."""
        self._end += 4096

    def read(self, item: Item, view: memoryview) -> None:
        with self._lock:
            self.reads += 1
        assert len(view) == len(item.data)
        if self.raised is not None and self.raised[0] is item:
            raise self.raised[1]
        view[:] = item.data


class Arrived(Exception):
    """Something has arrived other than it should be: what, and on which GPU."""


class Check:
    """The copier's own rooms for the GPUs to hash in."""

    def __init__(self, machine: Machine) -> None:
        self._rooms = machine.copier.rooms
        for device in range(machine.gpus):
            self._rooms.prepare(device)

    def rooms(self, worker: int, device: int) -> HashRooms:
        return self._rooms.of(worker, device)

    def wrong(self, content: Item, device: int) -> Exception:
        return Arrived(content, device)


def reading_of(machine: Machine, store: Store, check: bool) -> Reading[Item]:
    return Reading(store.read, Check(machine) if check else None)


def places_at(
    address: int, key: BlockKey, device: int, size: int, kinds: Sequence[str], store: Store, seed: int
) -> list[FillPlace[Item]]:
    """The chunks of a block's first ``size`` bytes, one for each kind; "zeros" have no content."""
    places = []
    for number, kind in enumerate(kinds):
        at = number * CHUNK
        length = min(CHUNK, size - at)
        assert length > 0
        item = None if kind == "zeros" else store.put(kind, noise(seed + number, length))
        descriptor = {"file": store.descriptor, "host": IN_MEMORY, "zeros": ALL_ZEROS, "read": ELSEWHERE}[kind]
        source, hash_ = (0, b"") if item is None else (item.at, chunk_hash(memoryview(item.data)))
        places.append(FillPlace(key, length, address + at, device, CHUNK, descriptor, source, hash_, item))
    store.leave_a_gap()
    return places


def places_of(
    machine: Machine, store: Store, kinds: Sequence[str], seed: int = 100, sizes: Sequence[int] = SIZES
) -> list[FillPlace[Item]]:
    """The chunks of a block for each kind, which holds something else."""
    places: list[FillPlace[Item]] = []
    for i, kind in enumerate(kinds):
        size = sizes[i % len(sizes)]
        block = machine.block(noise(seed + 1000 + i, -(-size // HALF) * HALF))
        each = [kind] * -(-size // CHUNK)
        places += places_at(machine.address(block), block.key, block.device, size, each, store, seed + 10 * i)
    return places


def kind_of(place: FillPlace[Item]) -> str:
    """What a trace calls it."""
    return {IN_MEMORY: HOST, ALL_ZEROS: ZEROS}.get(place.descriptor, FILE)


class Trace:
    """Stands for a CopyTrace."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, str, bool]] = []

    def add(self, worker: int, *times: Any) -> None:
        asked, taken, landed, pieces, saved = times
        assert worker >= 0
        assert 0 < asked <= taken <= landed == saved <= time.perf_counter()
        self.pieces += pieces

    def bytes(self, kind: str) -> int:
        return sum(size for size, each, _ in self.pieces if each == kind)


class Filling:
    """A job, and somebody who looks at the memory of whatever is said to have arrived, as soon as that is said."""

    def __init__(
        self,
        machine: Machine,
        places: Sequence[FillPlace[Item]],
        *,
        mapped: bool = True,
        held: Path | None = None,
        bandwidth: float = 0,
        behind: bool = True,
    ) -> None:
        """``mapped``: all blocks are, from the beginning. ``held``: as long as that file exists nothing can arrive.

        ``bandwidth``: no more can have arrived than at so many bytes per second. ``behind``: the blocks still hold what
        the machine has put there, and keep it where nothing has been loaded.
        """
        self.places = places
        self.table = ChunkTable(CHUNK, len(places))
        self.plan = FillPlan(packed(places), range(len(places)), machine.copier.slot_bytes, self.table)
        if mapped:
            for key in self.plan.first_use:
                self.plan.map(key)
        self.progress = machine.progress()
        self.cancelled = threading.Event()
        self.looks = 0
        """That found something new."""
        self._machine = machine
        self._held, self._bandwidth, self._behind = held, bandwidth, behind
        self._seen: set[int] = set()
        self._began = 0.0
        starts: dict[BlockKey, int] = {}
        self._offsets = [place.address - starts.setdefault(place.key, place.address) for place in places]

    def run(self, reading: Reading[Item], workers: int | None = None, trace: Trace | None = None) -> None:
        """Do it. Whatever becomes of it, what counts as arrived is there, and the rest is as it was."""
        over = threading.Event()
        failures: list[BaseException] = []

        def watch() -> None:
            try:
                while not over.wait(0.0005):
                    self._look()
            except BaseException as error:
                failures.append(error)

        watching = threading.Thread(target=watch, daemon=True)
        self._began = time.monotonic()
        watching.start()
        try:
            arguments = (self.progress, self.cancelled, workers, trace)
            self._machine.copier.fill(self.plan, reading, *arguments)  # type: ignore[arg-type]
        finally:
            over.set()
            watching.join(PATIENCE)
            assert not watching.is_alive()
            assert not failures, failures
            self._look()
            assert self.progress.done == sum(self.places[number].size for number in self.saved())
            if self._behind:
                self._nothing_else()

    def _look(self) -> None:
        done = self.progress.done
        saved = self.saved()
        now = time.monotonic()
        assert self._held is None or not saved or not self._held.exists(), "it cannot have landed"
        assert done <= sum(self.places[number].size for number in saved)
        assert self._seen <= set(saved)
        if self._bandwidth:
            copied = sum(self.places[number].size for number in saved if self.places[number].content)
            assert now - self._began >= copied / self._bandwidth, "it cannot have landed"
        for number in set(saved) - self._seen:
            self.there(number)
        self.looks += len(saved) > len(self._seen)
        self._seen = set(saved)

    def _memory(self, number: int) -> int:
        return self._machine.mapped[self.places[number].key].address + self._offsets[number]

    def there(self, number: int) -> None:
        """What should have come to a place is there."""
        place = self.places[number]
        data = bytes(place.size) if place.content is None else place.content.data
        assert ctypes.string_at(self._memory(number), place.size) == data, f"place {number} is not there"

    def _nothing_else(self) -> None:
        """Nobody has touched what nobody was given, nor what lies behind a block's last place."""
        ends = {place.key: number for number, place in enumerate(self.places)}
        for number, (place, state) in enumerate(zip(self.places, self.states(), strict=True)):
            before = self._machine.content[place.key]
            start = end = self._offsets[number]
            if state != 0:
                start += place.size
            end += place.size
            if ends[place.key] == number:
                end = len(before)
            found = ctypes.string_at(self._memory(number) + start - self._offsets[number], end - start)
            assert found == before[start:end], f"place {number}, or what is behind it, was written to"

    def states(self) -> list[int]:
        return [self.table.state(number) for number in range(len(self.places))]

    def saved(self) -> list[int]:
        return [number for number, state in enumerate(self.states()) if state == SAVED]

    def all_arrived(self) -> None:
        """The job has loaded everything, and is over."""
        assert self.saved() == list(range(len(self.places)))
        assert self.progress.done == sum(place.size for place in self.places)
        for number in range(len(self.places)):
            self.there(number)


def filled_still(machine: Machine, store: Store, reading: Reading[Item]) -> None:
    """Another job of the same copier is right, whatever became of the last one."""
    store.raised = None
    filling = Filling(machine, places_of(machine, store, ["file", "zeros", "read", "file", "host", "file"], seed=300))
    filling.run(reading)
    filling.all_arrived()
