"""The steps of an analysed function: what its instructions do with addresses, registers numbered, names resolved.

Register 0 holds nothing: numbers, special registers. Every other register stands for one declared name in one scope,
or for one address of a declared thing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from phos.gpu_engine.spec.descriptor import Access


class Space(enum.Enum):
    """The state space that an access names (PTX ISA, "State Spaces"). CONST is the module's constant memory."""

    GENERIC = ""
    GLOBAL = "global"
    SHARED = "shared"
    LOCAL = "local"
    PARAM = "param"
    CONST = "const"


class Move(NamedTuple):
    """The target may hold what a source holds. ``distance``: None if places within objects are lost."""

    target: int
    sources: tuple[int, ...]
    distance: int | None = 0


class Mix(NamedTuple):
    """The target is computed from the sources in a way that leaves no pointer."""

    target: int
    sources: tuple[int, ...]


class Narrow(NamedTuple):
    """The target has some of the source's bits, or the source has fewer than the target."""

    target: int
    source: int


class Pack(NamedTuple):
    """The target's 64 bits are the sources', lowest first."""

    target: int
    sources: tuple[int, ...]


class Combine(NamedTuple):
    """The target's 64 bits are the sources', each with bits of its own: ``or``, ``bfi``."""

    target: int
    sources: tuple[int, ...]


class Scramble(NamedTuple):
    """The target's bits are the sources', and no argument has them so: bytes in another order, or one with a key.

    ``whole``: of two addresses; else of pieces of one.
    """

    target: int
    sources: tuple[int, ...]
    whole: bool


class Raise(NamedTuple):
    """The target is the source moved up by so many bits that there may be room for another word below."""

    target: int
    source: int


class Add(NamedTuple):
    """target = left + right; ``number`` is right's value where it is known."""

    target: int
    left: int
    right: int
    number: int | None


class Subtract(NamedTuple):
    """target = left - right; left is register 0 where right is only negated."""

    target: int
    left: int
    right: int
    number: int | None


class MultiplyAdd(NamedTuple):
    """target = factor * factor + addend."""

    target: int
    factors: tuple[int, ...]
    addend: int


class Strengthen(NamedTuple):
    """The target is the source, of which the program says that it is an address of global memory."""

    target: int
    source: int


class Load(NamedTuple):
    """``targets``, of ``size`` bytes each, come from memory at ``address`` + ``number``."""

    targets: tuple[int, ...]
    address: int
    number: int
    size: int
    space: Space


class Store(NamedTuple):
    """``sources`` go to memory. ``access`` is READ | WRITE for an atomic."""

    sources: tuple[int, ...]
    address: int
    number: int
    size: int
    space: Space
    access: Access


class Touch(NamedTuple):
    """Memory at ``address`` is accessed; no register takes part."""

    address: int
    access: Access
    space: Space


class Fill(NamedTuple):
    """Shared memory is filled from global memory, by an asynchronous copy."""


class Tensor(NamedTuple):
    """``access`` is done through the tensor map at ``address`` + ``number``."""

    address: int
    number: int
    access: Access


class MadeMap(NamedTuple):
    """A tensor map is put into memory at ``address``, or ``target`` into one as the address of what it stands for.

    Register 0 where one of these is not known to this step.
    """

    address: int
    target: int


class Indirect(NamedTuple):
    """Memory is accessed through a handle that says nothing of addresses: textures, surfaces."""

    access: Access


class Call(NamedTuple):
    """A call. Arguments and results are registers, or registers that hold the addresses of parameter variables."""

    name: str
    """Empty for an indirect call."""
    register: int
    among: tuple[str, ...] | None
    """The functions an indirect call may reach, where the text says so."""
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    site: int


Step: TypeAlias = (
    "Move | Mix | Narrow | Pack | Combine | Scramble | Raise | Add | Subtract | MultiplyAdd | Strengthen | Load | Store"
    " | Touch | Fill | Tensor | MadeMap | Indirect | Call"
)


class Kind(enum.Enum):
    """What a declared thing is."""

    PARAMETER = "kernel parameter"
    LOCAL = "local memory or a call's parameter"
    SHARED = "shared memory"
    VARIABLE = "module variable"
    FUNCTION = "function"


class Formal(NamedTuple):
    """A function's parameter or result: the number of its object, or of its register if it is declared as one."""

    object: int | None
    register: int


class Declared(NamedTuple):
    """A thing with an address; ``offset``, ``size`` in bytes: a kernel parameter's place in the parameter block."""

    kind: Kind
    name: str
    offset: int = 0
    size: int = 0
    pointer: bool = False
    around: tuple[int, int] = (0, 0)
    """From where to where the block looks the same around this parameter on every GPU."""
    alignment: int = 1


@dataclass
class Code:
    """A function, ready to be analysed."""

    name: str
    registers: int = 1
    steps: list[Step] = field(default_factory=list)
    objects: list[Declared] = field(default_factory=list)
    addresses: list[tuple[int, int, int]] = field(default_factory=list)
    """(register, object, offset): registers that stand for addresses."""
    parameters: list[Formal] = field(default_factory=list)
    results: list[Formal] = field(default_factory=list)
