"""What a protocol asks of a process that is being checkpointed or restored. Protocols know no sockets: phosd's sessions
implement :class:`GatedProcess`, and :class:`ForeignProcess` stands for one that runs without the frontend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.ptx_instrument.twin_table import Report

CONTROL_THREAD = "phos"
"""What the frontend's own thread is called, which it has once the process has initialised CUDA (frontend/control.c)."""


@dataclass(frozen=True)
class QuiesceTimes:
    """Seconds until no thread was inside the driver, and until every context was idle."""

    gate: float
    synchronise: float


@dataclass(frozen=True)
class Allocation:
    """A range that the application asked for; bytes."""

    address: int
    size: int
    block: int
    offset: int
    entry_point: str


@dataclass(frozen=True)
class HostAllocation:
    """Page-locked host memory; bytes."""

    address: int
    size: int
    entry_point: str


@dataclass(frozen=True)
class UncarriedState:
    """GPU state that the driver, not PhOS, saves: always right, but slow, and part of CRIU's pages."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class MappedBlock:
    """A block that a process maps, and whose it is (its own key, or the exporter's)."""

    number: int
    key: BlockKey
    size: int
    device: int


@dataclass
class Detached:
    """What detach answered: the process's memory map and the seconds it took."""

    blocks: list[MappedBlock] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    host_allocations: list[HostAllocation] = field(default_factory=list)
    uncarried: list[UncarriedState] = field(default_factory=list)
    unmap: float = 0.0
    reduce: float = 0.0


class TracingWindow(Protocol):
    """What a process needs to let its memory be saved, or loaded, while it runs (frontend/window_table.h)."""

    @property
    def shut(self) -> bool:
        """Nothing may have access before the window gives it."""

    @property
    def loads(self) -> bool:
        """It is a lazy restore's: phosd does not know the process's modules and kernels before it attaches."""

    def attaching(self) -> None:
        """The process is about to get its memory, and may compute then, even if its connection breaks."""

    def descriptors(self) -> list[int]:
        """Those that go to the frontend; they stay the window's. None: the window is over, nothing need be traced."""

    def wait_saved(self) -> None:
        """Return when nothing of the process's memory is left to save: for a process that cannot trace."""


class GatedProcess(Protocol):
    """A process under the frontend, as the protocols see it."""

    @property
    def pid(self) -> int:
        """A restored process has another than before."""

    @property
    def session(self) -> bytes:
        """What it calls itself."""

    @property
    def executable(self) -> str:
        """The path of its program."""

    takes_residue: bool
    """Whether :meth:`prepare_residue` can be asked for."""
    residue_bytes: int | None
    """What the driver wanted for its own part at the last checkpoint; None if there was none yet."""
    lost_reason: str
    """Why its memory is gone (:meth:`lose`); empty if it is not."""

    def prepare_residue(self, path: str, size: int, device: int, inode: int) -> None:
        """Map a file for what the driver will save (residue.py)."""

    def drop_residue(self) -> None:
        """Unmap that file: there will be no checkpoint. Waits for no answer."""

    def quiesce(self, timeout: float, patience: float) -> QuiesceTimes:
        """Close the gate and wait until the GPU is idle; on failure the gate is open again.

        ``timeout``: for the gate and for the GPU each; ``patience``: how much later its answer may come. Seconds.
        """

    def detach(self, *, reduce_stack: bool, huge_pages: bool, copy_threads: bool) -> Detached:
        """Drop every mapping and handle; on failure everything is mapped as before.

        Until it is attached again, what makes the driver's checkpoint smaller or quicker may be in force: less memory
        for stacks, huge pages for what the driver saves, several threads that copy it.
        """

    def open(self) -> None:
        """Open the gate of a process that is quiesced and attached."""

    def allow_attach(self) -> None:
        """The driver's part is back (restored and unlocked): the frontend may come and attach."""

    def lose(self, reason: str) -> None:
        """The driver's part cannot be brought back: every CUDA call of the process fails from now on."""

    def wait_attached(self, timeout: float) -> None:
        """Wait until the frontend has attached and opened its gate."""

    def own_blocks(self) -> list[Block]:
        """The blocks whose owner this process is."""

    def ordinals(self) -> dict[int, int]:
        """The process's numbers of the GPUs it sees, by phosd's."""

    def describe_kernels(self, timeout: float) -> None:
        """Give the frontend the access descriptors of the kernels that the process has asked for."""

    def watch(self, descriptors: Sequence[int]) -> None:
        """Calls of the running process are traced with these tables (cow/watch.py) until it is quiesced.

        Raises:
            PhosError: it cannot be watched.
        """

    def unwatch(self) -> None:
        """It is not going to be quiesced. Waits for no answer."""

    def trace(self, window: TracingWindow) -> None:
        """From its next attach on, calls of the process are traced."""

    def untrace(self) -> Callable[[float], None]:
        """Not any more. To be called when the window is over, of all processes before any is waited for.

        What is returned waits so many seconds for the process to put its window away, and not for one that is stopped.

        Raises:
            Mispredicted: (what is returned) something that was not saved has been written to, as far as is known.
        """

    def twin_counts(self) -> dict[str, int]:
        """What twin kernels met with in this window or the last, if there were any."""

    def twin_report(self) -> Report | None:
        """What twin kernels reported in this window or the last; None: there were none."""

    def alive(self) -> bool:
        """Whether the process still exists (a zombie does not count)."""


@dataclass(frozen=True)
class ForeignProcess:
    """A process that uses CUDA or NVML without the frontend: the driver alone saves all its GPU memory.

    No gate keeps its threads from calls that crash while it is saved, so they stand still (`ProcessTree.save_frozen`).
    """

    pid: int
    executable: str
    restore_thread: int
    """The one that carries out what the driver is asked to do, as the process itself numbers it."""
    silent: bool
    """It has the frontend, which does not serve it: most likely it only asks NVML, and there is no memory to save."""
