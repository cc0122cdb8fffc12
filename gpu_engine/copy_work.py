"""What a copier is given to do: pieces to copy out, where they go, and how what is loaded is had (see fill_plan.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from phos.gpu_engine.blocks import Block, BlockKey
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash
from phos.images.stripe import Room, Stripe

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
    """How many bytes there is room for in memory of the sink's own, however they are cut."""
    place_limit: int
    """And at once."""

    def take_room(self) -> Room:
        """That memory, page-locked, so that the GPU can write there."""

    def return_room(self, end: int) -> None:
        """So much of it is in use."""

    def write_placed(
        self, block: BlockKey, offset: int, size: int, address: int, hashes: Sequence[bytes] | None
    ) -> None:
        """Take what lies there by now; ``hashes``: its chunks', if they are known. Known zeros need be nowhere."""

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
    with the piece's hashes. 0: there is no such word."""

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


def known_spans(block: Block, hashes: Sequence[bytes], limit: int) -> list[Span]:
    """A block in spans of at most ``limit`` bytes; those of zeros apart. ``hashes``: of its chunks."""
    spans: list[Span] = []
    start = 0
    zero = [hash_ == zero_hash(min(CHUNK_BYTES, block.size - i * CHUNK_BYTES)) for i, hash_ in enumerate(hashes)]
    for end in range(1, len(hashes) + 1):
        if end == len(hashes) or zero[end] != zero[start] or (end - start) * CHUNK_BYTES >= limit:
            offset = start * CHUNK_BYTES
            size = min(end * CHUNK_BYTES, block.size) - offset
            spans.append(Span(block, offset, size, hashes[start:end], zero[start]))
            start = end
    return spans
