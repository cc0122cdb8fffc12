"""Which GPU memory is saved, where to, and in which order: save_plan.c and save_loop.c as Python objects.

Native code decides what comes next, and copies it, because what a process waits for must not wait for an interpreter
that compares, or does something else, just then.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from phos.gpu_engine.copy_lane import APPENDING, Addressed, Failure, driver_table, fail
from phos.gpu_engine.copy_work import Cancelled, NothingYet, Piece
from phos.gpu_engine.save_places import SavePlace, SavePlaces
from phos.images.errors import ImageError
from phos.images.native import chunks_library
from phos.images.stripe import Room

IN_PLACE = 0xFFFFFFFF
"""PHOS_SAVE_IN_PLACE of save_plan.h."""

UNDER_WAY_BYTES = 32 << 20
"""So much is queued for a GPU's copy engine at least, if there is so much: 0.6 ms of work on an H100. What somebody
waits for comes behind that."""

ZEROS_AT_ONCE = 64
"""Chunks of zeros, which are not copied."""

TAKES_IN_A_ROW = 16
"""So many pieces come from one GPU before the next one's turn."""

TAKEN, NOTHING_YET, NOTHING_LEFT = range(3)
"""enum phos_save_taken."""

DONE = 0
"""What phos_save() answers, unless it is broken."""


class PoolFlags(NamedTuple):
    """A shadow pool, as far as it tells of transfers: its flags' address, its window, its number there, slots, GPU."""

    flags: int
    window: int
    number: int
    slots: int
    device: int


class _Made(ctypes.Structure):
    """struct phos_save_made."""

    _fields_ = (("address", ctypes.c_uint64), ("chunk", ctypes.c_uint32), ("slot", ctypes.c_uint32))


class _Queue(ctypes.Structure):
    """struct phos_save_queue."""

    _fields_ = (
        ("order", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("next", ctypes.c_uint32),
        ("left", ctypes.c_uint32),
        ("zero", ctypes.c_uint32),
        ("asked", ctypes.c_void_p),
        ("made", ctypes.c_void_p),
        ("rings", ctypes.c_uint64 * 4),
    )


class _Window(ctypes.Structure):
    """struct phos_save_window."""

    _fields_ = (("view", ctypes.c_void_p), ("head", ctypes.c_uint32), ("dead", ctypes.c_uint32))


class _Pool(ctypes.Structure):
    """struct phos_save_pool."""

    _fields_ = (
        ("flags", ctypes.c_void_p),
        ("window", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("zero", ctypes.c_uint32),
    )


class _Plan(ctypes.Structure):
    """struct phos_save_plan, without its lock, which lies behind."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("places", "queues", "windows", "pools", "table", "state", "owed")),
        ("owed_head", ctypes.c_uint64),
        ("owed_tail", ctypes.c_uint64),
        *(
            (name, ctypes.c_uint32)
            for name in (
                *("count", "queue_count", "window_count", "pool_count", "left", "pending", "join_bytes"),
                *("zeros_at_once", "prioritise", "asked", "changing", "part", "broken", "in_turns"),
            )
        ),
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("aside_ns", "again_ns", "aside_since", "aside_again"),
                *("room", "room_size", "segment", "room_end", "landed", "hold_until"),
            )
        ),
    )


class _Piece(ctypes.Structure):
    """struct phos_save_piece."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("first", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("urgent", ctypes.c_uint32),
    )


class _Record(ctypes.Structure):
    """struct phos_save_record."""

    _fields_ = (
        ("piece", _Piece),
        ("to", ctypes.c_uint64),
        ("taken_ns", ctypes.c_uint64),
        ("landed_ns", ctypes.c_uint64),
        ("changing", ctypes.c_uint32),
        ("zero", ctypes.c_uint32),
    )


class _Pump(ctypes.Structure):
    """struct phos_save_pump."""

    _fields_ = (
        ("driver", ctypes.c_void_p),
        ("stream", ctypes.c_uint64),
        ("events", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("recorded", ctypes.c_uint64),
        ("under_way_bytes", ctypes.c_uint64),
        ("under_way", ctypes.c_uint32),
        ("event", ctypes.c_uint32),
        ("bytes", ctypes.c_uint64),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(chunks_library()))
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.phos_save_plan_size.restype = ctypes.c_uint64
    library.phos_save_begin.argtypes = library.phos_save_end.argtypes = [pointer]
    library.phos_save_events.restype = u32
    library.phos_save.argtypes = [pointer, pointer, u32, pointer]
    return library


@functools.cache
def _brief() -> ctypes.PyDLL:
    """The same, for what takes less time than getting the interpreter lock back."""
    library = ctypes.PyDLL(str(chunks_library()))
    pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    library.phos_save_take.argtypes = [pointer, u32, pointer]
    library.phos_save_landed.argtypes = [pointer, pointer]
    library.phos_save_owed.argtypes = library.phos_save_owes.argtypes = [pointer]
    library.phos_save_owed.restype = ctypes.c_int64
    library.phos_save_made.argtypes = [pointer, u32, u32, u64, u32]
    library.phos_save_made.restype = None
    library.phos_save_settled.argtypes = [pointer, u32]
    library.phos_save_settled.restype = None
    return library


class SavedPiece(NamedTuple):
    """A piece that lies in the image's memory; seconds by time.perf_counter()."""

    piece: Piece
    to: int
    """0: nowhere, being zeros."""
    changing: bool
    """Its memory may have changed before it was copied."""
    taken: float
    landed: float


class SavePlan:
    """Of one checkpoint. Methods may be called from any thread; each GPU has a queue."""

    def __init__(
        self,
        places: Sequence[SavePlace],
        order: Sequence[int],
        expected: Sequence[bytes] | None,
        *,
        join_bytes: int,
        zeros: Sequence[int] | None = None,
        table: Addressed | None = None,
        windows: Sequence[Addressed] = (),
        pools: Sequence[PoolFlags] = (),
        aside: tuple[float, float] | None = None,
    ) -> None:
        """``order`` has the number of every place once; ``expected``: content hashes, if they are known.

        ``join_bytes``: neighbours may be taken together, up to so many. ``zeros``: those of which it is known already
        that they are, by ``expected``. ``aside``: copies step aside for processes' own
        transfers, for so many seconds at a stretch, and then go for so many all the same. ``table`` (a struct
        phos_chunk_table), ``windows`` (struct phos_window_view) and what ``pools`` point to have to stay until nothing
        is taken any more.
        """
        gpus = {pool.device for pool in pools}
        if not isinstance(places, SavePlaces) or not gpus <= set(places.devices):
            places = SavePlaces(places, gpus)
        self.places = places
        self._expected = expected
        self.devices = places.devices
        """The GPUs; their numbers in this list are those of the queues."""
        u32, count = ctypes.c_uint32, len(places)
        if zeros is None:
            zeros = places.zeros(expected) if expected is not None else []
        self._places = places.packed(zeros)
        orders = [order]
        if len(self.devices) > 1:
            orders = [[n for n in order if places[n].device == device] for device in self.devices]
        self._orders = [(u32 * max(1, len(each)))(*each) for each in orders]
        self._asked = [(u32 * max(1, count))() for _ in orders]
        self._made = [(_Made * max(1, count))() for _ in orders]
        at = ctypes.addressof
        self._queues = (_Queue * len(orders))(
            *(
                _Queue(at(ordered), len(each), 0, len(each), 0, at(asked), at(made))
                for ordered, each, asked, made in zip(self._orders, orders, self._asked, self._made, strict=True)
            )
        )
        self._windows = (_Window * max(1, len(windows)))(*(_Window(window.address) for window in windows))
        self._pools = (_Pool * max(1, len(pools)))(*(_Pool(*pool[:4]) for pool in pools))
        self._state = (ctypes.c_uint8 * max(1, count))()
        self._owed = (u32 * max(1, count))()
        self._room = (ctypes.c_uint64 * -(-_library().phos_save_plan_size() // 8))()
        self.address = at(self._room)
        self._plan = plan = _Plan.from_buffer(self._room)
        for name, memory in (
            *(("places", self._places), ("queues", self._queues), ("windows", self._windows), ("pools", self._pools)),
            *(("state", self._state), ("owed", self._owed)),
        ):
            setattr(plan, name, at(memory))
        plan.table = table.address if table is not None else None
        plan.count = plan.left = count
        plan.queue_count, plan.window_count, plan.pool_count = len(orders), len(windows), len(pools)
        plan.join_bytes, plan.zeros_at_once = join_bytes, ZEROS_AT_ONCE
        if aside is not None:
            plan.prioritise = True
            plan.aside_ns, plan.again_ns = (int(seconds * 1e9) for seconds in aside)
        self._takes = 0
        _library().phos_save_begin(self.address)

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            _library().phos_save_end(self.address)

    # What goes on.

    def may_change(self) -> None:
        """From now on memory may have changed before it is saved."""
        self._plan.changing = 1

    @property
    def changing_address(self) -> int:
        """Of the word that says so, for native code."""
        return self.address + _Plan.changing.offset

    def in_parts(self, part: int) -> None:
        """From now on ``part`` bytes are under way at a time; 0: as many as keep the copy engine busy."""
        self._plan.part = part

    def hold(self, seconds: float) -> None:
        """For so long only what processes have asked for is copied; 0: no longer."""
        self._plan.hold_until = time.monotonic_ns() + int(seconds * 1e9) if seconds else 0

    @property
    def in_turns(self) -> int:
        """How many pieces were copied by parts."""
        return int(self._plan.in_turns)

    @property
    def landed(self) -> int:
        """Bytes that have been saved."""
        return int(self._plan.landed)

    def break_(self) -> None:
        """Nothing of it is wanted any more."""
        self._plan.broken = 1

    # What processes have taken: shadows.py.

    def owed(self) -> int | None:
        """The next chunk of which it is to be found out where it is; None: there is none."""
        chunk = _brief().phos_save_owed(self.address)
        return None if chunk < 0 else int(chunk)

    @property
    def owes(self) -> bool:
        """Whether there is one."""
        return bool(_brief().phos_save_owes(self.address))

    def made(self, chunk: int, address: int, device: int, slot: int) -> None:
        """A chunk that was owed lies in a shadow slot."""
        _brief().phos_save_made(self.address, self.devices.index(device), chunk, address, slot)

    def left(self, chunk: int) -> None:
        """A chunk that was owed, and nobody else has now, is in its place as it was."""
        _brief().phos_save_made(self.address, 0xFFFFFFFF, chunk, 0, IN_PLACE)

    def settled(self, chunk: int) -> None:
        """A chunk that was owed is in other hands."""
        _brief().phos_save_settled(self.address, chunk)

    def window_dead(self, number: int) -> None:
        """The process of a window has ended: its transfers are nobody's."""
        self._windows[number].dead = 1

    @property
    def wants_flags(self) -> bool:
        """Whether only newer flags can tell of some transfer."""
        return bool(self._plan.asked)

    def flags_read(self) -> None:
        """They are about to be read: what is wanted from here on is wanted anew."""
        self._plan.asked = 0

    # Pieces.

    def take(self) -> Piece | None:
        """The next piece of any queue, for who copies it himself and says :meth:`has_landed`; None: there are no more.

        Raises:
            NothingYet: there is none now.
        """
        taken, piece = NOTHING_LEFT, _Piece()
        # Several of one GPU in a row: they are copied together. What two threads count once does no harm.
        self._takes += 1
        for queue in range(len(self.devices)):
            number = (self._takes // TAKES_IN_A_ROW + queue) % len(self.devices)
            taken = _brief().phos_save_take(self.address, number, ctypes.byref(piece))
            if taken == TAKEN:
                return self.piece_of(piece, self.devices[number])
        if taken == NOTHING_YET:
            raise NothingYet
        return None

    def has_landed(self, piece: Piece) -> None:
        """Its bytes are in host memory."""
        slot = IN_PLACE if piece.slot < 0 else piece.slot
        count = len(piece.hashes) if piece.hashes is not None else 1
        native = _Piece(piece.address, piece.size, piece.chunk, count, slot, 0)
        _brief().phos_save_landed(self.address, ctypes.byref(native))

    def piece_of(self, piece: _Piece, device: int) -> Piece:
        """What native code has taken for a GPU."""
        place, first, slot = self.places[piece.first], int(piece.first), int(piece.slot)
        hashes = None if self._expected is None else self._expected[first : first + piece.count]
        return Piece(
            place.key,
            place.offset,
            int(piece.bytes),
            int(piece.address),
            device,
            first,
            -1 if slot == IN_PLACE else slot,
            hashes,
            bool(piece.urgent),
        )

    def give_room(self, room: Room) -> None:
        """Where :class:`Pump` puts what it copies."""
        self._plan.room, self._plan.room_size, self._plan.segment, self._plan.room_end = room  # struct phos_save_plan

    @property
    def room_end(self) -> int:
        """How much of it has been taken."""
        return int(self._plan.room_end)


def events_of_a_pump() -> int:
    """How many a :class:`Pump` needs."""
    return int(_library().phos_save_events())


class Pump:
    """What copies one GPU's pieces into the room of a plan. Each method is for one thread at a time."""

    def __init__(self, plan: SavePlan, device: int, stream: int, events: Sequence[Any]) -> None:
        """``stream``: of that GPU's; ``events``: for this alone, see :func:`events_of_a_pump`."""
        self._save = plan
        self.device = device
        self._queue = plan.devices.index(device)
        self._records = (_Record * (len(plan.places) + 1))()
        self._events = (ctypes.c_uint64 * len(events))(*(int(event) for event in events))
        self._driver = driver_table()
        self._pump = _Pump(
            driver=ctypes.addressof(self._driver),
            stream=stream,
            events=ctypes.addressof(self._events),
            records=ctypes.addressof(self._records),
            under_way_bytes=UNDER_WAY_BYTES,
        )
        self._read = 0

    def run(self) -> None:
        """Copy until nothing is left; the GPU's context is current.

        Raises:
            ImageError: there is no more room.
            DriverError: a copy failed. Something may be under way then.
            Cancelled: the plan was broken; likewise.
        """
        failure = Failure()
        arguments = self._save.address, ctypes.byref(self._pump), self._queue, ctypes.byref(failure)
        status = _library().phos_save(*arguments)
        if status < 0 and failure.call == APPENDING:
            raise ImageError("There is more data than room was made for in the image's memory.")
        if status < 0:
            fail(failure)
        if status != DONE:
            raise Cancelled

    def next_record(self) -> SavedPiece | None:
        """The next piece that has been saved; None: there is none now. Calls must not overlap."""
        if self._read == self._pump.recorded:
            return None
        record = self._records[self._read]
        self._read += 1
        piece = self._save.piece_of(record.piece, self.device)
        return SavedPiece(piece, int(record.to), bool(record.changing), record.taken_ns * 1e-9, record.landed_ns * 1e-9)
