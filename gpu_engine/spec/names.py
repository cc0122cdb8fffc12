"""Descriptors from the types in a kernel's mangled name: ``const T *`` is read, ``T *`` is read and written.

Structs by value are scanned for addresses at every launch, and so are 64-bit integers, in which some programs hand
addresses over: a number that is none names no device memory.
"""

from __future__ import annotations

from phos.gpu_engine.spec.descriptor import (
    ADDRESS_BYTES,
    TENSOR_MAP_BYTES,
    Access,
    AccessDescriptor,
    Field,
    FieldKind,
    Parameter,
    Source,
)
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.mangled import parameter_types
from phos.gpu_engine.spec.mangled_types import (
    BUILTIN_BYTES,
    INTEGERS,
    Array,
    Builtin,
    Code,
    Expansion,
    Named,
    Pack,
    Pointer,
    Qualified,
    Type,
    Unknown,
)

BOTH = Access.READ | Access.WRITE
TENSOR_MAP_NAMES = ("CUtensorMap", "CUtensorMap_st")


def describe(kernel: str, parameters: tuple[Parameter, ...]) -> AccessDescriptor:
    """What a kernel's name says of it.

    Raises:
        SpecError: the name is not mangled, or not understood, or does not fit the parameter layout.
    """
    types = parameter_types(kernel)
    if len(types) != len(parameters):
        raise SpecError(f"The name of kernel {kernel} tells of {len(types)} parameters, its code of {len(parameters)}.")
    fields = []
    indirect = Access.NONE
    for found, parameter in zip(types, parameters, strict=True):
        plain, _ = _unqualified(found)
        size = _size(plain)
        if isinstance(plain, Unknown | Pack | Expansion | Array) or (size is not None and size != parameter.size):
            raise SpecError(f"The name of kernel {kernel} does not fit its parameter at offset {parameter.offset}.")
        field = _field(plain, parameter)
        if field is not None:
            fields.append(field)
        if isinstance(plain, Pointer):
            indirect |= _through(plain)
    return AccessDescriptor(kernel, parameters, tuple(fields), indirect, Source.NAME)


def _unqualified(found: Type) -> tuple[Type, bool]:
    const = False
    while isinstance(found, Qualified):
        const |= found.const
        found = found.of
    return found, const


def _size(found: Type) -> int | None:
    """Bytes of a parameter of this type; None where the name does not tell."""
    if isinstance(found, Pointer):
        return ADDRESS_BYTES
    return BUILTIN_BYTES[found.code] if isinstance(found, Builtin) else None


def _field(found: Type, parameter: Parameter) -> Field | None:
    offset, size = parameter.offset, parameter.size
    if isinstance(found, Pointer):
        target, const = _target(found)
        if isinstance(target, Code):
            return None
        return Field(offset, size, Access.READ if const else BOTH, FieldKind.POINTER)
    if size < ADDRESS_BYTES or isinstance(found, Code) or (isinstance(found, Builtin) and found.code not in INTEGERS):
        return None
    if isinstance(found, Named) and found.name in TENSOR_MAP_NAMES and size == TENSOR_MAP_BYTES:
        return Field(offset, size, BOTH, FieldKind.TENSOR_MAP)
    return Field(offset, size, BOTH, FieldKind.SCAN)


def _target(pointer: Pointer) -> tuple[Type, bool]:
    """What a pointer points to, and whether that is const; an array is what its elements are."""
    target, const = _unqualified(pointer.to)
    while isinstance(target, Array):
        target, of_element = _unqualified(target.of)
        const |= of_element
    return target, const


def _through(pointer: Pointer) -> Access:
    """What is done through the addresses that lie where this pointer points."""
    target, _ = _target(pointer)
    if not isinstance(target, Pointer):
        return Access.NONE
    further, const = _target(target)
    if isinstance(further, Code):
        return Access.NONE
    return (Access.READ if const else BOTH) | _through(target)
