"""A plan over real tables, and workers whose driver is the test: what it is asked for, and when that is done."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

from phos.gpu_engine import copy_lane
from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.copy_lane import CALLS, NativeLane
from phos.gpu_engine.copy_work import SLOTS, HashRooms
from phos.gpu_engine.cow.chunk_table import SAVED, ChunkTable
from phos.gpu_engine.fill_plan import ALL_ZEROS, ELSEWHERE, GET, IN_MEMORY, FillLanes, FillPlan, FillWorker
from tests.unit.cow_scene import Process
from tests.unit.fill_places import FillPlace, packed

SIZE = 64
SESSION = b"s" * 16
BASE = 1 << 40
NOT_READY = 600
KERNEL = 4711
COPIES = 500
"""The streams that copies are in have numbers from here on."""


@dataclass
class Move:
    """Something that a GPU was asked to fill."""

    address: int
    data: bytes
    stream: int
    zeros: bool
    reached: bool = False
    sums: list[tuple[int, int, int]] = field(default_factory=list)
    """Where hashes are to come, how many, and bytes of each chunk."""


class Engine:
    """A driver that ends what is queued when the test, or who waits for it, says so."""

    def __init__(self) -> None:
        self.ready = True
        """Whether all that is under way has ended when somebody asks."""
        self.refused = ""
        """A call that fails, and..."""
        self.status = 1
        self.moves: list[Move] = []
        self.log: list[tuple[str, int]] = []
        """wait and query, and of which event."""
        self.launches: list[tuple[int, ...]] = []
        self.when: Callable[[], None] = lambda: None
        """Called before something is filled, waited for or asked."""
        self.failures: list[BaseException] = []
        self.breaths: list[tuple[int, int]] = []
        """Events that a stream of copies waits for, and how many moves had been queued before."""
        self._open: dict[int, list[Move]] = {}  # by stream: behind which no event is
        self._behind: dict[int, list[Move]] = {}  # by event
        integer, address, size, u32 = ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32
        kinds: dict[str, tuple[Callable[..., int], list[Any]]] = {
            "cuMemcpyHtoDAsync": (self._copy, [address, address, size, address]),
            "cuMemcpyDtoHAsync": (self._nothing, [address, address, size, address]),
            "cuMemsetD8Async": (self._zero, [address, ctypes.c_ubyte, size, address]),
            "cuLaunchKernel": (
                self._launch,
                [address, *[u32] * 7, address, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p],
            ),
            "cuEventRecord": (self._record, [address, address]),
            "cuEventSynchronize": (self._wait, [address]),
            "cuEventQuery": (self._query, [address]),
            "cuStreamWaitEvent": (self._follow, [address, address, u32]),
        }
        self._kept = [
            ctypes.CFUNCTYPE(integer, *kinds[name][1])(self._guarded(name, kinds[name][0])) for name, _ in CALLS
        ]
        self.table = (ctypes.c_uint64 * len(CALLS))(*(ctypes.cast(f, ctypes.c_void_p).value for f in self._kept))

    def _guarded(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def guarded(*arguments: Any) -> int:
            if name == self.refused:
                return self.status
            try:
                self.when()
                return call(*arguments)
            except BaseException as error:
                self.failures.append(error)
                return 999

        return guarded

    def _nothing(self, *_: Any) -> int:
        raise AssertionError("nobody saves")

    def _fill(self, move: Move) -> int:
        assert move.zeros == (move.stream < COPIES)
        self.moves.append(move)
        self._open.setdefault(move.stream, []).append(move)
        return 0

    def _copy(self, device: int, host: int, size: int, stream: int) -> int:
        return self._fill(Move(device, ctypes.string_at(host, size), stream, False))

    def _zero(self, device: int, value: int, size: int, stream: int) -> int:
        return self._fill(Move(device, bytes([value]) * size, stream, True))

    def _launch(self, kernel: int, *more: Any) -> int:
        *sizes, stream, parameters, extra = more
        assert not extra
        memory, chunk, room, sums = (ctypes.c_uint64.from_address(parameters[i]).value for i in range(4))
        move = self._open[stream][-1]
        assert memory == move.address
        self.launches.append((kernel, *sizes, stream, memory, chunk, room, sums))
        move.sums.append((sums, -(-len(move.data) // chunk), chunk))
        return 0

    def _record(self, event: int, stream: int) -> int:
        assert all(move.reached for move in self._behind.get(event, [])), "the event is another load's still"
        self._behind[event] = self._open.pop(stream)
        return 0

    def _follow(self, stream: int, event: int, flags: int) -> int:
        assert not flags
        if stream >= COPIES:
            self.breaths.append((event, len(self.moves)))
        else:
            assert all(move.stream >= COPIES for move in self._behind[event]), "it waits for no copy"
            self._open.setdefault(stream, []).extend(self._behind[event])
        return 0

    def _reach(self, event: int) -> int:
        for move in self._behind[event]:
            move.reached = True
            for at, count, chunk in move.sums:
                hashes = b"".join(hash_of(move.data[i * chunk : (i + 1) * chunk]) for i in range(count))
                ctypes.memmove(at, hashes, len(hashes))
        return 0

    def _wait(self, event: int) -> int:
        self.log.append(("wait", event))
        return self._reach(event)

    def _query(self, event: int) -> int:
        self.log.append(("query", event))
        return self._reach(event) if self.ready else NOT_READY


def hash_of(data: bytes) -> bytes:
    """What this driver's kernel makes of a chunk."""
    return data[:16].ljust(16, b"\0")


class FillScene:
    """Blocks of small chunks, and a worker for each GPU."""

    made: ClassVar[list[FillScene]] = []

    def __init__(
        self,
        blocks: Sequence[str],
        order: Sequence[int] | None = None,
        *,
        join: int = 1,
        processes: int = 1,
        devices: Sequence[int] = (),
        mapped: bool = True,
        size: int = SIZE,
        hashed: bool = False,
        steps: bool = False,
    ) -> None:
        """A letter for each chunk of a block: a to d lie in files, one behind the other; an upper-case letter leaves a
        gap before. m lies in memory (M likewise), 0 is zeros, e is elsewhere. A last ``.`` is half a chunk less.

        ``join``: so many chunks at most in one piece. ``devices``: the blocks', 0 if it is not said.
        """
        FillScene.made.append(self)
        self.size = size
        self.engine = Engine()
        self._files: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self.memory = ctypes.create_string_buffer(2 * size * (1 + sum(map(len, blocks))))
        self.data: list[bytes] = []
        self.places: list[FillPlace[int]] = []
        self.keys: list[BlockKey] = [(SESSION, number) for number in range(len(blocks))]
        self.of_block: list[list[int]] = []
        for block, text in enumerate(blocks):
            device = devices[block] if devices else 0
            self.of_block.append([])
            letters = text.rstrip(".")
            for i, letter in enumerate(letters):
                self.of_block[-1].append(len(self.places))
                last = i + 1 == len(letters) and text.endswith(".")
                self._put(block, letter, size // 2 if last else size, device)
        self.count = len(self.places)
        self.order = list(range(self.count) if order is None else order)
        self.table = ChunkTable(size, self.count)
        self.processes = [Process(number, self.table, (1,)) for number in range(processes)]
        windows = [process.table for process in self.processes]
        self.plan = FillPlan(packed(self.places), self.order, join * size, self.table, windows)
        if mapped:
            for key in self.keys:
                self.plan.map(key)
        self.workers = [self.worker(queue, hashed=hashed, steps=steps) for queue in range(len(self.plan.devices))]
        self.arrived = 0

    def _put(self, block: int, letter: str, size: int, device: int) -> None:
        data = bytes(size) if letter == "0" else random.Random(len(self.places)).randbytes(size)
        descriptor, source = {"0": ALL_ZEROS, "e": ELSEWHERE}.get(letter, IN_MEMORY), 0
        if letter not in "0e":
            name = letter.lower()
            at = self._ends.get(name, 0) + (self.size // 2 if letter.isupper() else 0)
            self._ends[name] = at + size
            if name == "m":
                source = ctypes.addressof(self.memory) + at
                ctypes.memmove(source, data, size)
            else:
                if name not in self._files:
                    self._files[name] = os.memfd_create(f"phos-test-{name}")
                descriptor, source = self._files[name], at
                os.pwrite(descriptor, data, at)
        self.data.append(data)
        address = BASE + sum(place.size for place in self.places)  # blocks lie side by side
        content = len(self.places) if letter != "0" else None
        key, hash_ = (SESSION, block), b"" if content is None else hash_of(data)
        place = FillPlace(key, size, address, device, self.size, descriptor, source, hash_, content)
        self.places.append(place)

    def worker(self, queue: int = 0, *, hashed: bool = False, steps: bool = False) -> FillWorker:
        """A further worker on a GPU."""
        device = self.plan.devices[queue]
        first = 10 * len(getattr(self, "workers", [])) + 1000 * (queue + 1)
        room = 64 * self.size  # mapped and not cleared: it may be hundreds of megabytes, of which few are written to
        slots = [(ctypes.c_char * room).from_buffer(mmap.mmap(-1, room)) for _ in range(SLOTS)]
        sums = [ctypes.create_string_buffer(64 * 16) for _ in range(SLOTS)]
        with mock.patch.object(copy_lane, "driver_table", return_value=self.engine.table):
            lanes = FillLanes(
                *(
                    NativeLane(mock.Mock(handle=handle), [event, event + 1], [ctypes.addressof(slot) for slot in slots])
                    for handle, event in ((100 + device, first), (COPIES + device, first + 2))
                )
            )
        rooms = HashRooms(KERNEL, [7000, 8000], [ctypes.addressof(each) for each in sums]) if hashed else None
        worker = FillWorker(self.plan, queue, lanes, rooms, steps=steps)
        worker.kept = slots, sums  # type: ignore[attr-defined]
        return worker

    def close(self) -> None:
        """Give the descriptors back."""
        for process in self.processes:
            process.table.close()
        self.table.close()
        for descriptor in self._files.values():
            os.close(descriptor)

    def step(self, queue: int = 0, worker: FillWorker | None = None) -> int:
        """Take one piece, if there is one; what is elsewhere is got. Why it ends."""
        worker = worker or self.workers[queue]
        try:
            status = worker.fill(0)
        finally:
            self.arrived += worker.arrived
            self.raise_()
        if status == GET:
            slots = worker.kept[0]  # type: ignore[attr-defined]
            data = self.data[worker.wanted]
            ctypes.memmove(slots[worker.slot], data, len(data))
            try:
                worker.got()
            finally:
                self.arrived += worker.arrived
                self.raise_()
        return status

    def land(self, worker: FillWorker | None = None) -> None:
        """Have all of a worker's arrive."""
        worker = worker or self.workers[0]
        worker.land()
        self.arrived += worker.arrived
        self.raise_()

    def raise_(self) -> None:
        """What has gone wrong in the driver's calls."""
        assert not self.engine.failures, self.engine.failures

    def steps(self, count: int, queue: int = 0) -> list[list[int]]:
        """Take so many pieces; which."""
        before = len(self.engine.moves)
        for _ in range(count):
            self.step(queue)
        return self.pieces()[before:]

    def run(self, queue: int = 0) -> int:
        """Take until there is nothing; the last answer."""
        for _ in range(10 * self.count + 10):
            if (status := self.step(queue)) not in (0, GET):
                return status
        raise AssertionError("it does not end")

    def numbers(self, move: Move) -> list[int]:
        """The places that a move has filled, which have been given their own data."""
        first = next(number for number, place in enumerate(self.places) if place.address == move.address)
        numbers: list[int] = []
        at = 0
        while at < len(move.data):
            number = first + len(numbers)
            place = self.places[number]
            assert (place.key, place.address) == (self.places[first].key, move.address + at)
            assert move.data[at : at + place.size] == self.data[number]
            assert move.stream == (100 if move.zeros else COPIES) + place.device
            assert move.zeros == (place.content is None)
            numbers.append(number)
            at += place.size
        assert at == len(move.data)
        return numbers

    def pieces(self) -> list[list[int]]:
        """What has been filled, in order."""
        return [self.numbers(move) for move in self.engine.moves]

    def saved(self) -> list[int]:
        """What counts as arrived."""
        return [number for number in range(self.count) if self.table.state(number) == SAVED]
