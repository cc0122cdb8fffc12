"""Content hashes of GPU memory at *t1*: 3 TB/s on an H100, while the processes stand still anyway (DESIGN §2, §5).

They are the hashes that the image holds (:mod:`phos.images.chunk_hash`), so that no processor has to work them out, and
chunks of zeros need no copying. What a concurrent checkpoint saves later is hashed on the CPU and compared: a chunk
that something wrote to before it was saved is found, whatever that something was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.ring import CHUNK_BYTES
from phos.images.formats import HASH_SIZE

if TYPE_CHECKING:
    from phos.gpu_engine.copier import MappedBlocks

SPAN_BYTES = 65536
THREADS = 256
"""SPAN and THREADS of content_hash.cu."""


class ContentHasher:
    """The kernel and its stream on each GPU. Callers take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._kernels: dict[int, driver.Kernel] = {}
        self._lanes: dict[int, driver.Lane] = {}

    def prepare(self, device: int) -> None:
        """Load the kernel on a GPU ahead of the first use."""
        with self._lock:
            self._prepare(device)

    def _prepare(self, device: int) -> None:
        if device not in self._kernels:
            context = driver.context(device)
            image = Path(__file__).with_name("content_hash.ptx").read_bytes()
            self._kernels[device] = context.kernel(image, "phos_content_hash")
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
        size = -(-wanted // driver.GRANULARITY) * driver.GRANULARITY
        context.use()
        with driver.scratch(context, size) as sums:
            lane.fill_zero(sums.address, wanted)
            first = 0
            for block in blocks:
                address = mapped[block.key].address
                place = sums.address + first * HASH_SIZE
                lane.launch(kernel, block.size // SPAN_BYTES, THREADS, address, chunk_bytes, place)
                first += chunk_count(block.size, chunk_bytes)
            host = driver.PinnedBuffer(wanted)
            try:
                lane.copy_to_host(host.address, sums.address, wanted)
                lane.synchronise()
                raw = bytes(host.view[:wanted])
                return [raw[at : at + HASH_SIZE] for at in range(0, wanted, HASH_SIZE)]
            finally:
                host.free()


def chunk_count(size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Chunks of a block of that many bytes."""
    return -(-size // chunk_bytes)
