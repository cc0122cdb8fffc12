"""What is saved next, during a window: first what an application waits for or has copied aside."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phos.gpu_engine.copy_work import Piece
from phos.gpu_engine.cow.chunk_table import SAVED, ChunkTable
from phos.gpu_engine.cow.shadows import Shadows, Window
from phos.gpu_engine.errors import Mispredicted
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.gpu_engine.save_places import SavePlace
from phos.gpu_engine.save_plan import PoolFlags, SavePlan

STEP_ASIDE_SECONDS = 0.01
"""So long phosd's copies wait for the application's at a stretch."""

STEP_ASIDE_PAUSE = 0.1
"""So long they then go all the same: a transfer that is queued behind a long kernel is in nobody's way."""

STALL_WORKERS = 4
"""So many workers append to files while the processes stand still. More of them save more by then, but CRIU and the
driver, which the processes wait for, go slower for it."""

TURN_BYTES = 2 << 20
"""So much is copied at a time while processes are brought back (save_loop.c)."""


ATTACH_SECONDS = 0.1
"""So long copies stand back at most while a process maps its memory, for which it stands still: even copies that take
turns double the time of that, and what would be copied meanwhile is not much. Who asks for a copy gets it."""


class ChunkFeed:
    """The chunks of a checkpoint: a plan for what is copied into memory of the image's, and a
    :class:`~phos.gpu_engine.copy_work.Source` over it for what is appended to files.

    A chunk comes from where its content of *t1* is: from the original, which nobody writes to before it is marked as
    saved, or from a shadow slot once the GPU has made that copy.
    """

    def __init__(
        self,
        table: ChunkTable,
        places: Sequence[SavePlace],
        order: Sequence[int],
        windows: Sequence[Window],
        expected: Sequence[bytes] | None,
        *,
        prioritise: bool,
        join_bytes: int = CHUNK_BYTES,
        zeros: Sequence[int] | None = None,
    ) -> None:
        """``order`` has every chunk once; ``expected``: content hashes at *t1*, or None for no validation.

        ``zeros``: the chunks that are zeros by these, if somebody has looked.
        ``join_bytes``: neighbours that nobody waits for may be taken together, up to so many bytes.
        """
        self._table = table
        self.places = places
        self.plan = SavePlan(
            places,
            order,
            expected,
            join_bytes=join_bytes,
            zeros=zeros,
            table=table,
            windows=[window.table for window in windows],
            pools=[
                PoolFlags(pool.flags, number, at, pool.slots, pool.device)
                for number, window in enumerate(windows)
                for at, pool in enumerate(window.pools.pools)
            ],
            aside=(STEP_ASIDE_SECONDS, STEP_ASIDE_PAUSE) if prioritise and windows else None,
        )
        self.shadows = Shadows(table, windows, self.plan)
        """To be followed while pieces are taken."""
        self.validates = expected is not None
        self._runs_on = threading.Event()
        self._lock = threading.Lock()  # guards _attaching
        self._attaching = 0
        self.table = table.address
        self.changing = self.plan.changing_address if self.validates else 0

    def workers(self) -> int | None:
        """How many may append now; None: all."""
        return None if self._runs_on.is_set() else STALL_WORKERS

    def take(self) -> Piece | None:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        self.shadows.check()
        return self.plan.take()

    def in_turns(self) -> int:
        """How many pieces were copied while processes were brought back, into memory of the image's."""
        return self.plan.in_turns

    def bringing_back(self) -> None:
        """Until all run on, copies take turns: the driver and those that map memory need the copy engines as well."""
        self.plan.in_parts(TURN_BYTES)

    def attaching(self) -> None:
        """A process is about to get its memory. Until the first has, what is saved need not be compared."""
        self.plan.may_change()
        with self._lock:
            self._attaching += 1
            self.plan.hold(ATTACH_SECONDS)

    def attached(self) -> None:
        """It has mapped it."""
        with self._lock:
            self._attaching = max(0, self._attaching - 1)
            if not self._attaching:
                self.plan.hold(0)

    def runs_on(self) -> None:
        """No process waits any more for what goes on beside the copies: they may take what they can get."""
        self.plan.in_parts(0)
        self.plan.hold(0)
        self._runs_on.set()

    def landed(self, piece: Piece) -> None:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        self.plan.has_landed(piece)

    def changed(self, piece: Piece, number: int, data: memoryview) -> Mispredicted:
        """See :class:`~phos.gpu_engine.copy_work.Source`."""
        place = self.places[piece.chunk + number]
        return Mispredicted(
            f"GPU memory changed before it was saved (block {place.key[1]}, {place.size} bytes at {place.offset}): "
            "a kernel wrote where no guess said it would."
        )

    def unsaved(self) -> int:
        """How many chunks are not saved."""
        return sum(self._table.state(chunk) != SAVED for chunk in range(len(self.places)))
