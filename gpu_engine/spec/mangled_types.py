"""What mangled.py makes of a function's parameters: a tree that says what is a pointer, and to what."""

from __future__ import annotations

from dataclasses import dataclass

from phos.gpu_engine.spec.errors import SpecError

MAX_PARAMETERS = 4096

BUILTIN_BYTES = {
    "v": 0, "w": 4, "b": 1, "c": 1, "a": 1, "h": 1, "s": 2, "t": 2, "i": 4, "j": 4, "l": 8, "m": 8, "x": 8, "y": 8,
    "n": 16, "o": 16, "f": 4, "d": 8, "e": 16, "g": 16, "z": 0,
    "Dd": 8, "De": 16, "Df": 4, "Dh": 2, "Di": 4, "Ds": 2, "Du": 1, "Da": 0, "Dc": 0, "Dn": 8,
}  # fmt: skip
"""Sizes of the built-in types where CUDA runs (LP64)."""
INTEGERS = "lmxyno"
"""Those that may hold an address."""


@dataclass(frozen=True, eq=False)
class Type:
    """A type, or what stands in the place of one. Identity counts: substitutions refer to the same object."""


@dataclass(frozen=True, eq=False)
class Builtin(Type):
    """A built-in type, by its code."""

    code: str


@dataclass(frozen=True, eq=False)
class Pointer(Type):
    """A pointer or a reference."""

    to: Type
    reference: bool = False


@dataclass(frozen=True, eq=False)
class Qualified(Type):
    """A cv-qualified type."""

    const: bool
    of: Type


@dataclass(frozen=True, eq=False)
class Named(Type):
    """A class, union or enumeration. ``arguments`` are those of the last part of its name, if that is a template."""

    name: str
    arguments: tuple[Type, ...] | None = None
    typed: bool = False
    """As a function's name it hides a return type: constructors, destructors and conversions do not have one."""


@dataclass(frozen=True, eq=False)
class Array(Type):
    """An array; parameters are never one, but pointers and references point to them."""

    of: Type


@dataclass(frozen=True, eq=False)
class Code(Type):
    """A function, or a pointer to a member: nothing that is data."""


@dataclass(frozen=True, eq=False)
class Pack(Type):
    """The arguments that a parameter pack stands for."""

    items: tuple[Type, ...]


@dataclass(frozen=True, eq=False)
class Expansion(Type):
    """A pack expansion: the pattern, once for each item of the packs in it."""

    pattern: Type


@dataclass(frozen=True, eq=False)
class Unknown(Type):
    """A value, or a type that only the compiler can work out."""


def expand(found: Type, into: list[Type]) -> None:
    """Append a type, or in place of a pack expansion its items. Raises SpecError where that cannot be done."""
    if isinstance(found, Expansion):
        packs: list[Pack] = []
        _find_packs(found.pattern, packs, set())
        if len({len(pack.items) for pack in packs}) != 1:
            raise SpecError("A parameter pack in the name cannot be expanded.")
        for index in range(len(packs[0].items)):
            expand(_pick(found.pattern, index), into)
    elif isinstance(found, Pack):
        for item in found.items:
            expand(item, into)
    else:
        into.append(found)
    if len(into) > MAX_PARAMETERS:
        raise SpecError("The name has more parameters than a function can have.")


def _find_packs(found: Type, packs: list[Pack], seen: set[int]) -> None:
    # Substitutions make this a graph: a short name may stand for a tree that nobody could walk.
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, Pack):
        packs.append(found)
    elif isinstance(found, Pointer):
        _find_packs(found.to, packs, seen)
    elif isinstance(found, Qualified | Array):
        _find_packs(found.of, packs, seen)
    elif isinstance(found, Named):
        for argument in found.arguments or ():
            _find_packs(argument, packs, seen)


def _pick(found: Type, index: int) -> Type:
    if isinstance(found, Pack):
        return found.items[index]
    if isinstance(found, Pointer):
        return pointer_to(_pick(found.to, index), found.reference)
    if isinstance(found, Qualified):
        return Qualified(found.const, _pick(found.of, index))
    if isinstance(found, Array):
        return Array(_pick(found.of, index))
    return found


def pointer_to(to: Type, reference: bool) -> Type:
    """References to references are references to what these refer to."""
    return to if reference and isinstance(to, Pointer) and to.reference else Pointer(to, reference)
