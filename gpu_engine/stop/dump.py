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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from phos.gpu_engine import driver, inventory, toggle
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.copier import Cancelled, Copier, Progress
from phos.gpu_engine.errors import CheckpointFailed, DriverError, NoSuchProcess, PhosError
from phos.gpu_engine.process import Detached, ForeignProcess, GatedProcess
from phos.gpu_engine.timeline import Timeline
from phos.images.errors import ImageError
from phos.images.writer import ImageWriter

log = logging.getLogger(__name__)

BorrowBlocks = Callable[[Sequence[BlockKey]], list[Block]]
DescribeProcess = Callable[[GatedProcess, Detached], inventory.ProcessRecord]

RETURN_SECONDS = 120.0
"""How long a released process may take to come back."""


@dataclass(frozen=True)
class Settings:
    """What a person may choose for a checkpoint. Seconds."""

    quiesce_timeout: float = 60.0
    quiesce_tries: int = 3
    reduce_stack: bool = True
    huge_pages: bool = True

    @staticmethod
    def from_environment() -> Settings:
        """PHOS_QUIESCE_SECONDS, PHOS_REDUCERS (a comma-separated list of 'stack-limit' and 'huge-pages', or 'none')."""
        reducers = os.environ.get("PHOS_REDUCERS", "stack-limit,huge-pages").split(",")
        return Settings(
            quiesce_timeout=float(os.environ.get("PHOS_QUIESCE_SECONDS", "60")),
            reduce_stack="stack-limit" in reducers,
            huge_pages="huge-pages" in reducers,
        )

    def reducers(self) -> list[str]:
        """The names of the toggle reducers in use."""
        chosen = {"stack-limit": self.reduce_stack, "huge-pages": self.huge_pages}
        return [name for name, used in chosen.items() if used]


class StopDump:
    """One checkpoint of a tree of processes."""

    kind = "dump"

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
        self._detached: dict[bytes, Detached] = {}
        self._quiesced: list[GatedProcess] = []
        self._toggled: list[int] = []
        self._records: list[inventory.ProcessRecord] = []
        self._frozen_at = 0.0
        self._warnings: list[str] = []
        self._writer = ImageWriter(directory, stripes=copier.threads)

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
            self._reserve()
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
        except (PhosError, OSError) as error:
            self._give_up(str(error))
            raise CheckpointFailed(str(error)) from error
        self._frozen_at = self.timeline.now()

    def _reserve(self) -> None:
        """Allocate the image's room while the processes still compute: memory-backed file systems are slow at it."""
        size = sum(block.size for process in self.gated for block in process.own_blocks())
        if size:
            with self.timeline.phase("reserve room"):
                if not self._writer.reserve(size):
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
            raise CheckpointFailed(
                f"phosd has no descriptor of GPU memory block {number} of process {owner.pid if owner else '?'}: "
                "phosd and its keeper were both killed since the process was last restored. Restart the process."
            ) from error

    def _checkpoint(self) -> None:
        foreign = {process.pid for process in self.foreign}

        def one(pid: int) -> None:
            toggle.checkpoint(pid, toggle.FOREIGN_LOCK_MS if pid in foreign else toggle.LOCK_MS)
            self._toggled.append(pid)

        toggle.in_parallel(one, self.pids)

    def _copy(self) -> None:
        try:
            with self.timeline.phase("GPU data", concurrent=True):
                self._copier.save(self._borrowed, self._writer.write, self.progress, self._cancelled)
        except BaseException as error:
            self._copy_failure = error
            if not isinstance(error, Cancelled):
                log.error("%s: copying GPU memory failed: %s", self.path, error)

    # Step 2: CRIU has ended.

    def criu_ended(self) -> None:
        """CRIU has dumped its part (or failed); the tasks are about to be released or killed."""
        log.info("%s: CRIU has ended", self.path)
        self.timeline.add("CRIU freeze and dump", self._frozen_at)

    def finish(self, criu_result: int) -> None:
        """Bring back who is alive, and commit or withdraw the image. ``criu_result`` is CRIU's own, 0 for success.

        Raises:
            CheckpointFailed: the image is withdrawn; the processes run.
        """
        if criu_result != 0:
            self._give_up("CRIU failed; its own log says why (dump.log, or what -o names, or the terminal).")
            raise CheckpointFailed(self.error)
        began = self.timeline.now()
        if self._copying:
            self._copying.join()
        self.timeline.add("wait for GPU data", began)
        self._return_blocks()
        back = self._bring_back()
        if self._copy_failure is not None:
            self._withdraw(f"Copying GPU memory to {self.path} failed: {self._copy_failure}")
            raise CheckpointFailed(self.error)
        if back:
            log.error("%s: %s", self.path, back)
        message = inventory.build(
            "stop",
            self._records,
            self.foreign,
            driver.gpus(),
            self.versions,
            self.since,
        )
        message.reducers.extend(self.settings.reducers())
        inventory.add_timings(message, self.timeline.phases(), self.timeline.now())
        try:
            self._writer.commit(message)
        except (ImageError, OSError) as error:
            self._withdraw(f"Completing the image in {self.path} failed: {error}")
            raise CheckpointFailed(self.error) from error
        self.error = back
        self.state = "committed"
        log.info("%s: committed, %d bytes of GPU memory", self.path, self.progress.total)

    def _alive(self, pid: int) -> bool:
        return driver.checkpoint_state(pid) is not None

    def _bring_back(self) -> str:
        """Driver restore, unlock, attach, open for every process that is still there. Returns what went wrong."""
        failures: list[str] = []

        def revive(pid: int) -> None:
            try:
                toggle.revive(pid)
            except NoSuchProcess:
                pass  # CRIU has killed it, as asked
            except DriverError as error:
                if self._alive(pid):
                    failures.append(f"Process {pid}: {error} It stays stopped; its last state is in the image.")

        living = [pid for pid in self._toggled if self._alive(pid)]
        if living:
            with self.timeline.phase("driver restore"):
                toggle.in_parallel(revive, living)
        self._toggled = []
        with self.timeline.phase("attach"):
            returning = []
            for process in self.gated:
                if process.session in self._detached and process.alive():
                    process.allow_attach()
                    returning.append(process)
            for process in returning:
                try:
                    process.wait_attached(RETURN_SECONDS)
                except PhosError as error:
                    if process.alive():
                        failures.append(str(error))
        self._detached = {}
        return " ".join(failures)

    def _give_up(self, reason: str) -> None:
        """Undo everything, in the reverse order of doing it."""
        self._cancelled.set()
        if self._copying:
            self._copying.join()
        self._return_blocks()
        detached = set(self._detached)
        problems = self._bring_back()
        for process in self._quiesced:
            if process.session not in detached:
                try:
                    process.open()
                except PhosError as error:
                    problems += f" {error}"
        self._quiesced = []
        self._withdraw(reason + (f" Then: {problems}" if problems.strip() else ""))

    def _withdraw(self, reason: str) -> None:
        self._writer.abort()
        self.error = reason
        self.state = "failed"

    def _return_blocks(self) -> None:
        for block in self._borrowed:
            os.close(block.descriptor)
        self._borrowed = []
