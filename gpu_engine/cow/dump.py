"""A checkpoint by soft copy-on-write: the processes run on as soon as CRIU has dumped its part (paper §4.2, DESIGN §4).

The image is the state at *t1*, when they stood still. What is not saved when they run on is saved while they compute: a
process copies aside what it is about to overwrite (frontend/window_shadow.c); the copier takes that before the rest.
Was a guess wrong, the content hash of *t1* shows it, and there is no image.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine.copy_placed import PlacedSave
from phos.gpu_engine.copy_trace import CopyTrace, tracing
from phos.gpu_engine.copy_work import Cancelled
from phos.gpu_engine.cow.feed import ChunkFeed
from phos.gpu_engine.cow.settings import CowSettings
from phos.gpu_engine.cow.watch import Watch
from phos.gpu_engine.cow.window import Windows
from phos.gpu_engine.errors import CheckpointFailed, DriverError, Mispredicted, PhosError
from phos.gpu_engine.job_states import MISPREDICTED
from phos.gpu_engine.process import GatedProcess
from phos.gpu_engine.stop.dump import Assignment, StopDump
from phos.gpu_engine.stop.tree import BorrowBlocks
from phos.gpu_engine.timeline import STALL, STALL_BEGINS
from phos.gpu_engine.touch_order import TouchOrder

log = logging.getLogger(__name__)

DESCRIBE_SECONDS = 5.0
"""How long a checkpoint waits for access descriptors that are being worked out, for however many processes. Without
one, a launch may write to all that its arguments point to: slower, not wrong."""


END_SECONDS = 5.0
"""How long all processes may take to put their windows away. The image does not need it, but what they have met with is
counted until then; one whose GPU work is long takes as long as that."""


def describe(processes: Sequence[GatedProcess]) -> None:
    """Give each the access descriptors of its kernels, and wait for what is missing :data:`DESCRIBE_SECONDS` in all.

    Processes of one tree mostly have the same modules: those that come later find analysed what the first waited for.
    """
    deadline = time.monotonic() + DESCRIBE_SECONDS
    for process in processes:
        _describe_kernels(process, max(0.0, deadline - time.monotonic()))


def _describe_kernels(process: GatedProcess, seconds: float) -> None:
    """One that has ended meanwhile, or does not answer, is named when it is to come to rest."""
    try:
        process.describe_kernels(seconds)
    except PhosError as error:
        log.info("Process %d is not told what its kernels touch: %s", process.pid, error)


class CowMemory:
    """What outlives a checkpoint: what windows have seen. Training repeats itself.

    ``written``: in which order processes first write to their memory once they run on; so the next checkpoint saves it.
    """

    def __init__(self) -> None:
        self.written = TouchOrder()
        self.touched = TouchOrder()

    def forget(self, session: bytes) -> None:
        """Its process has ended."""
        self.written.forget(session)
        self.touched.forget(session)


class CowDump(StopDump):
    """One concurrent checkpoint of a tree of processes that is to run on."""

    protocol = "cow"
    _joining = "wait for comparing"

    def __init__(self, assignment: Assignment, cow: CowSettings, memory: CowMemory) -> None:
        """As :class:`~phos.gpu_engine.stop.dump.StopDump`."""
        super().__init__(assignment)
        self._cow = cow
        self._memory = memory
        self._windows = Windows(cow, self._copier.shared_lane)
        self._watch = Watch()
        self._laid_out = threading.Event()  # the windows can be opened, or never will
        self._saved = threading.Event()  # all data is in the image, or will not be
        # Set while what has been copied may be told to the image and compared. Not while the processes stand still for
        # CRIU: its plugin waits for answers of phosd's, and threads that take piece after piece would delay them.
        self._settling = threading.Event()
        self._settling.set()
        self._unhashed = False  # nothing would show a wrong guess: the processes stand still until all is saved
        self._ended = False  # the windows
        self._counts: dict[str, int] = {}

    def _prepare(self, borrow: BorrowBlocks) -> None:
        self._begin_to_watch()
        super()._prepare(borrow)
        with self.timeline.phase("prepare the window"):
            describe(self.gated)
            self._windows.lend_pools(self.gated)
        for session, (seen, blocks) in self._watch.seen().items():
            self._memory.touched.learn(session, seen.touched, blocks)
            self._memory.written.learn(session, seen.written, blocks)
        written = self._memory.written.of(process.session for process in self.gated)
        with self._mapping:
            foreseen = [block for process in self.gated for block in process.own_blocks() if block.key in self._mapped]
            foreseen.sort(key=lambda block: block.key)
            self._windows.foresee(foreseen, self._mapped, written)

    @property
    def _hashes_all(self) -> bool:
        return self._cow.validate

    def _begin_to_watch(self) -> None:
        strangers = [process for process in self.gated if not self._memory.written.of([process.session])]
        for process in strangers:
            _describe_kernels(process, 0.0)  # of the others' launches nothing is known, nor noted
        self._watch.begin(strangers)

    def _copy(self) -> None:
        try:
            if not self._borrowed:
                return
            self._mapped.add(self._borrowed)
            expected = self._hash_if_it_can() if self._cow.validate else None
            self._check_room(expected)
            feed = self._windows.lay_out(
                self.gated,
                self._tree.detached,
                self._borrowed,
                self._mapped,
                expected,
                self._writer,
            )
            self._laid_out.set()
            device = self._borrowed[0].device
            with tracing(self.path) as trace:
                if self._windows.placed:
                    self._copy_into_image(feed, trace)
                else:
                    with self._copying_data(feed):
                        self._copier.drain(
                            feed, device, self._writer, self.progress, self._cancelled, feed.workers, trace
                        )
        except BaseException as error:
            self._copy_failure = self._copy_failure or error
            if not isinstance(error, Cancelled):
                log.error("%s: copying GPU memory failed: %s", self.path, error)
        finally:
            if not self._saved.is_set():
                self._windows.over()
            self._laid_out.set()
            self._saved.set()

    def _hash_if_it_can(self) -> list[bytes] | None:
        """A program may have left no memory on a GPU for the sums."""
        try:
            return self._hash()
        except DriverError as error:
            log.warning(
                "%s: the GPU does not hash its memory, so the processes stand still until all is saved: %s",
                self.path,
                error,
            )
            self._unhashed = True
            return None

    @contextmanager
    def _copying_data(self, feed: ChunkFeed) -> Iterator[None]:
        """All data is saved when it ends, or will not be."""
        with self.timeline.phase("GPU data", concurrent=True), feed.shadows.followed():
            yield
        self._windows.over()
        self._saved.set()

    def _copy_into_image(self, feed: ChunkFeed, trace: CopyTrace | None) -> None:
        changed = feed.changed if feed.validates else None
        save = PlacedSave(feed.plan, self._writer, changed, trace, self._settling)
        with self._copying_data(feed):
            try:
                self._copier.save_placed(save, self._writer, self.progress, self._cancelled)
            except Cancelled:
                feed.shadows.check()  # it has failed, and ended the copies
                raise
        self._settling.wait()  # else all workers rest here, and a restore may want some
        with self.timeline.phase("compare GPU data", concurrent=True):
            self._copier.settle_placed(save, self.progress, self._cancelled)

    def _keep_residues(self) -> None:
        """Copying can wait until the processes run again; the driver is not expected to write there (DESIGN §2)."""
        self._residues.start_hashing()

    def task_frozen(self, pid: int, criu_pid: int, tracer: int) -> None:
        """See :meth:`StopDump.task_frozen`."""
        self._settling.clear()
        super().task_frozen(pid, criu_pid, tracer)

    def finish(self, criu_result: int) -> None:
        """See :meth:`StopDump.finish`."""
        if self.state == "committed" or criu_result != 0 or self._failure or self._interruption.asked:
            super().finish(criu_result)
            return
        self._laid_out.wait()
        if self._unhashed:
            self._wait_saved()
        if self._borrowed and self._copy_failure is None:
            for process in self.gated:
                process.trace(self._windows.of(process))
        self._windows.bringing_back()
        back = self._bring_back()
        self._settling.set()
        self._windows.runs_on()
        began = next((phase.start for phase in self.timeline.phases() if phase.name in STALL_BEGINS), None)
        if began is not None:
            self.timeline.add(STALL, began, concurrent=True)
        self._say_if_not_back(back)
        self._wait_saved()
        self._residues.start_saving(self._writer)  # not before: a process waits for copies, and for none of these
        self._end_windows()
        self._return_blocks()  # comparing needs none, and the processes may have freed some
        try:
            self._complete()
        except CheckpointFailed as error:
            self._withdraw(str(error) + (f" Then: {back}" if back else ""))
            raise CheckpointFailed(self.error) from error
        finally:
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Who has ended meanwhile was perhaps forgotten before the windows were learnt from."""
        for process in self.gated:
            if not process.alive():
                self._memory.forget(process.session)

    def _wait_saved(self) -> None:
        """Return when nobody waits for copies any more. What has come is compared still: nobody waits for that."""
        began = self.timeline.now()
        self._saved.wait()
        self.timeline.add("wait for GPU data", began)

    def _end_windows(self) -> None:
        """Nobody uses anything of a window from here on, but for what processes map themselves."""
        self._ended = True
        self._windows.over()
        until = time.monotonic() + END_SECONDS
        for wait in [process.untrace() for process in self.gated]:
            try:
                wait(max(0.0, until - time.monotonic()))
            except Mispredicted as error:
                self._copy_failure = self._copy_failure or error
        self._counts = self._windows.counts()
        for process in self.gated:
            for name, value in process.twin_counts().items():
                self._counts[name] = self._counts.get(name, 0) + value
        for name in self._windows.culprits():
            log.info("%s: %s may write anywhere: it waited until everything was saved", self.path, name)
        for session, seen in self._windows.touched().items():
            self._memory.touched.learn(session, seen.touched, self._keys)
            self._memory.written.learn(session, seen.written, self._keys)
        self._windows.close()
        if self._counts:
            log.info("%s: in the window: %s", self.path, ", ".join(f"{k} {v}" for k, v in self._counts.items()))

    def _withdraw(self, reason: str) -> None:
        self._cancelled.set()
        self._settling.set()
        self._wait_for_data()  # before the image's memory, which is being compared, is let go
        super()._withdraw(reason)

    def _withdrawn(self) -> str:
        if isinstance(self._copy_failure, Mispredicted) or self._residues.changed:
            return MISPREDICTED  # the world has to be stopped
        return super()._withdrawn()

    def _give_up(self, reason: str) -> None:
        self._cancelled.set()
        self._settling.set()
        self._watch.give_up()  # waits for nobody: gates are closed
        self._windows.over()
        self._windows.runs_on()
        super()._give_up(reason)
        self._end_windows()
        self._forget_ended()

    def _complete(self) -> None:
        self._settling.set()
        if not self._ended:  # CRIU is about to kill the processes: nobody traces
            self._windows.runs_on()
            self._wait_saved()
            self._end_windows()
        super()._complete()

    def _add_to(self, message: pb.Inventory) -> None:
        message.validated = self._cow.validate
        for name, value in self._counts.items():
            message.window[name] = value
