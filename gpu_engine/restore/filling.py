"""A restore's GPU data on its way: blocks are mapped while others still use the processors, then all is loaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from phos.gpu_engine.blocks import Block
from phos.gpu_engine.copier import Copier
from phos.gpu_engine.copy_trace import tracing
from phos.gpu_engine.copy_work import Progress
from phos.gpu_engine.engine_turns import engine_turns
from phos.gpu_engine.fill_plan import FillPlan
from phos.gpu_engine.restore.arrival import reading_of
from phos.gpu_engine.restore.reserved import ReservedMemory
from phos.gpu_engine.restore.sources import Manner
from phos.images.source import ImageSource


class Filling:
    """One restore's. Whoever makes it lets go of the ``memory`` afterwards, used or not."""

    def __init__(
        self,
        image: ImageSource,
        copier: Copier,
        plan: FillPlan[Any],
        how: Manner,
        memory: ReservedMemory,
        blocks: Sequence[Block],
        chunks: set[int],
    ) -> None:
        """Begin to map the ``blocks``, in this order, all of which have addresses in ``memory``.

        ``chunks``: the sizes that their chunks have.
        """
        self._image = image
        self._copier = copier
        self._plan = plan
        self._how = how
        memory.map(blocks, plan)
        for device in plan.devices:
            copier.prepare_workers(device)  # of a phosd that has just been started
        self._reading = reading_of(image, copier, plan.devices, chunks, how.at_once)

    def run(self, progress: Progress, cancelled: threading.Event) -> None:
        """Load all of it.

        Raises:
            Cancelled, ImageError, DriverError, OSError.
        """
        with tracing(str(self._image.path)) as trace, engine_turns.telling(self._plan):
            self._copier.fill(self._plan, self._reading, progress, cancelled, self._how.workers, trace)
