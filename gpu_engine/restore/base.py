"""What every restore does, whenever the GPU's data comes: memory, the driver's part, and who computes again.

phosd creates the physical memory and begins to fill it while CRIU brings the CPU side back; the driver's part follows
as soon as CRIU lets a process go; then the frontend attaches (DESIGN §4).
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver, procfs, toggle
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_work import Cancelled, Progress
from phos.gpu_engine.errors import CheckpointFailed, DriverError, NoSuchProcess, PhosError, RestoreFailed
from phos.gpu_engine.job_states import FAILED
from phos.gpu_engine.process import CONTROL_THREAD, GatedProcess
from phos.gpu_engine.procfs import has_ended, inner_pid, thread_names
from phos.gpu_engine.residue import RestoredResidues
from phos.gpu_engine.restore.filling import Filling
from phos.gpu_engine.restore.gpus import match_gpus, require_room
from phos.gpu_engine.restore.named_memory import RestoredNamedMemory
from phos.gpu_engine.restore.plan import in_image
from phos.gpu_engine.restore.reserved import ReservedMemory
from phos.gpu_engine.restore.socket_folders import SocketFolders
from phos.gpu_engine.restore.sources import confirm, open_source, reads_files
from phos.gpu_engine.timeline import Timeline
from phos.images.errors import ImageError
from phos.images.source import ImageSource

log = logging.getLogger(__name__)


@dataclass
class RestoredProcess:
    """A process under the frontend as the image describes it; ``pid`` is the image's.

    ``session`` and those of ``imports`` are what they are called from now on; the image may call them otherwise.
    """

    message: pb.Process
    pid: int
    session: bytes
    imports: dict[int, BlockKey] = field(default_factory=dict)


VERDICT_SECONDS = 10.0
"""For so long a thread that brings back a process which has ended may take to say whether it was back by then."""

PROGRAM_SECONDS = 0.5
"""How often to look whether a process that is to get its memory back is still the same program."""

DRIVER_SECONDS = 500.0
"""How long the driver may take to bring a process back of which only its own thread runs, and all of its GPU memory."""

BUSY_SECONDS = 10.0
"""So long does it take at most to park another process of the same image, which needs the same files for that."""

Register = Callable[[RestoredProcess, list[Block]], GatedProcess]
"""Makes a process and its blocks known to phosd, before it exists."""

UNDER_WAY = ("loading", "loaded")
"""States in which a restore is not over (job_states.py has the last ones)."""

PARKED = ("parking", "parked")
"""States before those of a process in a pool that nobody has taken yet."""


class Restore(ABC):
    """One restore of an image."""

    kind = "restore"
    mode = ""
    """eager or lazy."""

    def __init__(self, directory: int, path: str, copier: Copier) -> None:
        """``directory`` is an open descriptor of the image directory; it stays the caller's.

        Raises:
            ImageError: there is no whole image in it.
        """
        self.path = path
        self.state = "loading"
        self.error = ""
        self.timeline = Timeline()
        self.since = self.timeline.since
        self.progress = Progress(0, [0] * copier.threads)
        self._copier = copier
        self._cancelled = threading.Event()
        self._loaded = threading.Event()
        self._whole = False  # all data is there
        self._driver_ready: set[int] = set()
        self._pids: dict[int, int] = {}  # the tasks that CRIU has put together → pidfd, or -1
        self._beside: dict[int, int] = {}  # and those of the tree that never used CUDA
        self._computing: set[int] = set()  # those of them that have all of their GPU state back
        self._reviving: set[int] = set()  # those whose driver's part a thread brings back
        self._attaching: set[int] = set()  # those that a thread gives their memory
        self._promised: set[int] = set()  # those whose driver's part is to be brought back while they stand still
        self._still: set[int] = set()  # and those of which that has begun, until CRIU has ended
        self._let_go = False  # CRIU has ended, or lets them go: nothing is brought back standing still any more
        self._over = threading.Event()
        self.put_away = threading.Event()
        """Nothing is left of it that could be in the way of another restore of the same image."""
        # Guards _whole, _driver_ready, _pids, _beside, _computing, _reviving, _attaching, _promised, _still, _let_go,
        # state and error.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # what ready() goes by
        self._sessions: dict[bytes, GatedProcess] = {}
        self._image: ImageSource = open_source(directory)
        self.unsound = False
        """What was copied through could not be put back: phosd's GPU context may be lost."""
        self._residues: RestoredResidues | None = None
        self._named_memory: RestoredNamedMemory | None = None
        self.socket_folders: SocketFolders | None = None
        """Made for it; whoever has set them keeps or discards them."""
        self._memory = ReservedMemory()  # where phosd copies to
        self.gpu_moves: dict[int, str] = {}
        """What was asked for, as gpu_moves.py reads it; to be set before it begins."""
        self._gpu_pairs: dict[str, str] = {}
        self._ordinals: dict[int, int] = {}
        inventory = self._image.inventory
        self._gated_pids = {process.pid for process in inventory.processes if process.under_frontend}
        self._image_pids = {process.pid for process in inventory.processes}
        self._waiting_for = len(inventory.processes)
        self.names: dict[bytes, bytes] = {}
        """The image's session → what it is called from now on; empty if all keep their names."""
        self._image_names: dict[bytes, bytes] = {}
        self.processes = self._restored_processes()

    def rename(self) -> None:
        """Give its sessions names of their own, beside another process of the same image. Before it begins."""
        self.names = {process.message.session: secrets.token_bytes(len(process.session)) for process in self.processes}
        self._image_names = {now: old for old, now in self.names.items()}
        self.processes = self._restored_processes()

    def _restored_processes(self) -> list[RestoredProcess]:
        return [
            RestoredProcess(
                message=process,
                pid=process.pid,
                session=self._now(process.session),
                imports={
                    b.block: (self._now(b.owner_session), b.owner_block) for b in process.blocks if b.owner_session
                },
            )
            for process in self._image.inventory.processes
            if process.under_frontend
        ]

    def names_for(self, pid: int, session: bytes) -> dict[bytes, bytes]:
        """What the image's sessions are called, if this is one of its processes and calls itself by the old name."""
        return self.names if session in self.names and self.restored(pid) else {}

    def _now(self, session: bytes) -> bytes:
        """What a session of the image is called from now on."""
        return self.names.get(session, session)

    def _in_image(self, key: BlockKey) -> BlockKey:
        """What the image calls a block."""
        return in_image(self._image_names, key)

    @property
    def pids(self) -> list[int]:
        """The real pids of the GPU processes restored so far."""
        with self._lock:
            return list(self._pids)

    def restored(self, pid: int) -> bool:
        """Whether CRIU has named this pid as one of the restored."""
        with self._lock:
            return pid in self._pids

    def warnings(self) -> list[str]:
        """What a person should know although the restore goes on."""
        return [] if self._named_memory is None else list(self._named_memory.warnings)

    def window_counts(self) -> dict[str, int]:
        """What the processes met with while their memory was loaded; nothing, if it was there before they ran."""
        return {}

    def begin(self, register: Register) -> None:
        """Check the GPUs, create the memory, hand each process's blocks to ``register``, start loading.

        Raises:
            RestoreFailed: and nothing is left behind.
        """
        self._match_gpus()
        wanted = self._wanted_blocks()
        require_room(wanted.values())
        self._residues = RestoredResidues(self._image, BUSY_SECONDS)
        self._named_memory = RestoredNamedMemory(self._image, BUSY_SECONDS)
        threading.Thread(target=self._load_residues, args=(self._residues,), name="residue").start()
        try:
            self._begin(wanted, register)
        except BaseException:
            self._residues.wait()  # it reads the image, which the caller closes
            raise

    def _begin(self, wanted: dict[BlockKey, Block], register: Register) -> None:
        blocks = self._make_blocks(wanted)
        self.progress.total = sum(block.size for block in blocks.values())
        unregistered = dict(blocks)
        borrowed: list[Block] = []
        try:
            for b in blocks.values():
                borrowed.append(Block(b.key, b.size, b.device, os.dup(b.descriptor), b.by_application))
            for process in self.processes:
                own = [unregistered.pop(key) for key in blocks if key[0] == process.session]
                self._sessions[process.session] = register(process, own)
            if unregistered:
                raise RestoreFailed("The image's processes map GPU memory of a process that is not in the image.")
            threading.Thread(target=self._load, args=(borrowed,), name="load").start()
        except BaseException:
            for block in [*borrowed, *unregistered.values()]:
                os.close(block.descriptor)
            raise

    def _match_gpus(self) -> None:
        wanted = list(self._image.inventory.gpus)
        self._ordinals, self._gpu_pairs = match_gpus(wanted, driver.gpus(), self.gpu_moves)

    def close(self) -> None:
        """Let a restore go that never began loading."""
        if self._residues is not None:
            self._residues.discard()
        if self._named_memory is not None:
            self._named_memory.discard()
        self._image.close()
        self._loaded.set()
        self._over.set()

    @abstractmethod
    def _prepare(self, blocks: list[Block]) -> Filling:
        """What comes before loading, in the same thread: CRIU works already, but nobody attaches before this is done.

        Raises: as :meth:`_fill`.
        """

    def _fill(self, filling: Filling) -> None:
        """Load all of the data, in a thread of its own.

        Raises:
            Cancelled, ImageError, DriverError, OSError.
        """
        filling.run(self.progress, self._cancelled)

    def _filled(self) -> None:
        """All of it is there, and what it should be. Raises: as :meth:`_fill`."""
        log.info("%s: %d bytes of GPU memory loaded", self.path, self.progress.total)

    def _put_back(self) -> None:
        """Nobody copies to the blocks any more, whatever has become of that: drop what it took."""
        self._memory.free()

    @abstractmethod
    def _may_attach(self) -> bool:
        """Whether the data allows a process to attach now; with the lock held."""

    def _load_residues(self, residues: RestoredResidues) -> None:
        if self._named_memory is not None:
            self._named_memory.fill()
        with self.timeline.phase("residue", concurrent=True):
            residues.fill()
        if residues.error:
            self.fail(f"What the driver had saved cannot be put back: {residues.error}")

    def _wanted_blocks(self) -> dict[BlockKey, Block]:
        """The image's blocks, none of which has memory (or a descriptor) yet."""
        wanted: dict[BlockKey, Block] = {}
        for process in self._image.inventory.processes:
            for block in process.blocks:
                key = (
                    block.owner_session or process.session,
                    block.owner_block if block.owner_session else block.block,
                )
                if block.device not in self._ordinals or key not in self._image.blocks:
                    raise RestoreFailed(
                        f"The image contradicts itself: block {block.block} of process {process.pid} "
                        f"(GPU {block.device}) is not among its blocks and GPUs."
                    )
                now = (self._now(key[0]), key[1])
                device, size = self._ordinals[block.device], self._image.blocks[key].size
                wanted[now] = Block(now, size, device, -1, block.owner == pb.Block.APPLICATION)
        return wanted

    def _make_blocks(self, wanted: dict[BlockKey, Block]) -> dict[BlockKey, Block]:
        blocks: dict[BlockKey, Block] = {}
        try:
            with self.timeline.phase("create GPU memory"):
                for key, b in wanted.items():
                    descriptor = driver.context(b.device).create_block(b.size)
                    blocks[key] = Block(key, b.size, b.device, descriptor, b.by_application)
        except DriverError as error:
            for block in blocks.values():
                os.close(block.descriptor)
            raise RestoreFailed(f"GPU memory for the image could not be created: {error}") from error
        return blocks

    def _load(self, borrowed: list[Block]) -> None:
        try:
            filling = self._prepare(borrowed)
            if reads_files(self._image) and self._residues is not None:
                self._residues.wait()  # it is read by the same processors, and the driver waits for it
            with self.timeline.phase("GPU data", concurrent=True):
                self._fill(filling)
                confirm(self._image)
            self._filled()
            with self._lock:
                self._whole = True
                if self.state == "loading":
                    self.state = "loaded"
                self._changed.notify_all()
                self._settle()
        except Cancelled:
            pass
        except Exception as error:
            if not isinstance(error, (ImageError, DriverError, OSError)):
                log.exception("%s: loading failed in an unforeseen way", self.path)
            self.fail(f"Loading GPU memory from {self.path} failed: {error}")
        finally:
            try:
                self._put_back()
            except Exception as error:  # the data is there, or the restore has failed for that
                log.error("%s: what the data was copied through cannot be put back: %s", self.path, error)
                self.unsound = True
            for block in borrowed:
                os.close(block.descriptor)
            if self._residues is not None:
                self._residues.wait()
            self._image.close()
            self._loaded.set()

    def task_restored(self, pid: int) -> None:
        """CRIU has put a process together and is about to let it go; returns when the driver's part is back.

        Runs in a thread of its own: the driver waits for the process to run.
        """
        try:
            self._bring_back_driver_part(pid)
        finally:
            with self._lock:
                self._reviving.discard(pid)

    def _bring_back_driver_part(self, pid: int) -> None:
        if self._residues is not None:
            self._residues.wait()
            if self._residues.error:
                return  # the restore has failed for that
        try:
            with self.timeline.phase("driver restore"):
                self._revive(pid)
            log.info("%s: the driver's part of process %d is back", self.path, pid)
        except NoSuchProcess:
            return  # it was killed; watch_to_the_end() says so
        except PhosError as error:
            self.fail(f"The driver could not restore process {pid}: {error}")
            return
        if inner_pid(pid) in self._gated_pids:
            with self._lock:
                self._driver_ready.add(pid)
                self._changed.notify_all()
        else:
            self._computes(pid)  # without the frontend nothing else has to come back

    def _revive(self, pid: int) -> None:
        with self._lock:
            still = pid in self._still
        if still:
            toggle.put_back(pid, self._gpu_pairs or None)
        else:
            toggle.revive(pid, self._gpu_pairs or None)

    def _thread(self, pid: int) -> int:
        """The driver's thread of a process, as that numbers it; 0 if the image does not name it."""
        return next((p.restore_thread for p in self._image.inventory.processes if p.pid == inner_pid(pid)), 0)

    def bring_back(self, pids: Sequence[int], seconds: float = DRIVER_SECONDS) -> None:
        """The driver's threads run, of processes whose others stand still: the driver's part of each.

        Raises:
            RestoreFailed: one cannot be brought back; all processes of the restore have been ended.
        """
        with self._lock:
            if self._let_go:
                return  # CRIU was killed after it had asked: let_go() sees to them
            self._still |= set(pids)
            self._promised -= set(pids)
        try:
            toggle.together(self.task_restored, pids, seconds, "bring back", at_any_rate=True)
        except CheckpointFailed as error:
            self.fail(str(error))
            raise RestoreFailed(self.error or str(error)) from error
        with self._lock:
            gone = [pid for pid in pids if pid not in self._driver_ready and pid not in self._computing]
        if gone:
            self.fail(f"Process {gone[0]} ended while it was restored.")
            raise RestoreFailed(self.error or f"Process {gone[0]} ended while it was restored.")

    def held_by(self, criu: int) -> bool:
        """Whether CRIU has yet to let one of the tasks go; it lets none go before its plugin has named all of them."""
        with self._lock:
            named = [*self._pids, *self._beside]
        return not named or any(procfs.traces(criu, pid) for pid in named)

    def let_go(self) -> None:
        """Nobody holds the tasks any more: what was to be brought back standing still is so running."""
        with self._lock:
            self._let_go = True
            promised, self._promised = self._promised, set()
            self._still.clear()
            self._settle()
        for pid in promised:
            try:
                self._revive_beside(pid)
            except RuntimeError:  # there can be no thread
                self.task_restored(pid)

    def _share(self) -> None:
        """CRIU has opened what tasks share by a name, and is about to let them run."""
        if self._named_memory is not None:
            self._named_memory.release()
            self._named_memory.wait()

    def take_task(self, pid: int) -> dict[int, int]:
        """CRIU's plugin names a task that it is about to let go: bring the driver's part back beside it.

        Those without the frontend are brought back standing still: nothing keeps their threads from calls that crash
        before (bench/ungated.py). When this is the last of them, returns all of them, each with the thread that has to
        run for :meth:`bring_back`, as it is numbered there.

        The plugin, and with it the stopped task, waits for this: no driver call may be made here, because the driver's
        calls on a process, GetState too, wait until that process runs.

        Raises:
            RestoreFailed: what they share is not what it was.
        """
        self._share()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            pidfd = -1
        inner = inner_pid(pid)
        uses_cuda = inner in self._image_pids
        strangers = self._image_pids - self._gated_pids
        standing_still = inner in strangers and self._thread(pid) != 0  # which the image may not name
        with self._lock:  # all at once: if CRIU is killed here, let_go() comes before it or behind it
            (self._pids if uses_cuda else self._beside)[pid] = pidfd
            failed = self.state in FAILED
            if failed:
                self._kill(pid, pidfd)  # it must not go on without its memory
            elif uses_cuda:
                self._reviving.add(pid)  # before it runs
                standing_still = standing_still and not self._let_go
                if standing_still:
                    self._promised.add(pid)
        if failed or not uses_cuda:
            return {}
        if not standing_still:
            self._revive_beside(pid)
        with self._lock:
            all_here = strangers <= {inner_pid(taken) for taken in self._pids}
            return {promised: self._thread(promised) for promised in self._promised} if all_here else {}

    def _revive_beside(self, pid: int) -> None:
        threading.Thread(target=self.task_restored, args=(pid,), name=f"restore-{pid}", daemon=True).start()

    def wait_ready(self, pid: int, seconds: float) -> bool:
        """Whether the frontend in ``pid`` may attach, within so many seconds; at once if it never may."""

        def settled() -> bool:
            return self.state not in (*PARKED, *UNDER_WAY) or (pid in self._driver_ready and self._may_attach())

        with self._lock:
            self._changed.wait_for(settled, seconds)
            return pid in self._driver_ready and self._may_attach()

    def awaits(self, pid: int) -> bool:
        """Whether a process is to ask for its memory, and has not."""
        with self._lock:
            asked = self._computing | self._attaching
            return pid in self._pids.keys() - asked and inner_pid(pid) in self._gated_pids

    def attaching(self, pid: int) -> None:
        """A process under the frontend gets its memory back. Followed by :meth:`attached` or :meth:`not_attached`."""
        with self._lock:
            self._attaching.add(pid)

    def attached(self, pid: int) -> None:
        """It computes again, or has ended since."""
        with self._lock:
            self._driver_ready.discard(pid)
        self._computes(pid)
        self.not_attached(pid)

    def not_attached(self, pid: int) -> None:
        """Nobody brings this process's memory back any more."""
        with self._lock:
            self._attaching.discard(pid)

    def _computes(self, pid: int) -> None:
        with self._lock:
            self._computing.add(pid)
            self._settle()

    def _settle(self) -> None:
        """The end, if all data is there and all processes compute, none of them held by CRIU; with the lock held."""
        if len(self._computing) == self._waiting_for and self.state == "loaded" and not self._still:
            self.state = "attached"
            self._over.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has succeeded or failed; whether it has."""
        return self._over.wait(seconds)

    def need(self, key: BlockKey, seconds: float) -> bool:
        """Whether a block's data is there within so many seconds; it goes before others.

        Raises:
            KeyError: it does not come any more.
        """
        if not self._loaded.wait(seconds):
            return False
        self._require_whole(key)
        return True

    def _require_whole(self, key: BlockKey) -> None:
        with self._lock:
            if not self._whole or self.state in FAILED:
                raise KeyError(key)

    def fail(self, reason: str, state: str = "failed") -> None:
        """Give the whole restore up: no process of it may go on without its memory."""
        with self._lock:
            if self.state not in (*PARKED, *UNDER_WAY):
                return
            self.state = state
            self.error = reason
            self._changed.notify_all()
            self._over.set()
            # With the lock: who sees the new state may close the descriptors, whose numbers are others' then.
            for pid, pidfd in (*self._pids.items(), *self._beside.items()):
                self._kill(pid, pidfd)
        log.error("%s", reason)
        self._cancelled.set()  # after that: whoever copies may then tell processes that wait that all is there

    @staticmethod
    def _kill(pid: int, pidfd: int) -> None:
        with suppress(OSError):  # it has ended
            if pidfd >= 0:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)

    def watch_to_the_end(self) -> None:
        """CRIU is done with them. Wait until all processes compute; one that ends before that ends the restore."""
        seen: dict[int, float] = {}  # who has ended → when that was noticed
        looked = time.monotonic()
        while True:
            with self._lock:
                if self.state not in UNDER_WAY:
                    break
                everybody = dict(self._pids)
            for pid, fd in everybody.items():
                if has_ended(pid, fd):
                    seen.setdefault(pid, time.monotonic())
            # After that: one that computes may end at once, before the thread that let it go has said that it computes.
            with self._lock:
                waiting = everybody.keys() - self._computing
                missing = self._waiting_for - len(everybody)
                told = self._reviving | self._attaching
                since = time.monotonic() - VERDICT_SECONDS
                gone = [pid for pid in waiting & seen.keys() if pid not in told or seen[pid] < since]
            if not waiting and not missing and seen.keys() == everybody.keys():
                self._all_have_ended()
            elif gone:
                self.fail(f"Process {gone[0]} ended before its GPU state was back.")
            elif missing > 0:
                self.fail(f"CRIU ended, and {missing} of the image's GPU processes are not there.")
            elif time.monotonic() - looked > PROGRAM_SECONDS:
                looked = time.monotonic()
                replaced = {pid for pid in waiting - told - seen.keys() if self._is_another_program(pid)}
                with self._lock:  # as above: it may have been given its memory since, and be what it likes
                    replaced -= self._computing | self._reviving | self._attaching
                if replaced:
                    self.fail(f"Process {min(replaced)} replaced its program before its GPU state was back.")
            else:
                time.sleep(0.01)
        self._loaded.wait()
        if self._residues is not None:
            self._residues.discard()
        if self._named_memory is not None:
            if self.state == "attached":
                self._named_memory.keep()
            else:
                self._named_memory.discard()
        with self._lock:
            descriptors = [fd for fd in (*self._pids.values(), *self._beside.values()) if fd >= 0]
            self._pids, self._beside = dict.fromkeys(self._pids, -1), {}
        for descriptor in descriptors:
            os.close(descriptor)

    def _is_another_program(self, pid: int) -> bool:
        """Whether a process has no frontend any more that could ask for its memory."""
        names = thread_names(pid) if inner_pid(pid) in self._gated_pids else set()
        return bool(names) and CONTROL_THREAD not in names and not procfs.is_ending(pid)

    def _all_have_ended(self) -> None:
        """They computed, and need no memory any more."""
        with self._lock:
            if self.state in UNDER_WAY:
                self.state = "attached"
                self._over.set()
        self._cancelled.set()
