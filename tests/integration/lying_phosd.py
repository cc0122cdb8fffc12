"""phosd for tests of wrong guesses: while the file LYING_PHOSD names exists, it says that kernels touch nothing.

LYING_PHOSD_TWINS="cannot start": the first time that a process's kernels are to get twins there is no thread for that.
Started as phosd is: ``python -m tests.integration.lying_phosd --socket PATH``.
"""

from __future__ import annotations

import os
from pathlib import Path

from phos.gpu_engine import landing
from phos.gpu_engine.daemon import command_line, kernels
from phos.gpu_engine.spec.table import FIELD, HEADER, KERNEL, PARAMETER
from tests.integration.altered_phosd import no_thread


def without_accesses(packed: bytes) -> bytes:
    """A table of access descriptors in which nothing is read or written."""
    table = bytearray(packed)
    _, kernels, parameters, fields = HEADER.unpack_from(table)[:4]
    at = HEADER.size
    for _ in range(kernels):
        record = list(KERNEL.unpack_from(table, at))
        record[7] = 0
        KERNEL.pack_into(table, at, *record)
        at += KERNEL.size
    at += parameters * PARAMETER.size
    for _ in range(fields):
        offset, size, _access, kind = FIELD.unpack_from(table, at)[:4]
        FIELD.pack_into(table, at, offset, size, 0, kind)
        at += FIELD.size
    return bytes(table)


def lie() -> None:
    """Change what kernels are said to touch."""
    packed_file = kernels.packed_file

    def perhaps(packed: bytes) -> int:
        return packed_file(without_accesses(packed) if Path(os.environ["LYING_PHOSD"]).exists() else packed)

    kernels.packed_file = perhaps
    landing.SLOWEST = 1.0  # some want it to find huge pages, however long that takes


if __name__ == "__main__":
    lie()
    if os.environ.get("LYING_PHOSD_TWINS") == "cannot start":
        no_thread("twins")()
    command_line.main(prog_name="phosd")
