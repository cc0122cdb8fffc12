"""Bulk copies between GPU memory and an image, through a pinned ring of bounded size.

Each worker thread owns two slots of the ring and one stream a GPU: while it writes one slot to the image (or fills one
from it), the copy engine works on the other. The streams of all workers feed one copy engine, so it always has work
queued. All copies to a GPU share one (fill_loop.c says why).
What is appended to files, Python decides, for several pieces at a time (copy_loop.c); loading is native (fill_loop.c),
and so is copying into memory of the image's own, for which there is no ring and one thread for each GPU (save_loop.c).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from phos.gpu_engine import driver
from phos.gpu_engine.arrival_rooms import ArrivalRooms
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.content_hash import ContentHasher, bytes_to_copy, chunk_count
from phos.gpu_engine.copy_in import Filler
from phos.gpu_engine.copy_lane import NativeLane
from phos.gpu_engine.copy_out import Saver
from phos.gpu_engine.copy_placed import PlacedSave
from phos.gpu_engine.copy_trace import CopyTrace
from phos.gpu_engine.copy_work import (
    SLOTS,
    Cancelled,
    Item,
    Piece,
    Progress,
    Reading,
    Sink,
    Source,
    Span,
    known_spans,
)
from phos.gpu_engine.errors import OUT_OF_MEMORY, DriverError
from phos.gpu_engine.fill_plan import FillLanes, FillPlan
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.ring import CHUNK_BYTES, MAXIMUM_RING, default_threads, wanted_bytes
from phos.gpu_engine.save_places import SavePlaces, places_of
from phos.gpu_engine.save_plan import Pump, SavePlan, events_of_a_pump
from phos.gpu_engine.shared_workers import Lease, SharedWorkers

log = logging.getLogger(__name__)

SETTLING_WORKERS = 3
"""So many see to what has come into memory of an image's while processes stand still or compute: more take memory
bandwidth from the copies, and processors from the processes."""

SETTLING_SECONDS = 1e-3
"""How long they wait if there is nothing."""

Taken = TypeVar("Taken")


class _Spans:
    """Whole blocks, one slot's worth at a time."""

    table = changing = 0

    def __init__(self, spans: Iterable[Span], mappings: MappedBlocks) -> None:
        self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        for s in spans:
            address = 0 if s.zero else mappings[s.block.key].address + s.offset
            self._pieces.put(Piece(s.block.key, s.offset, s.size, address, s.block.device, hashes=s.hashes))

    def take(self) -> Piece | None:
        try:
            return self._pieces.get_nowait()
        except queue.Empty:
            return None

    def landed(self, piece: Piece) -> None:
        """Nobody waits for it."""

    def changed(self, piece: Piece, number: int, data: memoryview) -> Exception:
        """It cannot be: nobody looks."""
        return ValueError(f"chunk {number} of a piece of block {piece.key[1]} was compared, and nothing asks for that")


class _Worker:
    """One worker's slots and streams."""

    def __init__(self, number: int, ring: driver.PinnedBuffer, slot_bytes: int) -> None:
        self.number = number
        base = number * 2 * slot_bytes
        self.slots = [
            (ring.address + base + i * slot_bytes, ring.view[base + i * slot_bytes :][:slot_bytes]) for i in (0, 1)
        ]
        self.lanes: dict[int, driver.Lane] = {}
        self.copy_lanes: dict[driver.Lane, NativeLane] = {}
        self._used: set[driver.Lane] = set()  # since the last quiet moment
        self._events: list[Any] = []

    def copy_lane(self, device: int) -> NativeLane:
        """This worker's stream on a GPU; its context becomes current."""
        context = driver.context(device)
        context.use()
        if device not in self.lanes:
            self.lanes[device] = driver.Lane(context)
        return self._on(self.lanes[device])

    def copy_lane_on(self, lane: driver.Lane, device: int) -> NativeLane:
        """This worker's part of a stream that is not its own; the GPU's context becomes current."""
        driver.context(device).use()
        return self._on(lane)

    def _on(self, lane: driver.Lane) -> NativeLane:
        if lane not in self.copy_lanes:
            events = [lane.event() for _ in range(SLOTS)]
            self._events += events
            self.copy_lanes[lane] = NativeLane(lane, events, [address for address, _ in self.slots])
        self._used.add(lane)
        return self.copy_lanes[lane]

    @contextmanager
    def quiet_afterwards(self) -> Iterator[None]:
        """Whatever happens meanwhile, nothing of it is under way afterwards, nor uses the slots.

        What fails then is raised, unless something has failed already, which says why.
        """
        failing = True
        try:
            yield
            failing = False
        finally:
            while self._used:
                try:
                    self._used.pop().synchronise()
                except DriverError:
                    if not failing:
                        raise

    def release(self) -> None:
        """Give the streams and events back, and let go of the ring."""
        for event in self._events:
            driver.destroy_event(event)
        for lane in self.lanes.values():
            lane.destroy()
        for _, view in self.slots:
            view.release()


def _taking(
    take: Callable[[], Taken | None], lease: Lease[_Worker], cancelled: threading.Event
) -> Callable[[], Taken | None]:
    """How a worker takes from a source: until it ends, or the worker is wanted elsewhere."""

    def next_one() -> Taken | None:
        if cancelled.is_set():
            raise Cancelled
        if lease.leave():
            return None
        taken = take()
        if taken is None:
            lease.over()
        return taken

    return next_one


class Copier:
    """The ring and its workers, which jobs share (shared_workers.py). Methods may be called from any thread."""

    def __init__(self, threads: int | None = None, ring_bytes: int | None = None) -> None:
        self.threads = threads or default_threads()
        wanted = min(ring_bytes, MAXIMUM_RING) if ring_bytes else wanted_bytes(self.threads)
        # A slot holds whole chunks: fewer workers where the ring is too small for all.
        self.threads = max(1, min(self.threads, wanted // (2 * CHUNK_BYTES)))
        self.slot_bytes = max(1, wanted // (2 * self.threads * CHUNK_BYTES)) * CHUNK_BYTES
        self.hasher = ContentHasher()
        self.rooms = ArrivalRooms(self.hasher, self.threads)
        self._ring: driver.PinnedBuffer | None = None
        self._workers: list[_Worker] = []
        self._shared: SharedWorkers[_Worker] | None = None
        self._lanes: dict[tuple[int, bool], driver.Lane] = {}  # by GPU, and whether they are for what comes to it
        self._making = threading.Lock()  # guards _ring, _workers, _shared and _lanes

    @property
    def ring_bytes(self) -> int:
        """Pinned memory in use; bytes."""
        return self._ring.size if self._ring else 0

    def prepare(self, device: int) -> None:
        """Pin the ring ahead of the first job (1 GiB takes about 0.5 s on an H100 machine), and make room for hashes.

        Raises:
            DriverError: the host has too little memory left, or the GPU refuses; not that it is full.
        """
        self.prepare_workers(device)
        try:
            self.rooms.prepare(device)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            log.info("GPU %d has no memory for hashes yet: %s", device, error)

    def prepare_workers(self, device: int) -> None:
        """The ring and the threads alone.

        Raises:
            DriverError: the host has too little memory left, or the GPU refuses.
        """
        self._prepare(device).prepare()

    def _prepare(self, device: int) -> SharedWorkers[_Worker]:
        with self._making:
            if self._shared is None:
                driver.context(device).use()
                self._ring = driver.PinnedBuffer(2 * self.threads * self.slot_bytes)
                self._workers = [_Worker(n, self._ring, self.slot_bytes) for n in range(self.threads)]
                self._shared = SharedWorkers(self._workers)
            return self._shared

    def shared_lane(self, device: int, *, inward: bool = False) -> driver.Lane:
        """A stream for what goes into the image's own memory, and for flags of shadows; ``inward``: for loading."""
        with self._making:
            if (device, inward) not in self._lanes:
                self._lanes[device, inward] = driver.Lane(driver.context(device))
            return self._lanes[device, inward]

    def release(self) -> None:
        """Give the ring and all else back. No job may be under way."""
        self.rooms.release()
        with self._making:
            if self._shared is not None:
                self._shared.close()
            for worker in self._workers:
                worker.release()
            for lane in self._lanes.values():
                lane.destroy()
            self._workers, self._shared, self._lanes = [], None, {}
            if self._ring is not None:
                self._ring.free()
                self._ring = None

    def save(
        self,
        blocks: Sequence[Block],
        sink: Sink,
        progress: Progress,
        cancelled: threading.Event,
        mapped: MappedBlocks | None = None,
        hashes: Sequence[bytes] | None = None,
        trace: CopyTrace | None = None,
    ) -> None:
        """Copy whole blocks out.

        ``mapped`` may hold some of them already, and stays the caller's. ``hashes``: of all chunks of the blocks, in
        order, if they are known; chunks of zeros are not copied then.

        Raises:
            Cancelled: ``cancelled`` was set.
            Exception: the first that ``write`` or the driver raised; the others are stopped.
        """
        if not blocks:
            return
        mappings = mapped or MappedBlocks()
        try:
            mappings.add(blocks)
            if sink.placeable and bytes_to_copy(blocks, hashes) <= sink.placeable:
                places = SavePlaces(places_of(blocks, mappings))
                plan = SavePlan(places, range(len(places)), hashes, join_bytes=sink.place_limit)
                placed = PlacedSave(plan, sink, None, trace)
                self.save_placed(placed, sink, progress, cancelled)
                self.settle_placed(placed, progress, cancelled)
            else:
                spans = _Spans(self._spans(blocks, hashes), mappings)
                self.drain(spans, blocks[0].device, sink, progress, cancelled, trace=trace)
        finally:
            if mapped is None:
                mappings.close()

    def drain(
        self,
        source: Source,
        device: int,
        sink: Sink,
        progress: Progress,
        cancelled: threading.Event,
        workers: Callable[[], int | None] = lambda: None,
        trace: CopyTrace | None = None,
    ) -> None:
        """Append whatever ``source`` gives to files, until it ends; ``device`` is any GPU that has a part in it.

        ``workers``: how many may take part by now, which may become more; None: all. ``trace`` is told of each piece.

        Raises: as :meth:`save`, and what the source raises.
        """

        def work(worker: _Worker, lease: Lease[_Worker]) -> None:
            def saved(size: int) -> None:
                progress.done_by_worker[worker.number] += size

            with worker.quiet_afterwards():
                Saver(worker.number, worker.slots, worker.copy_lane, source, sink, saved, trace).run(
                    _taking(source.take, lease, cancelled)
                )

        self._run(work, device, cancelled, workers)

    def save_placed(self, save: PlacedSave, sink: Sink, progress: Progress, cancelled: threading.Event) -> None:
        """Copy all of a plan into memory of the sink's, and see to what has come meanwhile; the rest is for
        :meth:`settle_placed`.

        Raises: as :meth:`save`, and what seeing to it raises. Nothing is under way then.
        """
        plan = save.plan
        if not plan.devices:
            return
        plan.give_room(sink.take_room())

        def work(worker: _Worker, lease: Lease[_Worker]) -> None:
            while not (save.copied() or lease.leave()):
                if save.rests():
                    continue
                if size := save.one(worker.number):
                    progress.done_by_worker[worker.number] += size
                else:
                    time.sleep(SETTLING_SECONDS)
            if save.copied():
                lease.over()

        with self._pumping(save):
            self._run(work, plan.devices[0], cancelled, lambda: SETTLING_WORKERS)
        sink.return_room(plan.room_end)

    @contextmanager
    def _pumping(self, save: PlacedSave) -> Iterator[None]:
        """Meanwhile a thread for each GPU copies; afterwards nothing is under way."""
        lanes: list[driver.Lane] = []
        events: list[Any] = []
        threads: list[threading.Thread] = []

        def pump(one: Pump) -> None:
            failure: BaseException | None = None
            try:
                driver.context(one.device).use()
                one.run()
            except BaseException as error:
                failure = error
            save.ended(failure)

        failing = True
        try:
            pumps: list[Pump] = []
            for device in save.plan.devices:
                driver.context(device).use()
                lanes.append(self.shared_lane(device))
                its_own = [lanes[-1].event() for _ in range(events_of_a_pump())]
                events += its_own
                pumps.append(Pump(save.plan, device, lanes[-1].handle, its_own))
            save.begin(pumps)
            for one in pumps:
                thread = threading.Thread(target=pump, args=(one,), name=f"save-{one.device}")
                thread.start()
                threads.append(thread)
            yield
            failing = False
        finally:
            if failing:
                save.plan.break_()
            for thread in threads:
                thread.join()
            problems: list[DriverError] = []
            ends: list[Callable[[], None]] = [lane.synchronise for lane in lanes]
            ends += [partial(driver.destroy_event, event) for event in events]
            for end in ends:
                try:
                    end()
                except DriverError as error:
                    problems.append(error)
            # What has failed before says why.
            if problems and not failing:
                raise problems[0]

    def settle_placed(self, save: PlacedSave, progress: Progress, cancelled: threading.Event) -> None:
        """See to what :meth:`save_placed` has left.

        Raises: likewise.
        """

        def work(worker: _Worker, lease: Lease[_Worker]) -> None:
            while not lease.leave():
                if save.rests():
                    continue
                size = save.one(worker.number)
                if not size:
                    lease.over()
                progress.done_by_worker[worker.number] += size

        if save.plan.devices:
            self._run(work, save.plan.devices[0], cancelled, lambda: None)

    def _run(
        self,
        work: Callable[[_Worker, Lease[_Worker]], None],
        device: int,
        cancelled: threading.Event,
        workers: Callable[[], int | None],
    ) -> None:
        if not self._prepare(device).run(work, cancelled.is_set, workers):
            raise Cancelled

    def _spans(self, blocks: Sequence[Block], hashes: Sequence[bytes] | None) -> list[Span]:
        if hashes is None:
            return [
                Span(block, offset, min(self.slot_bytes, block.size - offset))
                for block in blocks
                for offset in range(0, block.size, self.slot_bytes)
            ]
        spans: list[Span] = []
        first = 0
        for block in blocks:
            count = chunk_count(block.size)
            spans += known_spans(block, hashes[first : first + count], self.slot_bytes)
            first += count
        return spans

    def fill(
        self,
        plan: FillPlan[Item],
        reading: Reading[Item],
        progress: Progress,
        cancelled: threading.Event,
        workers: int | None = None,
        trace: CopyTrace | None = None,
    ) -> None:
        """Fill all that a plan names. ``workers``: how many take part; None: all. ``trace`` is told of each piece.

        Raises: as :meth:`save`, and what the reading raises.
        """
        if not plan.devices:
            return
        if reading.check is None:
            plan.places.get_all()
        roams = min(workers or self.threads, self.threads) < len(plan.devices)

        def work(worker: _Worker, lease: Lease[_Worker]) -> None:
            def arrived(size: int) -> None:
                progress.done_by_worker[worker.number] += size

            def leave() -> bool:
                if cancelled.is_set():
                    raise Cancelled
                return lease.leave()

            def lanes(device: int) -> FillLanes:
                shared = self.shared_lane(device, inward=True)
                return FillLanes(worker.copy_lane(device), worker.copy_lane_on(shared, device))

            with worker.quiet_afterwards():
                slots = [view for _, view in worker.slots]
                filler = Filler(worker.number, slots, lanes, plan, reading, arrived, trace, roams=roams)
                if filler.run(leave):
                    lease.over()

        self._run(work, plan.devices[0], cancelled, lambda: workers)
