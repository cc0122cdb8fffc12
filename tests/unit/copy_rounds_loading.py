"""Rounds of copy_rounds.py that fill GPU memory."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.copy_work import SLOTS, HashRooms, Progress, Reading
from phos.gpu_engine.cow.chunk_table import SAVED, ChunkTable
from phos.gpu_engine.fill_plan import ALL_ZEROS, ELSEWHERE, IN_MEMORY, FillPlan, Places
from phos.gpu_engine.restore.arrival import room_bytes
from phos.gpu_engine.restore.reserved import ReservedMemory
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.images.errors import ImageError
from tests.unit.copy_machine import HALF, PATIENCE, Blamed, Machine, fails, hashes_of, noise, started

SPAN_BYTES = 65536


@dataclass(frozen=True)
class Item:
    """Where a load's data comes from, and what it is."""

    kind: str
    """file, host or read."""
    at: int
    """The offset in the file, or the address."""
    data: bytes
    hashes: Sequence[bytes]

    def chunks(self) -> list[Item]:
        """Each chunk of it."""
        parts = range(0, len(self.data), CHUNK)
        return [
            Item(self.kind, self.at + at, self.data[at : at + CHUNK], [hash_])
            for at, hash_ in zip(parts, self.hashes, strict=True)
        ]

    def with_hashes(self, hashes: Sequence[bytes]) -> Item:
        """The same, said to be something else."""
        return Item(self.kind, self.at, self.data, hashes)


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
        self.raised: tuple[int, Exception] | None = None
        """Where something cannot be read, and what reading it fails with."""

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
        if self.raised is not None and self.raised[0] == item.at:
            raise self.raised[1]
        view[:] = item.data

    def located(self, item: Item | None) -> tuple[int, int]:
        """Descriptor and offset, or address, as a plan has them."""
        if item is None:
            return ALL_ZEROS, 0
        kinds = {"file": self.descriptors.get(item.at, self.descriptor), "host": IN_MEMORY, "read": ELSEWHERE}
        return kinds[item.kind], item.at


class Check:
    """Hashes what has arrived, in GPU memory."""

    def __init__(self, machine: Machine, undo: ExitStack, chunks: int = 4) -> None:
        self._room_bytes = room_bytes(chunks)
        size = driver.GRANULARITY
        assert SLOTS * machine.copier.threads * self._room_bytes <= size
        self._kernels = [machine.copier.hasher.arrival_kernel(device) for device in range(machine.gpus)]
        self._room = []
        for device in range(machine.gpus):
            driver.context(device).use()
            self._room.append(undo.enter_context(driver.scratch(driver.context(device), size)).address)
            machine.copier.hasher.clear(device, self._room[device], size)
        self._host = driver.PinnedBuffer(size)
        undo.callback(self._host.free)

    def rooms(self, worker: int, device: int) -> HashRooms:
        at = [(worker * SLOTS + slot) * self._room_bytes for slot in range(SLOTS)]
        rooms, hosts = [self._room[device] + offset for offset in at], [self._host.address + offset for offset in at]
        return HashRooms(self._kernels[device].handle, rooms, hosts)

    def wrong(self, content: Item, device: int) -> Exception:
        return Blamed(content.at, device)


@contextmanager
def reading_of(machine: Machine, store: Store, check: bool) -> Iterator[Reading[Item]]:
    with ExitStack() as undo:
        yield Reading(store.read, Check(machine, undo) if check else None)


@dataclass(frozen=True)
class Made:
    """What is to come to an address; ``item`` None: zeros."""

    address: int
    size: int
    device: int
    item: Item | None

    @property
    def data(self) -> bytes:
        return bytes(self.size) if self.item is None else self.item.data

    def is_there(self) -> bool:
        return ctypes.string_at(self.address, self.size) == self.data


class Loads:
    """A plan of them, all mapped; each is a block of its own. What is said to have arrived is looked at."""

    def __init__(self, made: Sequence[Made], store: Store, order: Sequence[int] | None = None) -> None:
        self.made = list(made)
        self._chunks = [load.item.chunks() if load.item else [Item("zeros", 0, b"", [b""])] for load in made]
        places: Places[Item] = Places(lambda key, number: self._chunks[key[1]][number])
        self.of_place: list[int] = []
        for number, (load, items) in enumerate(zip(self.made, self._chunks, strict=True)):
            places.add((b"x" * 16, number), load.device, self._rows(load, items, store))
            self.of_place += [number] * (len(places) - len(self.of_place))
        self.table = ChunkTable(CHUNK, len(places))
        numbers = [place for wanted in order or range(len(made)) for place in self.places_of(wanted)]
        self.plan = FillPlan(places, numbers, 4 * CHUNK, self.table)
        for key in places.blocks:
            self.plan.map(key)
        self.seen: list[int] = []
        """Numbers of loads, as they were found to have arrived."""

    @staticmethod
    def _rows(load: Made, items: Sequence[Item], store: Store) -> list[tuple[int, int, int, int, int, bytes]]:
        rows = []
        for number, item in enumerate(items):
            descriptor, source = store.located(item if load.item else None)
            size = min(CHUNK, load.size - number * CHUNK)
            rows.append((load.address + number * CHUNK, source, size, CHUNK, descriptor, item.hashes[0]))
        return rows

    def places_of(self, load: int) -> list[int]:
        """Its places."""
        return [place for place, number in enumerate(self.of_place) if number == load]

    def arrived(self, load: int) -> bool:
        """Whether all of it is said to be there."""
        return all(self.table.state(place) == SAVED for place in self.places_of(load))

    def look(self) -> None:
        """What is said to have arrived since is there."""
        for number, load in enumerate(self.made):
            if number not in self.seen and self.arrived(number):
                assert load.is_there(), f"load {number} is not there"
                self.seen.append(number)

    def count(self) -> int:
        self.look()
        return len(self.seen)


def fill(
    machine: Machine,
    loads: Loads,
    reading: Reading[Item],
    cancelled: threading.Event | None = None,
    look: Callable[[], None] | None = None,
) -> Progress:
    """Fill, and look all the time at what is said to have arrived; raises what filling raises."""
    progress = machine.progress()
    thread, failures = started(
        lambda: machine.copier.fill(loads.plan, reading, progress, cancelled or threading.Event())
    )
    while thread.is_alive():
        (look or loads.look)()
        time.sleep(0.0002)
    loads.look()
    if failures:
        raise failures[0]
    assert progress.done == sum(load.size for load in loads.made)
    assert loads.count() == len(loads.made)
    return progress


def loads_of(machine: Machine, store: Store, kinds: Sequence[str], seed: int = 100) -> list[Made]:
    """A load for each kind, into memory that holds something else; "zeros" has no content. Sizes differ."""
    loads = []
    for i, kind in enumerate(kinds):
        size = (CHUNK, HALF, CHUNK - SPAN_BYTES, CHUNK)[i % 4]
        if kind == "host" and i % 3 == 0:
            size = 3 * CHUNK + HALF  # needs no slot
        block = machine.block(noise(seed + 1000 + i, -(-size // HALF) * HALF))
        item = None if kind == "zeros" else store.put(kind, noise(seed + i, size))
        loads.append(Made(machine.address(block), size, block.device, item))
    return loads


def loads_still(machine: Machine, store: Store, reading: Reading[Item]) -> None:
    """Another job of the same copier is right, whatever became of the last one."""
    store.descriptors, store.raised = {}, None
    kinds = ["file", "zeros", "read", "file", "host", "file"]
    fill(machine, Loads(loads_of(machine, store, kinds, seed=300), store), reading)


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
    """Everything gets where it belongs, and is said to have arrived then, with fewer workers than GPUs as well."""
    machine = Machine(threads)
    store = Store(folder, 40 * CHUNK)
    with reading_of(machine, store, check) as reading:
        which = MIXED if kinds == "mixed" else [kinds] * 9
        for turn in range(2):  # the second finds the lanes as the first has left them
            made = loads_of(machine, store, which, seed=turn * 100)
            fill(machine, Loads(made, store), reading)
            for load in made:  # nothing behind it has been touched
                address = load.address + load.size
                spare = -load.size % HALF
                block = next(b for b in machine.content if machine.mapped[b].address == load.address)
                assert ctypes.string_at(address, spare) == machine.content[block][load.size : load.size + spare]
        through = ["read"] if check else ["read", "file"]
        assert store.reads == 2 * sum(kind in through for kind in which)


def load_blocks(folder: Path) -> None:
    """Blocks that become mapped meanwhile; one that never does ends the job."""
    machine = Machine(2)
    store = Store(folder, 8 * CHUNK)
    blocks = machine.blocks(["xx" * 3, "x", "xxxx"])
    expected: dict[BlockKey, bytes] = {}
    contents: dict[BlockKey, list[Item | None]] = {}
    for number, block in enumerate(blocks):
        contents[block.key] = []
        for offset in range(0, block.size, CHUNK):
            size = min(CHUNK, block.size - offset)
            zeros = (number + offset // CHUNK) % 3 == 1
            part = bytes(size) if zeros else noise(500 + number * 10 + offset // CHUNK, size)
            contents[block.key].append(None if zeros else store.put("file" if offset else "read", part))
            expected[block.key] = expected.get(block.key, b"") + part

    def content(key: BlockKey, number: int) -> Item:
        found = contents[key][number]
        assert found is not None
        return found

    memory = ReservedMemory()
    places = Places(content)
    for block in blocks:
        address, rows = memory.reserve(block), []
        for number, item in enumerate(contents[block.key]):
            descriptor, source = store.located(item)
            size, hash_ = min(CHUNK, block.size - number * CHUNK), item.hashes[0] if item else b""
            rows.append((address + number * CHUNK, source, size, CHUNK, descriptor, hash_))
        places.add(block.key, block.device, rows)
    plan = FillPlan(places, range(len(places)), CHUNK)
    with reading_of(machine, store, True) as reading:
        progress = machine.progress()
        memory.map(reversed(blocks), plan)
        machine.copier.fill(plan, reading, progress, threading.Event())
        assert progress.done == sum(block.size for block in blocks)
        memory.free()
        for block in blocks:
            assert machine.memory(block) == expected[block.key]
        broken = FillPlan(places, range(len(places)), CHUNK)
        thread, failures = started(lambda: machine.copier.fill(broken, reading, progress, threading.Event()))
        time.sleep(0.05)
        assert thread.is_alive()
        assert broken.due() in expected
        broken.break_(Blamed("it cannot be mapped"))
        thread.join(PATIENCE)
        assert [failure.args for failure in failures] == [("it cannot be mapped",)]


def load_wrong(folder: Path, kind: str) -> None:
    """What has arrived other than it should be ends the job, and does not count as arrived."""
    machine = Machine(1)
    store = Store(folder, 16 * CHUNK)
    with reading_of(machine, store, True) as reading:
        made = loads_of(machine, store, ["file", "zeros", kind, "file", "file"])
        item = made[2].item
        assert item is not None
        first = bytes([*item.hashes[0][:15], item.hashes[0][15] ^ 1])
        made[2] = Made(made[2].address, made[2].size, made[2].device, item.with_hashes([first, *item.hashes[1:]]))
        loads = Loads(made, store)
        error = fails(Blamed, lambda: fill(machine, loads, reading))
        assert error.args == (item.at, made[2].device)
        assert not loads.arrived(2)
        loads_still(machine, store, reading)


def load_urgent(folder: Path) -> None:
    """What somebody waits for arrives before all that was not under way."""
    machine = Machine(1)
    machine.gpus = 1
    held = Path(os.environ["SOFTGPU_COPY_HOLD"])
    store = Store(folder, 8 * CHUNK)
    made = loads_of(machine, store, ["file"] * 12)
    with reading_of(machine, store, True) as reading:
        loads = Loads(made, store)
        arrived: list[int] = []

        def look() -> None:
            arrived.extend(n for n in range(12) if n not in arrived and loads.arrived(n))

        held.touch()
        thread, failures = started(lambda: fill(machine, loads, reading, look=look))
        time.sleep(0.2)
        assert not loads.plan.want((b"x" * 16, 11))
        assert not loads.plan.want((b"x" * 16, 10))
        held.unlink()
        thread.join(PATIENCE)
        assert not failures, failures
        look()
        last = max(arrived.index(10), arrived.index(11))
        assert last <= SLOTS + 1, arrived
        assert loads.plan.want((b"x" * 16, 11))


def load_held(folder: Path, urgent: bool) -> None:
    """Nothing has arrived as long as no copy to the GPU ends."""
    machine = Machine(2)
    held = Path(os.environ["SOFTGPU_COPY_HOLD"])
    store = Store(folder, 16 * CHUNK)
    made = loads_of(machine, store, ["file", "read", "host", "file", "file", "host", "file", "file"])
    with reading_of(machine, store, True) as reading:
        loads = Loads(made, store)
        if urgent:
            for number in range(len(made)):
                loads.plan.want((b"x" * 16, number))
        held.touch()
        thread, failures = started(lambda: fill(machine, loads, reading))
        time.sleep(0.3)
        assert thread.is_alive()
        assert not any(loads.arrived(number) for number in range(len(made)))
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
    with reading_of(machine, store, check) as reading:
        made = loads_of(machine, store, kinds)
        loads = Loads(made, store)
        began = time.monotonic()

        def look() -> None:
            arrived = sum(load.size for number, load in enumerate(made) if loads.arrived(number))
            assert time.monotonic() - began >= arrived / bandwidth, "it cannot have landed"
            loads.look()

        fill(machine, loads, reading, look=look)


def load_failing(folder: Path, why: str, behind: int) -> None:
    """What cannot be read ends the job with the reason; what came before it has landed and counts for nobody later."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, 16 * CHUNK)
    text = {"short": "a file has ended early", "closed": os.strerror(errno.EBADF)}.get(why, "it is on fire")
    with reading_of(machine, store, why != "unchecked") as reading:
        made = loads_of(machine, store, ["file"] * behind + ["zeros", "file", "file"])
        bad = made[behind + 1].item
        assert bad is not None
        if why == "short":
            store.descriptors[bad.at] = os.open(folder / "short", os.O_RDWR | os.O_CREAT)
            os.ftruncate(store.descriptors[bad.at], bad.at + len(bad.data) - 1)
        else:
            store.descriptors[bad.at] = 9999
        if why in ("reader", "unchecked"):
            store.raised = bad.at, ImageError(text)
        loads = Loads(made, store)
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
    made = loads_of(machine, store, ["zeros", "read", "file", "file"])
    with reading_of(machine, store, True) as reading:
        for _ in range(6):
            for load in made:
                ctypes.memset(load.address, 0x5A, load.size)
            fill(machine, Loads(made, store), reading)
