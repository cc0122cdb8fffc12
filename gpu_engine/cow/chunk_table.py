"""The tables that phosd shares with the frontends during a window (frontend/window_table.h), as Python objects.

Everything that must be atomic is done by libphos_chunks.so (chunk_table.c).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from phos.gpu_engine import sealed
from phos.images.native import chunks_library

UNSAVED, SAVING, SAVED = 0, 1, 2
SHADOWED = 0x10000
"""Plus the process's number times 2^16 plus the slot's: enum phos_chunk_state."""

NO_SLOT = 0xFFFF
"""Instead of a slot's number: the process has taken the chunk, and not queued its copy yet."""

TOUCH_WRITES = 0x80000000
"""PHOS_TOUCH_WRITES of window_table.h."""

POOL_FLAGS = 2 << 20
TRANSFERS = 64
"""PHOS_POOL_FLAGS and PHOS_TRANSFERS of window_table.h; a test compares them."""


COW, LAZY, STRICT, WATCH = 0, 1, 2, 3
"""enum phos_window_mode."""

RECENT, RECENT_NAME = 8, 120
"""PHOS_RECENT and PHOS_RECENT_NAME of window_table.h."""


class Loading(ctypes.Structure):
    """struct phos_window_loading: what a process met with while its memory was loaded; times in ns."""

    _fields_ = (
        ("first_launch_ns", ctypes.c_uint64),
        ("opened", ctypes.c_uint64),
        ("open_ns", ctypes.c_uint64),
        ("fault", ctypes.c_uint32),
        ("launches", ctypes.c_uint32),
        ("recent", (ctypes.c_char * RECENT_NAME) * RECENT),
    )

    def last_kernels(self) -> list[str]:
        """The kernels launched last, the newest first."""
        count = min(int(self.launches), RECENT)
        names = [self.recent[(self.launches - 1 - i) % RECENT].value for i in range(count)]
        return [name.decode(errors="replace") for name in names]


class Counts(ctypes.Structure):
    """struct phos_window_counts: what a process's calls met with in the window; times in ns."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "calls",
            "call_ns",
            "shadowed",
            "waits",
            "wait_ns",
            "anything",
            "stream_waits",
            "failures",
        )
    ]

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return {name: int(getattr(self, name)) for name, *_ in self._fields_}


class _View(ctypes.Structure):
    """struct phos_window_view of chunk_table.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("slots_at", ctypes.c_uint64),
        ("transfers_at", ctypes.c_uint64),
        ("queue_at", ctypes.c_uint64),
        ("order_at", ctypes.c_uint64),
        ("slots", ctypes.c_uint32),
        ("queue", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("zero", ctypes.c_uint32),
    )


@functools.cache
def library() -> ctypes.PyDLL:
    """libphos_chunks.so with its prototypes.

    Its functions take less time than letting go of the interpreter lock: with a dozen threads that copy, each would
    have to wait for the lock again.

    Raises:
        OSError: it has not been built.
    """
    lib = ctypes.PyDLL(str(chunks_library()))
    u32, u64, i64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p
    prototypes: dict[str, tuple[object, list[object]]] = {
        "phos_chunks_size": (u64, [u32]),
        "phos_chunks_begin": (None, [pointer, u32, u32]),
        "phos_chunks_state": (u32, [pointer, u32]),
        "phos_chunks_claim": (u32, [pointer, u32]),
        "phos_chunks_saved": (None, [pointer, u32]),
        "phos_chunks_close": (None, [pointer]),
        "phos_window_size": (u64, [u32, u32, u32, u32, u32]),
        "phos_window_begin": (None, [pointer, pointer, u32, u32, u32, u32, u32, u32, u32, u32]),
        "phos_window_set_block": (None, [pointer, u32, u64, u64, u32]),
        "phos_window_set_pool": (None, [pointer, u32, u32, u32, u32, u64]),
        "phos_window_next": (i64, [pointer, pointer]),
        "phos_window_next_touched": (i64, [pointer, pointer]),
        "phos_window_loading": (None, [pointer, pointer]),
        "phos_window_ticket": (u32, [pointer, u32]),
        "phos_window_free_slot": (None, [pointer, u32]),
        "phos_window_transferring": (u32, [pointer, u32, u32, pointer]),
        "phos_window_faulted": (u64, [pointer]),
        "phos_window_counts": (None, [pointer, pointer]),
        "phos_window_culprit": (None, [pointer, ctypes.c_char_p]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


class _Shared:
    """Zeroed memory in a memfd."""

    def __init__(self, name: str, size: int) -> None:
        self.descriptor = sealed.make(name, size)
        try:
            self._memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._anchor)

    def close(self) -> None:
        """Give it back; nobody may use the address any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            del self._anchor
            self._memory.close()


class ChunkTable:
    """The state of every chunk of a checkpoint. Methods may be called from any thread."""

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        self.chunks = chunks
        self._lib = library()
        self._shared = _Shared("phos-chunks", max(1, self._lib.phos_chunks_size(chunks)))
        self._lib.phos_chunks_begin(self._shared.address, chunk_bytes, chunks)

    @property
    def descriptor(self) -> int:
        """The memfd."""
        return self._shared.descriptor

    @property
    def address(self) -> int:
        """For native code."""
        return self._shared.address

    def state(self, chunk: int) -> int:
        """UNSAVED, SAVING, SAVED, or SHADOWED + where."""
        return int(self._lib.phos_chunks_state(self._shared.address, chunk))

    def is_saved(self, chunk: int) -> bool:
        """Whether it is."""
        return self.state(chunk) == SAVED

    def claim(self, chunk: int) -> int:
        """Take a chunk that nobody has. Returns its state before: UNSAVED if it is the caller's now."""
        return int(self._lib.phos_chunks_claim(self._shared.address, chunk))

    def saved(self, chunk: int) -> None:
        """From now on anybody may write to the chunk."""
        self._lib.phos_chunks_saved(self._shared.address, chunk)

    def close_window(self) -> None:
        """Nobody waits, nobody traces any more."""
        self._lib.phos_chunks_close(self._shared.address)

    def close(self) -> None:
        """Give the memory back; frontends keep theirs."""
        self._shared.close()


@dataclass(frozen=True)
class PoolShape:
    """A shadow pool: the process's number of the GPU, slots, and bytes of memory."""

    device: int
    slots: int
    size: int


class WindowTable:
    """One process's part of a window."""

    def __init__(
        self,
        process: int,
        blocks: Sequence[tuple[int, int, int]],
        pools: Sequence[PoolShape],
        queue: int,
        *,
        prioritise: bool,
        mode: int = COW,
        order: int = 0,
    ) -> None:
        """``blocks``: (number in the process's session, bytes, first chunk); ``queue``, ``order``: their lengths."""
        self.process = process
        self.pools = list(pools)
        self.first_slots = [sum(p.slots for p in pools[:i]) for i in range(len(pools))]
        self._lib = library()
        slots = sum(p.slots for p in pools)
        size = self._lib.phos_window_size(len(blocks), len(pools), slots, queue, order)
        self._shared = _Shared("phos-window", size)
        address = self._shared.address
        self._view = _View()
        self.address = ctypes.addressof(self._view)
        """For native code: of the struct phos_window_view."""
        self._lib.phos_window_begin(
            self.address, address, process, len(blocks), len(pools), slots, queue, order, int(prioritise), mode
        )
        for index, (number, bytes_, first) in enumerate(blocks):
            self._lib.phos_window_set_block(address, index, number, bytes_, first)
        for index, pool in enumerate(pools):
            self._lib.phos_window_set_pool(address, index, pool.device, self.first_slots[index], pool.slots, pool.size)
        self._head = ctypes.c_uint32(0)
        self._touched_head = ctypes.c_uint32(0)

    @property
    def descriptor(self) -> int:
        """The memfd."""
        return self._shared.descriptor

    def next_touched(self) -> tuple[int, bool] | None:
        """The next chunk that the process touched for the first time, and whether that may have been by writing.

        One that was read first comes again when it is written to. One caller at a time.
        """
        touch = self._lib.phos_window_next_touched(self.address, ctypes.byref(self._touched_head))
        return None if touch < 0 else (int(touch) & ~TOUCH_WRITES, bool(touch & TOUCH_WRITES))

    def loading(self) -> Loading:
        """How far a lazily restored process is."""
        loading = Loading()
        self._lib.phos_window_loading(self._shared.address, ctypes.byref(loading))
        return loading

    def next_wanted(self) -> int | None:
        """The next chunk that the process wants to be seen to; one caller at a time."""
        chunk = self._lib.phos_window_next(self.address, ctypes.byref(self._head))
        return None if chunk < 0 else int(chunk)

    def ticket(self, slot: int) -> int:
        """What the GPU sets a slot's flag to once its copy has been made."""
        return int(self._lib.phos_window_ticket(self.address, slot))

    def free_slot(self, slot: int) -> None:
        """The process may use the slot again."""
        self._lib.phos_window_free_slot(self.address, slot)

    def transferring(self, pool: int, flags: int) -> int:
        """Bit 0: a call that moves data is under way. Bit 1: a queued transfer has not ended, as far as is known.

        ``flags`` is the host address of the pool's flags as last read.
        """
        return int(self._lib.phos_window_transferring(self.address, pool, self.pools[pool].slots, flags))

    def faulted(self) -> int:
        """Bit p: the context that copies to pool p has an error; what is not copied yet never will be, nor changed."""
        return int(self._lib.phos_window_faulted(self._shared.address))

    def culprit(self) -> str:
        """The first call that might write anywhere, for which the process waited until all was saved; empty: none."""
        name = ctypes.create_string_buffer(RECENT_NAME)
        self._lib.phos_window_culprit(self._shared.address, name)
        return name.value.decode(errors="replace")

    def counts(self) -> Counts:
        """What the process's calls met with so far."""
        counts = Counts()
        self._lib.phos_window_counts(self._shared.address, ctypes.byref(counts))
        return counts

    def close(self) -> None:
        """Give the memory back."""
        self._shared.close()
