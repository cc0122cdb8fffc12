"""What is loaded into GPU memory, from where, and in which order: fill_plan.c and fill_loop.c as Python objects.

Native code decides what comes next, because that is asked twelve thousand times a second, by a dozen threads, while
others in this process have to bring applications back and should find the interpreter free.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.content_hash import SPAN_BYTES, THREADS
from phos.gpu_engine.copy_lane import Addressed, Failure, LaneRecord, NativeLane, fail
from phos.gpu_engine.copy_trace import FILE, HOST, ZEROS
from phos.gpu_engine.copy_work import SLOTS, HashRooms, Item
from phos.images.formats import HASH_SIZE
from phos.images.native import chunks_library

IN_MEMORY, ALL_ZEROS, ELSEWHERE = -1, -2, -3
"""Descriptors of what is in no file: PHOS_FILL_IN_MEMORY, ..._ZEROS and ..._ELSEWHERE of fill_plan.h."""

OUT_OF_TIME, NOTHING_YET, NOTHING_LEFT, GET, BROKEN = range(5)
"""Why a worker returns: the same of fill_loop.c, where GET is ELSEWHERE."""

STEPS_KEPT = 64
"""Pieces that a worker tells a trace of at once."""

_PLACE = struct.Struct(f"=QQIIiIII{HASH_SIZE}s")
"""struct phos_fill_place."""

_DESCRIPTOR = struct.Struct("=i")
_DESCRIPTOR_AT = struct.calcsize("=QQII")


class _Queue(ctypes.Structure):
    """struct phos_fill_queue."""

    _fields_ = (
        ("order", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("next", ctypes.c_uint32),
        ("left", ctypes.c_uint32),
        ("asked", ctypes.c_void_p),
        ("head", ctypes.c_uint64),
        ("tail", ctypes.c_uint64),
        ("queued", ctypes.c_uint64),
    )


class _Window(ctypes.Structure):
    """struct phos_fill_window."""

    _fields_ = (("view", ctypes.c_void_p), ("head", ctypes.c_uint32), ("zero", ctypes.c_uint32))


class _Plan(ctypes.Structure):
    """struct phos_fill_plan, without its lock, which lies behind."""

    _fields_ = (
        ("places", ctypes.c_void_p),
        ("queues", ctypes.c_void_p),
        ("windows", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("mapped", ctypes.c_void_p),
        ("needed", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("queue_count", ctypes.c_uint32),
        ("window_count", ctypes.c_uint32),
        ("join_bytes", ctypes.c_uint32),
        ("on_demand", ctypes.c_uint64),
        ("on_demand_bytes", ctypes.c_uint64),
        ("broken", ctypes.c_uint32),
        ("breathes", ctypes.c_uint32),
    )


class _Load(ctypes.Structure):
    """struct phos_fill_load."""

    _fields_ = (
        ("first", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("bytes", ctypes.c_uint64),
        ("hashed", ctypes.c_uint32),
        ("zero", ctypes.c_uint32),
    )


class _Step(ctypes.Structure):
    """struct phos_fill_step."""

    _fields_ = (
        ("asked_ns", ctypes.c_uint64),
        ("taken_ns", ctypes.c_uint64),
        ("queued_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("descriptor", ctypes.c_int32),
        ("urgent", ctypes.c_uint32),
    )


class _Worker(ctypes.Structure):
    """struct phos_fill_worker."""

    _fields_ = (
        ("lane", LaneRecord),
        ("copies", LaneRecord),
        ("loads", _Load * SLOTS),
        ("hash_kernel", ctypes.c_void_p),
        ("rooms", ctypes.c_uint64 * SLOTS),
        ("sums", ctypes.c_void_p * SLOTS),
        ("span_bytes", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("turn", ctypes.c_uint32),
        ("steps_most", ctypes.c_uint32),
        ("steps", ctypes.POINTER(_Step)),
        ("steps_made", ctypes.c_uint32),
        ("place", ctypes.c_uint32),
        ("urgent", ctypes.c_uint32),
        ("zero", ctypes.c_uint32),
        ("arrived", ctypes.c_uint64),
        ("asked_ns", ctypes.c_uint64),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    library.phos_fill_plan_size.restype = u64
    library.phos_fill_begin.argtypes = library.phos_fill_end.argtypes = [pointer]
    library.phos_fill.argtypes = [pointer, pointer, u32, u64, pointer]
    library.phos_fill_got.argtypes = [pointer, pointer, u32, pointer]
    library.phos_fill_land.argtypes = [pointer, pointer, pointer]
    return library


@functools.cache
def _brief() -> ctypes.PyDLL:
    """The same, for what takes less time than getting the interpreter lock back."""
    library = ctypes.PyDLL(str(chunks_library()))
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.phos_fill_want.argtypes = [pointer, u32, u32]
    library.phos_fill_counts.argtypes = [pointer, pointer, pointer]
    library.phos_fill_map.argtypes = [pointer, u32]
    library.phos_fill_break.argtypes = [pointer]
    library.phos_fill_due.argtypes = [pointer, u32]
    library.phos_fill_due.restype = ctypes.c_int64
    return library


class Arrivals(Addressed, Protocol):
    """Where it is said what has arrived: a :class:`~phos.gpu_engine.cow.chunk_table.ChunkTable`."""

    def is_saved(self, chunk: int) -> bool:
        """Whether a place has its data."""


class Places(Generic[Item]):
    """Chunks, where they go and what comes there: each block's follow each other, in the order of their numbers.

    There are thousands of them, and nothing is loaded before they are known: they are kept as native code has them.
    """

    def __init__(self, content: Callable[[BlockKey, int], Item]) -> None:
        """``content``: a chunk of a block by its number in that, for who has to get it or say what is wrong with it."""
        self._content = content
        self.packed = bytearray()
        self.blocks: list[BlockKey] = []
        self.firsts: list[int] = []
        """The number of each block's first place."""
        self.block_of: list[int] = []
        """The block of each place, by its number here."""
        self.devices: list[int] = []
        """The GPUs; their numbers in this list are those of the queues."""
        self.queue_of: list[int] = []
        """The queue of each block."""

    def add(self, key: BlockKey, device: int, chunks: Iterable[tuple[int, int, int, int, int, bytes]]) -> None:
        """A block and its chunks: device address, offset in a file or address, bytes, those of a whole chunk,
        descriptor (or IN_MEMORY, ALL_ZEROS, ELSEWHERE) and hash.
        """
        if device not in self.devices:
            self.devices.append(device)
        queue, block, first = self.devices.index(device), len(self.blocks), len(self)
        self.packed += b"".join([_PLACE.pack(*rest, block, queue, 0, hash_) for *rest, hash_ in chunks])
        self.blocks.append(key)
        self.firsts.append(first)
        self.queue_of.append(queue)
        self.block_of += [block] * (len(self.packed) // _PLACE.size - first)

    def __len__(self) -> int:
        return len(self.block_of)

    def content(self, place: int) -> Item:
        """What comes to a place."""
        block = self.block_of[place]
        return self._content(self.blocks[block], place - self.firsts[block])

    def key(self, place: int) -> tuple[BlockKey, int]:
        """Its block, and its number in that."""
        block = self.block_of[place]
        return self.blocks[block], place - self.firsts[block]

    def size(self, place: int) -> int:
        """Its bytes."""
        return int(_PLACE.unpack_from(self.packed, place * _PLACE.size)[2])

    def zeros(self, place: int) -> bool:
        """Whether nothing but zeros comes there."""
        return self.descriptor(place) == ALL_ZEROS

    def descriptor(self, place: int) -> int:
        """Of the file that it lies in, or IN_MEMORY, ALL_ZEROS, ELSEWHERE."""
        return int(_DESCRIPTOR.unpack_from(self.packed, place * _PLACE.size + _DESCRIPTOR_AT)[0])

    def get_all(self) -> None:
        """What lies in files, others are to get: nobody could check it otherwise. Before anybody fills."""
        for place in range(len(self)):
            if self.descriptor(place) >= 0:
                _DESCRIPTOR.pack_into(self.packed, place * _PLACE.size + _DESCRIPTOR_AT, ELSEWHERE)


class FillPlan(Generic[Item]):
    """Of one restore. Methods may be called from any thread."""

    def __init__(
        self,
        places: Places[Item],
        order: Sequence[int],
        join_bytes: int,
        table: Arrivals | None = None,
        windows: Sequence[Addressed] = (),
    ) -> None:
        """``order`` has the number of every place once: how they come if nobody waits.

        Those that lie one behind the other are loaded at once, at most ``join_bytes``. ``table``: where it is said what
        has arrived, by their numbers; it and the ``windows`` (struct phos_window_view), which say what is waited for,
        have to stay until nobody fills any more. Nothing is added to the ``places`` from now on.
        """
        self.places = places
        self._table = table
        self._numbers = {key: block for block, key in enumerate(places.blocks)}
        of_place = places.block_of
        self.first_use = [places.blocks[block] for block in dict.fromkeys([of_place[number] for number in order])]
        """The blocks, in the order in which something of them is due first."""
        self._error: BaseException | None = None
        self._enlisted = 0
        self._lock = threading.Lock()  # guards _error and _enlisted
        # What native code looks at, all of it kept here.
        queue_of = places.queue_of
        orders = [list(order)]
        if len(places.devices) != 1:
            orders = [[n for n in order if queue_of[of_place[n]] == queue] for queue in range(len(places.devices))]
        u32 = ctypes.c_uint32
        self._packed = (ctypes.c_char * len(places.packed)).from_buffer(places.packed)
        self._orders = [(u32 * len(each))(*each) for each in orders]
        self._asked = [(u32 * len(each))() for each in orders]
        self._queues = (_Queue * len(orders))(
            *(
                _Queue(ctypes.addressof(each), len(each), 0, len(each), ctypes.addressof(asked))
                for each, asked in zip(self._orders, self._asked, strict=True)
            )
        )
        self._windows = (_Window * len(windows))(*(_Window(window.address) for window in windows))
        self._state = (ctypes.c_uint8 * len(places))()
        self._mapped, self._needed = (u32 * len(places.blocks))(), (u32 * len(places.blocks))()
        self._room = (ctypes.c_uint64 * -(-_library().phos_fill_plan_size() // 8))()
        self.address = ctypes.addressof(self._room)
        self._plan = plan = _Plan.from_buffer(self._room)
        plan.places = ctypes.addressof(self._packed)
        plan.queues = ctypes.addressof(self._queues)
        plan.windows = ctypes.addressof(self._windows)
        plan.table = table.address if table is not None else None
        plan.state = ctypes.addressof(self._state)
        plan.mapped, plan.needed = ctypes.addressof(self._mapped), ctypes.addressof(self._needed)
        plan.count, plan.queue_count, plan.window_count = len(places), len(orders), len(windows)
        plan.join_bytes = join_bytes
        _library().phos_fill_begin(self.address)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            _library().phos_fill_end(self.address)

    # Blocks become mapped while others are loaded: reserved.py.

    def due(self) -> BlockKey | None:
        """A block of which something is wanted now, and which is not mapped."""
        block = int(_brief().phos_fill_due(self.address, len(self.places.blocks)))
        return None if block < 0 else self.places.blocks[block]

    def map(self, key: BlockKey) -> None:
        """The block is mapped at its address."""
        if key in self._numbers:
            _brief().phos_fill_map(self.address, self._numbers[key])

    def break_(self, error: BaseException) -> None:
        """A block cannot be mapped: who fills fails with this."""
        with self._lock:
            self._error = self._error or error
        _brief().phos_fill_break(self.address)

    @property
    def error(self) -> BaseException:
        """What :meth:`break_` was told."""
        with self._lock:
            return self._error or RuntimeError("the plan is not broken")

    def breathe(self, wanted: bool) -> None:
        """Whether copies leave the copy engines to others now and then (fill_loop.c); at first they do not."""
        self._plan.breathes = wanted

    # What is waited for.

    def want(self, key: BlockKey) -> bool:
        """Load a block before others, for somebody who has no window; whether all of it is there."""
        if (block := self._numbers.get(key)) is None:
            return True
        first = self.places.firsts[block]
        end = ([*self.places.firsts, len(self.places)])[block + 1]
        _brief().phos_fill_want(self.address, first, end - first)
        return self._table is not None and all(map(self._table.is_saved, range(first, end)))

    def on_demand(self) -> tuple[int, int]:
        """Places that went before others because a process waited for them, and their bytes."""
        count, size = ctypes.c_uint64(), ctypes.c_uint64()
        _brief().phos_fill_counts(self.address, ctypes.byref(count), ctypes.byref(size))
        return count.value, size.value

    @property
    def devices(self) -> list[int]:
        """The GPUs; their numbers in this list are those of the queues."""
        return self.places.devices

    def device_of(self, place: int) -> int:
        """A place's GPU."""
        return self.devices[self.places.queue_of[self.places.block_of[place]]]

    def enlist(self) -> int:
        """A number for each worker, in the order in which they come."""
        with self._lock:
            self._enlisted += 1
            return self._enlisted - 1


class FillStep(NamedTuple):
    """What became of a piece; seconds by time.perf_counter()."""

    asked: float
    taken: float
    queued: float
    size: int
    kind: str
    urgent: bool


class FillLanes(NamedTuple):
    """Where a worker queues what it does on a GPU."""

    own: NativeLane
    copies: NativeLane
    """Its part of the stream that all copies to that GPU are in."""


class FillWorker:
    """A worker's use of one GPU for a plan. Of one thread, in which that GPU's context is current."""

    def __init__(
        self, plan: FillPlan[Any], queue: int, lanes: FillLanes, rooms: HashRooms | None, *, steps: bool = False
    ) -> None:
        """``queue``: the GPU's number in the plan. ``rooms``: to hash what has arrived; None: nothing is hashed.

        ``steps``: keep them.
        """
        self._plan = plan
        self._queue = queue
        self._lanes = lanes
        own, copies = lanes.own.record, lanes.copies.record
        self._worker = worker = _Worker(lane=own, copies=copies, span_bytes=SPAN_BYTES, threads=THREADS)
        self._steps = (_Step * STEPS_KEPT)() if steps else None
        if self._steps is not None:
            worker.steps, worker.steps_most = self._steps, STEPS_KEPT
        if rooms is not None:
            worker.hash_kernel = rooms.kernel
            worker.rooms[:], worker.sums[:] = rooms.rooms, rooms.hosts
        self._failure = Failure()

    def fill(self, seconds: float) -> int:
        """Load for about so long, and say why it ends. After NOTHING_YET and NOTHING_LEFT nothing is under way.

        Raises:
            CopyFailed: a place could not be read, or something else has arrived.
            DriverError: the GPU refuses.
        """
        status = _library().phos_fill(*self._arguments, int(seconds * 1e9), ctypes.byref(self._failure))
        return int(self._checked(status))

    def got(self) -> None:
        """After GET: :attr:`wanted` lies in slot :attr:`slot`. Raises: as :meth:`fill`."""
        self._checked(_library().phos_fill_got(*self._arguments, ctypes.byref(self._failure)))

    def land(self) -> None:
        """Wait for what is under way. Raises: as :meth:`fill`."""
        plan, worker, _ = self._arguments
        self._checked(_library().phos_fill_land(plan, worker, ctypes.byref(self._failure)))

    @property
    def _arguments(self) -> tuple[int, Any, int]:
        return self._plan.address, ctypes.byref(self._worker), self._queue

    def _checked(self, status: int) -> int:
        if status < 0:
            fail(self._failure)
        return status

    @property
    def wanted(self) -> int:
        """After GET: the number of a place, the data of which the caller is to put into a slot."""
        return int(self._worker.place)

    @property
    def slot(self) -> int:
        """The number of that slot."""
        return int(self._worker.turn)

    @property
    def arrived(self) -> int:
        """Bytes that were said to have arrived by the last call."""
        return int(self._worker.arrived)

    def steps(self) -> list[FillStep]:
        """What became of the pieces that the last call has queued, if they are kept."""
        kinds = {IN_MEMORY: HOST, ALL_ZEROS: ZEROS}
        return [
            FillStep(
                step.asked_ns * 1e-9,
                step.taken_ns * 1e-9,
                step.queued_ns * 1e-9,
                int(step.bytes),
                kinds.get(step.descriptor, FILE),
                bool(step.urgent),
            )
            for step in (self._steps or ())[: self._worker.steps_made]
        ]
