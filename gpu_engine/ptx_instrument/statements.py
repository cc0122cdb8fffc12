"""What functions and modules are made of (PTX ISA, "Statements", "Directives", "Variables").

Every node knows from where to where it stands in the text (characters), so that an edit can be made beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from phos.gpu_engine.ptx_instrument.operands import Operand

_TYPES_OF_BYTES = {
    1: ".b8 .u8 .s8 .pred .e4m3 .e5m2",
    2: ".b16 .u16 .s16 .f16 .bf16 .e4m3x2 .e5m2x2",
    4: ".b32 .u32 .s32 .f32 .tf32 .f16x2 .bf16x2 .u16x2 .s16x2 .s8x4 .u8x4",
    8: ".b64 .u64 .s64 .f64 .f32x2 .texref .samplerref .surfref",
    16: ".b128",
}
TYPE_BYTES = {name: size for size, names in _TYPES_OF_BYTES.items() for name in names.split()}
"""Size in bytes of what a type names (PTX ISA, "Types"). An opaque type is a handle of eight bytes."""

VECTOR_LENGTH = {".v2": 2, ".v4": 4, ".v8": 8}


@dataclass(slots=True)
class Node:
    """``start`` and ``end`` are where it stands in the text; they do not count when two nodes are compared."""

    start: int = field(compare=False)
    end: int = field(compare=False)


@dataclass(slots=True)
class Instruction(Node):
    """``@!p opcode operands;``. ``guard`` is the predicate with its ``!``, or an empty text."""

    guard: str
    opcode: str
    operands: tuple[Operand, ...]


@dataclass(slots=True)
class Label(Node):
    """``name:``"""

    name: str


@dataclass(slots=True)
class Targets(Node):
    """``label: .branchtargets a, b;`` or ``.calltargets``."""

    label: str
    directive: str
    names: tuple[str, ...]


@dataclass(slots=True)
class Declarator:
    """One name of a declaration. ``count`` is n of ``%r<n>``; ``sizes`` holds an array's, None for ``[]``."""

    name: str
    count: int | None = None
    sizes: tuple[int | None, ...] = ()
    initial: tuple[str, ...] = ()
    """The tokens after ``=``."""


@dataclass(slots=True)
class Variable(Node):
    """A declaration: ``.reg``, ``.local``, ``.shared``, ``.global``, ``.const``, ``.param``; parameters too."""

    linkage: tuple[str, ...]
    """``.visible``, ``.extern``, ``.weak``, ``.common``, in the order found."""
    space: str
    type: str
    vector: str
    alignment: int | None
    attributes: tuple[str, ...]
    """The tokens of anything else before the name: ``.ptr .global .align 16``, ``.attribute(.managed)``."""
    declarators: tuple[Declarator, ...]

    @property
    def pointer(self) -> bool:
        """Is this a parameter declared as a pointer (PTX ISA, "Kernel Function Parameter Attribute: .ptr")?"""
        return ".ptr" in self.attributes

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return TYPE_BYTES.get(self.type, 8) * VECTOR_LENGTH.get(self.vector, 1)

    def bytes(self, declarator: Declarator) -> int:
        """Bytes of what one of the names stands for; an array of unknown size has none."""
        size = self.element_bytes
        for length in declarator.sizes:
            size *= length or 0
        return size

    @property
    def natural_alignment(self) -> int:
        """The alignment in bytes: what is written, else the element's size."""
        return self.alignment or self.element_bytes


@dataclass(slots=True)
class Directive(Node):
    """Any other directive, with the tokens after it: ``.loc``, ``.file``, ``.pragma``, ``.version``, ``.maxntid``."""

    name: str
    arguments: tuple[str, ...]
    ended: bool
    """Does a semicolon follow?"""


@dataclass(slots=True)
class Section(Node):
    """``.section name { … }``: debug information, kept as tokens."""

    name: str
    tokens: tuple[str, ...]


@dataclass(slots=True)
class Prototype(Node):
    """``label: .callprototype (results) _ (parameters);``"""

    label: str
    results: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    directives: tuple[Directive, ...]


@dataclass(slots=True)
class Block(Node):
    """``{ … }``: names declared inside are not known outside."""

    statements: list[Statement]


Statement: TypeAlias = "Instruction | Label | Targets | Variable | Directive | Section | Prototype | Block"


@dataclass(slots=True)
class Function(Node):
    """A kernel or a device function; ``body`` is None for a declaration."""

    linkage: tuple[str, ...]
    kernel: bool
    attributes: tuple[str, ...]
    name: str
    results: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    directives: tuple[Directive, ...]
    body: Block | None


Item: TypeAlias = "Function | Variable | Directive | Section"


@dataclass(slots=True)
class Module:
    """A whole text."""

    text: str = field(compare=False)
    items: list[Item]

    def _directive(self, name: str) -> tuple[str, ...]:
        for item in self.items:
            if isinstance(item, Directive) and item.name == name:
                return item.arguments
        return ()

    @property
    def version(self) -> tuple[int, int]:
        """The PTX ISA version."""
        major, _, minor = self._directive(".version")[0].partition(".")
        return int(major), int(minor or 0)

    @property
    def target(self) -> str:
        """What it was compiled for, such as ``sm_90a``."""
        return self._directive(".target")[0]

    @property
    def functions(self) -> list[Function]:
        """Kernels and device functions, declarations included, in the text's order."""
        return [item for item in self.items if isinstance(item, Function)]

    @property
    def variables(self) -> list[Variable]:
        """The module's own variables."""
        return [item for item in self.items if isinstance(item, Variable)]
