"""The processes of a dump: brought to a stand, and back. What becomes of their memory meanwhile is not known here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from phos.gpu_engine import driver, procfs, toggle
from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.errors import CheckpointFailed, DriverError, NoSuchProcess, PhosError, Unresponsive
from phos.gpu_engine.process import Detached, ForeignProcess, GatedProcess, QuiesceTimes
from phos.gpu_engine.stop.settings import Settings
from phos.gpu_engine.timeline import Timeline

FIRST_TRY_SECONDS = 0.15
"""How long processes that are to be quiesced stand still for the first try."""

LONGER = 1.25
"""How many times as long each further try may take. Those that fail cost processes that wait for each other time, and
those whose work is long none."""

PAUSE_SECONDS = 0.02
"""How long they run between two tries."""

LEAD_SECONDS = 0.02
"""So long all gates stay closed in a try, before who has come to rest goes on for those that have not."""

BorrowBlocks = Callable[[Sequence[BlockKey]], list[Block]]
"""See :meth:`phos.gpu_engine.daemon.memory.Broker.borrow`."""


def try_seconds(total: float) -> Iterator[float]:
    """How long each try to quiesce may take.

    The GPU's work may be long, or wait for what a program does once its gate is open again: a thread that sets what a
    stream waits for, a process whose part of a collective is not launched yet. Short tries soon find a moment without
    the second; the first goes on while gates are open or closed, and is done within a longer one. In every other try
    processes go on in turns (:class:`ProcessTree`).
    """
    seconds = FIRST_TRY_SECONDS
    while 3 * seconds < total:
        yield seconds
        total -= seconds
        seconds *= LONGER
    yield total


class ProcessTree:
    """The GPU processes below the one that is dumped, and how far each has been brought."""

    def __init__(
        self,
        gated: Sequence[GatedProcess],
        foreign: Sequence[ForeignProcess],
        settings: Settings,
        timeline: Timeline,
    ) -> None:
        self.gated = list(gated)
        self.foreign = list(foreign)
        self.detached: dict[bytes, Detached] = {}  # by session: those whose memory is given over now
        self.warnings: list[str] = []
        self._settings = settings
        self._timeline = timeline
        self._quiesced: list[GatedProcess] = []
        self._toggles: dict[int, toggle.Step] = {}
        self._saved: set[int] = set()  # those without the frontend that the driver has saved
        self._put_back: dict[int, toggle.Step] = {}  # those that the driver was to bring back while they stood still

    @property
    def pids(self) -> list[int]:
        """All GPU processes of the checkpoint."""
        return [process.pid for process in self.gated] + [process.pid for process in self.foreign]

    def find_warnings(self) -> list[str]:
        """What a person should know of processes that are detached."""
        found = [
            f"Process {process.pid} ({process.executable}) was not started under 'phos-gpu run': the driver alone "
            "saves its GPU memory, into its own host memory and CRIU's pages. That is right, but many times slower."
            if not process.silent
            else f"Process {process.pid} ({process.executable}) has the driver at work and has told phosd of no GPU "
            "memory (most likely it only asks NVML): the driver alone saves what it has."
            for process in self.foreign
        ]
        for process in self.gated:
            detached = self.detached.get(process.session)
            for state in detached.uncarried if detached else []:
                if state.bytes >= 64 << 20:
                    found.append(
                        f"Process {process.pid} ({process.executable}): {state.bytes >> 20} MiB of {state.kind} stay "
                        "with the driver, which saves them slowly."
                    )
        return found

    def quiesce(self) -> None:
        """All gates at once: work of one process may wait for another's (collectives).

        Raises:
            Unresponsive: a process did not answer, or its GPU work does not end.
            CheckpointFailed: a gate could not be closed, however often it was tried, or a process has ended.
        """
        if not self.gated:
            return
        with (
            self._timeline.phase("quiesce"),
            ThreadPoolExecutor(len(self.gated), thread_name_prefix="quiesce") as pool,
        ):
            for number, seconds in enumerate(try_seconds(self._settings.quiesce_timeout)):
                if number:
                    for error in _open_all(self._quiesced)():  # let the others' work finish
                        raise error
                    self._quiesced = []
                    time.sleep(PAUSE_SECONDS)
                try:
                    futures = self._try(pool, seconds, in_turns=number % 2 == 1)
                except (RuntimeError, PhosError):  # no further thread, or gate opened: what the others do is not known
                    self._quiesced = list(self.gated)
                    raise
                failures = [f.exception() for f in futures.values() if f.exception()]
                self._quiesced = [p for p in self.gated if not futures[p.session].exception()]
                if not failures:
                    return
                if ended := next((p for p in self.gated if not p.alive()), None):
                    raise _ended(ended)  # no further try will be better, and the others may wait for it
                if stuck := [error for error in failures if isinstance(error, Unresponsive)]:
                    raise stuck[0]
            raise failures[0] or CheckpointFailed("A process could not be quiesced.")

    def _try(self, pool: ThreadPoolExecutor, seconds: float, *, in_turns: bool) -> dict[bytes, Future[QuiesceTimes]]:
        """One try to close all gates, by session.

        ``in_turns``: who has come to rest goes on until one of the others has. Of ranks one mostly waits in a
        collective for another that does something else, however long: rarely would both be found outside of it.
        The gates of those that wait stay closed, so that they come to rest as soon as the other has come that far.
        """
        end = time.monotonic() + seconds
        patience = self._settings.quiesce_timeout
        futures = {p.session: pool.submit(p.quiesce, seconds, patience) for p in self.gated}
        while in_turns:
            _, waiting = wait(futures.values(), LEAD_SECONDS)
            left = end - time.monotonic()
            if not waiting or left <= LEAD_SECONDS:
                break
            rested = [p for p in self.gated if futures[p.session].done() and not futures[p.session].exception()]
            if len(rested) + len(waiting) < len(self.gated):
                break  # one has failed
            for process in rested:
                process.open()
            wait(waiting, left, FIRST_COMPLETED)
            left = max(LEAD_SECONDS, end - time.monotonic())
            futures |= {p.session: pool.submit(p.quiesce, left, patience) for p in rested}
        wait(futures.values())
        return futures

    def detach(self) -> None:
        """Every process drops its mappings; those that have are in :attr:`detached`, also when another one failed."""
        if not self.gated:
            return

        def one(process: GatedProcess) -> None:
            self.detached[process.session] = process.detach(
                reduce_stack=self._settings.reduce_stack,
                huge_pages=self._settings.huge_pages,
                copy_threads=self._settings.copy_threads,
            )

        with ThreadPoolExecutor(len(self.gated), thread_name_prefix="detach") as pool:
            for future in [pool.submit(one, process) for process in self.gated]:
                future.result()

    def collect(self, borrow: BorrowBlocks) -> list[Block]:
        """All memory of the detached processes, borrowed.

        Raises:
            CheckpointFailed: some of it is not held, or not the tree's.
        """
        tree = {process.session for process in self.gated}
        keys = {block.key for process in self.gated for block in process.own_blocks()}
        for process in self.gated:
            for block in self.detached[process.session].blocks:
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
                raise _ended(owner) from error
            raise CheckpointFailed(
                f"phosd has no descriptor of GPU memory block {number} of process {owner.pid if owner else '?'}: "
                "phosd and its keeper were both killed since the process was last restored. Restart the process."
            ) from error

    def checkpoint(self) -> None:
        """The driver saves its own part of every process under the frontend, and locks the others.

        Raises:
            Unresponsive: a process is stopped, or the driver does not answer.
            CheckpointFailed: the driver refused.
        """
        for process in self.gated:
            self._toggles[process.pid] = toggle.Step(toggle.checkpoint, process.pid)
        for stranger in self.foreign:
            self._toggles[stranger.pid] = toggle.Step(toggle.lock, stranger.pid)
        for step in toggle.wait_for(self._toggles.values(), self._settings.checkpoint_timeout):
            raise Unresponsive(
                f"The driver could not checkpoint process {step.pid}: "
                + ("it is stopped. Continue it first." if procfs.is_stopped(step.pid) else "it does not answer.")
            )
        for step in self._toggles.values():
            if step.error is not None:
                raise step.error

    def save_frozen(self, pids: Collection[int]) -> None:
        """The driver saves all of processes without the frontend of which only its threads run.

        Raises:
            CheckpointFailed: the driver refused, or does not answer, or a process has ended.
        """
        with self._timeline.phase("driver saves all"):
            self._together(toggle.save, pids, self._settings.checkpoint_timeout, "save")
        self._saved |= set(pids)

    @property
    def unsaved(self) -> list[int]:
        """Processes without the frontend that nobody had saved."""
        return [process.pid for process in self.foreign if process.pid not in self._saved]

    def check_device_files(self, tasks: Iterable[int]) -> None:
        """All ``tasks`` of the tree stand still, and none may lose anything by being restored without device files.

        The driver has closed its own in the processes that it has saved. A child that was forked after CUDA had been
        initialised has those of its parent's, and nothing of the driver's that lives: it can never use them.

        Raises:
            CheckpointFailed: one has such a file open or mapped, and may use it.
        """
        saved = set(self.pids)
        for pid in tasks:
            try:
                name = procfs.file_open_in(pid, driver.device_files())
                if name and (why := "though the driver has saved it" if pid in saved else _may_use(pid)):
                    raise CheckpointFailed(
                        f"Process {pid} ({procfs.executable(pid)}) has {name} open, {why}. PhOS does not carry what it "
                        "has there: of graphics (EGL, Vulkan), of a second driver library, or handed over by another "
                        "process. If it has only just begun to use the GPU, try again."
                    )
            except OSError as error:
                if not procfs.has_ended(pid):
                    raise CheckpointFailed(f"What files process {pid} has open cannot be told: {error}") from error

    def put_back_frozen(self, pids: Collection[int]) -> None:
        """The driver brings such processes back, or unlocks them, of which again only its threads run.

        Raises:
            CheckpointFailed: as :meth:`save_frozen`. :meth:`bring_back` tries again.
        """
        before = dict(self._toggles)
        try:
            with self._timeline.phase("driver restore"):
                self._together(toggle.recover, pids, self._settings.return_timeout, "bring back")
        finally:
            begun = {pid: step for pid, step in self._toggles.items() if pid in pids and step is not before.get(pid)}
            self._put_back |= begun
        for pid in pids:
            del self._toggles[pid]

    def _together(self, action: Callable[[int], None], pids: Collection[int], seconds: float, what: str) -> None:
        foreign = {process.pid for process in self.foreign}
        for pid in pids:
            before = self._toggles.get(pid)
            if pid not in foreign or before is None:
                raise CheckpointFailed(f"Process {pid} is none that the driver alone is to {what} now.")
            if not before.ended():  # nor will this be done then
                raise Unresponsive(f"The driver cannot {what} process {pid}: it has not done what it was asked before.")
        toggle.together(action, pids, seconds, what, begun=self._toggles)

    def bring_back(self, *, killed: bool = False) -> str:
        """Driver restore, unlock, attach, open for every process that is still there. Returns what went wrong.

        Each process returns by itself: one that is stopped, or finds no GPU memory, holds up nobody else, and comes
        back when it can, however long after this method has returned.

        ``killed``: CRIU was to kill them, so nothing is said of those that are not there any more.
        """
        failures: list[str] = []
        back: set[int] = set()
        toggled = set(self._toggles)
        gated = {p.pid: p for p in self.gated if p.session in self.detached}
        allowed: list[GatedProcess] = []

        def revive(pid: int) -> None:
            process = gated.get(pid)
            try:
                if pid in toggled:
                    toggle.revive_when_there_is_room(pid)
            except NoSuchProcess as error:
                if not killed and isinstance(error.__cause__, DriverError):  # or it would have ended at any rate
                    self.warnings.append(f"{error} The driver's answer was: {error.__cause__}")
                return
            except PhosError as error:
                if not _alive(pid):
                    return
                if process is not None:
                    process.lose(str(error))  # it may end at once: that it was lost is to be said all the same
                raise CheckpointFailed(f"Process {pid}: {error} Its CUDA calls fail from now on.") from error
            back.add(pid)
            if process is not None and process.alive():
                process.allow_attach()
                allowed.append(process)

        pids = [pid for pid in {*gated, *toggled} if pid in gated or _alive(pid)]
        if pids:
            with self._timeline.phase("driver restore"):
                steps = [toggle.Step(revive, pid, self._toggles.get(pid), at_any_rate=True) for pid in pids]
                late = toggle.wait_for(steps, self._settings.return_timeout)
            failures += [self._not_back(step.pid) for step in late if _alive(step.pid)]
            failures += [str(step.error) for step in steps if step.error is not None]
        if not killed:
            failures += [self._ended_by(pid, step) for pid, step in self._put_back.items() if pid not in back]
        self._toggles = {}
        deadline = time.monotonic() + self._settings.return_timeout
        if gated:
            with self._timeline.phase("attach"):
                for process in list(allowed):
                    self._wait_attached(process, deadline, failures)
        self.detached = {}
        return " ".join(filter(None, failures))

    @staticmethod
    def _ended_by(pid: int, step: toggle.Step) -> str:
        """What the driver answered when it was to bring a process back that stood still, if that has ended since.

        It could not end by itself then, and ends most likely at the first call that fails.
        """
        if not isinstance(step.error, DriverError) or _alive(pid):
            return ""
        return f"Process {pid}: {step.error} The process has ended since."

    def _wait_attached(self, process: GatedProcess, deadline: float, failures: list[str]) -> None:
        while True:
            try:
                process.wait_attached(min(1.0, max(0.0, deadline - time.monotonic())))
                return
            except PhosError as error:
                if not process.alive() and not process.lost_reason:
                    return
                if procfs.is_stopped(process.pid):
                    failures.append(self._not_back(process.pid))
                    return
                if not isinstance(error, Unresponsive) or time.monotonic() > deadline:
                    failures.append(str(error))
                    return

    def _not_back(self, pid: int) -> str:
        if procfs.is_stopped(pid):
            self.warnings.append(f"Process {pid} is stopped: its GPU state comes back when it is continued.")
            return ""
        return f"Process {pid} has not come back within {self._settings.return_timeout:.0f} s; phosd goes on trying."

    def open_gates(self, but: Collection[bytes]) -> Callable[[], list[str]]:
        """Let those go on that were quiesced, but for sessions that were detached too.

        What is returned waits until they do, and says what went wrong: who does not answer keeps nobody waiting.
        """
        opening = _open_all([p for p in self._quiesced if p.session not in but and p.alive()])
        self._quiesced = []
        return lambda: [str(error) for error in opening()]


def _open_all(processes: Sequence[GatedProcess]) -> Callable[[], list[Exception]]:
    """Begin to open all gates. What is returned waits for that, and says what went wrong."""
    by_pid = {process.pid: process for process in processes}

    def open_gate(pid: int) -> None:
        by_pid[pid].open()

    steps = [toggle.Step(open_gate, pid, at_any_rate=True) for pid in by_pid]

    def wait_opened() -> list[Exception]:
        for step in steps:
            step.ended(threading.TIMEOUT_MAX)
        return [step.error for step in steps if step.error is not None]

    return wait_opened


def _may_use(pid: int) -> str:
    """Why a process with device files open is none that was forked after CUDA had been initialised; empty: it is one.

    Raises:
        OSError: it cannot be told.
    """
    if any(map(driver.own_thread, procfs.thread_names(pid))):
        return "and a thread of the driver's, which has not saved it"
    libraries = {os.path.basename(name) for name in procfs.mapped_files(pid)}
    if not any(name.startswith("libcuda.so") for name in libraries):
        return "and not from a process with CUDA that it was forked from"
    if any(name.startswith(("libnvidia-glcore", "libnvidia-eglcore")) for name in libraries):
        return "and the driver's library for graphics"
    return ""


def _ended(process: GatedProcess) -> CheckpointFailed:
    return CheckpointFailed(f"Process {process.pid} ({process.executable}) ended while it was being checkpointed.")


def _alive(pid: int) -> bool:
    return driver.checkpoint_state(pid) is not None
