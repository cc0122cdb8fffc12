"""A checkpoint by the stop protocol.

Order (DESIGN §3, §4): every process of the tree is quiesced, detached and checkpointed by the driver while it still
runs, or, without the frontend, only locked (:meth:`StopDump.begin`); CRIU freezes and dumps the CPU side while the
blocks are copied; when both have ended (:meth:`StopDump.finish`) whoever is still alive is brought back, and the image
is committed. Whatever fails, the processes run on as before and the image directory holds nothing of ours.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import psutil

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver, inventory, procfs
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.content_hash import bytes_to_copy
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_trace import tracing
from phos.gpu_engine.copy_work import Cancelled, Progress
from phos.gpu_engine.errors import CRIU_FAILED, INTERRUPTED, NO_THREAD, CheckpointFailed, DriverError, PhosError
from phos.gpu_engine.interruption import Interruption
from phos.gpu_engine.landing import Landing
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.named_memory import DumpedNamedMemory
from phos.gpu_engine.process import Detached, ForeignProcess, GatedProcess
from phos.gpu_engine.procfs import is_alive
from phos.gpu_engine.residue import DumpedResidues
from phos.gpu_engine.shared_files import SharedFiles
from phos.gpu_engine.stop.settings import Settings
from phos.gpu_engine.stop.tree import BorrowBlocks, ProcessTree
from phos.gpu_engine.task_pages import TaskPages
from phos.gpu_engine.timeline import Timeline
from phos.gpu_engine.touch_order import TouchOrder, to_messages
from phos.images import criu_mappings
from phos.images.errors import ImageError
from phos.images.files import free_bytes
from phos.images.formats import COMMIT_FILE, CRIU_INVENTORY_FILE
from phos.images.reader import Image
from phos.images.writer import ImageWriter

log = logging.getLogger(__name__)

MARGIN_PART = 64
"""Room for this part more than there is GPU memory is made: the processes may allocate some while it is made."""

DescribeProcess = Callable[[GatedProcess, Detached], inventory.ProcessRecord]

USUAL_RESIDUE = {"nvidia": 512 << 20, "software": 32 << 20}
"""What a driver wants for its own part when it is checkpointed, by :func:`driver.kind`; bytes."""


@dataclass(frozen=True)
class Assignment:
    """What is to be dumped, where to, and how.

    directory  an open descriptor of the image directory; it stays the caller's.
    path       what to call it.
    criu       the process that dumps them, which may be in other namespaces than ours.
    shares_names  it, they and we find the same files in /dev/shm (shared_memory.py).
    interruption  somebody's wish that it be ended.
    """

    directory: int
    path: str
    gated: Sequence[GatedProcess]
    foreign: Sequence[ForeignProcess]
    copier: Copier
    settings: Settings
    versions: inventory.Versions
    criu: int
    shares_names: bool = True
    interruption: Interruption = field(default_factory=Interruption)


class StopDump:
    """One checkpoint of a tree of processes."""

    kind = "dump"
    protocol = "stop"
    _joining = "wait for GPU data"  # the phase in which the thread that copies is waited for
    order: TouchOrder | None = None
    """What is known of the order in which the processes touch their memory."""
    access_tables: Mapping[bytes, Callable[[], tuple[bytes, bool]]] = MappingProxyType({})
    """What is known of what their kernels touch, by session (frontend/access_table.h), and whether that is all."""

    def __init__(self, assignment: Assignment) -> None:
        """
        Raises:
            ImageError: the directory holds an image already, or cannot be written.
        """
        self.path = assignment.path
        self.gated = list(assignment.gated)
        self.settings = assignment.settings
        self.versions = assignment.versions
        self._criu = assignment.criu
        self.shares_names = assignment.shares_names
        self.state = "writing"
        self.error = ""
        self.progress = Progress(0, [0] * assignment.copier.threads)
        self.timeline = Timeline()
        self.since = self.timeline.since
        self._tree = ProcessTree(assignment.gated, assignment.foreign, assignment.settings, self.timeline)
        self._copier = assignment.copier
        self._interruption = assignment.interruption
        self._cancelled = threading.Event()
        self._copying: threading.Thread | None = None
        self._copy_failure: BaseException | None = None
        self._borrowed: list[Block] = []
        self._keys: frozenset[BlockKey] = frozenset()  # of those, also when they have been returned
        self._mapped = MappedBlocks()
        # Guards _mapped until there is _borrowed, and when both are let go of.
        self._mapping = threading.Lock()
        self.returned = threading.Event()
        self._residues = DumpedResidues()
        self._records: list[inventory.ProcessRecord] = []
        self._frozen_at = 0.0
        self._programs: dict[int, tuple[str, ...]] = {}  # of all GPU processes, when phosd had their part
        self._frozen: dict[int, tuple[str, ...]] = {}  # of all tasks that CRIU dumps
        self._holders: dict[int, int] = {}  # the tasks that a CRIU holds → that CRIU
        self._unlooked = ""  # why all that there is of them is not known
        self._froze_unknown = False  # and of one in a namespace of its own, whose number for us is not known
        self._failure = ""  # why the image cannot be completed
        self._writer = ImageWriter(assignment.directory, stripes=assignment.copier.threads)
        self._landing: Landing | None = None
        self._unreserved = 0  # bytes of GPU memory that no room has been made for
        self._directory = os.dup(assignment.directory)
        self._pages = TaskPages(self._directory)
        self.shared_files = SharedFiles(self._directory)
        """What the plugin gives, to be copied in CRIU's place."""
        self._named_memory = DumpedNamedMemory(self._writer, assignment.shares_names)
        self._hidden = b""
        self._links: Mapping[str, int] = {}
        self._tasks_with_device_files: Sequence[int] = ()
        self._has_device_mappings = False

    @property
    def pids(self) -> list[int]:
        """All GPU processes of the checkpoint."""
        return self._tree.pids

    def warnings(self) -> list[str]:
        """What a person should know although the checkpoint goes on."""
        return list(self._tree.warnings)

    # Step 1: while the processes still run.

    def begin(self, borrow: BorrowBlocks, describe: DescribeProcess) -> None:
        """Quiesce, detach and checkpoint every process, or lock it, and start copying.

        ``borrow`` gives descriptors of the blocks that stay valid whatever happens to the owner; ``describe`` adds
        what the daemon knows of a process.

        Raises:
            CheckpointFailed: and everything runs as before.
        """
        # Copying ends at once; who does something else looks at the next step.
        self._interruption.on_asked(self._cancelled.set)
        try:
            self._prepare(borrow)
            self._interruption.check()
            self._tree.quiesce()
            self._interruption.check()
            with self.timeline.phase("detach"):
                self._tree.detach()
            self._tree.warnings = self._tree.find_warnings()
            self._programs = {pid: procfs.program(pid) for pid in self.pids}
            log.info("%s: processes %s are detached", self.path, self.pids)
            self._records = [describe(p, self._tree.detached[p.session]) for p in self.gated]
            borrowed = self._tree.collect(borrow)
            with self._mapping:
                self._borrowed = borrowed
                self._keys = frozenset(block.key for block in borrowed)
            self.progress.total = sum(block.size for block in self._borrowed)
            copying = threading.Thread(target=self._copy, name="save")
            copying.start()
            self._copying = copying  # only now: one that never began cannot be waited for
            with self.timeline.phase("driver checkpoint"):
                self._tree.checkpoint()
            self._interruption.check()
            self._keep_residues()
        except Exception as error:
            if not isinstance(error, (PhosError, ImageError, OSError)):
                log.exception("%s: the checkpoint failed in an unforeseen way", self.path)
                error = CheckpointFailed(_unforeseen(error))
            self._give_up(str(error))
            raise CheckpointFailed(self.error) from error
        self._frozen_at = self.timeline.now()

    def _prepare(self, borrow: BorrowBlocks) -> None:
        """What can be done while the processes still compute: room for the image, and phosd's mappings of their blocks.

        Memory-backed file systems are slow at finding pages, and mapping would wait for the driver's checkpoint. The
        processes may allocate and free meanwhile: what is new is mapped later, what is gone is not copied.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="prepare-pages") as beside:
            pages = beside.submit(self._prepare_pages) if self.settings.cpu_pages else None
            self._prepare_gpu(borrow)
            if pages:
                pages.result()
        if self.copies:  # of what is left of the room
            with self.timeline.phase("prepare shared memory"):
                self.shared_files.prepare(self.pids, self._unreserved)

    def _prepare_pages(self) -> None:
        with self.timeline.phase("prepare CPU pages", concurrent=True):
            self._pages.prepare(self.pids)

    def _prepare_gpu(self, borrow: BorrowBlocks) -> None:
        blocks = [block for process in self.gated for block in process.own_blocks()]
        with self.timeline.phase("map blocks"):
            for block in blocks:
                with suppress(KeyError), self._mapping:  # freed since
                    borrowed = borrow([block.key])
                    try:
                        self._mapped.add(borrowed)
                    finally:
                        os.close(borrowed[0].descriptor)
        for device in {block.device for block in blocks}:
            self._copier.hasher.prepare(device)
        if self.settings.residue and self.gated:
            with self.timeline.phase("prepare residue"):
                estimate = self.settings.residue_bytes or USUAL_RESIDUE[driver.kind()]
                self._residues.prepare(self.gated, estimate, self._criu)
        self._unreserved = sum(block.size for block in blocks)
        size = self._room_for(blocks)
        # What is reserved for data that turns out to be zeros would be missing for CRIU's pages.
        room = free_bytes(self._directory) - sum(_resident_bytes(pid) for pid in self.pids)
        if size and room > size:
            with self.timeline.phase("reserve room"):
                if self.settings.in_place:
                    more = sum(block.size for block in blocks) // MARGIN_PART
                    self._landing = Landing.prepare(self._writer, size + more if room > size + 2 * more else size, room)
                if self._landing is None and not self._writer.reserve(size):
                    log.info("%s: less room than %d bytes of GPU memory need", self.path, size)
                else:
                    self._unreserved = 0

    def _room_for(self, blocks: Sequence[Block]) -> int:
        """For how many bytes of blocks room is made. What is zeros takes none in the image.

        An allocator may have taken most of the GPU's memory to keep, and making room for 60 GB takes seconds. What is
        zeros now may be none when the processes stand still (gradients, after they were set to zero): so there is room
        for twice as much as there is now.
        """
        total = sum(block.size for block in blocks)
        if not self._hashes_all:
            return total
        try:
            with self.timeline.phase("look for zeros"), self._mapping:
                mapped = [block for block in blocks if block.key in self._mapped]
                return min(total, 2 * bytes_to_copy(mapped, self._copier.hasher.hash(mapped, self._mapped)))
        except DriverError as error:
            log.info("%s: the GPU does not hash its memory: %s", self.path, error)
            return total

    @property
    def _hashes_all(self) -> bool:
        """Whether it will be known when the processes stand still what is zeros."""
        return True

    def _copy(self) -> None:
        try:
            hashes = None
            try:
                hashes = self._hash()
            except DriverError as error:
                log.info("%s: the GPU does not hash its memory, so the CPU does: %s", self.path, error)
            self._check_room(hashes)
            with self.timeline.phase("GPU data", concurrent=True), tracing(self.path) as trace:
                writer, mapped = self._writer, self._mapped
                self._copier.save(self._borrowed, writer, self.progress, self._cancelled, mapped, hashes, trace)
        except BaseException as error:
            self._copy_failure = error
            if not isinstance(error, Cancelled):
                log.error("%s: copying GPU memory failed: %s", self.path, error)

    def _check_room(self, hashes: Sequence[bytes] | None) -> None:
        """Room for the data was made while the processes computed. ``hashes``: of all its chunks, if they are known."""
        if self._landing is not None and bytes_to_copy(self._borrowed, hashes) > self._writer.placeable:
            log.info("%s: there is more in the GPU's memory by now than room was made for in huge pages", self.path)
            self._landing.give_up()
            self._landing = None

    def _hash(self) -> list[bytes]:
        """The hash of each chunk of the blocks, in order, while nobody writes to them.

        Raises:
            DriverError: a GPU has no memory left for the sums, for example.
        """
        self._mapped.add(self._borrowed)
        with self.timeline.phase("content hash", concurrent=True):
            return self._copier.hasher.hash(self._borrowed, self._mapped)

    def _keep_residues(self) -> None:
        """The driver has saved its part, and everything stands still."""
        self._residues.start_saving(self._writer)

    # Step 2: CRIU dumps.

    @property
    def copies(self) -> bool:
        """Whether what the processes share without a name is copied here, not by CRIU; once all is prepared."""
        return self.settings.cpu_pages and self._pages.merges

    def task_frozen(self, pid: int, criu_pid: int, tracer: int) -> None:
        """CRIU, which is process ``tracer``, has frozen a task of the tree, and calls it ``criu_pid``. ``pid``: our
        number of it; 0: it is in a pid namespace below CRIU's, and not known.

        CRIU waits for this: it only begins to copy the task's pages (task_pages.py). :meth:`look_at` does the rest.

        Raises:
            CheckpointFailed: somebody has asked for the end of it.
        """
        self._interruption.check()
        if pid and self.settings.cpu_pages:
            self._pages.freeze(pid, criu_pid, tracer)

    def look_at(self, pid: int, tracer: int) -> None:
        """What else there is of such a task, while CRIU goes on and still keeps it frozen. What fails is said later."""
        if not pid:
            self._froze_unknown = True
            return
        try:
            self._frozen[pid] = procfs.program(pid)
            if procfs.tracer(pid) == tracer:
                self._holders[pid] = tracer
            self._named_memory.look(pid, tracer)
        except Exception as error:
            log.exception("Looking at process %d, which CRIU has frozen", pid)
            self._unlooked = self._unlooked or f"Process {pid} could not be looked at while it was frozen: {error}"

    def tell_pages(self, criu_pid: int, table: int) -> None:
        """CRIU is about to look at the pages of a task that it has frozen.

        ``table`` is a memfd for what it need not dump (task_pages.py).

        Raises:
            OSError: the table cannot be written.
            CheckpointFailed: somebody has asked for the end of it.
        """
        self._interruption.check()
        self._pages.tell(criu_pid, table)

    def tasks_run(self, pids: Sequence[int], *, back: bool) -> None:
        """Of frozen processes without the frontend the driver's threads run, and no others.

        The driver saves what it holds of them, or brings it ``back`` before they are let go.

        Raises:
            CheckpointFailed: it cannot be done.
        """
        if back:
            self._tree.put_back_frozen(pids)
        else:
            self._interruption.check()
            self._tree.save_frozen(pids)

    # Step 3: CRIU has ended.

    def leave_out_device_files(self, tasks: Sequence[int], *, mappings: bool) -> None:
        """Some of all these tasks have device files of the GPU's open, or, with ``mappings``, mapped.

        They are restored without: see :meth:`ProcessTree.check_device_files`. Call it before :meth:`criu_ended`.
        """
        self._tasks_with_device_files, self._has_device_mappings = tasks, mappings

    def criu_ended(self, result: int, hidden: bytes, links: Mapping[str, int], *, kills: bool) -> None:
        """CRIU has dumped its part (or failed: ``result`` is not 0), and the tasks are still frozen.

        ``hidden``: which pages it was not shown (task_pages.py). ``links``: which links it was kept from making
        (named_memory.py).

        If CRIU is about to kill them, the image is completed first: a process may be killed only when it is safe on
        disk. Waiting costs it nothing. A process that is to run on is not kept waiting here (DESIGN §3).

        Raises:
            CheckpointFailed: the image cannot be completed, so the tasks must not be killed.
        """
        log.info("%s: CRIU has ended", self.path)
        self._hidden, self._links = hidden, links
        try:
            with self.timeline.phase("wait for CPU pages", concurrent=True):
                if result:
                    self.shared_files.give_up()
                self._pages.wait()
                if not result:
                    self.shared_files.wait(self._interruption.check)
            self._interruption.check()
            if self._unlooked:
                raise CheckpointFailed(self._unlooked)
            if result == 0:
                with self.timeline.phase("wait for named memory", concurrent=True):
                    self._named_memory.wait()
                self._check_tasks()
                self._check_held()
                self._tree.check_device_files(self._tasks_with_device_files)
        except CheckpointFailed as error:
            self._failure = str(error)
            raise
        finally:
            self.timeline.add("CRIU freeze and dump", self._frozen_at)
        if result == 0 and kills:
            self._complete()

    def _check_tasks(self) -> None:
        """Between phosd's part and CRIU's, processes run: they may end, be no descendants any more, or execve().

        Raises:
            CheckpointFailed: CRIU has not dumped each process that phosd has saved, as it was then.
        """
        for pid, program in self._programs.items():
            if not is_alive(pid):
                raise CheckpointFailed(f"Process {pid} ended while it was being checkpointed.")
            if pid in self._tree.unsaved:
                continue  # :meth:`_complete` says so
            if pid not in self._frozen:
                if self._froze_unknown:
                    continue  # it may be that one
                raise CheckpointFailed(
                    f"Process {pid} left the tree that CRIU dumps while it was being checkpointed: its parent ended."
                )
            if self._frozen[pid] != program:
                raise CheckpointFailed(f"Process {pid} replaced its program while it was being checkpointed.")

    def _check_held(self) -> None:
        """
        Raises:
            CheckpointFailed: what was read last of a task may be of when it ran again: its CRIU was killed.
        """
        for pid, tracer in self._holders.items():
            if procfs.tracer(pid) != tracer:
                raise CheckpointFailed(f"Process {pid} was let go before all of it was saved: CRIU ended too soon.")

    def finish(self, criu_result: int) -> None:
        """Bring back who is alive, and commit or withdraw the image. ``criu_result`` is CRIU's own, 0 for success.

        Raises:
            CheckpointFailed: the image is withdrawn; the processes run.
        """
        if self.state == "committed":
            self._say_if_not_back(self._bring_back(killed=True))
            return
        if self._interruption.asked:
            self._failure = INTERRUPTED
        if criu_result != 0 or self._failure:
            self._give_up(self._failure or CRIU_FAILED)
            raise CheckpointFailed(self.error)
        self._wait_for_data()
        back = self._bring_back()
        self._say_if_not_back(back)  # before the commit: who waits for the image looks no further
        try:
            self._complete()
        except CheckpointFailed as error:
            self._withdraw(str(error) + (f" Then: {back}" if back else ""))
            raise CheckpointFailed(self.error) from error

    def abandon(self, reason: str) -> None:
        """Give the checkpoint up from wherever it stands, unless it has ended: nobody will call :meth:`finish`."""
        if self.state == "writing":
            self._give_up(reason)

    def _say_if_not_back(self, problems: str) -> None:
        if problems:
            self.error = problems
            log.error("%s: %s", self.path, problems)

    def _wait_for_data(self) -> None:
        if self._copying is None:
            return
        began = self.timeline.now()
        self._copying.join()
        self._copying = None
        self.timeline.add(self._joining, began)
        self._return_blocks()

    def _complete(self) -> None:
        """Wait for the data and commit the image.

        Raises:
            CheckpointFailed: that was not possible; the image is not withdrawn yet.
        """
        try:
            self._interruption.check()
            for pid in self._tree.unsaved:
                if not is_alive(pid):
                    raise CheckpointFailed(f"Process {pid} ended while it was being checkpointed.")
                raise CheckpointFailed(
                    f"CRIU's plugin has not had the driver save process {pid}, which is without the frontend. It is of "
                    "another version than phosd: end phosd ('phosd --stop'), so that the plugin's own is started."
                )
            with self.timeline.phase("merge CPU pages", concurrent=True):
                self._pages.merge(self._hidden)
                self.shared_files.merge()
            if self._has_device_mappings:
                left_out = criu_mappings.leave_out_device_mappings(self._directory)
                log.info("%s: mappings of device files left out, by task: %s", self.path, left_out)
            self._wait_for_data()
            self._interruption.check()
            if self._copy_failure is not None:
                raise self._copy_failure
            message = inventory.build(
                self.protocol, self._records, self._tree.foreign, driver.gpus(), self.versions, self.since
            )
            self._named_memory.describe(message, self._directory, self._links)
            message.reducers.extend(self.settings.reducers())
            inventory.add_timings(message, self.timeline.phases(), self.timeline.now())
            self._residues.describe(message, self._writer)
            self._add_to(message)
            for process in message.processes:
                if process.session in self.access_tables:
                    process.access_table, process.access_table_whole = self.access_tables[process.session]()
            if self.order is not None:
                message.order.extend(to_messages(self.order.of(process.session for process in self.gated)))
            self._interruption.settle()
            self._writer.commit(message)
            # Nobody may have removed or cut a file meanwhile: this image is what a process is about to be killed for.
            try:
                Image.open(self._directory).close()
            except ImageError:
                with suppress(OSError):
                    os.unlink(COMMIT_FILE, dir_fd=self._directory)
                raise
        except Exception as error:
            if not isinstance(error, (PhosError, ImageError, OSError)):
                log.exception("%s: completing the image failed in an unforeseen way", self.path)
            what = "Copying GPU memory to" if error is self._copy_failure else "Completing the image in"
            self._failure = INTERRUPTED if self._interruption.asked else f"{what} {self.path} failed: {error}"
            raise CheckpointFailed(self._failure) from error
        self._named_memory.remove_links()
        self._close_directory()
        self.state = "committed"
        log.info("%s: committed, %d bytes of GPU memory", self.path, self.progress.total)
        self.shared_files.discard()
        self._residues.discard()

    def _add_to(self, message: pb.Inventory) -> None:
        """What else a protocol has to say in the inventory."""

    def _bring_back(self, *, killed: bool = False) -> str:
        """Everybody who is there runs again as before. Returns what went wrong. See :meth:`ProcessTree.bring_back`."""
        began = self.timeline.now()
        self._residues.wait()  # the driver may change what it reads
        self.timeline.add("wait for residue", began)
        return self._tree.bring_back(killed=killed)

    def _give_up(self, reason: str) -> None:
        """Undo everything, in the reverse order of doing it; but who only waits for that goes on at once."""
        self._cancelled.set()
        self.shared_files.give_up()
        opening = self._tree.open_gates(but=set(self._tree.detached))
        if self._copying:
            self._copying.join()
        self._return_blocks()
        problems = [self._bring_back(), *opening()]
        said = " ".join(filter(None, problems))
        self._withdraw(reason + (f" Then: {said}" if said else ""))

    def _withdraw(self, reason: str) -> None:
        self._residues.drop(self.gated)
        self._residues.discard()
        if self._pages.unmerged or self.shared_files.unmerged:  # CRIU's part looks whole, and lacks most of the memory
            with suppress(OSError):
                os.unlink(CRIU_INVENTORY_FILE, dir_fd=self._directory)
        self._pages.discard()
        self.shared_files.discard()
        self._named_memory.discard()
        self._writer.abort()
        if self._landing is not None:  # whoever tries again needs the room
            self._landing.release()
            self._landing = None
        self._close_directory()
        self.error = reason
        self.state = self._withdrawn()

    def _withdrawn(self) -> str:
        """The state in which a checkpoint ends whose image is withdrawn."""
        return "failed"

    def _close_directory(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
        self._directory = -1
        if self._landing is not None:  # takes time, and the image is whole
            self._landing.release_later()
            self._landing = None

    @property
    def keeps_blocks(self) -> bool:
        """See :class:`~phos.gpu_engine.daemon.loans.Borrower`."""
        return bool(self._keys) and not self.returned.is_set()

    def let_go(self, key: BlockKey) -> None:
        """See :class:`~phos.gpu_engine.daemon.loans.Borrower`."""
        with self._mapping:
            if not self._keys:  # else it is needed, or about to be returned with the others
                try:
                    self._mapped.remove(key)
                except DriverError as error:
                    log.warning("%s: %s", self.path, error)

    def _return_blocks(self) -> None:
        with self._mapping:  # what is freed from here on is none of this job's any more
            borrowed, self._borrowed = self._borrowed, []
            mapped, self._mapped = self._mapped, MappedBlocks()
        for block in borrowed:
            os.close(block.descriptor)
        try:
            mapped.close()
        except DriverError as error:
            log.warning("%s: %s", self.path, error)
        self.returned.set()


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _unforeseen(error: Exception) -> str:
    if isinstance(error, RuntimeError) and "new thread" in str(error):
        return NO_THREAD
    return f"It failed in an unforeseen way ({error!r}); phosd's log has more."
