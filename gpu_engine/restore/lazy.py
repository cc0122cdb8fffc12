"""Lazy restore: the processes compute while their memory is still being loaded (paper §6, DESIGN §4).

Physical memory is created at once, and data flows into it while CRIU and the driver work. A process attaches as soon as
its driver's part is back; its calls are traced (frontend/window_lazy.c), wait for the chunks that they may touch, and
those jump the queue. Was a guess wrong in a strict window, the GPU faults; then the processes are ended and the restore
counts as mispredicted: it can be had eagerly, from the same image.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from contextlib import ExitStack, closing

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import Cancelled
from phos.gpu_engine.cow.chunk_table import LAZY, STRICT, ChunkTable, WindowTable
from phos.gpu_engine.errors import Mispredicted
from phos.gpu_engine.fill_plan import FillPlan, Places
from phos.gpu_engine.job_states import MISPREDICTED
from phos.gpu_engine.restore.base import PARKED, UNDER_WAY, Restore
from phos.gpu_engine.restore.filling import Filling
from phos.gpu_engine.restore.plan import places_of
from phos.gpu_engine.restore.settings import LazySettings
from phos.gpu_engine.restore.sources import Manner, manner
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.gpu_engine.touch_order import Touched, TouchOrder, from_messages, read_beside, write_beside
from phos.images.extents import Extent

log = logging.getLogger(__name__)

END_SECONDS = 60.0
"""How long all processes may take to give themselves access to everything, and to look for faults."""

WATCH_SECONDS = 0.005
"""How often to look whether a guess was wrong."""


class LoadWindow:
    """One process's window. Implements :class:`~phos.gpu_engine.process.TracingWindow`."""

    loads = True

    def __init__(self, table: WindowTable, chunks: ChunkTable, *, strict: bool) -> None:
        self.table = table
        self.shut = strict
        self._chunks = chunks
        self._there = threading.Event()

    def attaching(self) -> None:
        """See :class:`~phos.gpu_engine.process.TracingWindow`."""

    def descriptors(self) -> list[int]:
        """See :class:`~phos.gpu_engine.process.TracingWindow`."""
        return [] if self._there.is_set() else [self._chunks.descriptor, self.table.descriptor]

    def wait_saved(self) -> None:
        """See :class:`~phos.gpu_engine.process.TracingWindow`."""
        self._there.wait()

    def end(self) -> None:
        """All is there."""
        self._there.set()


class LazyRestore(Restore):
    """One restore of an image."""

    mode = "lazy"

    def __init__(
        self,
        directory: int,
        path: str,
        copier: Copier,
        settings: LazySettings,
        order: TouchOrder,
    ) -> None:
        """As :class:`~phos.gpu_engine.restore.base.Restore`; ``order`` is told of what the processes touch first."""
        super().__init__(directory, path, copier)
        self._learnt = order
        self._directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        self._settings = settings
        self._table: ChunkTable | None = None
        self._windows: dict[bytes, LoadWindow] = {}
        self._laid_out = False  # set once, by the loading thread: the sessions have their windows
        self._places: Places[Extent] | None = None
        self._plan: FillPlan[Extent] | None = None  # what is loaded when, once that is known
        self._counts: dict[str, int] = {}
        self._counting = threading.Lock()  # guards the tables against being closed while they are read, and _counts

    def suits(self) -> bool:
        """Whether the image's chunks are those of this version's windows; else it has to be restored eagerly."""
        return all(table.chunk_size == CHUNK_BYTES for table in self._image.blocks.values())

    def close(self) -> None:
        """See :class:`~phos.gpu_engine.restore.base.Restore`."""
        os.close(self._directory)
        super().close()

    def _prepare(self, blocks: list[Block]) -> Filling:
        self._lay_out(blocks)
        how = manner(self._image, self._copier, len({block.device for block in blocks}))
        self._plan = plan = self._make_plan(how)
        return self._filling(plan, how, blocks)

    def _lay_out(self, blocks: list[Block]) -> None:
        """Number the chunks, give each an address of phosd's, and make the tables that the processes are to share."""
        addresses = {block.key: self._memory.reserve(block) for block in blocks}
        self._places = places = places_of(self._image, blocks, addresses, self._image_names)
        first = dict(zip(places.blocks, places.firsts, strict=True))
        windows: dict[bytes, LoadWindow] = {}
        with ExitStack() as undo:
            shared = undo.enter_context(closing(ChunkTable(CHUNK_BYTES, len(places))))
            for number, process in enumerate(self.processes):
                records = []
                for b in process.message.blocks:
                    key = process.imports.get(b.block, (process.session, b.block))
                    records.append((b.block, b.size, first[key]))
                chunks = sum(-(-size // CHUNK_BYTES) for _, size, _ in records)
                mode = STRICT if self._settings.strict else LAZY
                table = WindowTable(number, records, [], chunks, prioritise=False, mode=mode, order=chunks)
                undo.callback(table.close)
                windows[process.session] = LoadWindow(table, shared, strict=self._settings.strict)
            undo.pop_all()
        with self._counting:
            self._table, self._windows = shared, windows
        for session, window in windows.items():
            self._sessions[session].trace(window)
        self._laid_out = True
        with self._lock:
            self._changed.notify_all()
            if self.state not in (*PARKED, *UNDER_WAY):  # it failed before there were windows that could be ended
                self._release_windows()

    def _may_attach(self) -> bool:
        return self._laid_out and self.state in UNDER_WAY

    def _fill(self, filling: Filling) -> None:
        threading.Thread(target=self._watch, name="watch-guesses", daemon=True).start()
        try:
            super()._fill(filling)
        except Cancelled:  # the processes are dead; what they touched first is worth knowing all the same
            self._end_windows()
            raise

    def _make_plan(self, how: Manner) -> FillPlan[Extent]:
        """What is loaded when."""
        assert self._table is not None
        assert self._places is not None
        tables = [window.table for window in self._windows.values()]
        return FillPlan(self._places, self._order(self._places), how.at_once, self._table, tables)

    def _filling(self, plan: FillPlan[Extent], how: Manner, blocks: list[Block]) -> Filling:
        """Blocks are mapped as they are due."""
        by_key = {block.key: block for block in blocks}
        in_order = [by_key[key] for key in plan.first_use]
        return Filling(self._image, self._copier, plan, how, self._memory, in_order, {CHUNK_BYTES})

    def _filled(self) -> None:
        super()._filled()
        with self.timeline.phase("end windows", concurrent=True):
            self._end_windows()

    def _order(self, places: Places[Extent]) -> list[int]:
        """What was touched first; then zeros, which cost next to nothing; then the rest, as it was allocated."""
        numbers = list(range(len(places)))
        if self._settings.order == "random":
            random.shuffle(numbers)
            return numbers
        first: list[int] = []
        if self._settings.order == "recorded":
            recorded = from_messages(self._image.inventory.order)
            beside = read_beside(self._directory, self._image.inventory.image_id)
            ends = [*places.firsts[1:], len(places)]
            of_block = {self._in_image(key): (places.firsts[n], ends[n]) for n, key in enumerate(places.blocks)}
            for key, number in [*beside, *recorded]:
                start, end = of_block.get(key, (0, 0))
                if start + number < end:
                    first.append(start + number)
        return list(dict.fromkeys([*first, *(n for n in numbers if places.zeros(n)), *numbers]))

    def _learn(self) -> None:
        """What the processes touched first: for checkpoints of them, and for this image's next restore."""
        blocks = set(self._places.blocks) if self._places is not None else set()
        for session, window in self._windows.items():
            touched: list[Touched] = []
            while self._places is not None and (touch := window.table.next_touched()) is not None:
                if touch[0] < len(self._places):
                    touched.append(self._places.key(touch[0]))
            self._learnt.learn(session, touched, blocks)
        if order := self._learnt.of(self._windows):
            named = [(self._in_image(key), chunk) for key, chunk in order]
            # It ends where all was there: what earlier restores have seen, with more time, comes behind it.
            image_id = self._image.inventory.image_id
            known = [place for place in read_beside(self._directory, image_id) if place[0] in self._image.blocks]
            write_beside(self._directory, image_id, dict.fromkeys([*named, *known]))

    def fail(self, reason: str, state: str = "failed") -> None:
        """See :class:`~phos.gpu_engine.restore.base.Restore`."""
        super().fail(reason, state)
        self._release_windows()

    def _release_windows(self) -> None:
        """Nobody need wait for the memory: it is there, or the processes are dead."""
        for window in self._windows.values():
            window.end()

    def need(self, key: BlockKey, seconds: float) -> bool:
        """See :class:`~phos.gpu_engine.restore.base.Restore`."""
        deadline = time.monotonic() + seconds
        while not self._loaded.is_set() and not self._over.is_set():
            with self._counting:
                if self._table is not None and self._plan is not None and self._plan.want(key):
                    return True
            if time.monotonic() > deadline:
                return False
            self._over.wait(WATCH_SECONDS)
        self._require_whole(key)
        return True

    def _end_windows(self) -> None:
        """All is there: nobody waits any more, everything has access, and whoever guessed wrong has said so.

        Not one that is stopped: it finds that out when it goes on, and ends itself then (frontend/window_lazy.c).
        """
        assert self._table is not None
        self._table.close_window()
        self._release_windows()
        until = time.monotonic() + END_SECONDS
        for wait in [self._sessions[session].untrace() for session in self._windows]:
            try:
                wait(max(0.0, until - time.monotonic()))
            except Mispredicted as error:
                self.fail(f"{error} It has been ended; restore it again.")
        self._look()
        with self._counting:
            self._counts = self._count()
            self._learn()
            culprits = sorted({name for window in self._windows.values() if (name := window.table.culprit())})
            self._close_tables()
        for name in culprits:
            log.info(
                "%s: %s may touch anything, as far as is known: it waited until everything was there", self.path, name
            )
        for session in self._windows:
            report = self._sessions[session].twin_report()
            if report is not None and report.violations:
                log.warning("%s: guesses were wrong, and their kernels waited: %s", self.path, report.named())
        log.info("%s: while loading: %s", self.path, ", ".join(f"{k} {v}" for k, v in self._counts.items()))

    def _close_tables(self) -> None:
        """With _counting held."""
        if self._table is not None:
            for window in self._windows.values():
                window.table.close()
            self._table.close()
            self._table = None

    def _load(self, borrowed: list[Block]) -> None:
        try:
            super()._load(borrowed)
        finally:
            os.close(self._directory)
            with self._counting:  # of one that failed: its processes have been ended
                if self._table is not None:
                    self._counts = self._count()
                self._close_tables()

    def _watch(self) -> None:
        while self.state in UNDER_WAY and not self._loaded.is_set():
            self._look()
            time.sleep(WATCH_SECONDS)

    def _look(self) -> None:
        """Whether a guess was wrong."""
        for process in self.processes:
            with self._counting:
                if self._table is None:
                    return
                loading = self._windows[process.session].table.loading()
            twins = self._sessions[process.session].twin_report()
            if twins is not None and twins.trapped:
                self.fail(
                    f"Process {process.pid} ({process.message.executable}) waited in vain for GPU memory that no guess "
                    f"named: {twins.named()}. It has been ended; restore it eagerly.",
                    MISPREDICTED,
                )
                return
            if loading.fault:
                named = ", ".join(loading.last_kernels()) or "none"
                self.fail(
                    f"Process {process.pid} ({process.message.executable}) touched GPU memory that was not restored "
                    f"yet and that no guess named (error {loading.fault}). Kernels launched last, the newest first: "
                    f"{named}. It has been ended; restore it eagerly.",
                    MISPREDICTED,
                )
                return

    def window_counts(self) -> dict[str, int]:
        """What calls met with, added up over the processes (frontend/window_table.h), and what phosd did for them."""
        with self._counting:
            return self._count() if self._table is not None else dict(self._counts)

    def _count(self) -> dict[str, int]:
        total: dict[str, int] = {}
        launched: list[int] = []
        for window in self._windows.values():
            loading = window.table.loading()
            wanted = ("calls", "call_ns", "waits", "wait_ns", "anything")
            found = {k: v for k, v in window.table.counts().as_dict().items() if k in wanted}
            found |= {name: int(getattr(loading, name)) for name in ("opened", "open_ns", "launches")}
            for name, value in found.items():
                total[name] = total.get(name, 0) + value
            if loading.first_launch_ns:
                launched.append(int(loading.first_launch_ns))
        for session in self._windows:
            for name, value in self._sessions[session].twin_counts().items():
                total[name] = total.get(name, 0) + value
        if self._plan is not None:
            total["on_demand"], total["on_demand_bytes"] = self._plan.on_demand()
        if launched:
            total["first_launch_ns"] = min(launched)
        return total
