"""Access descriptors: what a kernel does with the addresses among its launch arguments (DESIGN §5).

A kernel's arguments are one block of bytes, laid out by its parameters. A descriptor says where in that block device
addresses lie and what the kernel does through each: a :class:`Field`. Bytes that no field covers hold scalars. A
descriptor is a guess, not a proof: whoever uses one validates what came of it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ADDRESS_BYTES = 8

TENSOR_MAP_BYTES = 128
"""A CUtensorMap (CUDA driver API, cuTensorMapEncodeTiled): passed by value, it names its memory in private form."""

TENSOR_MAP_ALIGNMENT = 64
"""Of its place (the same page)."""


class Access(enum.IntFlag):
    """What is done through an address. Atomics both read and write."""

    NONE = 0
    READ = 1
    WRITE = 2


class FieldKind(enum.IntEnum):
    """How the addresses in a field are found at a launch."""

    POINTER = 0
    """The 8 bytes are one address."""
    SCAN = 1
    """Every 8 aligned bytes that name device memory are taken for an address."""
    TENSOR_MAP = 2
    """The 128 bytes are a tensor map; the frontend knows from what address it was encoded."""
    TABLE = 3
    """The 8 bytes are the address of memory in which addresses lie when the kernel begins; these are meant."""


class Source(enum.IntEnum):
    """Where a descriptor came from, best first."""

    PTX = 0
    """Data flow over PTX."""
    SASS = 1
    """Data flow over the disassembled machine code."""
    NAME = 2
    """The types in the mangled name: constness, pointers, structs."""
    LAYOUT = 3
    """Only offset and size of each parameter: every 8 bytes may be an address, read and written."""


@dataclass(frozen=True, order=True)
class Parameter:
    """One parameter's place in the parameter block; bytes."""

    offset: int
    size: int


@dataclass(frozen=True, order=True)
class Field:
    """A part of the parameter block that holds addresses; bytes. ``access`` is what the kernel does through them.

    None overlaps another, but that a table is a pointer as well: the kernel reads it there.
    """

    offset: int
    size: int
    access: Access
    kind: FieldKind


@dataclass(frozen=True)
class AccessDescriptor:
    """What one kernel does with its arguments.

    ``indirect`` is what it does through addresses that come from anywhere else: from a module's variables, or from
    memory that no argument names, or that the kernel itself writes to. (A store into a module's own ``__device__``
    variable is none: the driver saves those.)
    """

    kernel: str
    parameters: tuple[Parameter, ...]
    fields: tuple[Field, ...]
    indirect: Access
    source: Source
    guessed: bool = False
    """Its machine code cannot be followed: what it does beyond its arguments is not known, and not in ``indirect``."""

    @property
    def block_size(self) -> int:
        """Bytes of the parameter block."""
        return max((p.offset + p.size for p in self.parameters), default=0)


def with_tables(
    fields: Iterable[Field], tables: Mapping[int, Access], indirect: Access
) -> tuple[tuple[Field, ...], Access]:
    """The fields with those for tables by their places, and what is done indirectly.

    What a kernel finds in a table that it writes to itself nobody knows before; and of one through which it does no
    more than it does indirectly there is nothing to say.
    """
    others = list(fields)
    written = [field for field in others if field.access & Access.WRITE and field.kind != FieldKind.TENSOR_MAP]
    for place, access in tables.items():
        if any(field.offset < place + ADDRESS_BYTES and place < field.offset + field.size for field in written):
            indirect |= access
    for place, access in tables.items():
        if access & ~indirect:
            others.append(Field(place, ADDRESS_BYTES, access & ~indirect, FieldKind.TABLE))
    return tuple(sorted(others)), indirect


def from_layout(kernel: str, parameters: tuple[Parameter, ...]) -> AccessDescriptor:
    """The descriptor of a kernel of which nothing but the parameter layout is known."""
    both = Access.READ | Access.WRITE
    fields = tuple(Field(p.offset, p.size, both, FieldKind.SCAN) for p in parameters if p.size >= ADDRESS_BYTES)
    return AccessDescriptor(kernel, parameters, fields, Access.NONE, Source.LAYOUT)
