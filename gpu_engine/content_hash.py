"""Content hashes of GPU memory at *t1*: 3 TB/s on an H100, while the processes stand still anyway (DESIGN §2, §5).

They are the hashes that the image holds (:mod:`phos.images.chunk_hash`), so that no processor has to work them out, and
chunks of zeros need no copying. What a concurrent checkpoint saves later is hashed on the CPU and compared: a chunk
that something wrote to before it was saved is found, whatever that something was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.chunk_hash import zero_hash
from phos.images.formats import HASH_SIZE

SPAN_BYTES = 65536
THREADS = 256
"""SPAN and THREADS of content_hash.cu."""

ROOM_HEAD = 16
"""The same of content_hash.cu; bytes."""


class ContentHasher:
    """The kernel and its stream on each GPU. Callers take turns.

    ``keep``: the memory that hashing needs stays until :meth:`release`, for those who hash again and again; getting it
    takes longer than hashing a gigabyte.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._kept: dict[int, tuple[ExitStack, driver.Mapping, driver.PinnedBuffer]] = {}
        self._lock = threading.Lock()  # guards what follows
        self._kernels: dict[int, driver.Kernel] = {}
        self._arrival_kernels: dict[int, driver.Kernel] = {}
        self._lanes: dict[int, driver.Lane] = {}

    def prepare(self, device: int) -> None:
        """Load the kernels on a GPU ahead of the first use."""
        with self._lock:
            self._prepare(device)

    def arrival_kernel(self, device: int) -> driver.Kernel:
        """The kernel on a GPU that hashes what has just come: memory, bytes of a chunk, a room, host memory for hashes.

        A room is :data:`ROOM_HEAD` and the size of the hashes, zero before the first use.
        """
        with self._lock:
            self._prepare(device)
            return self._arrival_kernels[device]

    def clear(self, device: int, address: int, size: int) -> None:
        """Set GPU memory to zero: rooms before their first use. Returns when it is.

        Raises:
            DriverError: it cannot.
        """
        with self._lock:
            self._prepare(device)
            driver.context(device).use()
            self._lanes[device].fill_zero(address, size)
            self._lanes[device].synchronise()

    def _prepare(self, device: int) -> None:
        if device not in self._kernels:
            context = driver.context(device)
            image = Path(__file__).with_name("content_hash.ptx").read_bytes()
            names = "phos_content_hash", "phos_arrival_hash"
            self._kernels[device], self._arrival_kernels[device] = context.kernels(image, *names)
            self._lanes[device] = driver.Lane(context)

    def hash(self, blocks: Sequence[Block], mapped: MappedBlocks, chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
        """One hash for each chunk of each block, in order; the memory must not change meanwhile.

        ``chunk_bytes`` is a multiple of :data:`SPAN_BYTES`.

        Raises:
            DriverError: a GPU has no 2 MiB left for the sums, for example.
        """
        parts: dict[int, list[bytes]] = {}
        with self._lock:
            for device in sorted({block.device for block in blocks}):
                self._prepare(device)
                parts[device] = self._hash_on(device, [b for b in blocks if b.device == device], mapped, chunk_bytes)
        result: list[bytes] = []
        taken = dict.fromkeys(parts, 0)
        for block in blocks:
            count = chunk_count(block.size, chunk_bytes)
            start = taken[block.device]
            result += parts[block.device][start : start + count]
            taken[block.device] = start + count
        return result

    def _hash_on(self, device: int, blocks: Sequence[Block], mapped: MappedBlocks, chunk_bytes: int) -> list[bytes]:
        context, lane, kernel = driver.context(device), self._lanes[device], self._kernels[device]
        total = sum(chunk_count(block.size, chunk_bytes) for block in blocks)
        wanted = total * HASH_SIZE
        context.use()
        with self._room(device, wanted) as (sums, host):
            lane.fill_zero(sums.address, wanted)
            first = 0
            for block in blocks:
                address = mapped[block.key].address
                place = sums.address + first * HASH_SIZE
                lane.launch(kernel, block.size // SPAN_BYTES, THREADS, address, chunk_bytes, place)
                first += chunk_count(block.size, chunk_bytes)
            lane.copy_to_host(host.address, sums.address, wanted)
            lane.synchronise()
            raw = bytes(host.view[:wanted])
            return [raw[at : at + HASH_SIZE] for at in range(0, wanted, HASH_SIZE)]

    @contextmanager
    def _room(self, device: int, wanted: int) -> Iterator[tuple[driver.Mapping, driver.PinnedBuffer]]:
        """Memory for so many bytes of sums, on the GPU and on the host."""
        kept = self._kept.get(device)
        if kept is not None and kept[2].size >= wanted:
            yield kept[1:]
            return
        if kept is not None:
            self._kept.pop(device)[0].close()
        size = -(-wanted // driver.GRANULARITY) * driver.GRANULARITY
        with ExitStack() as undo:
            sums = undo.enter_context(driver.scratch(driver.context(device), size))
            host = driver.PinnedBuffer(size if self._keep else wanted)
            undo.callback(host.free)
            yield sums, host
            if self._keep:
                self._kept[device] = (undo.pop_all(), sums, host)

    def release(self) -> None:
        """Give back what was kept."""
        with self._lock:
            for device in list(self._kept):
                self._kept.pop(device)[0].close()


def bytes_to_copy(blocks: Sequence[Block], hashes: Sequence[bytes] | None) -> int:
    """Of whole blocks, without the chunks that are zeros by their hashes (in order; None: they are not known)."""
    total = sum(block.size for block in blocks)
    if hashes is None:
        return total
    whole, first = zero_hash(CHUNK_BYTES), 0
    for block in blocks:
        end = first + chunk_count(block.size)
        rest = block.size - (end - first - 1) * CHUNK_BYTES  # the last chunk
        total -= CHUNK_BYTES * hashes[first : end - 1].count(whole)
        if hashes[end - 1] == zero_hash(rest):
            total -= rest
        first = end
    return total


def chunk_count(size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Chunks of a block of that many bytes."""
    return -(-size // chunk_bytes)
