"""The binary form of access descriptors, for the frontend: frontend/access_table.h says what each byte is."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Mapping

from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Field, FieldKind, Parameter, Source
from phos.gpu_engine.spec.errors import SpecError

MAGIC = int.from_bytes(b"PHOSACC1", "little")

HEADER = struct.Struct("<QIII4x")
KERNEL = struct.Struct("<QQIIIIIBB?x")

PARAMETER = struct.Struct("<II")
FIELD = struct.Struct("<IIBB6x")

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_U32 = 0xFFFFFFFF

Row = tuple[int, AccessDescriptor]
"""A module's number in its session, and the descriptor of one of its kernels."""


def name_hash(name: str) -> int:
    """FNV-1a, 64 bits, of a kernel's name."""
    value = _FNV_OFFSET
    for byte in name.encode():
        value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return value


def pack(rows: Iterable[Row]) -> bytes:
    """The table of these descriptors. Of several for the same kernel and module the last one counts.

    A kernel whose parts do not fit the form's numbers is left out: the frontend treats it like an unknown one.
    """
    return _packed({(module, name_hash(found.kernel)): found for module, found in rows if _fits(module, found)})


def merge(*tables: bytes) -> bytes:
    """One table of what several say: of a kernel that more than one has, the row from the better source, or the later.

    Raises SpecError.
    """
    chosen: dict[tuple[int, int], AccessDescriptor] = {}
    for table in tables:
        for module, hashed, found in unpack(table):
            former = chosen.get((module, hashed))
            if former is None or found.source <= former.source:
                chosen[module, hashed] = found
    return _packed(chosen)


def of_modules(table: bytes, modules: Container[int]) -> bytes:
    """The part of a table that is of these modules. Raises SpecError."""
    return _packed({(module, hashed): found for module, hashed, found in unpack(table) if module in modules})


def _packed(chosen: Mapping[tuple[int, int], AccessDescriptor]) -> bytes:
    kernels, parameters, fields = bytearray(), bytearray(), bytearray()
    for (module, hashed), found in sorted(chosen.items(), key=lambda item: item[0]):
        record = KERNEL.pack(
            module,
            hashed,
            len(parameters) // PARAMETER.size,
            len(found.parameters),
            len(fields) // FIELD.size,
            len(found.fields),
            found.block_size,
            int(found.indirect),
            int(found.source),
            found.guessed,
        )
        kernels += record
        for parameter in found.parameters:
            parameters += PARAMETER.pack(parameter.offset, parameter.size)
        for field in found.fields:
            fields += FIELD.pack(field.offset, field.size, int(field.access), int(field.kind))
    header = HEADER.pack(MAGIC, len(chosen), len(parameters) // PARAMETER.size, len(fields) // FIELD.size)
    return b"".join((header, kernels, parameters, fields))


def _fits(module: int, found: AccessDescriptor) -> bool:
    numbers = [found.block_size]
    numbers += [field.offset + field.size for field in found.fields]
    return 0 <= module < 1 << 64 and all(0 <= number <= _U32 for number in numbers)


def is_empty(table: bytes) -> bool:
    """Whether a table that :func:`pack` has made has no kernel."""
    kernels: int = HEADER.unpack_from(table)[1]
    return not kernels


def unpack(table: bytes) -> list[tuple[int, int, AccessDescriptor]]:
    """(module, hash of the name, descriptor without its name) of each kernel in a table. Raises SpecError."""
    try:
        magic, kernels, parameters, fields = HEADER.unpack_from(table)
        if magic != MAGIC:
            raise SpecError("This is no table of access descriptors: its magic number is another one.")
        at_parameters = HEADER.size + kernels * KERNEL.size
        at_fields = at_parameters + parameters * PARAMETER.size
        if len(table) != at_fields + fields * FIELD.size:
            raise SpecError("The table of access descriptors has another size than its header says.")
        return [_unpack_kernel(table, index, at_parameters, at_fields) for index in range(kernels)]
    except struct.error:
        raise SpecError("The table of access descriptors is cut short.") from None
    except ValueError as error:
        raise SpecError(f"The table of access descriptors has a field with no meaning: {error}.") from None


def _unpack_kernel(table: bytes, index: int, at_parameters: int, at_fields: int) -> tuple[int, int, AccessDescriptor]:
    module, hashed, first_parameter, parameters, first_field, fields, _, indirect, source, guessed = KERNEL.unpack_from(
        table, HEADER.size + index * KERNEL.size
    )
    at_parameters += first_parameter * PARAMETER.size
    at_fields += first_field * FIELD.size
    found = AccessDescriptor(
        "",
        tuple(Parameter(*PARAMETER.unpack_from(table, at_parameters + i * PARAMETER.size)) for i in range(parameters)),
        tuple(_unpack_field(table, at_fields + i * FIELD.size) for i in range(fields)),
        Access(indirect),
        Source(source),
        guessed,
    )
    return module, hashed, found


def _unpack_field(table: bytes, offset: int) -> Field:
    start, size, access, kind = FIELD.unpack_from(table, offset)
    return Field(start, size, Access(access), FieldKind(kind))
