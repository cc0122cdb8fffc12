"""Rounds of copy_rounds.py that fill GPU memory."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.content_hash import SPAN_BYTES, THREADS
from phos.gpu_engine.copy_work import UNDER_WAY, HashRoom, Load, NothingYet, Progress, Reading
from phos.gpu_engine.restore.arrival import room_bytes
from phos.gpu_engine.restore.reserved import ReservedMemory
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.images.errors import ImageError
from tests.unit.copy_machine import HALF, PATIENCE, Blamed, Machine, fails, hashes_of, noise, started


@dataclass(frozen=True)
class Item:
    """Where a load's data comes from, and what it is."""

    kind: str
    """file, host or read."""
    at: int
    """The offset in the file, or the address."""
    data: bytes
    hashes: Sequence[bytes]


class Store:
    """Contents in a file and in page-locked memory."""

    def __init__(self, folder: Path, room: int) -> None:
        self.descriptor = os.open(folder / "contents", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._end = 4096
        driver.context(0).use()
        self._pinned = driver.PinnedBuffer(room)
        self._used = 0
        self.reads = 0
        self.descriptors: dict[int, int] = {}
        """By offset in the file: another descriptor than the file's."""
        self.raised: tuple[Item, Exception] | None = None
        """What cannot be read, and what reading it fails with."""

    def put(self, kind: str, data: bytes) -> Item:
        hashes = hashes_of(data)
        if kind == "host":
            at, self._used = self._pinned.address + self._used, self._used + len(data)
            assert self._used <= self._pinned.size
            ctypes.memmove(at, data, len(data))
            return Item(kind, at, data, hashes)
        at, self._end = self._end, self._end + len(data) + 4096
        os.pwrite(self.descriptor, data, at)
        return Item(kind, at, data, hashes)

    def read(self, item: Item, view: memoryview) -> None:
        self.reads += 1
        assert len(view) == len(item.data)
        if self.raised is not None and self.raised[0] is item:
            raise self.raised[1]
        view[:] = item.data

    def lies_at(self, item: Item) -> int | None:
        return item.at if item.kind == "host" else None

    def file_of(self, item: Item) -> tuple[int, int] | None:
        return (self.descriptors.get(item.at, self.descriptor), item.at) if item.kind == "file" else None


class Check:
    """Hashes what has arrived, in GPU memory, and compares."""

    def __init__(self, machine: Machine, undo: ExitStack, chunks: int = 4) -> None:
        self._room_bytes = room_bytes(chunks)
        size = driver.GRANULARITY
        assert UNDER_WAY * machine.copier.threads * self._room_bytes <= size
        self._kernels = [machine.copier.hasher.arrival_kernel(device) for device in range(machine.gpus)]
        self._room = []
        for device in range(machine.gpus):
            driver.context(device).use()
            self._room.append(undo.enter_context(driver.scratch(driver.context(device), size)).address)
            machine.copier.hasher.clear(device, self._room[device], size)
        self._host = driver.PinnedBuffer(size)
        undo.callback(self._host.free)
        self._lock = threading.Lock()
        self._rooms: dict[int, Load[Item]] = {}
        self.ended = 0

    def room(self, number: int, load: Load[Item]) -> HashRoom:
        assert load.content is not None
        with self._lock:
            assert number not in self._rooms, "the room is another load's still"
            self._rooms[number] = load
        at = number * self._room_bytes
        assert room_bytes(len(load.content.hashes)) <= self._room_bytes
        grid = load.size // SPAN_BYTES
        kernel = self._kernels[load.device].handle
        return HashRoom(kernel, grid, THREADS, CHUNK, self._room[load.device] + at, self._host.address + at)

    def end(self, number: int, load: Load[Item]) -> None:
        assert load.content is not None
        with self._lock:
            assert self._rooms.pop(number) is load
            self.ended += 1
        at = number * self._room_bytes
        wanted = b"".join(load.content.hashes)
        if self._host.view[at : at + len(wanted)] != wanted:
            raise Blamed(load.address)

    def forget(self) -> None:
        """What a job that failed had under way."""
        self._rooms.clear()


@contextmanager
def reading_of(machine: Machine, store: Store, check: bool) -> Iterator[Reading[Item]]:
    with ExitStack() as undo:
        yield Reading(store.read, store.lies_at, store.file_of, Check(machine, undo) if check else None)


class Loads:
    """A source of loads that looks at the memory when one is said to have arrived."""

    def __init__(self, loads: Sequence[Load[Item] | None], held: Path | None = None) -> None:
        self._left = list(loads)
        self._held = held
        self._lock = threading.Lock()
        self.taken: dict[int, list[int]] = {}
        self.arrivals: dict[int, list[int]] = {}
        """Numbers of loads, by thread."""
        self._numbers = {id(load): number for number, load in enumerate(loads)}

    def take(self) -> Load[Item] | None:
        with self._lock:
            if not self._left:
                return None
            load = self._left.pop(0)
            if load is not None:
                self.taken.setdefault(threading.get_ident(), []).append(self._numbers[id(load)])
        if load is None:
            raise NothingYet
        return load

    def urgent_at_once(self) -> int:
        return 1

    def arrived(self, load: Load[Item]) -> None:
        assert self._held is None or not self._held.exists(), "it cannot have landed"
        data = bytes(load.size) if load.content is None else load.content.data
        assert ctypes.string_at(load.address, load.size) == data, f"load {self._numbers[id(load)]} is not there"
        with self._lock:
            self.arrivals.setdefault(threading.get_ident(), []).append(self._numbers[id(load)])

    def count(self) -> int:
        with self._lock:
            return sum(map(len, self.arrivals.values()))


def fill(machine: Machine, loads: Loads, reading: Reading[Item]) -> Progress:
    progress = machine.progress()
    machine.copier.fill(loads, 0, reading, progress, threading.Event())
    return progress


def loads_of(machine: Machine, store: Store, kinds: Sequence[str], seed: int = 100) -> list[Load[Item]]:
    """A load for each kind, into memory that holds something else; "zeros" has no content. Sizes differ."""
    loads = []
    for i, kind in enumerate(kinds):
        size = (CHUNK, HALF, CHUNK - SPAN_BYTES, CHUNK)[i % 4]
        if kind == "host" and i % 3 == 0:
            size = 3 * CHUNK + HALF  # needs no slot
        block = machine.block(noise(seed + 1000 + i, -(-size // HALF) * HALF))
        item = None if kind == "zeros" else store.put(kind, noise(seed + i, size))
        loads.append(Load(machine.address(block), size, block.device, item))
    return loads


def loads_still(machine: Machine, store: Store, reading: Reading[Item]) -> None:
    """Another job of the same copier is right, whatever became of the last one."""
    if isinstance(reading.check, Check):
        reading.check.forget()
    store.descriptors, store.raised = {}, None
    loads = Loads(loads_of(machine, store, ["file", "zeros", "read", "file", "host", "file"], seed=300))
    fill(machine, loads, reading)
    assert loads.count() == 6


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


def load_all(folder: Path, kinds: str, check: bool, threads: int) -> None:
    """Everything gets where it belongs, and is said to have arrived once, then, in the order of each worker."""
    machine = Machine(threads)
    store = Store(folder, 40 * CHUNK)
    with reading_of(machine, store, check) as reading:
        which = MIXED if kinds == "mixed" else [kinds] * 9
        for turn in range(2):  # the second finds the lanes as the first has left them
            made = loads_of(machine, store, which, seed=turn * 100)
            loads = Loads(made)
            progress = fill(machine, loads, reading)
            assert progress.done == sum(load.size for load in made)
            assert loads.arrivals == loads.taken
            assert sorted(n for each in loads.arrivals.values() for n in each) == list(range(len(which)))
            for load in made:  # nothing behind it has been touched
                address = load.address + load.size
                spare = -load.size % HALF
                block = next(b for b in machine.content if machine.mapped[b].address == load.address)
                assert ctypes.string_at(address, spare) == machine.content[block][load.size : load.size + spare]
        if check:
            assert isinstance(reading.check, Check)
            assert reading.check.ended == 2 * sum(kind != "zeros" for kind in which)
        through = ["read"] if check else ["read", "file"]
        assert store.reads == 2 * sum(kind in through for kind in which)


def load_blocks(folder: Path) -> None:
    """Extents of blocks."""
    machine = Machine(2)
    store = Store(folder, 8 * CHUNK)
    blocks = machine.blocks(["xx" * 3, "x", "xxxx"])
    extents: list[tuple[Block, int, int, Item | None]] = []
    expected: dict[BlockKey, bytes] = {}
    for number, block in enumerate(blocks):
        data = b""
        for offset in range(0, block.size, CHUNK):
            size = min(CHUNK, block.size - offset)
            zeros = (number + offset // CHUNK) % 3 == 1
            part = bytes(size) if zeros else noise(500 + number * 10 + offset // CHUNK, size)
            extents.append((block, offset, size, None if zeros else store.put("file" if offset else "read", part)))
            data += part
        expected[block.key] = data
    with reading_of(machine, store, True) as reading:
        memory, progress = ReservedMemory(), machine.progress()
        addresses = {block.key: memory.reserve(block) for block in blocks}
        memory.map(reversed(blocks))

        def address(key: BlockKey) -> int:
            return addresses[key] if memory.mapped(key) else 0

        machine.copier.load(blocks, iter(extents), reading, progress, threading.Event(), address)
        assert progress.done == sum(block.size for block in blocks)
        memory.free()
    for block in blocks:
        assert machine.memory(block) == expected[block.key]


def load_wrong(folder: Path, kind: str) -> None:
    """What has arrived other than it should be ends the job, and does not count as arrived."""
    machine = Machine(1)
    store = Store(folder, 16 * CHUNK)
    with reading_of(machine, store, True) as reading:
        made = loads_of(machine, store, ["file", "zeros", kind, "file", "file"])
        item = made[2].content
        assert item is not None
        wrong = Item(
            kind, item.at, item.data, [bytes([*item.hashes[0][:15], item.hashes[0][15] ^ 1]), *item.hashes[1:]]
        )
        made[2] = Load(made[2].address, made[2].size, made[2].device, wrong)
        loads = Loads(made)
        error = fails(Blamed, lambda: fill(machine, loads, reading))
        assert error.args == (made[2].address,)
        assert list(loads.arrivals.values()) == [[0, 1]]
        loads_still(machine, store, reading)


def load_urgent(folder: Path) -> None:
    """What somebody waits for arrives before what had been taken already and was held back for it."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, 8 * CHUNK)
    made: list[Load[Item] | None] = []
    for i, load in enumerate(loads_of(machine, store, ["file", "read", "file", "zeros", "host"] * 2)):
        made.append(Load(load.address, load.size, load.device, load.content, urgent=i in (2, 3, 6, 9)))
    made.insert(5, None)  # nothing yet; numbers from here on are one higher
    with reading_of(machine, store, True) as reading:
        loads = Loads(made)
        fill(machine, loads, reading)
        assert list(loads.arrivals.values()) == [[2, 3, 0, 1, 4, 7, 10, 6, 8, 9]], loads.arrivals


def load_held(folder: Path, urgent: bool) -> None:
    """Nothing has arrived as long as no copy to the GPU ends."""
    machine = Machine(2)
    held = Path(os.environ["SOFTGPU_COPY_HOLD"])
    store = Store(folder, 16 * CHUNK)
    made = loads_of(machine, store, ["file", "read", "host", "file", "file", "host", "file", "zeros"])
    if urgent:
        made = [Load(m.address, m.size, m.device, m.content, urgent=True) for m in made]
    with reading_of(machine, store, True) as reading:
        loads = Loads(made, held)
        held.touch()
        thread, failures = started(lambda: fill(machine, loads, reading))
        time.sleep(0.3)
        assert thread.is_alive()
        assert loads.count() == 0
        assert 0 < sum(map(len, loads.taken.values())) <= 2 * UNDER_WAY
        held.unlink()
        thread.join(PATIENCE)
        assert not failures, failures
        assert loads.count() == len(made)


def load_slowly(folder: Path, check: bool) -> None:
    """Nothing has arrived before the GPU has had the time for it and all before it."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, 24 * CHUNK)
    kinds = ["file", "file", "host", "file", "file", "read", "file", "host", "file", "file"]
    bandwidth = float(os.environ["SOFTGPU_COPY_BANDWIDTH"])

    class Timed(Loads):
        copied = 0

        def arrived(self, load: Load[Item]) -> None:
            self.copied += load.size
            assert time.monotonic() - began >= self.copied / bandwidth, "it cannot have landed"
            super().arrived(load)

    with reading_of(machine, store, check) as reading:
        made = loads_of(machine, store, kinds)
        began = time.monotonic()
        loads = Timed(made)
        fill(machine, loads, reading)
        assert loads.count() == len(kinds)


def load_failing(folder: Path, why: str, behind: int) -> None:
    """What cannot be read ends the job with the reason; what came before it has landed and counts for nobody later."""
    machine = Machine(1)
    machine.gpus = 1  # so that loads are given to the library together
    store = Store(folder, 16 * CHUNK)
    text = {"short": "a file has ended early", "closed": os.strerror(errno.EBADF)}.get(why, "it is on fire")
    with reading_of(machine, store, why != "unchecked") as reading:
        made = loads_of(machine, store, ["file"] * behind + ["zeros", "file", "file"])
        bad = made[behind + 1].content
        assert bad is not None
        if why == "short":
            store.descriptors[bad.at] = os.open(folder / "short", os.O_RDWR | os.O_CREAT)
            os.ftruncate(store.descriptors[bad.at], bad.at + len(bad.data) - 1)
        else:
            store.descriptors[bad.at] = 9999
        if why in ("reader", "unchecked"):
            store.raised = bad, ImageError(text)
        loads = Loads(made)
        error = fails(ImageError if store.raised else OSError, lambda: fill(machine, loads, reading), text)
        assert isinstance(error, ImageError) or error.args[0] == (0 if why == "short" else errno.EBADF)
        assert loads.count() <= behind + 1
        loads_still(machine, store, reading)
    machine.saves_still(folder / "next")


def load_between_slots(folder: Path) -> None:
    """What is read by Python into a slot stays there until the GPU has it, whatever comes from files next."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, CHUNK)
    kinds = ["zeros", "read", "file", "file"]
    made = loads_of(machine, store, kinds)
    with reading_of(machine, store, True) as reading:
        for _ in range(6):
            for load in made:
                ctypes.memset(load.address, 0x5A, load.size)
            loads = Loads(made)
            fill(machine, loads, reading)
            assert list(loads.arrivals.values()) == [[0, 1, 2, 3]]


# -------------------------------------------------------------------------------------------------------------- both
