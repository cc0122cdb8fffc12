"""The toggle: the driver's own checkpoint of a process's GPU control state (DESIGN §1), for many processes at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from phos.gpu_engine import driver
from phos.gpu_engine.errors import CheckpointFailed, DriverError, NoSuchProcess

log = logging.getLogger(__name__)

LOCK_MS = 10_000
"""For a process that is quiesced already: nothing is left to wait for."""

FOREIGN_LOCK_MS = 60_000
"""For a process without the frontend: its GPU work has to end first."""


def in_parallel(action: Callable[[int], None], pids: Iterable[int]) -> None:
    """Run ``action(pid)`` for all at once; raises the first failure after all have ended."""
    wanted = list(pids)
    if not wanted:
        return
    with ThreadPoolExecutor(len(wanted), thread_name_prefix="toggle") as pool:
        for future in [pool.submit(action, pid) for pid in wanted]:
            if error := future.exception():
                raise error


def checkpoint(pid: int, lock_ms: int) -> None:
    """Lock and checkpoint one process; if that fails the process is left running.

    Raises:
        CheckpointFailed: the driver refused.
    """
    try:
        driver.checkpoint_lock(pid, lock_ms)
        driver.checkpoint_checkpoint(pid)
    except DriverError as error:
        revive(pid)
        raise CheckpointFailed(f"Process {pid}: {error} The process goes on as before.") from error


def revive(pid: int, gpu_pairs: dict[str, str] | None = None) -> None:
    """Bring a process back to running from whatever state the driver has it in.

    Raises:
        NoSuchProcess: it has ended.
        DriverError: the driver cannot restore it.
    """
    state = driver.checkpoint_state(pid)
    if state is None:
        raise NoSuchProcess(f"Process {pid} has ended, or holds no CUDA context.")
    if state == "checkpointed":
        driver.checkpoint_restore(pid, gpu_pairs)
        state = driver.checkpoint_state(pid)
    if state == "locked":
        driver.checkpoint_unlock(pid)
