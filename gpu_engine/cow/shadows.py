"""Chunks that processes have copied aside: which of those copies the GPU has made.

Behind each copy the GPU sets a flag, in its own memory. Reading the flags is a copy as well, and its turn comes behind
all those that phosd has queued, milliseconds later. So a thread of its own reads them, and who copies need not wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from phos.gpu_engine.cow.chunk_table import NO_SLOT, SHADOWED, UNSAVED, ChunkTable, WindowTable
from phos.gpu_engine.cow.shadow_pool import LentPools, ShadowPool
from phos.gpu_engine.errors import Mispredicted
from phos.gpu_engine.save_plan import SavePlan

READ_SECONDS = 1e-4
"""The flags are read at most so often, while somebody waits for one."""

IDLE_SECONDS = 1e-3
"""And so often it is looked whether somebody does."""

ALIVE_SECONDS = 0.1
"""How often to look whether a process still runs that owes a copy, or transfers something."""


@dataclass
class Window:
    """One process's window."""

    table: WindowTable
    pools: LentPools
    alive: Callable[[], bool]


class _Copy(NamedTuple):
    """A copy that a process has queued."""

    chunk: int
    process: int
    pool: ShadowPool
    at: int
    """Which of the process's pools it is."""
    number: int
    """Of the slot, in the pool."""
    ticket: int
    slot: int


class Shadows:
    """The copies of all processes of a checkpoint; what is found out, the plan is told. Of one thread."""

    def __init__(self, table: ChunkTable, windows: Sequence[Window], plan: SavePlan) -> None:
        self._table = table
        self._windows = windows
        self._plan = plan
        self._looked = 0.0
        self._dead: frozenset[int] = frozenset()  # numbers of processes that had ended before the flags were read
        self._faulted = [0] * len(windows)  # of each process, what WindowTable.faulted() said; likewise
        self._owed: list[int] = []  # where they are is not known yet
        self._copies: list[_Copy] = []
        self._failure: BaseException | None = None  # replaced as a whole: any thread may look

    def check(self) -> None:
        """
        Raises: what :meth:`read` has raised in its thread.
        """
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Meanwhile a thread reads the flags.

        Raises:
            RuntimeError: there can be no thread.
        """
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(ended,), name="shadow-flags", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _follow(self, ended: threading.Event) -> None:
        try:
            while not ended.wait(READ_SECONDS if self._in_demand() else IDLE_SECONDS):
                self.read()
        except BaseException as error:
            self._failure = error
            self._plan.break_()

    def _in_demand(self) -> bool:
        return bool(self._owed or self._copies or self._plan.owes or self._plan.wants_flags)

    def read(self) -> None:
        """Find out what has been made, and now and then who has ended.

        Raises:
            Mispredicted: a process said something that cannot be.
            DriverError: the flags cannot be read.
        """
        dead = self._dead
        faulted = [window.table.faulted() for window in self._windows]  # before the flags, as who is dead
        now = time.perf_counter()
        if now - self._looked >= ALIVE_SECONDS:
            self._looked = now
            # Before the flags: those of who has ended are then the last ones.
            dead = frozenset(number for number, window in enumerate(self._windows) if not window.alive())
        # Of who has just been found dead or with an error in any case: a chunk of his may be owed at any moment.
        if dead - self._dead or faulted != self._faulted or self._in_demand():
            self._plan.flags_read()
            pools = [pool for window in self._windows for pool in window.pools.pools]
            for pool in pools:
                pool.begin_reading()
            for pool in pools:
                pool.end_reading()
        for number in dead - self._dead:
            self._plan.window_dead(number)
        self._dead, self._faulted = dead, faulted
        copies = list(self._copies)
        owed, self._owed = self._owed, []
        while (chunk := self._plan.owed()) is not None:
            owed.append(chunk)
        for chunk in owed:
            self._locate(chunk, copies)
        left = []
        for copy in copies:
            if copy.pool.flag(copy.number) == copy.ticket:
                self._plan.made(copy.chunk, copy.pool.address(copy.number), copy.pool.device, copy.slot)
            elif copy.process in dead or faulted[copy.process] >> copy.at & 1:
                # It will not be made, and what comes behind it in its stream is not run either.
                self._plan.left(copy.chunk)
            else:
                left.append(copy)
        self._copies = left

    def _locate(self, chunk: int, copies: list[_Copy]) -> None:
        state = self._table.state(chunk)
        if state == UNSAVED:  # the driver refused the copy
            if self._table.claim(chunk) == UNSAVED:
                self._plan.left(chunk)
            else:
                self._owed.append(chunk)
            return
        if state < SHADOWED:  # phosd has it
            self._plan.settled(chunk)
            return
        process, slot = divmod(state - SHADOWED, SHADOWED)
        if process >= len(self._windows):
            raise Mispredicted(f"Chunk {chunk} is in the hands of a process that does not exist.")
        if slot != NO_SLOT:
            window = self._windows[process]
            found = window.pools.find(slot)
            if found is None:
                raise Mispredicted(f"A process said that it copied chunk {chunk} to a place that does not exist.")
            at, number = found
            pool = window.pools.pools[at]
            copies.append(_Copy(chunk, process, pool, at, number, window.table.ticket(slot), state - SHADOWED))
        elif process in self._dead:
            self._plan.left(chunk)
        else:
            self._owed.append(chunk)
