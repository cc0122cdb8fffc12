"""What instructions work on (PTX ISA, "Instruction Operands").

Operands are named tuples: they are compared by value, and a text has hundreds of thousands. Their text is what the
assembler reads, not what stood in the source: spaces are lost.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Name(NamedTuple):
    """A register, variable, label, function or ``_``, a component's ``.x`` included. ``offset`` as in ``name+8``."""

    text: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.text}+{self.offset}" if self.offset else self.text


class Immediate(NamedTuple):
    """A number as it is written, sign included, or a constant expression."""

    number: str

    def __str__(self) -> str:
        return self.number


class Address(NamedTuple):
    """``[a]``, ``[a+8]``, ``[a, {x, y}]``: what stands between the brackets."""

    inner: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.inner))}]"


class Vector(NamedTuple):
    """``{a, b}``."""

    elements: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{{{', '.join(map(str, self.elements))}}}"


class Group(NamedTuple):
    """``(a, b)``: the arguments or results of a call."""

    members: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.members))})"


class Pair(NamedTuple):
    """``p|q``: two results."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


class Complement(NamedTuple):
    """``!p`` as an operand: the predicate's complement; ``-a`` of a register."""

    sign: str
    operand: Operand

    def __str__(self) -> str:
        return f"{self.sign}{self.operand}"


Operand: TypeAlias = "Name | Immediate | Address | Vector | Group | Pair | Complement"


def integer(text: str) -> int | None:
    """The value of an integer constant with an optional sign (PTX ISA, "Integer Constants"); None if it is none."""
    negative = text.startswith("-")
    digits = text.lstrip("+-").rstrip("U")
    try:
        if digits[:2] in ("0x", "0X"):
            value = int(digits, 16)
        elif digits[:2] in ("0b", "0B"):
            value = int(digits, 2)
        elif len(digits) > 1 and digits[0] == "0":
            value = int(digits, 8)
        elif len(digits) > 20:
            return None
        else:
            value = int(digits)
    except ValueError:
        return None
    return -value if negative else value


def names(operand: Operand) -> list[Name]:
    """Every name in an operand, from left to right."""
    if isinstance(operand, Name):
        return [operand]
    if isinstance(operand, Immediate):
        return []
    if isinstance(operand, Pair):
        return names(operand.first) + names(operand.second)
    if isinstance(operand, Complement):
        return names(operand.operand)
    return [name for part in operand[0] for name in names(part)]
