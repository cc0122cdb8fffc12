"""What a register may hold, as far as addresses go.

A value is a set of *atoms*, each with a *role*. An atom says where bits came from: bytes of the parameter block,
memory, the address of something that the module declares. The role says what they are good for in an address:

- OFFSET: they came through a multiplication, a shift, or are narrower than an address: an index, never a pointer while
  anything better is there;
- WEAK: eight bytes as they were loaded: a pointer, or a 64-bit index;
- STRONG: the program itself says that this is a pointer (``cvta.to.global``, ``.ptr``);
- DISTANCE: from a pointer to this one, which the sum with the former leads to. Shifts and divisions between do not
  change that;
- MINUS: this was subtracted. It is no address, but once it is subtracted again it is as good as a DISTANCE.

Roles are bits, and STRONG has that of WEAK: on one way an atom may be a pointer, on another it was subtracted. In sums
and differences they go by signs: what an address points into was added to it at least once, in whatever order.
Sums take the atoms of both sides, but a WEAK side added to a STRONG one is an index, and becomes OFFSET.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

OFFSET, WEAK, STRONG, DISTANCE, MINUS = 0, 1, 3, 4, 8
POINTER = STRONG | DISTANCE
"""An atom with any of these bits may be what an address points into."""
LASTING = DISTANCE | MINUS
"""What stays through shifts, divisions, and 32 bits."""

MAXIMUM_PLACES = 16
"""A value that names so many places in one object names just the object: pointers that walk in loops."""


class Bytes(NamedTuple):
    """These bytes of the parameter block."""

    offset: int
    size: int


class Anywhere(NamedTuple):
    """Some of these bytes of the parameter block: an array with a computed index."""

    first: int
    size: int
    mark: str = "anywhere"


class Loaded(NamedTuple):
    """Something that was in memory, or that an unknown function returned.

    ``table``: where in the parameter block the address of that memory lies, if it does.
    """

    table: int | None = None
    mark: str = "loaded"


class Place(NamedTuple):
    """The address of object number ``object`` plus ``offset``; None: some offset."""

    object: int
    offset: int | None
    mark: str = "place"


class Raised(NamedTuple):
    """No origin, but a mark beside others: some of the bits were moved up into the upper half."""

    mark: str = "raised"


Atom: TypeAlias = "Bytes | Anywhere | Loaded | Place | Raised"
Value: TypeAlias = dict[Atom, int]

LOADED = Loaded()
RAISED = Raised()
EMPTY: Value = {}


def join(target: Value, atom: Atom, role: int) -> bool:
    """Add an atom to a value; True if that changed it."""
    held = target.get(atom)
    if held is not None and not role & ~held:
        return False
    if held is None and len(target) >= MAXIMUM_PLACES and isinstance(atom, Place) and atom.offset is not None:
        anywhere = Place(atom.object, None)
        held = target.get(anywhere)
        if held is not None and not role & ~held:
            return False
        if sum(1 for other in target if isinstance(other, Place) and other.object == atom.object) >= MAXIMUM_PLACES:
            atom = anywhere
        else:
            held = None
    target[atom] = role | (held or OFFSET)
    return True


def union(target: Value, source: Value) -> bool:
    """Add all of ``source`` to ``target``; True if that changed it."""
    changed = False
    for atom, role in list(source.items()) if source is target else source.items():
        changed |= join(target, atom, role)
    return changed


def moved(value: Value, distance: int | None) -> Iterator[tuple[Atom, int]]:
    """The value with its places moved by ``distance`` bytes; None: by some number of them."""
    for atom, role in value.items():
        if isinstance(atom, Place) and atom.offset is not None and distance != 0:
            yield Place(atom.object, None if distance is None else atom.offset + distance), role
        else:
            yield atom, role


def narrowed(value: Value) -> Iterator[tuple[Atom, int]]:
    """Part of a value's bits: only shared memory's addresses and distances fit into fewer than 64."""
    for atom, role in value.items():
        if atom != RAISED:
            yield atom, role if isinstance(atom, Place) else role & LASTING


def computed(value: Value) -> Iterator[tuple[Atom, int]]:
    """What was multiplied, shifted or divided."""
    for atom, role in value.items():
        if atom != RAISED:
            yield atom, role & LASTING


def negated(value: Value) -> Iterator[tuple[Atom, int]]:
    """What was subtracted, or multiplied by a negative number."""
    for atom, role in moved(value, None):
        if atom != RAISED:
            yield atom, (MINUS if role & POINTER else OFFSET) | (DISTANCE if role & MINUS else OFFSET)


def demoted(value: Value, other: Value) -> Iterator[tuple[Atom, int]]:
    """One side of a sum with its roles in the sum."""
    weak_is_index = strong(other) and not strong(value)
    for atom, role in value.items():
        yield atom, role & LASTING if weak_is_index else role


def strong(value: Value) -> bool:
    """Whether the program itself says of any atom that it is a pointer."""
    return any(role & STRONG == STRONG for role in value.values())


def runs(pieces: Iterable[Bytes]) -> list[Bytes]:
    """Bytes that touch or overlap, made one."""
    result: list[Bytes] = []
    for piece in sorted(pieces):
        if result and piece.offset <= result[-1].offset + result[-1].size:
            last = result.pop()
            result.append(Bytes(last.offset, max(last.size, piece.offset + piece.size - last.offset)))
        else:
            result.append(piece)
    return result


def assembled(parts: list[Value]) -> Iterator[tuple[Atom, int]]:
    """Eight bytes put together from narrower parts, lowest first: a pointer if its pieces belong together."""
    first, rest = parts[0], parts[1:]
    for part in parts:
        for atom, role in part.items():
            if isinstance(atom, Place) or role & LASTING:
                yield atom, role
                continue
            # What is less than an address, and in all parts, is a number: extended by its sign, or a mask.
            whole = all(atom in other for other in parts) and (not isinstance(atom, Bytes) or atom.size >= 8)
            yield atom, WEAK if whole and rest else OFFSET
            if isinstance(atom, Loaded) and not whole and all(any(isinstance(a, Loaded) for a in p) for p in parts):
                yield LOADED, WEAK  # halves from different places
    pieces = [atom for part in parts for atom in part if isinstance(atom, Bytes) and atom.size < 8]
    for piece in runs(pieces):
        if piece.size >= 8 and any(isinstance(atom, Bytes) and atom.offset == piece.offset for atom in first):
            yield (piece if piece.size == 8 else Anywhere(*piece)), WEAK
    if _apart(parts, (0, 4)):
        yield LOADED, WEAK


def combined(parts: list[Value]) -> Iterator[tuple[Atom, int]]:
    """What eight bytes become that are put together from shifted pieces: unaligned loads, halves.

    Arguments are searched for addresses at whole words, so that pieces of which it is not known which belong together,
    or that do not lie there as they do in an address, are as good as an address from memory.
    """
    pieces = [atom for part in parts for atom in part if isinstance(atom, Bytes) and atom.size < 8]
    for piece in runs(pieces):
        if piece.size >= 8:
            yield (piece if piece.size == 8 and _in_order(piece, parts) else LOADED), WEAK
    if _apart(parts, (0, 4, -4)):
        yield LOADED, WEAK
    if len(parts) < 2:
        return
    for atom in parts[0]:
        if isinstance(atom, Bytes) and atom.size >= 8 and all(atom in other for other in parts):
            yield atom, WEAK
    if all(any(_somewhere(atom) and not role & POINTER for atom, role in part.items()) for part in parts):
        yield LOADED, WEAK


def _apart(parts: list[Value], places: tuple[int, ...]) -> bool:
    """Whether two parts are each half a word of the arguments, the second at none of these places from the first."""
    halves = [[atom for atom in part if atom != RAISED] for part in parts]
    if len(halves) != 2 or any(len(half) != 1 for half in halves):
        return False
    (one,), (other,) = halves
    if not isinstance(one, Bytes) or not isinstance(other, Bytes) or (one.size, other.size) != (4, 4):
        return False
    return other.offset - one.offset not in places


def _in_order(whole: Bytes, parts: list[Value]) -> bool:
    """Whether what was moved into the upper half is the upper half of these bytes, and what was not, the lower."""
    middle = whole.offset + whole.size // 2
    for part in parts:
        for atom in part:
            if isinstance(atom, Bytes) and atom.size < 8 and whole.offset <= atom.offset < whole.offset + whole.size:
                upper = atom.offset >= middle
                if atom.offset < middle < atom.offset + atom.size or (upper and RAISED not in part):
                    return False
                if not upper and RAISED in part and not any(_is_upper(other, middle) for other in part):
                    return False
    return True


def _is_upper(atom: Atom, middle: int) -> bool:
    return isinstance(atom, Bytes) and atom.offset >= middle


def completed(parts: list[Value]) -> Iterator[tuple[Atom, int]]:
    """What the sum of a word in the upper half and one in the lower becomes: as if they were put together.

    But what already is an address is the base of this one, and not a piece of another.
    """
    return combined([_pieces(part) for part in parts])


def _pieces(value: Value) -> Value:
    whole = [atom for atom, role in value.items() if isinstance(atom, Bytes) and atom.size >= 8 and role & POINTER]
    return {
        atom: role
        for atom, role in value.items()
        if not isinstance(atom, Bytes)
        or atom.size >= 8
        or not any(w.offset <= atom.offset and atom.offset + atom.size <= w.offset + w.size for w in whole)
    }


def _somewhere(atom: Atom) -> bool:
    return isinstance(atom, Loaded | Anywhere)
