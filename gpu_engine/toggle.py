"""The toggle: the driver's own checkpoint of a process's GPU control state (DESIGN §1), for many processes at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping
from pathlib import Path

from phos.gpu_engine import driver
from phos.gpu_engine.engine_turns import engine_turns
from phos.gpu_engine.errors import OUT_OF_MEMORY, CheckpointFailed, DriverError, NoSuchProcess, PhosError, Unresponsive
from phos.gpu_engine.procfs import inner_thread, is_alive, is_stopped

log = logging.getLogger(__name__)

LOCK_MS = 10_000
"""For a process that is quiesced already: nothing is left to wait for."""

FOREIGN_LOCK_MS = 60_000
"""For a process without the frontend: its GPU work has to end first."""


ILLEGAL_STATE = 401
"""CUDA_ERROR_ILLEGAL_STATE: a process is not in the state that a call is for."""

NOT_SUPPORTED = 801
"""CUDA_ERROR_NOT_SUPPORTED: what the driver answers to a lock of a process with CUPTI or under MPS (driver 580.159)."""


class Step:
    """One driver call, or a few, on one process, in a thread of its own.

    The driver's calls wait for threads of the target process, so for ever if it is stopped (by a signal, by a
    debugger), and nothing interrupts them. Whoever waits for a step can give up waiting; the step itself goes on when
    the process does.
    """

    def __init__(
        self, action: Callable[[int], None], pid: int, after: Step | None = None, *, at_any_rate: bool = False
    ) -> None:
        """Start ``action(pid)``; if ``after`` is given, when that has ended.

        ``at_any_rate``: in this thread if there can be no other (a limit on processes). It cannot be given up then.

        Raises:
            RuntimeError: there can be no other thread.
        """
        self.pid = pid
        self.error: Exception | None = None
        self._action = action
        self._after = after
        self._over = threading.Event()
        try:
            threading.Thread(target=self._run, name=f"{action.__name__}-{pid}", daemon=True).start()
        except RuntimeError:
            if not at_any_rate:
                raise
            self._run()

    def _run(self) -> None:
        if self._after is not None:
            self._after._over.wait()
        try:
            self._action(self.pid)
        except Exception as error:
            self.error = error
        finally:
            self._over.set()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has ended; waits so long for it."""
        return self._over.wait(max(0.0, seconds))


def wait_for(steps: Iterable[Step], seconds: float, *, held: bool = False) -> list[Step]:
    """Wait for all. Returns what has not ended: after ``seconds``, or when only stopped processes are left.

    ``held``: all of them are stopped, but for the driver's threads.
    """
    left = list(steps)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        left[0].ended(0.2)
        left = [step for step in left if not step.ended()]
        if left and not held and all(is_stopped(step.pid) for step in left):
            break
    return left


def together(
    action: Callable[[int], None],
    pids: Collection[int],
    seconds: float,
    what: str,
    *,
    begun: MutableMapping[int, Step] | None = None,
    at_any_rate: bool = False,
) -> None:
    """One step of each of these processes, of which only the driver's threads run.

    Every other thread stands still. One that held what the driver's needs would hold it for ever.

    ``what``: the driver is to do to each. ``begun``: gets each step as it begins. ``at_any_rate``: as :class:`Step`'s.

    Raises:
        Unresponsive: a step has not ended within so many seconds. It goes on.
        CheckpointFailed: a step has failed, or cannot begin.
    """
    steps: list[Step] = []
    for pid in pids:
        try:
            steps.append(Step(action, pid, at_any_rate=at_any_rate))
        except RuntimeError as error:
            raise CheckpointFailed(f"The driver is not asked to {what} process {pid}: {error}.") from error
        if begun is not None:
            begun[pid] = steps[-1]
    for step in wait_for(steps, seconds, held=True):
        raise Unresponsive(f"The driver did not {what} process {step.pid} within {seconds:.0f} s.")
    failed = [(step.pid, step.error) for step in steps if step.error is not None]
    if failed:
        said = [str(error) if f"rocess {pid} " in str(error) else f"Process {pid}: {error}" for pid, error in failed]
        raise CheckpointFailed(" ".join(said)) from failed[0][1]


def restore_thread(pid: int, seconds: float) -> int:
    """The thread that carries the driver's restore of a process out, by its number in that process's pid namespace.

    0 if the driver does not say, or not within so many seconds.
    """
    found: list[int] = []

    def ask(pid: int) -> None:
        found.append(driver.checkpoint_thread(pid))

    asking = Step(ask, pid)
    if not asking.ended(seconds) or not found:
        log.info("The driver does not name the thread of process %d that restores it: %s", pid, asking.error)
        return 0
    return inner_thread(pid, found[0])


def holds_cuda(pid: int) -> bool:
    """Whether a process has a CUDA context, or, if it is stopped and the driver cannot ask it, may have one."""
    if is_stopped(pid):
        try:
            return "/libcuda.so" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            return False
    return driver.checkpoint_state(pid) is not None


def checkpoint(pid: int) -> None:
    """Lock and checkpoint a process that is quiesced; if that fails it is left running.

    Raises:
        CheckpointFailed: the driver refused.
    """

    def steps() -> None:
        driver.checkpoint_lock(pid, LOCK_MS)
        with engine_turns.driver_at_work():
            driver.checkpoint_checkpoint(pid)

    _carefully(pid, steps)


def lock(pid: int) -> None:
    """Block further calls of a process without the frontend, and wait for its GPU work.

    Not all calls: those that ask for the state of a stream or an event, and the first ones about a thread's own stream,
    go on, and crash once it is checkpointed (bench/ungated.py).

    Raises:
        CheckpointFailed: the driver refused; the process is left running.
    """
    _carefully(pid, lambda: driver.checkpoint_lock(pid, FOREIGN_LOCK_MS))


def save(pid: int) -> None:
    """Checkpoint a locked process of which only the driver's thread runs. Nothing else is asked of the driver.

    Raises:
        NoSuchProcess: it has ended.
        DriverError: the driver refused; it is locked as before.
    """
    try:
        with engine_turns.driver_at_work():
            driver.checkpoint_checkpoint(pid)
    except DriverError as error:
        if not is_alive(pid):
            raise NoSuchProcess(f"Process {pid} ended while it was being checkpointed.") from error
        raise


def _carefully(pid: int, steps: Callable[[], None]) -> None:
    try:
        steps()
    except DriverError as error:
        if driver.checkpoint_state(pid) is None:
            raise CheckpointFailed(f"Process {pid} ended while it was being checkpointed.") from error
        try:
            revive(pid)
        except PhosError as second:
            raise CheckpointFailed(f"Process {pid}: {error} Bringing it back failed as well: {second}") from error
        reason = ""
        if error.code == NOT_SUPPORTED:
            reason = (
                "It cannot checkpoint a process in which a profiler (CUPTI, as torch.profiler uses it) is or has been"
                " at work, nor one under MPS. "
            )
        raise CheckpointFailed(f"Process {pid}: {error} {reason}The process goes on as before.") from error


def revive(pid: int, gpu_pairs: dict[str, str] | None = None) -> None:
    """Bring a process back to running from whatever state the driver has it in.

    Raises:
        NoSuchProcess: it has ended.
        DriverError: the driver cannot restore it.
        CheckpointFailed: the driver has given it up earlier, or another tool has it.
    """
    state = driver.checkpoint_state(pid)
    if state is None:
        raise NoSuchProcess(f"Process {pid} has ended, or holds no CUDA context.")
    try:
        if state == "checkpointed":
            with engine_turns.driver_at_work():
                driver.checkpoint_restore(pid, gpu_pairs)
            state = driver.checkpoint_state(pid)
        if state == "locked":
            driver.checkpoint_unlock(pid)
    except DriverError as error:
        if driver.checkpoint_state(pid) is None:
            raise NoSuchProcess(f"Process {pid} ended while its GPU state was brought back.") from error
        raise
    if state == "busy":
        raise CheckpointFailed(f"Another tool saves or restores the GPU state of process {pid}: leave it to that one.")
    if state == "failed":
        raise CheckpointFailed(f"The driver has lost the GPU state of process {pid} (it says 'failed').")


def put_back(pid: int, gpu_pairs: dict[str, str] | None = None) -> None:
    """Restore and unlock a checkpointed process of which only the driver's restore thread runs.

    Nothing else is asked of the driver: its answers may come from another thread.

    Raises:
        NoSuchProcess: it has ended.
        DriverError: the driver cannot restore it.
    """
    try:
        with engine_turns.driver_at_work():
            driver.checkpoint_restore(pid, gpu_pairs)
        driver.checkpoint_unlock(pid)
    except DriverError as error:
        if not is_alive(pid):
            raise NoSuchProcess(f"Process {pid} ended while its GPU state was brought back.") from error
        raise


def revive_when_there_is_room(pid: int) -> None:
    """:func:`revive`, tried again every second while the GPU has too little memory for the process's own part.

    Raises: as :func:`revive`.
    """
    _when_there_is_room(revive, pid, lambda: driver.checkpoint_state(pid) == "checkpointed")


def recover(pid: int) -> None:
    """Bring a process back, or unlock it, of which perhaps only the driver's thread runs; waits for memory likewise.

    Nothing else is asked of the driver, as in :func:`put_back`.

    Raises: as :func:`put_back`.
    """
    try:
        _when_there_is_room(put_back, pid, lambda: is_alive(pid))
    except DriverError as error:
        if error.code != ILLEGAL_STATE:  # that it is not checkpointed
            raise
        driver.checkpoint_unlock(pid)


def _when_there_is_room(action: Callable[[int], None], pid: int, may_wait: Callable[[], bool]) -> None:
    said = False
    while True:
        try:
            action(pid)
            return
        except DriverError as error:
            if error.code != OUT_OF_MEMORY or not may_wait():
                raise
            if not said:
                log.warning("Process %d waits for GPU memory to become free: %s", pid, error)
                said = True
        time.sleep(1.0)
