"""What data flow over machine code needs from a cubin beyond the kernels' layouts: symbols by index, relocations."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from typing import TypeVar

from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

from phos.gpu_engine.spec import cubin
from phos.gpu_engine.spec.errors import SpecError

_FUNCTION = "STT_FUNC"
_ADDRESSES = (".rela.nv.constant4", ".rel.nv.constant4")
"""Relocations of the constant bank that holds the addresses of variables and functions."""

_R = TypeVar("_R")


def _read(image: bytes, what: str, read: Callable[[ELFFile], _R]) -> _R:
    """Run ``read``. pyelftools meets malformed files with many kinds of exceptions; they become one."""
    if not cubin.is_cubin(image):
        raise SpecError("This is no cubin: it is not an ELF file for GPUs.")
    try:
        return read(ELFFile(io.BytesIO(image)))
    except MemoryError:
        raise SpecError(f"The cubin's {what} would take more memory than there is.") from None
    except Exception as error:
        raise SpecError(f"The cubin's {what} cannot be read: {type(error).__name__} {error}.") from None


def function_indices(image: bytes, names: Collection[str]) -> list[int]:
    """Where the functions named stand in the symbol table; those that are not there are left out."""

    def read(elf: ELFFile) -> list[int]:
        table = elf.get_section_by_name(".symtab")
        if not isinstance(table, SymbolTableSection):
            return []
        return [
            index
            for index, symbol in enumerate(table.iter_symbols())
            if symbol["st_info"]["type"] == _FUNCTION and isinstance(symbol["st_shndx"], int) and symbol.name in names
        ]

    return _read(image, "symbols", read)


def address_slots(image: bytes) -> dict[int, str]:
    """By offset in constant bank 4, the symbol whose address the loader puts there."""

    def read(elf: ELFFile) -> dict[int, str]:
        slots: dict[int, str] = {}
        for name in _ADDRESSES:
            section = elf.get_section_by_name(name)
            if isinstance(section, RelocationSection):
                table = elf.get_section(section["sh_link"])
                for relocation in section.iter_relocations():
                    symbol = table.get_symbol(relocation["r_info_sym"])
                    slots[relocation["r_offset"]] = symbol.name
        return slots

    return _read(image, "relocations", read)
