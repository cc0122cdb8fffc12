"""What the driver is given as a module, in whatever wrapping, as cubins and PTX for one architecture.

A module may be a cubin, PTX text, a fat binary, or, for people who look into one, a whole host program or library.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field

from elftools.elf.elffile import ELFFile

from phos.gpu_engine.spec import cubin, fatbin, ptx_layout
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import ARCH_SPECIFIC, Buffer, Entry, Kind

FATBIN_SECTION = ".nv_fatbin"
"""What a program gives to the driver. (``__nv_relfatbin`` is what was linked into it.)"""


@dataclass
class Unit:
    """The code of one translation unit that the driver would take on a GPU: cubins of one architecture, and PTX.

    Images are uncompressed when they are asked for, once. ``ptx_matches``: the PTX is of the cubins' own architecture,
    so that it was made from the same source after the preprocessor; or there is no cubin and the driver compiles it.
    """

    arch: int
    runs_on: int
    """The GPU's capability: what PTX is compiled for."""
    _cubins: list[Entry]
    _ptx: Entry | None
    ptx_matches: bool
    _kept_cubins: list[bytes] | None = field(default=None, repr=False)
    _kept_ptx: str | None = field(default=None, repr=False)

    def cubins(self) -> list[bytes]:
        """The cubins, uncompressed."""
        if self._kept_cubins is None:
            self._kept_cubins = [entry.read() for entry in self._cubins]
        return self._kept_cubins

    def ptx(self) -> str | None:
        """The text of the PTX, if there is any."""
        if self._ptx is None:
            return None
        if self._kept_ptx is None:
            self._kept_ptx = decode_ptx(self._ptx.read())
        return self._kept_ptx


def decode_ptx(text: bytes) -> str:
    """PTX is ASCII, padded with zeros; identifiers and strings of careless tools are not always."""
    return text.rstrip(b"\0").decode("utf-8", "replace")


def units(image: Buffer, capability: int) -> Iterator[Unit]:
    """The units of a module, one after another.

    Arguments:
        capability: the GPU's, as 90 for 9.0; 0 takes the newest architecture there is.

    Raises:
        SpecError: this is no module, or a malformed one.
    """
    view = memoryview(image)
    if fatbin.is_container(view):
        yield select(fatbin.entries(view), capability)
    elif cubin.is_cubin(view):
        arch = cubin.architecture(view)
        yield Unit(arch, capability or arch, [_plain(Kind.ELF, view)], None, False)
    elif bytes(view[:4]) == b"\x7fELF":
        for section in _fatbin_sections(view):
            for container in fatbin.containers(section):
                yield select(fatbin.entries(container), capability)
    elif ptx_layout.is_ptx(bytes(view[: 1 << 16])):
        yield Unit(capability, capability, [], _plain(Kind.PTX, view), True)
    elif len(view) >= 4 and int.from_bytes(view[:4], "little") == fatbin.WRAPPER_MAGIC:
        fatbin.container_size(view)  # raises, with the sentence for wrappers
    else:
        raise SpecError("This is no module: neither a cubin, nor PTX, nor a fat binary, nor a program that holds one.")


def select(entries: list[Entry], capability: int) -> Unit:
    """Those entries of a fat binary that the driver would take on a GPU of this capability.

    CUDA C++ Programming Guide, "Binary Compatibility": cubins run on GPUs of the same major and an equal or higher
    minor revision, PTX on every equal or higher one; what is specific to an architecture runs on that alone, and what
    is specific to a family on equal or higher minor revisions.
    """

    def runs(entry: Entry) -> bool:
        if capability in (0, entry.arch):
            return True
        if entry.flags & ARCH_SPECIFIC or entry.arch > capability:
            return False
        family = entry.arch // 10 == capability // 10
        return family or (entry.kind == Kind.PTX and not entry.specific)

    usable = [entry for entry in entries if entry.kind in (Kind.PTX, Kind.ELF) and runs(entry)]
    cubins = [entry for entry in usable if entry.kind == Kind.ELF]
    texts = [entry for entry in usable if entry.kind == Kind.PTX]
    arch = max((entry.arch for entry in cubins), default=0)
    cubins = [entry for entry in cubins if entry.arch == arch]
    if any(entry.specific for entry in cubins):
        cubins = [entry for entry in cubins if entry.specific]
    ptx = max(texts, key=lambda entry: (entry.arch, entry.specific), default=None)
    specific = any(entry.specific for entry in cubins)
    matches = ptx is not None and (not cubins or (ptx.arch == arch and ptx.specific == specific))
    arch = arch or (ptx.arch if ptx else 0)
    return Unit(arch, capability or arch, cubins, ptx, matches)


def _plain(kind: Kind, view: memoryview) -> Entry:
    return Entry(kind, 0, 0, view, 0, 0)


def _fatbin_sections(view: memoryview) -> Iterator[memoryview]:
    try:
        places = [
            (section["sh_offset"], section["sh_size"])
            for section in ELFFile(io.BytesIO(view)).iter_sections()
            if section.name == FATBIN_SECTION
        ]
    except Exception as error:  # pyelftools meets malformed files with exceptions of many kinds
        raise SpecError(f"The sections of this program cannot be read: {type(error).__name__} {error}.") from None
    if not places:
        raise SpecError("This program holds no GPU code: it has no section .nv_fatbin.")
    for offset, size in places:
        yield view[offset : offset + size]
