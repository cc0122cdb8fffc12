"""What processes touch while a checkpoint of them is prepared.

A first checkpoint knows nothing of the order in which its processes write to their memory: much of what it saves while
they compute would come too late to spare them copies and waits. Preparing it takes a while (room for 60 GB takes
seconds), and they are watched meanwhile: their calls are traced as in a window, but nothing is copied and nobody waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.content_hash import chunk_count
from phos.gpu_engine.cow.chunk_table import WATCH, ChunkTable, WindowTable
from phos.gpu_engine.cow.window import first_touches
from phos.gpu_engine.errors import PhosError
from phos.gpu_engine.process import GatedProcess
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.gpu_engine.touch_order import FirstTouches, Touched

log = logging.getLogger(__name__)


class _Watched(NamedTuple):
    process: GatedProcess
    places: list[Touched]  # of each chunk, by its number
    chunks: ChunkTable
    table: WindowTable


class Watch:
    """Processes that are watched, from :meth:`begin` until they are quiesced or :meth:`give_up`."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._processes: list[GatedProcess] = []

    def begin(self, processes: Sequence[GatedProcess]) -> None:
        """Watch them; one that cannot be watched is not."""
        for process in processes:
            places: list[Touched] = []
            records = []
            for block in process.own_blocks():
                records.append((block.key[1], block.size, len(places)))
                places += [(block.key, number) for number in range(chunk_count(block.size))]
            if not places:
                continue
            chunks = ChunkTable(CHUNK_BYTES, len(places))
            # Each chunk may be read first and written to later.
            table = WindowTable(0, records, [], 0, prioritise=False, mode=WATCH, order=2 * len(places))
            try:
                process.watch([chunks.descriptor, table.descriptor])
                self._watched.append(_Watched(process, places, chunks, table))
                self._processes.append(process)
            except PhosError as error:
                log.info("%s", error)
                chunks.close()
                table.close()

    def seen(self) -> dict[bytes, tuple[FirstTouches, list[BlockKey]]]:
        """What each did up to now, by session, and the blocks that it had. What it does later is not looked at."""
        found: dict[bytes, tuple[FirstTouches, list[BlockKey]]] = {}
        for process, places, _, table in self._watched:
            touches = first_touches(table, places)
            found[process.session] = (touches, list({key for key, _ in places}))
            log.info(
                "Process %d: touched %d of %d chunks while it was watched, and wrote to %d",
                process.pid,
                len(dict.fromkeys(touches.touched)),
                len(places),
                len(touches.written),
            )
        self._close()
        return found

    def give_up(self) -> None:
        """There may have been no quiesce."""
        for process in self._processes:
            process.unwatch()
        self._close()

    def _close(self) -> None:
        for watched in self._watched:
            watched.chunks.close()
            watched.table.close()
        self._watched = []
