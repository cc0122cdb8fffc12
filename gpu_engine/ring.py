"""How large phosd's pinned ring is, and how many workers share it. Asks no driver, so that the doctor can ask too."""

from __future__ import annotations

import os

from phos.gpu_engine.errors import UsageError

MAXIMUM_RING = 2 << 30
CHUNK_BYTES = 4 << 20
"""The unit that is hashed, traced and stored (DESIGN §4)."""

SLOT_BYTES = CHUNK_BYTES
"""The whole ring should stay in the last-level cache: on an H100 machine (16 cores, image in /dev/shm, bench/ring.py)
slots of 4 MiB write 1.5 times as fast as slots of 16 MiB, although the GPU copies both at full speed."""

SPARE_CORES = 1
"""Left to CRIU and the driver, which work at the same time."""


def default_threads() -> int:
    """Workers, unless somebody chooses otherwise."""
    return max(2, min(16, (os.cpu_count() or 2) - SPARE_CORES))


def wanted_bytes(threads: int) -> int:
    """The ring's size: what PHOS_RING_BYTES says, else two slots for each worker; bytes.

    Raises:
        UsageError: the variable is no size.
    """
    text = os.environ.get("PHOS_RING_BYTES", "")
    try:
        asked = int(text) if text else 0
    except ValueError:
        asked = -1
    if asked < 0:
        raise UsageError(
            f"PHOS_RING_BYTES={text} is no size: it must be a plain number of bytes, 268435456 for example."
        )
    return min(asked or threads * 2 * SLOT_BYTES, MAXIMUM_RING)
