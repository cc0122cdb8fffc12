"""What is loaded next, what is joined to it, and when it counts: native plan and loop under a driver made of Python."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phos.gpu_engine import copy_lane
from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.copy_lane import CHANGED, READING, CopyFailed, NativeLane
from phos.gpu_engine.copy_work import HashRooms
from phos.gpu_engine.cow.chunk_table import SAVED, SAVING, UNSAVED, ChunkTable
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.fill_plan import (
    ALL_ZEROS,
    BROKEN,
    ELSEWHERE,
    GET,
    IN_MEMORY,
    NOTHING_LEFT,
    NOTHING_YET,
    OUT_OF_TIME,
    FillPlan,
    FillWorker,
    Places,
)
from tests.unit.cow_scene import Process

CHUNK = 4096
"""What the plan is told; nothing in it depends on the size."""

ZEROS_AT_ONCE = 64
"""Of fill_plan.c."""

SESSION = b"s" * 16
NOT_READY = 600


@dataclass
class Gpu:
    """A driver that copies at once, but whose events are reached when it is asked for, or allowed."""

    slow: bool = False
    """Events are reached only by who waits for them."""
    loads: list[tuple[str, int, int]] = field(default_factory=list)
    """(copy or zeros, device address, bytes) as queued."""
    refused: int = 0
    """No copy to this address."""
    sums: bytes = b""
    """What hashing comes to."""

    def __post_init__(self) -> None:
        integer, address, size = ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t
        byte = ctypes.c_ubyte
        nine = [address, *[ctypes.c_uint] * 7, address, ctypes.POINTER(ctypes.c_void_p), address]
        made = {
            "cuMemcpyHtoDAsync": ctypes.CFUNCTYPE(integer, address, address, size, address)(self._copy),
            "cuMemsetD8Async": ctypes.CFUNCTYPE(integer, address, byte, size, address)(self._zeros),
            "cuLaunchKernel": ctypes.CFUNCTYPE(integer, *nine)(self._launch),
            "cuEventQuery": ctypes.CFUNCTYPE(integer, address)(lambda _: NOT_READY if self.slow else 0),
        }
        nothing = ctypes.CFUNCTYPE(integer, address, address)(lambda *_: 0)
        self._kept = [made.get(name, nothing) for name, _ in copy_lane.CALLS]
        self.table = (ctypes.c_uint64 * len(self._kept))(*(ctypes.cast(f, ctypes.c_void_p).value for f in self._kept))

    def _copy(self, device: int, host: int, size: int, _: int) -> int:
        if device == self.refused:
            return 1
        self.loads.append(("copy", device, size))
        ctypes.memmove(device, host, size)
        return 0

    def _zeros(self, device: int, value: int, size: int, _: int) -> int:
        self.loads.append(("zeros", device, size))
        ctypes.memset(device, value, size)
        return 0

    def _launch(self, *arguments: object) -> int:
        sums = ctypes.cast(arguments[9][3], ctypes.POINTER(ctypes.c_uint64))[0]  # type: ignore[index]
        ctypes.memmove(sums, self.sums, len(self.sums))
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    def refuse(call: str, code: int) -> None:
        raise DriverError(call, code, "refused")

    monkeypatch.setattr(copy_lane, "_driver_table", lambda: made.table)
    monkeypatch.setattr(copy_lane.driver, "fail", refuse)
    return made


class Scene:
    """A file, memory, and places that come from them."""

    def __init__(self, folder: Path, chunks: int = 600, files: int = 2) -> None:
        self.room = ctypes.create_string_buffer(2 * chunks * CHUNK)
        self.base = ctypes.addressof(self.room)
        self.content = random.Random(3).randbytes(chunks * CHUNK)
        self.files = []
        for number in range(files):
            path = folder / f"data-{number}"
            path.write_bytes(self.content)
            self.files.append(os.open(path, os.O_RDONLY))
        self.memory = ctypes.create_string_buffer(self.content, len(self.content))
        self.slots = ctypes.create_string_buffer(2 * 64 * CHUNK)
        self.places: Places[int] = Places(lambda key, number: key[1] * 1000 + number)
        self.blocks = 0
        self.used = 0
        self.expected: list[bytes] = []

    def close(self) -> None:
        for file in self.files:
            os.close(file)

    def block(self, kinds: str, device: int = 0, at: Sequence[int] | None = None) -> BlockKey:
        """A block, with a chunk for each letter: a digit is a file's number, then m(emory), z(eros), e(lsewhere).

        ``at``: which chunk of the contents each is; one after the other, if it is not said.
        """
        key = (SESSION, self.blocks)
        self.blocks += 1
        rows = []
        for number, kind in enumerate(kinds):
            where = (len(self.expected) if at is None else at[number]) * CHUNK
            address = self.base + self.used
            self.used += CHUNK
            source = where + (ctypes.addressof(self.memory) if kind == "m" else 0)
            descriptors = {"m": IN_MEMORY, "z": ALL_ZEROS, "e": ELSEWHERE}
            descriptor = descriptors[kind] if kind in descriptors else self.files[int(kind)]
            rows.append((address, source, CHUNK, CHUNK, descriptor, bytes([len(self.expected) % 251]) * 16))
            self.expected.append(bytes(CHUNK) if kind == "z" else self.content[where : where + CHUNK])
        self.used += CHUNK  # no two blocks touch
        self.places.add(key, device, rows)
        return key

    def lane(self) -> NativeLane:
        slots = [ctypes.addressof(self.slots), ctypes.addressof(self.slots) + 64 * CHUNK]
        return NativeLane(SimpleNamespace(handle=0), [1, 2], slots)  # type: ignore[arg-type]

    def number(self, address: int) -> int:
        """Of the place at a device address."""
        at = self.base
        for key, first in zip(self.places.blocks, self.places.firsts, strict=True):
            count = sum(1 for place in range(len(self.places)) if self.places.key(place)[0] == key)
            if at <= address < at + count * CHUNK:
                return first + (address - at) // CHUNK
            at += (count + 1) * CHUNK
        raise AssertionError("nothing is there")

    def numbers(self, gpu: Gpu) -> list[list[int]]:
        """The places of each load, as they were queued."""
        return [[self.number(at) + i for i in range(size // CHUNK)] for _, at, size in gpu.loads]

    def is_there(self, place: int) -> bool:
        address = int.from_bytes(self.places.packed[place * 56 : place * 56 + 8], "little")
        return ctypes.string_at(address, CHUNK) == self.expected[place]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def mapped(plan: FillPlan[int]) -> FillPlan[int]:
    for key in plan.places.blocks:
        plan.map(key)
    return plan


def drain(worker: FillWorker) -> int:
    """Fill until nothing is left; the bytes that were said to have arrived."""
    arrived = 0
    while (status := worker.fill(10)) == OUT_OF_TIME:
        arrived += worker.arrived
    assert status == NOTHING_LEFT
    return arrived + worker.arrived


def test_every_chunk_comes_once_in_the_order(gpu: Gpu, scene: Scene) -> None:
    scene.block("01" * 25)
    order = list(range(50))
    random.Random(1).shuffle(order)
    table = ChunkTable(CHUNK, 50)
    plan = mapped(FillPlan(scene.places, order, CHUNK, table))
    assert drain(FillWorker(plan, 0, scene.lane(), None)) == 50 * CHUNK
    assert scene.numbers(gpu) == [[number] for number in order]
    assert all(table.state(number) == SAVED and scene.is_there(number) for number in order)
    assert FillWorker(plan, 0, scene.lane(), None).fill(1) == NOTHING_LEFT


def test_neighbours_are_loaded_at_once_as_far_as_may_be(gpu: Gpu, scene: Scene) -> None:
    scene.block("0000000")
    scene.block("01mmmzz")
    scene.block("zz000", at=[0, 1, 40, 42, 43])
    scene.block("mm", at=[7, 5])
    plan = mapped(FillPlan(scene.places, range(len(scene.places)), 3 * CHUNK))
    drain(FillWorker(plan, 0, scene.lane(), None))
    assert scene.numbers(gpu) == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
        [7],
        [8],
        [9, 10, 11],
        [12, 13],
        [14, 15],
        [16],
        [17, 18],
        [19],
        [20],
    ]
    assert [kind for kind, *_ in gpu.loads].count("zeros") == 2
    assert all(scene.is_there(place) for place in range(len(scene.places)))


def test_neighbours_apart_in_the_order_come_apart(gpu: Gpu, scene: Scene) -> None:
    scene.block("0000")
    drain(FillWorker(mapped(FillPlan(scene.places, [1, 2, 0, 3], 4 * CHUNK)), 0, scene.lane(), None))
    assert scene.numbers(gpu) == [[1, 2], [0], [3]]


def test_zeros_are_written_many_at_once(gpu: Gpu, scene: Scene) -> None:
    count = ZEROS_AT_ONCE + 3
    scene.block("z" * count)
    drain(FillWorker(mapped(FillPlan(scene.places, range(count), CHUNK)), 0, scene.lane(), None))
    assert [size // CHUNK for _, _, size in gpu.loads] == [ZEROS_AT_ONCE, 3]


def test_a_block_that_is_wanted_goes_first(gpu: Gpu, scene: Scene) -> None:
    scene.block("00")
    wanted = scene.block("1m")
    table = ChunkTable(CHUNK, 4)
    plan = mapped(FillPlan(scene.places, range(4), 2 * CHUNK, table))
    assert not plan.want(wanted)
    assert not plan.want(wanted)
    assert [table.state(place) for place in range(4)] == [UNSAVED] * 4
    drain(FillWorker(plan, 0, scene.lane(), None))
    assert scene.numbers(gpu) == [[2], [3], [0, 1]]
    assert plan.want(wanted)
    assert plan.want((SESSION, 99)), "nobody waits for what is not loaded"
    assert plan.on_demand() == (0, 0)


def test_what_a_process_waits_for_goes_first_whatever_it_says_besides(gpu: Gpu, scene: Scene) -> None:
    scene.block("0" * 10)
    process = Process(0, ChunkTable(CHUNK, 10), (1,), queue=64)
    plan = mapped(FillPlan(scene.places, range(10), CHUNK, process.chunks, [process.table]))
    process.want(7, 10, 4_000_000_000, 3, 7)
    drain(FillWorker(plan, 0, scene.lane(), None))
    assert scene.numbers(gpu) == [[n] for n in (7, 3, 0, 1, 2, 4, 5, 6, 8, 9)]
    assert plan.on_demand() == (3, 3 * CHUNK), "7 was asked for twice before it was given"


def test_nothing_is_given_before_it_is_mapped(gpu: Gpu, scene: Scene) -> None:
    a, b = scene.block("000"), scene.block("z")
    process = Process(0, ChunkTable(CHUNK, 4), (1,), queue=64)
    plan = FillPlan(scene.places, [3, 0, 1, 2], CHUNK, process.chunks, [process.table])
    worker = FillWorker(plan, 0, scene.lane(), None)
    assert plan.first_use == [b, a]
    assert plan.due() is None
    assert worker.fill(1) == NOTHING_YET
    assert plan.due() == b
    process.want(2)
    assert worker.fill(1) == NOTHING_YET
    assert plan.due() == a
    plan.map(b)
    assert plan.due() == a
    assert worker.fill(1) == NOTHING_YET
    assert scene.numbers(gpu) == [[3]], "what can be given is not held up"
    plan.map(a)
    assert plan.due() is None
    plan.map((SESSION, 99))
    drain(worker)
    assert scene.numbers(gpu) == [[3], [2], [0], [1]]


def test_a_plan_that_is_broken_says_why(gpu: Gpu, scene: Scene) -> None:
    scene.block("00")
    plan = mapped(FillPlan(scene.places, range(2), CHUNK))
    plan.break_(DriverError("cuMemMap", 2, "out of memory"))
    plan.break_(ValueError("what followed from it"))
    assert FillWorker(plan, 0, scene.lane(), None).fill(1) == BROKEN
    assert isinstance(plan.error, DriverError)
    assert gpu.loads == []


def test_only_what_has_landed_counts(gpu: Gpu, scene: Scene) -> None:
    scene.block("00000e")
    table = ChunkTable(CHUNK, 6)
    plan = mapped(FillPlan(scene.places, range(6), CHUNK, table))
    worker = FillWorker(plan, 0, scene.lane(), None)
    gpu.slow = True
    assert worker.fill(10) == GET
    # Each slot was waited for when it was wanted again; of the last two one is under way, the other's turn has come.
    assert [table.state(place) for place in range(6)] == [SAVED] * 4 + [SAVING] * 2
    assert (worker.wanted, worker.slot, worker.arrived) == (5, 1, 4 * CHUNK)
    room = (ctypes.c_char * CHUNK).from_address(ctypes.addressof(scene.slots) + worker.slot * 64 * CHUNK)
    room.raw = scene.expected[5]
    worker.got()
    assert (worker.arrived, table.state(5)) == (0, SAVING)
    worker.land()
    assert (worker.arrived, table.state(5)) == (2 * CHUNK, SAVED)
    assert scene.is_there(5)
    assert worker.fill(1) == NOTHING_LEFT


def test_what_is_waited_for_is_not_left_under_way(gpu: Gpu, scene: Scene) -> None:
    scene.block("00000000")
    process = Process(0, ChunkTable(CHUNK, 8), (1,), queue=64)
    plan = mapped(FillPlan(scene.places, range(8), CHUNK, process.chunks, [process.table]))
    worker = FillWorker(plan, 0, scene.lane(), None)
    gpu.slow = True
    process.want(6, 5)
    assert worker.fill(0) == OUT_OF_TIME
    assert process.chunks.state(6) == SAVING, "another is waited for: it is read meanwhile"
    assert worker.fill(0) == OUT_OF_TIME
    assert [process.chunks.state(place) for place in (5, 6)] == [SAVED] * 2
    assert worker.arrived == 2 * CHUNK
    assert worker.fill(0) == OUT_OF_TIME
    assert process.chunks.state(0) == SAVING, "nobody waits for this one"


def test_what_has_arrived_otherwise_does_not_count(gpu: Gpu, scene: Scene) -> None:
    scene.block("zz00")
    sums = ctypes.create_string_buffer(2 * 64)
    rooms = HashRooms(7, [8, 9], [ctypes.addressof(sums), ctypes.addressof(sums) + 64])
    table = ChunkTable(CHUNK, 4)
    worker = FillWorker(mapped(FillPlan(scene.places, range(4), 2 * CHUNK, table)), 0, scene.lane(), rooms)
    gpu.sums = b"\2" * 16 + b"\1" * 16
    with pytest.raises(CopyFailed) as caught:
        drain(worker)
    assert (caught.value.call, caught.value.number) == (CHANGED, 3)
    assert [table.state(place) for place in range(4)] == [SAVED, SAVED, SAVING, SAVING]


def test_what_cannot_be_read_or_copied_is_named(gpu: Gpu, scene: Scene) -> None:
    scene.block("001", at=[0, 9999, 5])
    worker = FillWorker(mapped(FillPlan(scene.places, range(3), CHUNK)), 0, scene.lane(), None)
    with pytest.raises(CopyFailed) as caught:
        drain(worker)
    assert caught.value.args == (READING, 0, 1)
    gpu.refused = scene.base + 2 * CHUNK
    with pytest.raises(DriverError, match="cuMemcpyHtoDAsync"):
        worker.fill(1)


def test_what_becomes_of_pieces_is_told(gpu: Gpu, scene: Scene) -> None:
    key = scene.block("0mz")
    plan = mapped(FillPlan(scene.places, range(3), CHUNK))
    plan.want(key)
    worker = FillWorker(plan, 0, scene.lane(), None, steps=True)
    assert worker.fill(10) == NOTHING_LEFT
    steps = worker.steps()
    assert [(step.size, step.kind, step.urgent) for step in steps] == [
        (CHUNK, "file", True),
        (CHUNK, "host", True),
        (CHUNK, "zeros", True),
    ]
    assert all(step.asked <= step.taken <= step.queued for step in steps)


def test_files_are_left_to_others_where_nobody_checks(gpu: Gpu, scene: Scene) -> None:
    scene.block("0mz1")
    scene.places.get_all()
    assert [scene.places.descriptor(place) for place in range(4)] == [ELSEWHERE, IN_MEMORY, ALL_ZEROS, ELSEWHERE]


def test_gpus_have_queues_of_their_own(gpu: Gpu, scene: Scene) -> None:
    for device in (3, 1, 3):
        scene.block("00", device)
    plan = mapped(FillPlan(scene.places, [5, 4, 3, 2, 1, 0], CHUNK))
    assert plan.devices == [3, 1]
    assert [plan.device_of(place) for place in range(6)] == [3, 3, 1, 1, 3, 3]
    drain(FillWorker(plan, 1, scene.lane(), None))
    assert scene.numbers(gpu) == [[3], [2]]
    drain(FillWorker(plan, 0, scene.lane(), None))
    assert scene.numbers(gpu)[2:] == [[5], [4], [1], [0]]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_asked_and_mapped_when_all_comes_once(gpu: Gpu, tmp_path: Path, data: st.DataObject) -> None:
    scene = Scene(tmp_path, 64)
    gpu.loads.clear()
    try:
        shapes = st.text(alphabet="01mze", min_size=1, max_size=6)
        for shape in data.draw(st.lists(shapes, min_size=1, max_size=6)):
            scene.block(shape, data.draw(st.integers(0, 2)))
        count = len(scene.places)
        order = data.draw(st.permutations(range(count)))
        process = Process(0, ChunkTable(CHUNK, count), (1,), queue=400)
        plan = FillPlan(scene.places, order, data.draw(st.integers(1, 4)) * CHUNK, process.chunks, [process.table])
        workers = {queue: [FillWorker(plan, queue, scene.lane(), None)] for queue in range(len(plan.devices))}
        left = set(workers)
        arrived = 0
        for step in range(1000):
            gpu.slow = data.draw(st.booleans()) if step < 30 else False
            if step < 30 and data.draw(st.booleans()):
                process.want(*data.draw(st.lists(st.integers(0, count + 5), max_size=4)))
            if step < 30 and data.draw(st.booleans()):
                plan.want(data.draw(st.sampled_from(scene.places.blocks)))
            if step >= 20 or data.draw(st.booleans()):
                plan.map(plan.due() or data.draw(st.sampled_from(scene.places.blocks)))
            for queue in sorted(left):
                worker = workers[queue][0]
                status = worker.fill(0)
                arrived += worker.arrived
                if status == GET:
                    slot = ctypes.addressof(scene.slots) + worker.slot * 64 * CHUNK
                    ctypes.memmove(slot, scene.expected[worker.wanted], CHUNK)
                    worker.got()
                    arrived += worker.arrived
                elif status == NOTHING_LEFT:
                    left.discard(queue)
                # The slots of this scene are all workers': nobody else may use them meanwhile.
                worker.land()
                arrived += worker.arrived
            for place in range(count):
                assert process.chunks.state(place) != SAVED or scene.is_there(place)
            if not left:
                break
        assert not left
        assert sorted(place for load in scene.numbers(gpu) for place in load) == list(range(count))
        assert all(process.chunks.state(place) == SAVED for place in range(count))
        assert arrived == count * CHUNK
    finally:
        scene.close()
