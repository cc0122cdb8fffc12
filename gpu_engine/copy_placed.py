"""Copying GPU memory into memory of the image's own: what is done beside the copies, which are native (save_plan.py).

A processor compares at a tenth of the rate at which a GPU writes (3 to 5 GB/s of 50 on an H100 machine), and who waits
to write to a chunk waits for its copy only. So the copies go on by themselves; what has come is told to the image, and
compared where it may have changed too early, by workers, few while processes compute, and in the end by all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from phos.gpu_engine.copy_loop import first_changed
from phos.gpu_engine.copy_out import kind_of
from phos.gpu_engine.copy_trace import CopyTrace
from phos.gpu_engine.copy_work import Piece, Sink
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.gpu_engine.save_plan import Pump, SavedPiece, SavePlan
from phos.images.mapping import view_of

REST_SECONDS = 0.01
"""After so long who rests looks whether there is anything left to rest for."""

Changed = Callable[[Piece, int, memoryview], Exception]
"""What to fail with because a chunk of a piece, counted from its beginning, has not the hash that it should; the memory
is what came instead."""


class PlacedSave:
    """One job. Any thread."""

    def __init__(
        self,
        plan: SavePlan,
        sink: Sink,
        changed: Changed | None,
        trace: CopyTrace | None = None,
        settling: threading.Event | None = None,
    ) -> None:
        """``changed`` None: nothing is compared. ``settling``: set while pieces that have come may be seen to."""
        self.plan = plan
        self._settling = settling
        self._sink = sink
        self._changed = changed
        self._trace = trace
        self._lock = threading.Lock()  # guards all below, and reading the pumps' records
        self._pumps: list[Pump] = []
        self._running = 0
        self._failure: BaseException | None = None

    def begin(self, pumps: Sequence[Pump]) -> None:
        """These are about to copy; :meth:`ended` is told of each."""
        self._pumps = list(pumps)
        self._running = len(self._pumps)

    def ended(self, failure: BaseException | None) -> None:
        """One of them has ended."""
        with self._lock:
            self._running -= 1
            self._failure = self._failure or failure
            if failure is not None:
                self.plan.break_()  # the others need not go on

    def copied(self) -> bool:
        """Whether all has been copied.

        Raises: what a copy failed with.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return not self._running

    def rests(self) -> bool:
        """Whether nobody is to see to anything; who asks is kept until that has changed, or for a moment."""
        return self._settling is not None and not self._settling.wait(REST_SECONDS)

    def one(self, worker: int) -> int:
        """See to a piece that has come: its bytes, or 0: there is none now. Not while it :meth:`rests`.

        Raises: what ``changed`` says, or the sink raises.
        """
        with self._lock:
            saved = next(filter(None, (pump.next_record() for pump in self._pumps)), None)
        if saved is None:
            return 0
        piece = saved.piece
        self._sink.write_placed(piece.key, piece.offset, piece.size, saved.to, piece.hashes)
        if self._trace is not None:
            self._trace.add(
                worker, saved.taken, saved.taken, saved.landed, [(piece.size, kind_of(piece), piece.urgent)]
            )
        self._compare(worker, saved)
        return piece.size

    def _compare(self, worker: int, saved: SavedPiece) -> None:
        piece = saved.piece
        if self._changed is None or piece.hashes is None or not saved.changing or not saved.to:
            return
        began = time.perf_counter()
        number = first_changed(saved.to, piece.size, CHUNK_BYTES, b"".join(piece.hashes))
        if number >= 0:
            raise self._changed(piece, number, view_of(saved.to, piece.size))
        if self._trace is not None:
            self._trace.checked(worker, began, piece.size)
