"""The windows of one checkpoint: tables, pools and the feed, and putting them away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.content_hash import bytes_to_copy, chunk_count
from phos.gpu_engine.copy_work import Sink
from phos.gpu_engine.cow.chunk_table import NO_SLOT, ChunkTable, WindowTable
from phos.gpu_engine.cow.feed import ChunkFeed
from phos.gpu_engine.cow.layout import Layout
from phos.gpu_engine.cow.settings import CowSettings
from phos.gpu_engine.cow.shadow_pool import LentPools, ShadowPool, slots_for
from phos.gpu_engine.cow.shadows import Window
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.process import Detached, GatedProcess
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.gpu_engine.touch_order import FirstTouches, Touched

log = logging.getLogger(__name__)


class ProcessWindow:
    """One process's window. Implements :class:`~phos.gpu_engine.process.TracingWindow`."""

    shut = False
    loads = False

    def __init__(self, table: WindowTable, chunks: ChunkTable, pools: LentPools, feed: ChunkFeed) -> None:
        self.table = table
        self.pools = pools
        self._chunks = chunks
        self._feed = feed
        self._saved = threading.Event()

    def attaching(self) -> None:
        """See :class:`~phos.gpu_engine.process.TracingWindow`."""
        self._feed.attaching()

    def descriptors(self) -> list[int]:
        """See :class:`~phos.gpu_engine.process.TracingWindow`."""
        self._feed.attached()
        if self._saved.is_set():
            return []
        return [self._chunks.descriptor, self.table.descriptor, *(pool.descriptor for pool in self.pools.pools)]

    def wait_saved(self) -> None:
        """See :class:`~phos.gpu_engine.process.TracingWindow`."""
        self._saved.wait()

    def end(self) -> None:
        """All is saved, or given up."""
        self._saved.set()


class Windows:
    """All windows of a checkpoint."""

    def __init__(self, settings: CowSettings, lane: Callable[[int], driver.Lane]) -> None:
        """``lane``: the stream of a GPU in which the flags of shadows are read."""
        self._settings = settings
        self._lane = lane
        self._pools: dict[bytes, LentPools] = {}
        self._windows: dict[bytes, ProcessWindow] = {}
        self._table: ChunkTable | None = None
        self._layout: Layout | None = None
        self._written_before: Sequence[Touched] = ()
        self.feed: ChunkFeed | None = None
        self.pool_bytes = 0
        self.placed = False
        """Whether GPUs write into the image itself."""

    def lend_pools(self, processes: Sequence[GatedProcess]) -> None:
        """While the processes still compute: shadow pools on every GPU that they have memory on."""
        wanted = {p.session: sorted({b.device for b in p.own_blocks()}) for p in processes}
        sharing = {
            device: sum(device in devices for devices in wanted.values()) for d in wanted.values() for device in d
        }
        for process in processes:
            pools: list[ShadowPool] = []
            visible = process.ordinals()
            for device in wanted[process.session]:
                if device not in visible:
                    continue
                try:
                    slots = slots_for(device, self._settings.pool_bytes, sharing[device])
                    if slots is None:
                        log.info("GPU %d: no room for a shadow pool for process %d", device, process.pid)
                        continue
                    slots = min(slots, NO_SLOT - sum(pool.slots for pool in pools))  # those that can be named
                    pools.append(ShadowPool(device, slots, self._lane(device)))
                    self.pool_bytes += pools[-1].slots * CHUNK_BYTES
                except DriverError as error:
                    log.warning("GPU %d: no shadow pool for process %d: %s", device, process.pid, error)
            self._pools[process.session] = LentPools(pools)

    def _pool_devices(self) -> set[int]:
        return {pool.device for pools in self._pools.values() for pool in pools.pools}

    def foresee(self, blocks: Sequence[Block], mapped: MappedBlocks, written_before: Sequence[Touched]) -> None:
        """While the processes still compute, after :meth:`lend_pools`: what :meth:`lay_out` will have to do.

        ``written_before``: what was seen written before, in order.
        """
        self._written_before = written_before
        self._layout = Layout(blocks, mapped, self._pool_devices(), written_before)

    def lay_out(
        self,
        processes: Sequence[GatedProcess],
        detached: dict[bytes, Detached],
        blocks: Sequence[Block],
        mapped: MappedBlocks,
        expected: Sequence[bytes] | None,
        sink: Sink,
    ) -> ChunkFeed:
        """With the processes detached: number the chunks and make the tables. ``sink``: where the data will go."""
        layout, devices = self._layout, self._pool_devices()
        self._layout = None
        if layout is None or not layout.fits(blocks, mapped, devices):
            layout = Layout(blocks, mapped, devices, self._written_before)
        chunks, places = layout.chunks, layout.places
        self._table = ChunkTable(CHUNK_BYTES, len(places))
        windows: list[Window] = []
        for number, process in enumerate(processes):
            pools = self._pools.setdefault(process.session, LentPools([]))
            visible = process.ordinals()
            own = [b for b in detached[process.session].blocks if b.key in chunks]
            records = [(b.number, b.size, chunks[b.key].start) for b in own]
            shapes = [pool.shape(visible[pool.device]) for pool in pools.pools]
            queue = 4 * sum(chunk_count(size) for _, size, _ in records)
            pools.table = WindowTable(
                number, records, shapes, queue, prioritise=self._settings.prioritise, order=queue // 2
            )
            windows.append(Window(pools.table, pools, process.alive))
        zeros = places.zeros(expected) if expected is not None else []
        self.placed = sink.placeable > 0 and bytes_to_copy(blocks, expected) <= sink.placeable
        self.feed = feed = ChunkFeed(
            self._table,
            places,
            layout.order(zeros),
            windows,
            expected,
            zeros=zeros,
            prioritise=self._settings.prioritise,
            join_bytes=sink.place_limit if self.placed else CHUNK_BYTES,
        )
        # All at once: another thread may give the checkpoint up meanwhile, and goes through them.
        self._windows = {
            process.session: ProcessWindow(window.table, self._table, window.pools, feed)
            for process, window in zip(processes, windows, strict=True)
        }
        return feed

    def of(self, process: GatedProcess) -> ProcessWindow:
        """A process's window."""
        return self._windows[process.session]

    def bringing_back(self) -> None:
        """The processes are about to be brought back; :meth:`runs_on` follows."""
        if self.feed is not None:
            self.feed.bringing_back()

    def runs_on(self) -> None:
        """Nobody stands still any more."""
        if self.feed is not None:
            self.feed.runs_on()

    def over(self) -> None:
        """All is saved or given up: nobody waits any more, and nobody begins to trace."""
        if self._table is not None:
            self._table.close_window()
        for window in self._windows.values():
            window.end()

    def touched(self) -> dict[bytes, FirstTouches]:
        """What each process did with its chunks in this window, in the order in which it first did so."""
        if self.feed is None:
            return {session: FirstTouches([], []) for session in self._windows}
        places = [(place.key, place.offset // CHUNK_BYTES) for place in self.feed.places]
        return {session: first_touches(window.table, places) for session, window in self._windows.items()}

    def culprits(self) -> list[str]:
        """Calls that might write anywhere, the first of each process: it waited until everything was saved."""
        return sorted({name for window in self._windows.values() if (name := window.table.culprit())})

    def counts(self) -> dict[str, int]:
        """What the processes met with, added up: struct phos_window_counts, and what phosd did for them."""
        total: dict[str, int] = {}
        for window in self._windows.values():
            for name, value in window.table.counts().as_dict().items():
                total[name] = total.get(name, 0) + value
        if self.feed is not None:
            total["pool_bytes"] = self.pool_bytes
            total["in_turns"] = self.feed.in_turns()
        return total

    def close(self) -> None:
        """Give memory and descriptors back, once nothing is copied any more and every process has been told.

        One that is stopped has its own mappings of tables and pools until it goes on: what its GPU still copies to a
        pool goes to memory that is nobody else's before that.
        """
        self.over()
        self._windows = {}
        self._layout, self._written_before = None, ()
        self.feed = None
        for pools in self._pools.values():
            pools.close()
        self._pools = {}
        if self._table is not None:
            self._table.close()
            self._table = None


def first_touches(table: WindowTable, places: Sequence[Touched]) -> FirstTouches:
    """What a process has noted in its table since this was asked last; ``places``: of each chunk, by its number."""
    found = FirstTouches([], [])
    while (touch := table.next_touched()) is not None:
        chunk, writes = touch
        if chunk < len(places):
            found.touched.append(places[chunk])
            if writes:
                found.written.append(places[chunk])
    return found
