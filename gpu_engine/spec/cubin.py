"""Cubins: the ELF files that hold machine code for one architecture of GPUs.

Kernels are the names for which there is a section ``.nv.constant0.<name>``, the bank in which a launch's parameters
arrive. Functions that others call have a section ``.nv.info.<name>`` too, a list of attributes::

    0  u8 format    1  u8 attribute    2  u16 value, or for format 4 the number of bytes that follow

of which three say how the parameters lie in the block of bytes that a launch hands over::

    0x17 KPARAM_INFO       12 bytes: 4 u16 ordinal, 6 u16 offset, 8 u32: size << 18 | ... (size in bytes)
    0x45 KPARAM_INFO_V2    12 bytes: 4 u16 ordinal, 6 u16 offset, 8 u16 size (parameter blocks of more than 4 KiB)
    0x0a PARAM_CBANK       8 bytes: 0 u32 symbol, 4 u16 offset in constant bank 0, 6 u16 size of the block
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from phos.gpu_engine.spec.descriptor import Parameter
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Buffer

EM_CUDA = 190
INFO_PREFIX = ".nv.info."
CONSTANT_PREFIX = ".nv.constant0."
TEXT_PREFIX = ".text."

_FORMAT_SIZED = 4
_KPARAM_INFO = 0x17
_KPARAM_INFO_V2 = 0x45
_PARAM_CBANK = 0x0A
_PARAMETER = struct.Struct("<IHHI")

_R = TypeVar("_R")


@dataclass(frozen=True)
class KernelInfo:
    """What ``.nv.info.<kernel>`` says: the parameters, and where their block lies in constant bank 0; bytes."""

    parameters: tuple[Parameter, ...]
    base: int
    size: int


@dataclass(frozen=True)
class Symbol:
    """A variable or function in a cubin; ``section`` is its section's name, empty where it is defined elsewhere."""

    name: str
    section: str
    value: int
    size: int


def is_cubin(image: Buffer) -> bool:
    """Whether this is an ELF file for GPUs."""
    return len(image) >= 20 and bytes(image[:4]) == b"\x7fELF" and int.from_bytes(image[18:20], "little") == EM_CUDA


def _guarded(image: Buffer, what: str, read: Callable[[ELFFile], _R]) -> _R:
    """Run ``read`` on the file. pyelftools meets malformed files with many kinds of exceptions; they become one."""
    if not is_cubin(image):
        raise SpecError("This is no cubin: it is not an ELF file for GPUs.")
    try:
        return read(ELFFile(io.BytesIO(image)))
    except SpecError:
        raise
    except MemoryError:
        raise SpecError(f"The cubin's {what} would take more memory than there is.") from None
    except Exception as error:
        raise SpecError(f"The cubin's {what} cannot be read: {type(error).__name__} {error}.") from None


def kernels(image: Buffer) -> list[str]:
    """The names of the kernels in a cubin, in its order, as they are mangled."""

    def read(elf: ELFFile) -> list[str]:
        names = (section.name for section in elf.iter_sections())
        return [name[len(CONSTANT_PREFIX) :] for name in names if name.startswith(CONSTANT_PREFIX)]

    return _guarded(image, "sections", read)


def infos(image: Buffer, read_names: Collection[str] | None = None) -> dict[str, KernelInfo]:
    """Parameter layouts of the kernels named (of all by default); names that the cubin does not have are left out."""

    def read(elf: ELFFile) -> dict[str, KernelInfo]:
        wanted = None if read_names is None else {INFO_PREFIX + name for name in read_names}
        found = {}
        for section in elf.iter_sections():
            name = section.name
            if name.startswith(INFO_PREFIX) and (wanted is None or name in wanted):
                kernel = name[len(INFO_PREFIX) :]
                found[kernel] = parse_info(kernel, section.data())
        return found

    return _guarded(image, "kernel attributes", read)


def parse_info(kernel: str, data: bytes) -> KernelInfo:
    """The attributes in one ``.nv.info.<kernel>`` section."""
    by_ordinal: dict[int, Parameter] = {}
    base = size = 0
    offset = 0
    while offset + 4 <= len(data):
        form, attribute, length = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form != _FORMAT_SIZED:
            continue  # the value stood in the place of the length
        if offset + length > len(data):
            raise SpecError(f"The attributes of kernel {kernel} are cut short.")
        if attribute in (_KPARAM_INFO, _KPARAM_INFO_V2):
            if length < _PARAMETER.size:
                raise SpecError(
                    f"A parameter of kernel {kernel} is described in {length} bytes; {_PARAMETER.size} are needed."
                )
            _, ordinal, start, packed = _PARAMETER.unpack_from(data, offset)
            by_ordinal[ordinal] = Parameter(start, packed >> 18 if attribute == _KPARAM_INFO else packed & 0xFFFF)
        elif attribute == _PARAM_CBANK and length >= 8:
            base, size = struct.unpack_from("<HH", data, offset + 4)
        offset += length
    if sorted(by_ordinal) != list(range(len(by_ordinal))):
        raise SpecError(f"The parameters of kernel {kernel} are not numbered from 0 without a gap.")
    return KernelInfo(tuple(by_ordinal[ordinal] for ordinal in sorted(by_ordinal)), base, size)


def layouts(image: Buffer, names: Collection[str] | None = None) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of each kernel named (of all by default), in their order."""
    return {name: info.parameters for name, info in infos(image, names).items()}


def symbols(image: Buffer) -> list[Symbol]:
    """Every symbol of a cubin that has a name."""

    def read(elf: ELFFile) -> list[Symbol]:
        table = elf.get_section_by_name(".symtab")
        if not isinstance(table, SymbolTableSection):
            return []
        names = [section.name for section in elf.iter_sections()]
        found = []
        for symbol in table.iter_symbols():
            index = symbol["st_shndx"]
            section = names[index] if isinstance(index, int) and index < len(names) else ""
            if symbol.name:
                found.append(Symbol(symbol.name, section, symbol["st_value"], symbol["st_size"]))
        return found

    return _guarded(image, "symbols", read)


def architecture(image: Buffer) -> int:
    """The architecture that a cubin is for, as in 90 for sm_90; 0 where its header does not say."""
    if not is_cubin(image) or len(image) < 52:
        raise SpecError("This is no cubin: it is not an ELF file for GPUs.")
    flags = int.from_bytes(image[48:52], "little")
    # CUDA 13 (ABI version 8) moved the number one byte up; older files have it lowest.
    return (flags >> 8) & 0xFF if image[8] >= 8 else flags & 0xFF
