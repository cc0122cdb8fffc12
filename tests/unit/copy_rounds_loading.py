"""Rounds of copy_rounds.py that fill GPU memory."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from phos.gpu_engine import driver
from phos.gpu_engine.content_hash import ROOM_HEAD, SPAN_BYTES
from phos.gpu_engine.copy_trace import FILE, HOST, ZEROS
from phos.gpu_engine.copy_work import SLOTS, Cancelled, Reading
from phos.gpu_engine.cow.chunk_table import SAVING, UNSAVED
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.restore.arrival import reading_of as reading
from phos.gpu_engine.restore.reserved import ReservedMemory
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.images.errors import ImageError
from phos.images.formats import HASH_SIZE
from tests.unit.copy_filling import (
    MIXED,
    Arrived,
    Filling,
    Item,
    Store,
    Trace,
    filled_still,
    kind_of,
    places_at,
    places_of,
    reading_of,
    until,
)
from tests.unit.copy_machine import HALF, PATIENCE, Machine, fails, started, view_of
from tests.unit.fill_places import FillPlace


def load_all(folder: Path, kinds: str, check: bool, threads: int) -> None:
    """Everything gets where it belongs, counts as arrived once and only when it is there, and is read once."""
    machine = Machine(threads, 2)
    store = Store(folder, 40 * CHUNK)
    which = MIXED if kinds == "mixed" else [kinds] * 9
    reading = reading_of(machine, store, check)
    for turn in range(2):  # the second finds the lanes as the first has left them
        filling = Filling(machine, places_of(machine, store, which, seed=turn * 100))
        trace = Trace()
        filling.run(reading, trace=trace)
        filling.all_arrived()
        through = ["read"] if check else ["read", "file"]
        contents = [place.content for place in filling.places]
        assert store.reads == sum(item is not None and item.kind in through for item in contents)
        store.reads = 0
        for kind in (FILE, HOST, ZEROS):
            assert trace.bytes(kind) == sum(place.size for place in filling.places if kind_of(place) == kind)
        largest = max(size for size, kind, _ in trace.pieces if kind in (FILE, HOST))
        assert largest == 2 * CHUNK, "neighbours come together"


def load_blocks(folder: Path) -> None:
    """Blocks that are mapped one after the other while others are filled, the last one first."""
    machine = Machine(2)
    store = Store(folder, 8 * CHUNK)
    blocks = machine.blocks(["xx" * 3, "x", "xxxx"])
    memory = ReservedMemory()
    places: list[FillPlace[Item]] = []
    for number, block in enumerate(blocks):
        counts = range(-(-block.size // CHUNK))
        kinds = ["zeros" if (number + i) % 3 == 1 else "file" if i else "read" for i in counts]
        places += places_at(memory.reserve(block), block.key, block.device, block.size, kinds, store, 500 + 10 * number)
    reading = reading_of(machine, store, True)
    filling = Filling(machine, places, mapped=False)
    memory.map(list(reversed(blocks)), filling.plan)
    filling.run(reading)
    filling.all_arrived()
    memory.free()
    filling.all_arrived()


def load_mapped_late(folder: Path, threads: int) -> None:
    """What is not mapped is waited for, and said to be due; nobody who has something mapped waits for it."""
    machine = Machine(threads)
    store = Store(folder, 8 * CHUNK)
    blocks = machine.blocks(["xxxx"] * 4)  # two for each GPU
    places: list[FillPlace[Item]] = []
    for number, block in enumerate(blocks):
        places += places_at(machine.address(block), block.key, block.device, block.size, ["file"] * 2, store, number)
    for broken in (False, True):
        for block in blocks:
            ctypes.memset(machine.address(block), 0x5A, block.size)
            machine.content[block.key] = b"\x5a" * block.size
        filling = Filling(machine, places, mapped=False)
        reading = reading_of(machine, store, True)
        thread, failures = started(lambda f=filling, r=reading: f.run(r))  # type: ignore[misc]
        until(lambda f=filling: f.plan.due() == blocks[0].key)  # type: ignore[misc]
        time.sleep(0.05)
        assert filling.saved() == []
        filling.plan.map(blocks[1].key)  # the first of the other GPU
        until(lambda f=filling: f.saved() == [2, 3])  # type: ignore[misc]
        assert filling.plan.due() == blocks[0].key
        filling.plan.map(blocks[0].key)
        until(lambda f=filling: f.plan.due() == blocks[2].key and f.saved() == [0, 1, 2, 3])  # type: ignore[misc]
        assert not filling.plan.want(blocks[3].key)
        until(lambda f=filling: f.plan.due() == blocks[2].key)  # type: ignore[misc]
        filling.plan.map(blocks[2].key)
        until(lambda f=filling: f.plan.due() == blocks[3].key and f.saved() == list(range(6)))  # type: ignore[misc]
        assert thread.is_alive()
        if broken:
            filling.plan.break_(DriverError("cuMemMap", 2, "CUDA_ERROR_OUT_OF_MEMORY"))
            filling.plan.break_(ValueError("of two that fail the first says why"))
        else:
            filling.plan.map(blocks[3].key)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert [type(failure) for failure in failures] == ([DriverError] if broken else []), failures
        assert filling.saved() == list(range(6 if broken else 8))
        filled_still(machine, store, reading)


def load_wrong(folder: Path, kind: str, which: int) -> None:
    """What has arrived other than it should be ends the job with its place, and does not count as arrived."""
    machine = Machine(1, 2)
    machine.gpus = 1
    store = Store(folder, 24 * CHUNK)
    reading = reading_of(machine, store, True)
    # The first three blocks have one chunk, one chunk and one; the fourth has three, of which two are one piece.
    places = places_of(machine, store, ["file", "zeros", "host", kind, "file", "file"])
    bad = 3 + which
    hash_ = places[bad].hash
    places[bad] = replace(places[bad], hash=bytes([*hash_[:15], hash_[15] ^ 1]))
    filling = Filling(machine, places)
    error = fails(Arrived, lambda: filling.run(reading))
    assert error.args == (places[bad].content, 0)
    piece = bad if kind == "read" else 3 + which // 2 * 2
    assert filling.saved() == list(range(piece)), "nothing of its piece counts, and all before it does"
    assert filling.table.state(bad) == SAVING
    filled_still(machine, store, reading)


def load_wrong_on_another_gpu(folder: Path) -> None:
    """The GPU that is blamed is the one where it has arrived."""
    machine = Machine(2)
    assert machine.gpus == 2
    store = Store(folder, 24 * CHUNK)
    reading = reading_of(machine, store, True)
    places = places_of(machine, store, ["file", "file", "host", "read"])
    for number, place in enumerate(places):
        wrong = [*places]
        wrong[number] = replace(place, hash=bytes(16))
        error = fails(Arrived, lambda w=wrong: Filling(machine, w, behind=False).run(reading))  # type: ignore[misc]
        assert error.args == (place.content, place.device)
    filled_still(machine, store, reading)


def load_urgent(folder: Path) -> None:
    """What somebody waits for comes before all else, chunk by chunk."""
    machine = Machine(1, 2)
    machine.gpus = 1
    store = Store(folder, 16 * CHUNK)
    reading = reading_of(machine, store, True)
    places = places_of(machine, store, ["file", "read", "host", "file", "zeros"])
    filling, trace = Filling(machine, places), Trace()
    keys = list(dict.fromkeys(place.key for place in places))
    wanted = [keys[3], keys[4], keys[2]]
    assert not any(filling.plan.want(key) for key in wanted)
    filling.run(reading, trace=trace)
    filling.all_arrived()
    assert all(filling.plan.want(key) for key in keys)
    first = [place for key in wanted for place in places if place.key == key]
    rest = [place for place in places if place.key not in wanted]
    expected = [(place.size, kind_of(place), place in first) for place in first + rest]
    assert trace.pieces == expected


def load_held(folder: Path, urgent: bool) -> None:
    """Nothing has arrived as long as no copy to the GPU ends."""
    machine = Machine(2)
    held = Path(os.environ["SOFTGPU_COPY_HOLD"])
    store = Store(folder, 24 * CHUNK)
    places = places_of(machine, store, ["file", "read", "host", "file", "file", "host", "file", "zeros"])
    reading = reading_of(machine, store, True)
    filling = Filling(machine, places, held=held)
    if urgent:
        for key in filling.plan.first_use:
            filling.plan.want(key)
    held.touch()
    thread, failures = started(lambda: filling.run(reading))
    until(lambda: filling.states().count(SAVING) > 0)
    time.sleep(0.3)
    assert thread.is_alive()
    assert filling.saved() == []
    assert filling.progress.done == 0
    assert 0 < filling.states().count(SAVING) <= 2 * SLOTS
    held.unlink()
    thread.join(PATIENCE)
    assert not failures, failures
    filling.all_arrived()


def load_slowly(folder: Path, check: bool) -> None:
    """Nothing has arrived before the GPU has had the time for it and all before it."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, 24 * CHUNK)
    kinds = ["file", "file", "host", "file", "file", "read", "file", "host", "file", "file"]
    reading = reading_of(machine, store, check)
    filling = Filling(machine, places_of(machine, store, kinds), bandwidth=float(os.environ["SOFTGPU_COPY_BANDWIDTH"]))
    filling.run(reading)
    filling.all_arrived()
    assert filling.looks >= 2, "somebody has looked meanwhile"


def load_failing(folder: Path, why: str, behind: int) -> None:
    """What cannot be read ends the job with the reason; what came before it has landed, nobody gets what follows."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, 16 * CHUNK)
    text = {"short": "a file has ended early", "closed": os.strerror(errno.EBADF)}.get(why, "it is on fire")
    reading = reading_of(machine, store, why != "unchecked")
    places = places_of(machine, store, [*["file"] * behind, "zeros", "file", "file"], sizes=(CHUNK, HALF))
    number = behind + 1
    bad = places[number]
    assert bad.content is not None
    descriptor = 9999
    if why == "short":
        descriptor = os.open(folder / "short", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, bad.source + bad.size - 1)
    places[number] = replace(bad, descriptor=descriptor)
    if why in ("reader", "unchecked"):
        store.raised = bad.content, ImageError(text)
    filling = Filling(machine, places)
    error = fails(ImageError if store.raised else OSError, lambda: filling.run(reading), text)
    assert isinstance(error, ImageError) or error.args[0] == (0 if why == "short" else errno.EBADF)
    states = filling.states()
    assert states[number:] == [SAVING, UNSAVED]
    assert states[: max(0, number - 1)].count(UNSAVED) == 0
    filled_still(machine, store, reading)
    machine.saves_still(folder / "next")


def load_failing_joined(folder: Path, which: int) -> None:
    """Of several chunks that are read at once, one cannot be read: who owns the file is asked what is wrong with it."""
    machine = Machine(1, 4)
    machine.gpus = 1
    store = Store(folder, CHUNK)
    reading = reading_of(machine, store, True)
    places = places_of(machine, store, ["file"], sizes=(4 * CHUNK,))
    assert len(places) == 4
    bad = places[which]
    assert bad.content is not None
    os.ftruncate(store.descriptor, bad.source + CHUNK // 2)
    store.raised = bad.content, ImageError("it is on fire")
    filling = Filling(machine, places)
    fails(ImageError, lambda: filling.run(reading), "it is on fire")
    assert filling.saved() == []


def load_between_slots(folder: Path) -> None:
    """What is read by Python into a slot stays there until the GPU has it, whatever comes from files next."""
    machine = Machine(1)
    machine.gpus = 1
    store = Store(folder, CHUNK)
    places = places_of(machine, store, ["zeros", "read", "file", "file", "read", "zeros", "file", "read", "read"])
    reading = reading_of(machine, store, True)
    for _ in range(4):
        for place in places:
            ctypes.memset(place.address, 0x5A, place.size)
        Filling(machine, places, behind=False).run(reading)


def load_with_few_workers(folder: Path) -> None:
    """One worker fills both GPUs, and does not wait at the one whose blocks are not mapped."""
    machine = Machine(3)
    store = Store(folder, 16 * CHUNK)
    places = places_of(machine, store, ["file", "host", "read", "file", "zeros", "file"])
    on = [[number for number, place in enumerate(places) if place.device == device] for device in (0, 1)]
    assert all(on)
    reading = reading_of(machine, store, True)
    for late in (0, 1):
        for place in places:
            ctypes.memset(place.address, 0x5A, place.size)
        filling = Filling(machine, places, mapped=False, behind=False)
        late_keys = dict.fromkeys(places[number].key for number in on[late])
        for key in filling.plan.first_use:
            if key not in late_keys:
                filling.plan.map(key)
        thread, failures = started(lambda f=filling: f.run(reading, workers=1))  # type: ignore[misc]
        until(lambda f=filling, o=on[1 - late]: f.saved() == o)  # type: ignore[misc]
        assert thread.is_alive()
        for key in late_keys:
            filling.plan.map(key)
        thread.join(PATIENCE)
        assert not failures, failures
        filling.all_arrived()
        assert sum(done > 0 for done in filling.progress.done_by_worker) == 1


def load_given_up(folder: Path) -> None:
    """A job that is given up while it loads, or waits for blocks, ends so; the next one is right."""
    machine = Machine(2)
    store = Store(folder, 4 * CHUNK)
    reading = reading_of(machine, store, True)
    filling = Filling(machine, places_of(machine, store, ["read"] * 24, sizes=(CHUNK, HALF)))

    def read(item: Item, view: memoryview) -> None:
        store.read(item, view)
        if store.reads >= 12:
            filling.cancelled.set()

    fails(Cancelled, lambda: filling.run(Reading(read, reading.check)))
    assert 12 - 1 - 2 * SLOTS <= len(filling.saved()) <= 13
    filled_still(machine, store, reading)
    waiting = Filling(machine, places_of(machine, store, ["file"] * 4, seed=700), mapped=False)
    thread, failures = started(lambda: waiting.run(reading))
    until(lambda: waiting.plan.due() is not None)
    time.sleep(0.05)
    assert thread.is_alive()
    waiting.cancelled.set()
    thread.join(PATIENCE)
    assert [type(failure) for failure in failures] == [Cancelled]
    assert waiting.states() == [UNSAVED] * len(waiting.places)
    filled_still(machine, store, reading)


def load_nothing(folder: Path) -> None:
    """A plan without places is filled at once."""
    machine = Machine(1)
    filling = Filling(machine, [])
    filling.run(Reading(Store(folder, CHUNK).read))
    assert (filling.plan.due(), filling.plan.on_demand(), filling.plan.first_use) == (None, (0, 0), [])


class Source:
    """An image, as far as it is asked how it is read."""

    path = Path("image")

    def read_into(self, content: Any, view: memoryview) -> None:
        """Checked by the processor."""

    def read_unchecked(self, content: Any, view: memoryview) -> None:
        """To be checked where it has arrived."""


def keep_rooms(folder: Path) -> None:
    """Rooms are got once, whatever fails beside them, each for itself; a GPU that has none left is no obstacle."""
    machine = Machine(3)
    rooms, image = machine.copier.rooms, Source()
    free = [driver.context(device).free_memory() for device in range(2)]

    def taken() -> list[int]:
        return [before - driver.context(device).free_memory() for device, before in enumerate(free)]

    def how(chunks: set[int], most: int = 2 * CHUNK) -> Reading[Any]:
        return reading(image, machine.copier, [0, 1], chunks, most)  # type: ignore[arg-type]

    # What processors have to check takes no memory of a GPU's.
    assert [how(chunks).check for chunks in (set(), {CHUNK, 4096})] == [None, None]
    assert how({SPAN_BYTES}, (rooms.most_chunks + 1) * SPAN_BYTES).check is None
    assert taken() == [0, 0]

    whole = driver.context(1).create_block(free[1] // driver.GRANULARITY * driver.GRANULARITY)
    told = how({CHUNK})
    assert (told.check, told.read) == (None, image.read_into)
    os.close(whole)
    until(lambda: taken()[1] == 0)

    told = how({CHUNK})
    assert told.check is not None
    assert told.read == image.read_unchecked
    once = taken()
    assert once == [driver.GRANULARITY] * 2
    assert how({SPAN_BYTES}, rooms.most_chunks * SPAN_BYTES).check is not None
    machine.copier.prepare(0)
    assert taken() == once, "they were there"

    every = [rooms.of(worker, device) for worker in range(3) for device in range(2)]
    assert every == [rooms.of(worker, device) for worker in range(3) for device in range(2)]
    needed = ROOM_HEAD + rooms.most_chunks * HASH_SIZE
    for device in range(2):
        starts = sorted(at for each in every[device::2] for at in each.rooms)
        assert all(second - first >= needed for first, second in itertools.pairwise(starts))
        assert starts[-1] + needed <= starts[0] + driver.GRANULARITY
        assert not any(view_of(starts[0], driver.GRANULARITY)), "zero before the first use"

    for _ in range(2):  # a job that fails leaves them as it found them
        store = Store(folder, 24 * CHUNK)
        places = places_of(machine, store, ["file", "read", "host", "file"])
        wrong = [replace(place, hash=bytes(16)) for place in places]
        checked = reading_of(machine, store, True)
        fails(Arrived, lambda w=wrong, c=checked: Filling(machine, w, behind=False).run(c))  # type: ignore[misc]
        assert not any(view_of(min(every[0].rooms), driver.GRANULARITY))
        filling = Filling(machine, places, behind=False)
        filling.run(checked)
        filling.all_arrived()

    free = [driver.context(device).free_memory() for device in range(2)]
    machine.copier.release()
    until(lambda: taken() == [-driver.GRANULARITY] * 2)
    assert how({CHUNK}).check is not None
    assert taken() == [0, 0]
