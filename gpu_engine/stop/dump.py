"""A checkpoint by the stop protocol.

Order (DESIGN §3, §4): every process of the tree is quiesced, detached and checkpointed by the driver while it still
runs (:meth:`StopDump.begin`); CRIU freezes and dumps the CPU side while the blocks are copied; when both have ended
(:meth:`StopDump.finish`) whoever is still alive is brought back, and the image is committed. Whatever fails, the
processes run on as before and the image directory holds nothing of ours.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

import psutil

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import driver, inventory, procfs, toggle
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copier import Cancelled, Copier, MappedBlocks, Progress
from phos.gpu_engine.cow.settings import size_of
from phos.gpu_engine.errors import CheckpointFailed, DriverError, NoSuchProcess, PhosError, Unresponsive, UsageError
from phos.gpu_engine.landing import Landing
from phos.gpu_engine.process import Detached, ForeignProcess, GatedProcess
from phos.gpu_engine.residue import DumpedResidues
from phos.gpu_engine.timeline import Timeline
from phos.gpu_engine.touch_order import TouchOrder, to_messages
from phos.images.errors import ImageError
from phos.images.formats import COMMIT_FILE
from phos.images.reader import Image
from phos.images.writer import ImageWriter

log = logging.getLogger(__name__)

BorrowBlocks = Callable[[Sequence[BlockKey]], list[Block]]
DescribeProcess = Callable[[GatedProcess, Detached], inventory.ProcessRecord]

REDUCERS = ("stack-limit", "huge-pages", "residue")

USUAL_RESIDUE = {"nvidia": 512 << 20, "software": 32 << 20}
"""What a driver wants for its own part when it is checkpointed, by :func:`driver.kind`; bytes."""

CRIU_FAILED = "CRIU failed; its own log says why (dump.log, or what -o names, or the terminal)."


@dataclass(frozen=True)
class Settings:
    """What a person may choose for a checkpoint. Seconds."""

    quiesce_timeout: float = 60.0
    quiesce_tries: int = 3
    checkpoint_timeout: float = 300.0
    return_timeout: float = 120.0
    reduce_stack: bool = True
    huge_pages: bool = True
    residue: bool = True
    in_place: bool = True  # GPUs write into the image's own pages, where they are huge
    residue_bytes: int = 0  # for a driver of which nothing is known yet; 0: as much as one of its kind usually wants

    @staticmethod
    def from_environment() -> Settings:
        """What phosd's environment says.

        PHOS_QUIESCE_SECONDS; PHOS_CHECKPOINT_SECONDS: how long the driver may take (whole GPUs are copied of processes
        without the frontend); PHOS_RETURN_SECONDS: how long a released process may take to come back; PHOS_REDUCERS: a
        comma-separated list of 'stack-limit', 'huge-pages' and 'residue', or 'none'; PHOS_RESIDUE_BYTES: how much
        memory is prepared for what the driver saves, at a process's first checkpoint; PHOS_IN_PLACE: on or off.

        Raises:
            UsageError: one of them has no meaning.
        """
        text = os.environ.get("PHOS_REDUCERS", ",".join(REDUCERS))
        reducers = [] if text.strip() in ("", "none") else [name.strip() for name in text.split(",")]
        if unknown := set(reducers) - set(REDUCERS):
            raise UsageError(
                f"PHOS_REDUCERS={text} in phosd's environment: '{min(unknown)}' is no reducer. "
                f"It is a list of {', '.join(REDUCERS)} with commas between, or none."
            )
        return Settings(
            quiesce_timeout=_seconds("PHOS_QUIESCE_SECONDS", 60.0),
            checkpoint_timeout=_seconds("PHOS_CHECKPOINT_SECONDS", 300.0),
            return_timeout=_seconds("PHOS_RETURN_SECONDS", 120.0),
            reduce_stack="stack-limit" in reducers,
            huge_pages="huge-pages" in reducers,
            residue="residue" in reducers,
            in_place=_switch("PHOS_IN_PLACE"),
            residue_bytes=size_of("PHOS_RESIDUE_BYTES", os.environ.get("PHOS_RESIDUE_BYTES", "0")),
        )

    def reducers(self) -> list[str]:
        """The names of the toggle reducers in use."""
        chosen = dict(zip(REDUCERS, (self.reduce_stack, self.huge_pages, self.residue), strict=True))
        return [name for name, used in chosen.items() if used]


def _switch(name: str) -> bool:
    text = os.environ.get(name, "on")
    if text not in ("on", "off"):
        raise UsageError(f"{name}={text} in phosd's environment is neither on nor off.")
    return text == "on"


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise UsageError(f"{name}={text} in phosd's environment is no number of seconds.")
    return value


def _free_bytes(directory: int) -> int:
    room = os.fstatvfs(directory)
    return room.f_bavail * room.f_frsize


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


class StopDump:
    """One checkpoint of a tree of processes."""

    kind = "dump"
    protocol = "stop"
    order: TouchOrder | None = None
    """What is known of the order in which the processes touch their memory."""
    access_tables: Mapping[bytes, Callable[[], bytes]] = MappingProxyType({})
    """What is known of what their kernels touch, by session (frontend/access_table.h)."""

    def __init__(
        self,
        directory: int,
        path: str,
        gated: Sequence[GatedProcess],
        foreign: Sequence[ForeignProcess],
        copier: Copier,
        settings: Settings,
        versions: inventory.Versions,
    ) -> None:
        """``directory`` is an open descriptor of the image directory; it stays the caller's.

        Raises:
            ImageError: the directory holds an image already, or cannot be written.
        """
        self.path = path
        self.gated = list(gated)
        self.foreign = list(foreign)
        self.settings = settings
        self.versions = versions
        self.criu = os.getpid()
        """The process that dumps them, where it is not in our namespaces."""
        self.state = "writing"
        self.error = ""
        self.since = time.time()
        self.progress = Progress(0, [0] * copier.threads)
        self.timeline = Timeline()
        self._copier = copier
        self._cancelled = threading.Event()
        self._copying: threading.Thread | None = None
        self._copy_failure: BaseException | None = None
        self._borrowed: list[Block] = []
        self._mapped = MappedBlocks()
        self._residues = DumpedResidues()
        self._detached: dict[bytes, Detached] = {}
        self._quiesced: list[GatedProcess] = []
        self._toggles: dict[int, toggle.Step] = {}
        self._records: list[inventory.ProcessRecord] = []
        self._frozen_at = 0.0
        self._warnings: list[str] = []
        self._failure = ""  # why the image cannot be completed
        self._writer = ImageWriter(directory, stripes=copier.threads)
        self._landing: Landing | None = None
        self._directory = os.dup(directory)

    @property
    def pids(self) -> list[int]:
        """All GPU processes of the checkpoint."""
        return [process.pid for process in self.gated] + [process.pid for process in self.foreign]

    def warnings(self) -> list[str]:
        """What a person should know although the checkpoint goes on."""
        return list(self._warnings)

    def _find_warnings(self) -> list[str]:
        found = [
            f"Process {process.pid} ({process.executable}) was not started under 'phos-gpu run': the driver alone "
            "saves its GPU memory, into its own host memory and CRIU's pages. That is right, but many times slower."
            for process in self.foreign
        ]
        for process in self.gated:
            detached = self._detached.get(process.session)
            for state in detached.uncarried if detached else []:
                if state.bytes >= 64 << 20:
                    found.append(
                        f"Process {process.pid} ({process.executable}): {state.bytes >> 20} MiB of {state.kind} stay "
                        "with the driver, which saves them slowly."
                    )
        return found

    # Step 1: while the processes still run.

    def begin(self, borrow: BorrowBlocks, describe: DescribeProcess) -> None:
        """Quiesce, detach and checkpoint every process, and start copying.

        ``borrow`` gives descriptors of the blocks that stay valid whatever happens to the owner; ``describe`` adds
        what the daemon knows of a process.

        Raises:
            CheckpointFailed: and everything runs as before.
        """
        try:
            self._prepare(borrow)
            self._quiesce()
            with self.timeline.phase("detach"):
                self._detach()
            self._warnings = self._find_warnings()
            log.info("%s: processes %s are detached", self.path, self.pids)
            self._records = [describe(p, self._detached[p.session]) for p in self.gated]
            self._borrowed = self._collect(borrow)
            self.progress.total = sum(block.size for block in self._borrowed)
            self._copying = threading.Thread(target=self._copy, name="save")
            self._copying.start()
            with self.timeline.phase("driver checkpoint"):
                self._checkpoint()
            self._keep_residues()
        except Exception as error:
            if not isinstance(error, (PhosError, ImageError, OSError)):
                log.exception("%s: the checkpoint failed in an unforeseen way", self.path)
                error = CheckpointFailed(f"It failed in an unforeseen way ({error!r}); phosd's log has more.")
            self._give_up(str(error))
            raise CheckpointFailed(self.error) from error
        self._frozen_at = self.timeline.now()

    def _prepare(self, borrow: BorrowBlocks) -> None:
        """What can be done while the processes still compute: room for the image, and phosd's mappings of their blocks.

        Memory-backed file systems are slow at finding pages, and mapping would wait for the driver's checkpoint. The
        processes may allocate and free meanwhile: what is new is mapped later, what is gone is not copied.
        """
        blocks = [block for process in self.gated for block in process.own_blocks()]
        with self.timeline.phase("map blocks"):
            for block in blocks:
                with suppress(KeyError):  # freed since
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
                self._residues.prepare(self.gated, estimate, self.criu)
        size = sum(block.size for block in blocks)
        # What is reserved for data that turns out to be zeros would be missing for CRIU's pages.
        if size and _free_bytes(self._directory) > size + sum(_resident_bytes(pid) for pid in self.pids):
            with self.timeline.phase("reserve room"):
                if self.settings.in_place:
                    self._landing = Landing.prepare(self._writer, size)
                if self._landing is None and not self._writer.reserve(size):
                    log.info("%s: less room than %d bytes of GPU memory need if none of it is zeros", self.path, size)

    def _quiesce(self) -> None:
        """All gates at once: work of one process may wait for another's (collectives)."""
        if not self.gated:
            return
        with self.timeline.phase("quiesce"), ThreadPoolExecutor(len(self.gated)) as pool:
            for attempt in range(1, self.settings.quiesce_tries + 1):
                timeout = self.settings.quiesce_timeout / self.settings.quiesce_tries
                futures = {p.session: pool.submit(p.quiesce, timeout) for p in self.gated}
                failures = [f.exception() for f in futures.values() if f.exception()]
                self._quiesced = [p for p in self.gated if not futures[p.session].exception()]
                if not failures:
                    return
                if stuck := [error for error in failures if isinstance(error, Unresponsive)]:
                    raise stuck[0]
                if attempt < self.settings.quiesce_tries:
                    for process in self._quiesced:
                        process.open()  # let the others' work finish
                    self._quiesced = []
            raise failures[0] or CheckpointFailed("A process could not be quiesced.")

    def _detach(self) -> None:
        if not self.gated:
            return

        def one(process: GatedProcess) -> None:
            self._detached[process.session] = process.detach(
                reduce_stack=self.settings.reduce_stack, huge_pages=self.settings.huge_pages
            )

        with ThreadPoolExecutor(len(self.gated)) as pool:
            for future in [pool.submit(one, process) for process in self.gated]:
                future.result()

    def _collect(self, borrow: BorrowBlocks) -> list[Block]:
        tree = {process.session for process in self.gated}
        keys = {block.key for process in self.gated for block in process.own_blocks()}
        for process in self.gated:
            for block in self._detached[process.session].blocks:
                if block.key[0] not in tree:
                    raise CheckpointFailed(
                        f"Process {process.pid} ({process.executable}) maps GPU memory that belongs to a process "
                        "outside the tree being dumped. Dump their common ancestor."
                    )
                keys.add(block.key)
        try:
            return borrow(sorted(keys))
        except KeyError as error:
            session, number = error.args[0]
            owner = next((p for p in self.gated if p.session == session), None)
            if owner is not None and not owner.alive():
                raise CheckpointFailed(
                    f"Process {owner.pid} ({owner.executable}) ended while it was being checkpointed."
                ) from error
            raise CheckpointFailed(
                f"phosd has no descriptor of GPU memory block {number} of process {owner.pid if owner else '?'}: "
                "phosd and its keeper were both killed since the process was last restored. Restart the process."
            ) from error

    def _checkpoint(self) -> None:
        foreign = {process.pid for process in self.foreign}

        def one(pid: int) -> None:
            toggle.checkpoint(pid, toggle.FOREIGN_LOCK_MS if pid in foreign else toggle.LOCK_MS)

        for pid in self.pids:
            self._toggles[pid] = toggle.Step(one, pid)
        for step in toggle.wait_for(self._toggles.values(), self.settings.checkpoint_timeout):
            raise Unresponsive(
                f"The driver could not checkpoint process {step.pid}: "
                + ("it is stopped. Continue it first." if procfs.is_stopped(step.pid) else "it does not answer.")
            )
        for step in self._toggles.values():
            if step.error is not None:
                raise step.error

    def _copy(self) -> None:
        try:
            hashes = None
            try:
                hashes = self._hash()
            except DriverError as error:
                log.info("%s: the GPU does not hash its memory, so the CPU does: %s", self.path, error)
            with self.timeline.phase("GPU data", concurrent=True):
                writer, mapped = self._writer, self._mapped
                self._copier.save(self._borrowed, writer, self.progress, self._cancelled, mapped, hashes)
        except BaseException as error:
            self._copy_failure = error
            if not isinstance(error, Cancelled):
                log.error("%s: copying GPU memory failed: %s", self.path, error)

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

    # Step 2: CRIU has ended.

    def criu_ended(self, result: int, *, kills: bool) -> None:
        """CRIU has dumped its part (or failed: ``result`` is not 0), and the tasks are still frozen.

        If CRIU is about to kill them, the image is completed first: a process may be killed only when it is safe on
        disk. Waiting costs it nothing. A process that is to run on is not kept waiting here (DESIGN §3).

        Raises:
            CheckpointFailed: the image cannot be completed, so the tasks must not be killed.
        """
        log.info("%s: CRIU has ended", self.path)
        self.timeline.add("CRIU freeze and dump", self._frozen_at)
        if result == 0 and kills:
            self._complete()

    def finish(self, criu_result: int) -> None:
        """Bring back who is alive, and commit or withdraw the image. ``criu_result`` is CRIU's own, 0 for success.

        Raises:
            CheckpointFailed: the image is withdrawn; the processes run.
        """
        if self.state == "committed":
            self._say_if_not_back(self._bring_back())
            return
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
        self.timeline.add("wait for GPU data", began)
        self._return_blocks()

    def _complete(self) -> None:
        """Wait for the data and commit the image.

        Raises:
            CheckpointFailed: that was not possible; the image is not withdrawn yet.
        """
        self._wait_for_data()
        try:
            if self._copy_failure is not None:
                raise self._copy_failure
            message = inventory.build(
                self.protocol, self._records, self.foreign, driver.gpus(), self.versions, self.since
            )
            message.reducers.extend(self.settings.reducers())
            inventory.add_timings(message, self.timeline.phases(), self.timeline.now())
            self._residues.describe(message, self._writer)
            self._add_to(message)
            for process in message.processes:
                process.access_table = (
                    self.access_tables[process.session]() if process.session in self.access_tables else b""
                )
            if self.order is not None:
                message.order.extend(to_messages(self.order.of(process.session for process in self.gated)))
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
            self._failure = f"{what} {self.path} failed: {error}"
            raise CheckpointFailed(self._failure) from error
        self._close_directory()
        self.state = "committed"
        log.info("%s: committed, %d bytes of GPU memory", self.path, self.progress.total)
        self._residues.discard()

    def _add_to(self, message: pb.Inventory) -> None:
        """What else a protocol has to say in the inventory."""

    def _alive(self, pid: int) -> bool:
        return driver.checkpoint_state(pid) is not None

    def _bring_back(self) -> str:
        """Driver restore, unlock, attach, open for every process that is still there. Returns what went wrong.

        Each process returns by itself: one that is stopped, or finds no GPU memory, holds up nobody else, and comes
        back when it can, however long after this method has returned.
        """
        began = self.timeline.now()
        self._residues.wait()  # the driver may change what it reads
        self.timeline.add("wait for residue", began)
        failures: list[str] = []
        toggled = set(self._toggles)
        gated = {p.pid: p for p in self.gated if p.session in self._detached}
        allowed: list[GatedProcess] = []

        def revive(pid: int) -> None:
            process = gated.get(pid)
            try:
                if pid in toggled:
                    toggle.revive_when_there_is_room(pid)
            except NoSuchProcess:
                return  # CRIU has killed it, as asked
            except PhosError as error:
                if process is not None and self._alive(pid):
                    process.lose(str(error))
                if self._alive(pid):
                    raise CheckpointFailed(f"Process {pid}: {error} Its CUDA calls fail from now on.") from error
                return
            if process is not None and process.alive():
                process.allow_attach()
                allowed.append(process)

        pids = [pid for pid in {*gated, *toggled} if pid in gated or self._alive(pid)]
        steps = [toggle.Step(revive, pid, self._toggles.get(pid)) for pid in pids]
        if steps:
            with self.timeline.phase("driver restore"):
                late = toggle.wait_for(steps, self.settings.return_timeout)
            failures += [self._not_back(step.pid) for step in late if self._alive(step.pid)]
            failures += [str(step.error) for step in steps if step.error is not None]
        self._toggles = {}
        deadline = time.monotonic() + self.settings.return_timeout
        if gated:
            with self.timeline.phase("attach"):
                for process in list(allowed):
                    self._wait_attached(process, deadline, failures)
        self._detached = {}
        return " ".join(filter(None, failures))

    def _wait_attached(self, process: GatedProcess, deadline: float, failures: list[str]) -> None:
        while True:
            try:
                process.wait_attached(min(1.0, max(0.0, deadline - time.monotonic())))
                return
            except PhosError as error:
                if not process.alive():
                    return
                if procfs.is_stopped(process.pid):
                    failures.append(self._not_back(process.pid))
                    return
                if not isinstance(error, Unresponsive) or time.monotonic() > deadline:
                    failures.append(str(error))
                    return

    def _not_back(self, pid: int) -> str:
        if procfs.is_stopped(pid):
            self._warnings.append(f"Process {pid} is stopped: its GPU state comes back when it is continued.")
            return ""
        return f"Process {pid} has not come back within {self.settings.return_timeout:.0f} s; phosd goes on trying."

    def _give_up(self, reason: str) -> None:
        """Undo everything, in the reverse order of doing it."""
        self._cancelled.set()
        if self._copying:
            self._copying.join()
        self._return_blocks()
        detached = set(self._detached)
        problems = self._bring_back()
        for process in self._quiesced:
            if process.session not in detached and process.alive():
                try:
                    process.open()
                except PhosError as error:
                    problems += f" {error}"
        self._quiesced = []
        self._withdraw(reason + (f" Then: {problems}" if problems.strip() else ""))

    def _withdraw(self, reason: str) -> None:
        self._residues.drop(self.gated)
        self._residues.discard()
        self._writer.abort()
        self._close_directory()
        self.error = reason
        self.state = "failed"

    def _close_directory(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
        self._directory = -1
        if self._landing is not None:  # takes time, and nobody has to wait for it
            threading.Thread(target=self._landing.release, name="release").start()
            self._landing = None

    def _return_blocks(self) -> None:
        for block in self._borrowed:
            os.close(block.descriptor)
        self._borrowed = []
        try:
            self._mapped.close()
        except DriverError as error:
            log.warning("%s: %s", self.path, error)
