"""What a twin is handed at a launch, and where it reports: frontend/twin_table.h in Python. All numbers are bytes."""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = int.from_bytes(b"PHOSTWN1", "little")

COW, LOADING = 0, 1
"""enum phos_twin_mode."""

SAVED = 2
"""PHOS_CHUNK_SAVED of frontend/window_table.h."""

# struct phos_twin_launch: the last parameter of a twin.
LAUNCH_WINDOW, LAUNCH_MAP, LAUNCH_RANGES, LAUNCH_KERNEL, LAUNCH_RANGE, LAUNCH_VARIABLE = 0, 8, 16, 20, 32, 288
RANGES = 16
VARIABLES = 32
LAUNCH_BYTES = LAUNCH_VARIABLE + 8 * VARIABLES
PARAMETER_BYTES_MOST = 4096
"""CUDA C++ Programming Guide, "__global__": what every GPU and driver takes."""

# struct phos_twin_map, one struct phos_twin_place after the other behind its header.
MAP_COUNT, MAP_PLACE, PLACE_BYTES = 0, 16, 32
PLACE_BEGIN, PLACE_END, PLACE_STATE, PLACE_DELTA = 0, 8, 16, 24

# struct phos_twin_window.
WINDOW_CLOSED, WINDOW_LIMIT, WINDOW_MODE, WINDOW_SHIFT, WINDOW_REPORTS, WINDOW_TRAPPED = 8, 16, 24, 28, 32, 36
WINDOW_REPORT = 64
REPORTS, REPORT_BYTES = 64, 16
NAMES, NAME_BYTES = 256, 120
WINDOW_NAME = WINDOW_REPORT + REPORTS * REPORT_BYTES
WINDOW_BYTES = WINDOW_NAME + NAMES * NAME_BYTES

_HEADER = struct.Struct("<QQQIIIIQQQ")
_REPORT = struct.Struct("<QII")


class Violation(NamedTuple):
    """A twin met with an address that its launch was not guessed to touch, and that was not saved, or not there."""

    kernel: str
    address: int
    line: int
    """Of the instruction, in the module's PTX."""
    write: bool

    def __str__(self) -> str:
        does = "writes to" if self.write else "reads"
        return f"{self.kernel or 'a kernel'} {does} {self.address:#x} (line {self.line} of its PTX)"


class Report(NamedTuple):
    """What the twins of one process have reported in a window so far."""

    launched: int
    """Launches of twins."""
    originals: int
    """Launches of kernels that have a twin, and for which the original had to do."""
    kernels: int
    """Kernels of which a twin was loaded."""
    violations: int
    """Accesses outside the guesses: one for each thread and access, until the report is full."""
    trapped: bool
    """One of them waited in vain: the process's context is lost."""
    first: tuple[Violation, ...]

    def named(self) -> str:
        """The first of each kernel, for people."""
        seen: dict[str, Violation] = {}
        for violation in self.first:
            seen.setdefault(violation.kernel, violation)
        return "; ".join(map(str, list(seen.values())[:4]))


def header() -> bytes:
    """A new struct phos_twin_window, without its end."""
    return _HEADER.pack(MAGIC, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def read(window: bytes) -> Report:
    """What a struct phos_twin_window says. Raises ValueError if it is none."""
    if len(window) < WINDOW_BYTES:
        raise ValueError("The table of the twins is cut short.")
    magic, _, _, _, _, count, trapped, launched, originals, kernels = _HEADER.unpack_from(window)
    if magic != MAGIC:
        raise ValueError("This is no table of twins: its magic number is another one.")
    first = []
    for index in range(min(count, REPORTS)):
        address, kernel, site = _REPORT.unpack_from(window, WINDOW_REPORT + index * REPORT_BYTES)
        if not address:
            continue  # counted, and not written yet
        name = b""
        if kernel < NAMES:
            name = window[WINDOW_NAME + kernel * NAME_BYTES : WINDOW_NAME + (kernel + 1) * NAME_BYTES].split(b"\0")[0]
        first.append(Violation(name.decode(errors="replace"), address, site >> 1, bool(site & 1)))
    return Report(launched, originals, kernels, count, bool(trapped), tuple(first))
