"""A process of a pool: restored up to the closed gate, and stopped; opened when somebody takes it (paper §6).

Parking does all that can be done before: CRIU brings the process back, the driver its context, the image's chunks are
laid out and sorted, the tables that the process will share are made, addresses for phosd's own copies reserved. What is
left for the take is to create physical memory, let the process go, and map. From there on it is a lazy restore.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from phos.gpu_engine import driver, toggle
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.errors import DriverError, RestoreFailed
from phos.gpu_engine.procfs import inner_pid
from phos.gpu_engine.residue import RestoredResidues
from phos.gpu_engine.restore.base import Register
from phos.gpu_engine.restore.filling import Filling
from phos.gpu_engine.restore.gpus import require_room
from phos.gpu_engine.restore.lazy import LazyRestore
from phos.gpu_engine.restore.named_memory import RestoredNamedMemory
from phos.gpu_engine.restore.settings import LazySettings
from phos.gpu_engine.restore.sources import Manner, confirm, manner
from phos.gpu_engine.timeline import Timeline
from phos.gpu_engine.touch_order import TouchOrder
from phos.images.errors import ImageError
from phos.images.formats import COMMIT_FILE

log = logging.getLogger(__name__)

NAMES_SECONDS = 2.0
"""So long does another restore keep names of memory at most, for one who is taken: as long as CRIU takes to open it."""

SETTLE_SECONDS = 0.1
"""How long a driver may believe an older figure of its free memory (the software GPU: 0.05 s)."""

DRIVER_SECONDS = 60.0
"""How long the driver may take to bring its part of a process back; it needs half a second."""

CRIU_FAILED = "CRIU failed."
"""The reason where nobody but CRIU's log knows a better one."""

THREAD_SECONDS = 10.0
"""How long the driver may take to name the thread that carries out its restore."""


def identity(directory: int) -> tuple[int, int, int, int]:
    """What tells an image from another that has been written in its place.

    Raises:
        RestoreFailed: there is none (any more).
    """
    try:
        status = os.stat(COMMIT_FILE, dir_fd=directory)
    except OSError as error:
        raise RestoreFailed(f"Its image is gone ({error.strerror}).") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class PooledRestore(LazyRestore):
    """One process (or tree of processes) of a pool. :meth:`park`, then :meth:`open` or :meth:`discard`."""

    mode = "pool"

    def __init__(self, directory: int, path: str, copier: Copier, settings: LazySettings, order: TouchOrder) -> None:
        """As :class:`~phos.gpu_engine.restore.lazy.LazyRestore`; its sessions are its own."""
        super().__init__(directory, path, copier, settings, order)
        self.rename()
        self.state = "parking"
        try:
            self.identity = identity(directory)
        except RestoreFailed:
            self.close()
            raise
        self.gpu_bytes = 0
        """What became less of the GPUs' free memory while the driver brought its part back."""
        self._free_before: int | None = None
        self.running = threading.Event()
        """All of its processes compute, or never will."""
        self._planned: dict[BlockKey, Block] = {}
        self.tables: dict[bytes, bytes] = {}
        """Access tables, by the image's session, of processes whose kernels are known already."""
        self._tasks: dict[int, int] = {}  # all of the tree's processes → pidfd
        self._how: Manner | None = None
        self._eager = False
        self._parking = threading.Lock()  # held while phosd's part of parking is done, and undone
        self._discarded = False

    @classmethod
    def check(cls, directory: int, path: str, copier: Copier, order: TouchOrder, gpu_moves: dict[int, str]) -> None:
        """See to it that processes of an image could be parked here, on these GPUs.

        Raises:
            ImageError, RestoreFailed: they could not.
        """
        tried = cls(directory, path, copier, LazySettings(), order)
        tried.gpu_moves = gpu_moves
        try:
            if not tried.suits():
                raise RestoreFailed(
                    f"{path} has chunks of another size than this PhOS makes. Restore it, checkpoint it again, and "
                    "make the pool of that image."
                )
            tried._match_gpus()
            tried._wanted_blocks()
            if any(process.pid == 1 for process in tried._image.inventory.processes):
                raise RestoreFailed(f"{path} holds a process with pid 1, which cannot be had twice.")
        finally:
            tried.close()

    @property
    def sessions(self) -> list[bytes]:
        """What its sessions are called."""
        return [process.session for process in self.processes]

    # Parking.

    def park(self, register: Register) -> None:
        """All that is done before CRIU begins.

        Raises:
            RestoreFailed, DriverError: and :meth:`discard` is to follow.
        """
        with self._parking:
            if self._discarded:
                raise RestoreFailed("It was not taken.")
            self._park(register)

    def _park(self, register: Register) -> None:
        self._match_gpus()
        self._planned = planned = self._wanted_blocks()
        self.progress.total = sum(block.size for block in planned.values())
        self._residues = RestoredResidues(self._image)
        self._named_memory = RestoredNamedMemory(self._image, pool=True)
        for process in self.processes:
            self._sessions[process.session] = register(process, [])
        if strangers := {key[0] for key in planned} - set(self._sessions):
            raise RestoreFailed(f"The image's processes map GPU memory of {len(strangers)} that are not in it.")
        self._lay_out(list(planned.values()))
        for device in {block.device for block in planned.values()}:
            self._copier.prepare(device)
        self._how = manner(self._image, self._copier, len({block.device for block in planned.values()}))
        self._plan = self._make_plan(self._how)
        threading.Thread(target=self._load_residues, args=(self._residues,), name="residue").start()

    def adopt(self, pid: int) -> int:
        """CRIU is about to leave a process stopped. Returns the thread of it that has to run before, or 0.

        Raises:
            RestoreFailed: the image does not say which, nor does the driver; what they share is not what it was.
        """
        self._share()
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise RestoreFailed(f"Process {pid} has ended while it was restored.") from error
        except OSError as error:
            raise RestoreFailed(f"Process {pid} cannot be watched while it is parked: {error}.") from error
        with self._lock:
            if self._discarded:  # while CRIU waited for an answer
                os.close(pidfd)
                raise RestoreFailed("It was not taken.")
            self._tasks[pid] = pidfd
            if inner_pid(pid) not in self._image_pids:
                self._beside[pid] = os.dup(pidfd)
                return 0  # a process of the tree that never used CUDA
            self._pids[pid] = os.dup(pidfd)
        thread = self._thread(pid) or toggle.restore_thread(pid, THREAD_SECONDS)
        if not thread:
            raise RestoreFailed(f"The driver does not say which thread of process {pid} carries its restore out.")
        return thread

    def bring_back(self, pids: Sequence[int], seconds: float = DRIVER_SECONDS) -> None:
        """As every restore does it, of all processes of a pool."""
        if self._free_before is None:
            self._free_before = self._free()
        super().bring_back(pids, seconds)

    def _free(self) -> int:
        return sum(driver.context(gpu).free_memory() for gpu in set(self._ordinals.values()))

    def parked(self) -> None:
        """CRIU has ended well.

        Raises:
            RestoreFailed: the processes are not all there.
        """
        with self._lock:
            missing = self._waiting_for - len(self._pids)
            if self.state == "parking" and not missing:
                self.state = "parked"
        if self._residues is not None:
            self._residues.wait()
            self._residues.discard()
        if self._named_memory is not None:
            self._named_memory.give_back()
        if self._free_before is not None:
            if (free := self._free()) >= self._free_before:
                time.sleep(SETTLE_SECONDS)
                free = self._free()
            self.gpu_bytes = max(0, self._free_before - free)
        if self.state != "parked":
            self.fail(f"CRIU ended, and {missing} of the image's GPU processes are not there.")
            raise RestoreFailed(self.error)

    def descriptors(self) -> list[int]:
        """Pidfds of all of its processes, which the caller closes."""
        with self._lock:
            return [os.dup(descriptor) for descriptor in self._tasks.values()]

    @property
    def tasks(self) -> list[int]:
        """All of the tree's processes, those without CUDA too."""
        with self._lock:
            return list(self._tasks)

    # Taking.

    def unchanged(self, directory: int) -> None:
        """See to it that the image is still the one that was parked.

        Raises:
            RestoreFailed: it is not.
        """
        if identity(directory) != self.identity:
            raise RestoreFailed("Another image has been written in its place.")
        try:
            confirm(self._image)
        except ImageError as error:
            raise RestoreFailed(f"{error}.") from error

    def open(self, hold: Callable[[list[Block]], None], *, eager: bool) -> None:
        """Create the memory, begin to load it, let the processes go. ``hold`` takes the blocks over.

        Raises:
            RestoreFailed: there is too little memory; it is parked as before. Or, if it is not, it can only be ended.
        """
        self.timeline = Timeline()
        self.since = self.timeline.since
        try:
            blocks = self._make_blocks(self._planned)
        except RestoreFailed:  # say why, or wait for what is just being given back
            require_room(self._planned.values())
            blocks = self._make_blocks(self._planned)
        borrowed: list[Block] = []
        try:
            for b in blocks.values():
                borrowed.append(Block(b.key, b.size, b.device, os.dup(b.descriptor), b.by_application))
        except OSError as error:
            for block in [*blocks.values(), *borrowed]:
                os.close(block.descriptor)
            raise RestoreFailed(f"phosd has no descriptors left: {error}") from error
        hold(list(blocks.values()))
        self._take_names()
        with self._lock:
            self.state = "loading"
            self._changed.notify_all()
            self._eager = eager
            self._discarded = True  # by the loading thread
            tasks = list(self._tasks.items())
            self._tasks = {}
        try:
            threading.Thread(target=self._load, args=(borrowed,), name="load").start()
        except RuntimeError as error:  # it is ended: by discard(), as it is not being loaded
            with self._lock:
                self._discarded, self._tasks = False, dict(tasks)
            for block in borrowed:
                os.close(block.descriptor)
            raise RestoreFailed(f"phosd cannot load its memory: {error}.") from error
        for _, pidfd in tasks:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)

    def _take_names(self) -> None:
        """From now on whoever opens memory by its name finds this process's; it has its own, whatever comes of this."""
        if self._named_memory is not None:
            try:
                self._named_memory.take_names(NAMES_SECONDS)
                self._named_memory.keep()
            except RestoreFailed as error:
                self._named_memory.give_back()
                log.warning("%s: %s", self.path, error)

    def _prepare(self, blocks: list[Block]) -> Filling:
        assert self._how is not None
        assert self._plan is not None
        return self._filling(self._plan, self._how, blocks)  # all else was done when it was parked

    def _may_attach(self) -> bool:
        if self._eager:
            return self.state in ("loaded", "attached")
        return super()._may_attach()

    def _computes(self, pid: int) -> None:
        super()._computes(pid)
        with self._lock:
            if len(self._computing) == self._waiting_for:
                self.running.set()

    def fail(self, reason: str, state: str = "failed") -> None:
        """See :class:`~phos.gpu_engine.restore.base.Restore`."""
        super().fail(reason, state)
        self.running.set()

    # The end of one that nobody takes.

    def discard(self) -> None:
        """Let a process go that is parked, or could not be: it is ended."""
        self.fail("It was not taken.")
        with self._parking:
            self._discard()

    def _discard(self) -> None:
        with self._lock:
            if self._discarded:
                return
            self._discarded = True
            named = (*self._pids.values(), *self._beside.values())
            descriptors = [*self._tasks.values(), *(fd for fd in named if fd >= 0)]
            for pidfd in self._tasks.values():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._tasks, self._pids, self._beside = {}, {}, {}
        for descriptor in descriptors:
            os.close(descriptor)
        with self._counting:
            self._close_tables()
        try:
            self._memory.free()
        except DriverError as error:
            log.error("%s: addresses of phosd's own cannot be given back: %s", self.path, error)
        self.close()
        self.put_away.set()
