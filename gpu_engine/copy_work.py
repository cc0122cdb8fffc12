"""What a copier is given to do: pieces to copy out, where they go, and how what is loaded is had (see fill_plan.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash
from phos.images.stripe import Stripe
from phos.images.writer import Place

IDLE_SECONDS = 5e-5
"""How long a worker that has nothing to copy waits before it looks again."""

MAPPING_SECONDS = 2e-4
"""How long a worker waits before it looks again whether a block is mapped."""

SLOTS = 2
"""Of the ring, for each worker: while the processor is at one, the copy engine works on the other."""

Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)


class Sink(Protocol):
    """Where what is copied out goes: an :class:`~phos.images.writer.ImageWriter`. Called from any worker's thread."""

    placeable: int
    """How many bytes :meth:`place` can give in all, however they are cut."""
    place_limit: int
    """And at once."""

    def place(self, size: int) -> Place | None:
        """Page-locked room of the sink's own, so that the GPU can write there; None: the ring is to be used."""

    def write_placed(self, block: BlockKey, offset: int, place: Place, hashes: Sequence[bytes] | None) -> None:
        """Take what lies in its place by now; ``hashes``: its chunks', if they are known."""

    def appending(self, stripe: int) -> AbstractContextManager[Stripe]:
        """The data file with a worker's number, for that worker alone, to append to it natively and record that."""


class Cancelled(Exception):
    """The job was given up by its owner."""


@dataclass(frozen=True)
class Span:
    """A part of a block that is copied at once; bytes. ``hashes``: of its chunks, if they are known."""

    block: Block
    offset: int
    size: int
    hashes: Sequence[bytes] | None = None
    zero: bool = False


@dataclass(frozen=True)
class Piece:
    """What is copied out at once: ``size`` bytes at an ``address`` of phosd's; they belong at ``offset`` of a block."""

    key: BlockKey
    offset: int
    size: int
    address: int
    """0: it is known to be zeros, and its hashes say so; nothing is copied."""
    device: int
    chunk: int = -1
    """Its number, for a source that counts chunks."""
    slot: int = -1
    """The shadow slot that it is in, if it is in one."""
    hashes: Sequence[bytes] | None = None
    """Of its chunks, if they are known."""
    urgent: bool = False
    """Somebody waits for it."""


class Checks(Protocol):
    """Pieces in memory of the image's own, to be compared when there is time (copy_check.py). Any thread."""

    def add(self, piece: Piece, address: int) -> None:
        """It has come to this address, and stays there."""

    def one(self) -> int:
        """Compare one piece that nobody has compared; its size, or 0 if there is none.

        Raises: what the job shall fail with if it is not what it should be.
        """


class NothingYet(Exception):
    """A source has no piece now, but is not at its end: ask again in so many ``seconds``."""

    def __init__(self, seconds: float = IDLE_SECONDS) -> None:
        super().__init__()
        self.seconds = seconds


class Source(Protocol):
    """Where the pieces come from. Its methods are called from any worker's thread."""

    table: int
    """Address of a struct phos_chunk_table where a piece's chunks are marked as saved as soon as their bytes are in
    host memory; 0: nobody waits for that."""
    changing: int
    """Address of a 32-bit word: unless it is 0 memory may have changed before it was copied, and what comes is compared
    with the piece's hashes, or given to ``checks``. 0: there is no such word."""
    permits: int
    """Address of a :class:`~phos.gpu_engine.copy_loop.Permits`, one of which is had before pieces are taken and until
    their bytes are in host memory; 0: as many are taken and queued as may be."""
    permitted: int
    """With one permit pieces are taken until there are so many bytes; 0: one piece."""

    def turns(self, device: int) -> int:
        """Address of that GPU's :class:`~phos.gpu_engine.copy_loop.Turns`; 0: its copies never take turns."""

    @property
    def checks(self) -> Checks | None:
        """What takes pieces that come to places of their own; None: none does, or nothing is compared."""

    def take(self) -> Piece | None:
        """The next piece, or None when there are no more.

        Raises:
            NothingYet: ask again soon.
        """

    def landed(self, piece: Piece) -> None:
        """The piece has been saved."""

    def changed(self, piece: Piece, number: int, data: memoryview) -> Exception:
        """What to fail with because a chunk of a piece, counted from its beginning, has not the hash that it should.

        ``data``: what came instead of the piece.
        """


@dataclass(frozen=True)
class HashRooms:
    """How a worker's loads are hashed where they have arrived; one of each for each slot."""

    kernel: int
    rooms: Sequence[int]
    """Device addresses, for the kernel to work at."""
    hosts: Sequence[int]
    """Page-locked, where the hashes are once a load has landed."""


class LoadCheck(Protocol[Item_contra]):
    """Checks loads where they have arrived."""

    def rooms(self, worker: int, device: int) -> HashRooms:
        """Those of a worker, by its number, on a GPU."""

    def wrong(self, content: Item_contra, device: int) -> Exception:
        """What the job shall fail with because something else has arrived on that GPU."""


@dataclass(frozen=True)
class Reading(Generic[Item]):
    """How the data of loads is had, where a plan does not say it; any thread may ask."""

    read: Callable[[Item, memoryview], None]
    """Fill a slot."""
    check: LoadCheck[Item] | None = None
    """Looks at everything but zeros before it counts as arrived."""


@dataclass
class Progress:
    """How far a copy is; bytes. Read without a lock: each worker adds to its own entry."""

    total: int
    done_by_worker: list[int]

    @property
    def done(self) -> int:
        """Bytes copied so far."""
        return sum(self.done_by_worker)


def known_spans(block: Block, hashes: Sequence[bytes], limit: int, zero_limit: int) -> list[Span]:
    """A block in spans of at most ``limit`` bytes; those of zeros (``zero_limit``) apart. ``hashes``: of its chunks."""
    spans: list[Span] = []
    start = 0
    zero = [hash_ == zero_hash(min(CHUNK_BYTES, block.size - i * CHUNK_BYTES)) for i, hash_ in enumerate(hashes)]
    for end in range(1, len(hashes) + 1):
        most = zero_limit if zero[start] else limit
        if end == len(hashes) or zero[end] != zero[start] or (end - start) * CHUNK_BYTES >= most:
            offset = start * CHUNK_BYTES
            size = min(end * CHUNK_BYTES, block.size) - offset
            spans.append(Span(block, offset, size, hashes[start:end], zero[start]))
            start = end
    return spans
