"""Shadow pools: GPU memory that phosd lends a process, for what it is about to overwrite (DESIGN §4)."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

from phos.gpu_engine import driver
from phos.gpu_engine.cow.chunk_table import POOL_FLAGS, TRANSFERS, PoolShape, WindowTable
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.ring import CHUNK_BYTES

log = logging.getLogger(__name__)

MARGIN_BYTES = 512 << 20
"""GPU memory that no slots take: the driver needs some for the way back, and the application may allocate."""

LEAST_BYTES = 8 << 20
"""And that not even pools without slots take: for hashes of *t1*, and the first kernel on the way back (detach.c)."""


class ShadowPool:
    """One process's pool on one GPU, as phosd sees it: the memory, and the flags that the GPU sets in it."""

    def __init__(self, device: int, slots: int, lane: driver.Lane) -> None:
        """``device`` is phosd's number of the GPU; ``lane``, the caller's, is where the flags are read.

        Raises:
            DriverError: the GPU has not that much memory left.
        """
        self.device = device
        self.slots = slots
        self.size = POOL_FLAGS + slots * CHUNK_BYTES
        self._words = slots + TRANSFERS
        self._lane = lane
        self._context = driver.context(device)
        with ExitStack() as undo:
            self.descriptor = self._context.create_block(self.size)
            undo.callback(os.close, self.descriptor)
            self._mapping = self._context.map_block(self.descriptor, self.size)
            undo.callback(self._mapping.unmap)
            self._host = driver.PinnedBuffer(self._words * 4)
            undo.callback(self._host.free)
            self._event = lane.event()
            undo.callback(driver.destroy_event, self._event)
            lane.fill_zero(self._mapping.address, self._words * 4)
            lane.record(self._event)
            driver.wait_event(self._event)
            self._undo = undo.pop_all()
        self._flags = self._host.view.cast("I")
        self._flags[:] = memoryview(bytes(self._words * 4)).cast("I")

    @property
    def flags(self) -> int:
        """The host address of the flags as last read."""
        return self._host.address

    def shape(self, ordinal: int) -> PoolShape:
        """What a window table says of it; ``ordinal`` is the process's number of the GPU."""
        return PoolShape(ordinal, self.slots, self.size)

    def begin_reading(self) -> None:
        """Have the flags read anew; one caller at a time."""
        self._context.use()
        self._lane.copy_to_host(self._host.address, self._mapping.address, self._words * 4)
        self._lane.record(self._event)

    def end_reading(self) -> None:
        """Return when they have been."""
        driver.wait_event(self._event)

    def flag(self, index: int) -> int:
        """A slot's flag (its number in this pool), as last read."""
        return int(self._flags[index])

    def address(self, index: int) -> int:
        """Where a slot's memory is for phosd."""
        return self._mapping.address + POOL_FLAGS + index * CHUNK_BYTES

    def close(self) -> None:
        """Give the memory back; the process has its own mapping until it ends its window.

        Raises:
            DriverError: phosd's context is lost; everything was tried.
        """
        self._flags.release()
        with self._undo:
            self._context.use()


def slots_for(device: int, wanted_bytes: int, processes: int) -> int | None:
    """How many slots each of some processes gets on a GPU: what was asked for, or what there is room for.

    None: there is not even room for the flags of pools without slots.
    """
    left = driver.context(device).free_memory() - processes * POOL_FLAGS
    if left < LEAST_BYTES:
        return None
    return max(0, min(wanted_bytes, left - MARGIN_BYTES)) // max(1, processes) // CHUNK_BYTES


class LentPools:
    """All pools of one process, by the number that its window table has for them."""

    def __init__(self, pools: list[ShadowPool]) -> None:
        self.pools = pools
        self.table: WindowTable | None = None

    def find(self, slot: int) -> tuple[int, int] | None:
        """Which pool has a slot, and the slot's number in it; None: there is no such slot."""
        for number, pool in enumerate(self.pools):
            if 0 <= slot < pool.slots:
                return number, slot
            slot -= pool.slots
        return None

    def close(self) -> None:
        """Give all of them back."""
        for pool in self.pools:
            try:
                pool.close()
            except DriverError as error:  # the job has failed for that already, and phosd starts anew
                log.warning("A shadow pool on GPU %d could not be put away: %s", pool.device, error)
        self.pools = []
        if self.table is not None:
            self.table.close()
            self.table = None
