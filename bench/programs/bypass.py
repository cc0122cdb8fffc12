"""Past the frontend and through it again, in a running process.

Whoever calls the driver, cuBLAS or cuDNN keeps the addresses that he was given: the CUDA runtime in tables, others in
what the dynamic linker fills. They are looked for in the writable memory of all libraries, and replaced by those of the
driver's or the library's own function, or by the frontend's again. So one process is compared with itself: same
addresses, same memory, same threads. Not for calls whose results the frontend has to know: allocations, modules,
handles. For x86-64, where a pointer is a word.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2] / "frontend"))
import gen_api
import gen_library

FRONTEND = Path(gen_api.__file__).parent
PASSED = {"gate", "launch", "graph_launch", "copy", "memset", "sync", "ctx"}
"""Effects of entry points (cuda_api.def) that may be reached without the frontend as long as nothing is allocated."""
LAZY = 1  # RTLD_LAZY
READ_WRITE = 3  # PROT_READ | PROT_WRITE
PAGE = 4096
REPORT = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
"""What PyTorch's allocator calls for each part that it hands out or takes back (frontend/parts.c)."""


class Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    access: str
    path: str


def mappings() -> list[Mapping]:
    """Return those of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_, path = [*line.split(maxsplit=5), ""][:6]
        start, end = (int(word, 16) for word in span.split("-"))
        found.append(Mapping(start, end, access, path))
    return found


def variables(found: list[Mapping]) -> Iterator[Mapping]:
    """Where libraries other than the frontend and the driver keep pointers: .data, .bss, tables that are read-only."""
    last = None  # the file of the mapping right before
    for this, following in zip(found, [*found[1:], None], strict=True):
        path = this.path or (last.path if last and last.end == this.start else "")
        last = this._replace(path=path)
        if ".so" not in path or re.match(r"libphos\.so|libcuda\.so", Path(path).name):
            continue
        bound = (
            following is not None and (following.start, following.path) == (this.end, path) and "w" in following.access
        )
        if this.access == "rw-p" or (this.access == "r--p" and bound):
            yield last


class Bypass:
    """Every pointer of this process that leads to the frontend, and where it would lead without."""

    def __init__(self) -> None:
        """Look for them. What is called has to have been called before: pointers are bound at the first call."""
        libc = ctypes.CDLL(None)
        libc.dlvsym.restype = ctypes.c_void_p
        libc.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
        # The frontend answers dlsym itself, but not this.
        address = libc.dlvsym(ctypes.CDLL("libc.so.6")._handle, b"dlsym", b"GLIBC_2.34")
        dlsym = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(address)
        found = mappings()
        files = {Path(mapping.path).name: mapping.path for mapping in found if ".so" in mapping.path}
        frontend = ctypes.CDLL(files["libphos.so"], mode=LAZY)._handle
        self.own: dict[int, int] = {}
        """By the address of the frontend's function that of the driver's or library's own."""
        for file, name in self._functions():
            for loaded in (name_ for name_ in files if name_.startswith(file)):
                own = dlsym(ctypes.CDLL(files[loaded], mode=LAZY)._handle, name.encode())
                ours = dlsym(frontend, name.encode())
                if own and ours and own != ours:
                    self.own[ours] = own
        self.pointers = [(address, ours) for mapping in variables(found) for address, ours in self._pointers(mapping)]
        """Where one lies, and the frontend's function that it leads to."""
        for address, _ in self.pointers:
            if libc.mprotect(ctypes.c_void_p(address & -PAGE), ctypes.c_size_t(PAGE), READ_WRITE):
                raise OSError(f"the page of {address:#x} could not be made writable")

    @staticmethod
    def _functions() -> Iterator[tuple[str, str]]:
        """Yield beginnings of files' names, and functions in them that are the frontend's, too."""
        for entry in gen_api.parse(FRONTEND / "cuda_api.def"):
            if entry.effect in PASSED:
                yield "libcuda.so", entry.symbol
        for function in gen_library.parse(FRONTEND / "library_api.def")[1]:
            yield f"lib{function.library}.so", function.name
        yield "libc10.so", REPORT

    def _pointers(self, mapping: Mapping) -> Iterator[tuple[int, int]]:
        words = memoryview((ctypes.c_uint64 * ((mapping.end - mapping.start) // 8)).from_address(mapping.start))
        own = self.own
        for number, word in enumerate(words.cast("B").cast("Q")):
            if word in own:
                yield mapping.start + 8 * number, word

    def set(self, bypassed: bool) -> int:
        """Let all of them lead to the driver, or to the frontend. Return how many do now. Nothing may be under way."""
        count = 0
        for address, ours in self.pointers:
            word = ctypes.c_uint64.from_address(address)
            if word.value in (ours, self.own[ours]):  # else something else lies there by now
                word.value = self.own[ours] if bypassed else ours
                count += 1
        return count
