"""What a kernel does with its arguments, as the tests of data flow over machine code write it down."""

from __future__ import annotations

from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, FieldKind

NONE, READ, WRITE = Access.NONE, Access.READ, Access.WRITE
BOTH = READ | WRITE
POINTER, SCAN, TENSOR_MAP, TABLE = FieldKind

# Per kernel: fields as (parameter's number, offset in it, size, access, kind), and what is done indirectly.
Expected = tuple[list[tuple[int, int, int, Access, FieldKind]], Access]


def pointers(*accesses: Access) -> list[tuple[int, int, int, Access, FieldKind]]:
    """The first parameters are pointers with these accesses; NONE is one that is not followed."""
    return [(number, 0, 8, access, POINTER) for number, access in enumerate(accesses) if access]


def table(number: int, access: Access) -> tuple[int, int, int, Access, FieldKind]:
    """A parameter is a pointer to addresses with this access."""
    return number, 0, 8, access, TABLE


def as_expected(found: AccessDescriptor) -> Expected:
    """A descriptor's fields by parameter."""
    fields = []
    for field in found.fields:
        number = max(n for n, p in enumerate(found.parameters) if p.offset <= field.offset)
        fields.append((number, field.offset - found.parameters[number].offset, field.size, field.access, field.kind))
    return fields, found.indirect
