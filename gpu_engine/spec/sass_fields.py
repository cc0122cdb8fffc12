"""From the accesses that a walk over machine code saw to the fields of a kernel's parameter block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from phos.gpu_engine.spec.descriptor import (
    ADDRESS_BYTES,
    TENSOR_MAP_ALIGNMENT,
    TENSOR_MAP_BYTES,
    Access,
    Field,
    FieldKind,
    Parameter,
)
from phos.gpu_engine.spec.sass_state import WORD, Kernel, MadeMap, Touch
from phos.gpu_engine.spec.sass_value import ANY, BLOCK, KEY, Atom, Atoms, Origin

# An index may be counted from 1, or be too large by one: the array may begin or end so many bytes from the place in the
# code, if its elements are no larger.
_NEAR = 64

# PyTorch's and Apex's lists of tensors have as many arrays side by side as there are lists, and one index for all.
# Nothing in the code says so: `p[i] = p[i + 30]` with one array looks the same.
_LISTS = re.compile(r"TensorList(ScalarList)?Metadata")
_SEPARATE = 64
"""Places in different lists are further apart. Less is what unrolled loops look like."""

_WORDS = (Origin.PARAMETER, Origin.ELEMENT)
_HALVES = (*_WORDS, Origin.LOADED)

_OWN = frozenset((Origin.BLOCK, Origin.VARIABLE, Origin.STACK, Origin.WINDOW))


class Base(NamedTuple):
    """Something that may be the base of an address: 8 bytes of the parameter block, or with a stride many such."""

    place: int
    stride: int
    rising: bool = False
    """Whether none of these is before the place."""
    table: bool = False
    """It is not what lies there, but something in the memory that this names."""


def _arguments(bases: Iterable[Base | None]) -> frozenset[Base]:
    """Those that lie among the arguments, and not in memory."""
    return frozenset(base for base in bases if base is not None and not base.table)


class Found:
    """What is done through each base, and through what lies in tables by their places.

    ``indirect`` is what is done through other addresses from memory.
    """

    def __init__(self) -> None:
        self.bases: dict[Base, Access] = {}
        self.tables: dict[int, Access] = {}
        self.maps: dict[Base, Access] = {}
        self.indirect = Access.NONE

    def note(self, base: Base | None, access: Access) -> None:
        """Note an access through a base; None is memory."""
        if base is None:
            self.indirect |= access
        elif base.table:
            self.tables[base.place] = self.tables.get(base.place, Access.NONE) | access
        else:
            self.bases[base] = self.bases.get(base, Access.NONE) | access


def resolve(kernel: Kernel, parameters: tuple[Parameter, ...], declared: Mapping[int, Access]) -> Found:
    """Decide which bases the accesses go through.

    ``declared``: the parameters that are pointers by the kernel's name, by their offset, and what may be done through
    them by it.
    """
    found = Found()
    doubtful: list[tuple[frozenset[Base | None], Access, frozenset[Base | None], bool]] = []
    alone: set[Base | None] = set()
    partly: set[Base | None] = set()
    touches = {touch for touch in kernel.touches if not touch.tensor_map}
    for touch in kernel.touches - touches:
        touches |= _resolve_map(touch, kernel, found)
    for touch in touches:
        candidates, elsewhere = _candidates(touch, parameters)
        if elsewhere:
            found.indirect |= touch.access
        if not candidates and not _is_own(touch):
            found.indirect |= touch.access  # an address from nowhere: a number in the code itself, for example
        # What went in as a number too: from a pointer to another, and added to the first, it leads to the other.
        numbers = _pairs(touch.derived, touch.derived)
        distances: frozenset[Base | None] = _arguments(numbers)
        # From one in memory it leads to what was subtracted from that: memory that was moved there, as a whole.
        beyond = _subtracted(distances, touch.derived) if distances != numbers else frozenset()
        alternatives = [base for bases, several in candidates if len(bases) == 1 or several for base in bases]
        # What was thrown together may be a sum: of an argument and of an index from shared memory, say. Taken for a
        # choice of an address from memory, it would make common kernels, sorts for example, write anywhere.
        sure = frozenset().union(*(bases for bases, _ in candidates if len(bases) == 1))
        # Where p may be 0, `p + n` is n, which is no pointer for that.
        sums = [bases for bases, several in candidates if len(_arguments(bases)) > 1 and not several]
        partly.update(base for base in alternatives if any(base in bases for bases in sums))
        alone.update(base for base in alternatives if all(base not in bases for bases in sums))
        for base in alternatives:
            in_memory = base is None or base.table
            access = touch.access & ~Access.WRITE if in_memory and base not in sure else touch.access
            if not access:
                continue
            found.note(base, access)
            for other in beyond if in_memory else distances if base in distances else ():
                found.note(other, access)
        # Something that was subtracted: the pointer known elsewhere may lie in the same memory as that, and lead on.
        moved = any(atom.origin == Origin.MINUS and _has_room(atom, parameters) for atom in touch.derived)
        doubtful += [
            (bases, touch.access, distances, moved) for bases, several in candidates if len(bases) > 1 and not several
        ]
    # A sum of two words that both look like addresses: the one that is a pointer elsewhere is the pointer here, unless
    # it was subtracted before; or else the one that is called a pointer.
    certain = found.bases.keys() - (partly - alone)
    for bases, access, distances, moved in doubtful:
        known = bases & certain
        if known & (bases if moved else distances):
            known = _arguments(bases)
        if not known and not moved:
            called = frozenset(base for base in _arguments(bases) if _is_called(base, access, declared))
            if not called & distances:
                known = called
        for base in known or bases:
            found.note(base, access)
            for other in distances if base in distances else ():
                found.note(other, access)
    return found


def _subtracted(bases: frozenset[Base | None], derived: Atoms) -> frozenset[Base | None]:
    """Those that were subtracted."""
    return frozenset(base for base in bases if base is not None and Atom(Origin.MINUS, base.place) in derived)


def _has_room(atom: Atom, parameters: tuple[Parameter, ...]) -> bool:
    """Whether a word is of a parameter that may be an address."""
    parameter = _containing(atom.place, parameters)
    return parameter is None or parameter.size >= ADDRESS_BYTES


def _in_one(place: int, parameters: tuple[Parameter, ...]) -> bool:
    """Whether the eight bytes there are of one parameter: flags side by side are no address."""
    parameter = _containing(place, parameters)
    return parameter is not None and place + ADDRESS_BYTES <= parameter.offset + parameter.size


def _is_called(base: Base, access: Access, declared: Mapping[int, Access]) -> bool:
    return not base.stride and access in declared.get(base.place, Access.NONE)


def _candidates(
    touch: Touch, parameters: tuple[Parameter, ...]
) -> tuple[list[tuple[frozenset[Base | None], bool]], bool]:
    """Per alternative, what may be its base, and whether these are many alternatives thrown together.

    And whether it may be none of them: what an argument becomes by arithmetic, no search of the arguments finds.
    """
    result: list[tuple[frozenset[Base | None], bool]] = []
    own = False
    elsewhere = _made_of_halves(touch)
    # Structs may be packed, and an index be aligned beside an address that is not.
    alignment = WORD if _apart(touch) else ADDRESS_BYTES
    for atoms in touch.low:
        mine = frozenset(atom for atom in atoms if atom.origin in _OWN) if ANY not in atoms else frozenset()
        if not mine <= touch.derived:
            own = True
            continue
        # From one place on the stack to another is an index of something else: what is added was subtracted before.
        rest = atoms - mine
        bases, straddling = _pairs(rest, touch.high, alignment), _straddling(rest, touch.high)
        if bases or straddling:
            result.append((bases | straddling, bool(straddling) or ANY in rest))
    # An address in a packed struct, put together from bytes: what is found so far is what was added to it.
    pieces = frozenset(Atom(Origin.PARAMETER, atom.place) for atom in touch.derived if atom.origin == Origin.BYTES)
    halves = _pairs(frozenset().union(*touch.low), pieces, WORD) | _pairs(pieces, touch.high, WORD)
    whole = halves | _pairs(pieces, pieces, WORD) | _straddling(pieces, pieces)
    if assembled := frozenset(base for base in whole if base is None or _in_one(base.place, parameters)):
        result.append((assembled, True))
    if result or own or _is_own(touch):
        return result, elsewhere
    # Structs may be packed: words that make no aligned address may make one that is not.
    packed = frozenset().union(*(_pairs(atoms, touch.high, WORD) for atoms in touch.low))
    if packed:
        return [(packed, True)], elsewhere
    # No base is left. Whatever went into the address some other way is all there is to go by, and may be no address
    # before: in units of so many bytes, or with a tag.
    low = frozenset().union(*touch.low) | touch.derived
    high = touch.high | touch.derived
    found = _pairs(low, high) | _straddling(low, high)
    unsure = frozenset(None if base is None or base.table else base for base in found)
    return [(unsure, True)] if unsure else [], True


def _made_of_halves(touch: Touch) -> bool:
    """Whether halves of an address lie among the arguments, but not side by side, or in the other order; or a key."""
    if KEY in touch.high and any(KEY in atoms for atoms in touch.low):
        return True
    if not _apart(touch):
        return False
    low = frozenset().union(*touch.low)
    matched = {_upper(atom) for atom in low}
    if not any(atom.origin in _HALVES and atom not in matched for atom in touch.high):
        return False
    return any(atom.origin in _HALVES and _upper(atom) not in touch.high for atom in low)


def _apart(touch: Touch) -> bool:
    """Whether it is known which words are lower halves and which are upper ones."""
    low = frozenset().union(*touch.low)
    return ANY not in touch.high | low and not any(atom in low and atom.origin in _WORDS for atom in touch.high)


def _is_own(touch: Touch) -> bool:
    """Whether it may be memory that no argument names: the stack, shared memory, a module's variable."""
    return any(atom.origin in _OWN for atoms in (touch.high, *touch.low) for atom in atoms)


def _pairs(low: Atoms, high: Atoms, alignment: int = ADDRESS_BYTES) -> frozenset[Base | None]:
    """The 8-byte words of which ``low`` has the lower and ``high`` the upper half."""
    bases: set[Base | None] = set()
    for atom in low:
        if atom.origin in _WORDS:
            if _upper(atom) in high and (atom.place % alignment == 0 or atom.stride):
                bases.add(Base(atom.place, atom.stride, atom.rising))
        elif atom.origin == Origin.LOADED:
            if atom.place >= 0 and atom in high:
                bases.add(Base(atom.place, 0, table=True))
            elif any(other.origin == Origin.LOADED for other in high):
                bases.add(None)  # halves from different places, too
    return frozenset(bases)


def _upper(atom: Atom) -> Atom:
    """The upper half of what has this as the lower one."""
    return atom._replace(place=atom.place + WORD) if atom.origin in _WORDS else atom


def _straddling(low: Atoms, high: Atoms) -> frozenset[Base | None]:
    """Places within words, of structs packed tighter than these: both halves have bits of the word that they share."""
    bases: set[Base | None] = set()
    for atom in low:
        following, last = (atom._replace(place=atom.place + distance) for distance in (WORD, ADDRESS_BYTES))
        if atom.origin == Origin.PARAMETER and following in low and following in high and last in high:
            bases.update(Base(atom.place + byte, 0) for byte in range(1, WORD))
    return frozenset(bases)


def _resolve_map(touch: Touch, kernel: Kernel, found: Found) -> set[Touch]:
    """Tensor copies: the address is that of a tensor map, among the parameters or in memory.

    Gives what is touched through maps in memory that the kernel made itself.
    """
    through: set[Touch] = set()
    # What the register held on another way is a number, and no map's address.
    for atoms in frozenset(filter(None, touch.low)) or touch.low:
        if BLOCK in atoms:
            # Where an argument was added as it is, the place may be any.
            stride, rising = (touch.scale, touch.rising) if len(atoms) == 1 else (1, False)
            base = Base(touch.offset - kernel.layout.base, stride, rising)
            found.maps[base] = found.maps.get(base, Access.NONE) | touch.access
            continue
        pointers = _pairs(atoms, touch.high)
        for pointer in pointers:
            found.note(pointer, Access.READ)
        named = pointers and len(_arguments(pointers)) == len(pointers)
        maps = [one for one in kernel.made_maps if _is_at(one, pointers, touch)] if named else []
        # Sizes are put there as well.
        addresses = [
            address
            for address in frozenset().union(*(one.addresses for one in maps))
            if any(_pairs(low, address.high, WORD) for low in address.low)
        ]
        if not addresses:
            found.indirect |= touch.access
        through.update(address._replace(access=touch.access) for address in addresses)
    return through


def _is_at(made: MadeMap, pointers: frozenset[Base | None], touch: Touch) -> bool:
    """Whether a map that was made may be where a tensor copy looks for one."""
    distance = made.place.offset - touch.offset
    if distance % touch.scale if touch.scale else distance:
        return False
    return any(_pairs(atoms, made.place.high) == pointers for atoms in made.place.low)


def fields(found: Found, parameters: tuple[Parameter, ...], kernel: str) -> tuple[tuple[Field, ...], Access]:
    """The fields for what was found, and what more is done indirectly because its place is not known."""
    pointers: dict[int, Access] = {}
    scans: list[tuple[int, int, Access]] = []
    indirect = Access.NONE
    maps: dict[int, Access] = {}
    for base, access in found.maps.items():
        places = _map_places(base, parameters)
        if not places:
            indirect |= access
        for place in places:
            maps[place] = maps.get(place, Access.NONE) | access
    for base, access in found.bases.items():
        within = _containing(base.place, parameters) == _containing(base.place + ADDRESS_BYTES - 1, parameters)
        if not base.stride and (within or base.place % WORD == 0):
            pointers[base.place] = pointers.get(base.place, Access.NONE) | access
    for base, access in found.bases.items():
        if base.stride and (base.place % ADDRESS_BYTES if base.stride % ADDRESS_BYTES == 0 else base.stride > WORD):
            indirect |= access  # elements of packed structs: scans look at multiples of 8 bytes only
    scans += _scans({b: a for b, a in found.bases.items() if b.stride}, parameters, _LISTS.search(kernel) is not None)
    return _laid_out(pointers, scans, maps), indirect


def _containing(place: int, parameters: tuple[Parameter, ...]) -> Parameter | None:
    return next((p for p in parameters if p.offset <= place < p.offset + p.size), None)


def _reached(base: Base, parameters: tuple[Parameter, ...]) -> list[Parameter]:
    """The parameters in which an array may lie with an index into it that is not known; all where none is near."""
    before = max(_NEAR, base.stride)
    after = 0 if base.rising else before
    near = [p for p in parameters if p.offset - before <= base.place < p.offset + p.size + after]
    return [p for p in near or parameters if p.size >= ADDRESS_BYTES]


def _map_places(base: Base, parameters: tuple[Parameter, ...]) -> list[int]:
    if not base.stride:
        parameter = _containing(base.place, parameters)
        inside = parameter is not None and base.place + TENSOR_MAP_BYTES <= parameter.offset + parameter.size
        return [base.place] if inside else []
    places: list[int] = []
    for parameter in _reached(base, parameters):
        stride = base.stride
        if stride < TENSOR_MAP_BYTES:  # maps do not overlap: it is a step of bytes, not of maps
            stride = TENSOR_MAP_ALIGNMENT if parameter.size % TENSOR_MAP_BYTES else TENSOR_MAP_BYTES
        first = _first(base._replace(stride=stride), parameter)
        places += range(first, parameter.offset + parameter.size - TENSOR_MAP_BYTES + 1, stride)
    return places


def _first(base: Base, parameter: Parameter) -> int:
    """The first place in a parameter where elements of an array may lie."""
    start = parameter.offset + (
        (base.place - parameter.offset) % base.stride if base.stride % ADDRESS_BYTES == 0 else 0
    )
    return max(start, base.place) if base.rising else start


def _scans(bases: dict[Base, Access], parameters: tuple[Parameter, ...], lists: bool) -> list[tuple[int, int, Access]]:
    """The ranges in which elements of arrays of pointers lie. ``lists``: arrays side by side are known to be."""
    result: list[tuple[int, int, Access]] = []
    places = sorted(base.place for base in bases)
    for base, access in bases.items():
        for parameter in _reached(base, parameters):
            end = parameter.offset + parameter.size
            if lists and base.stride == ADDRESS_BYTES:
                end = min([end, *(place for place in places if place >= base.place + _SEPARATE)])
            result.append((_first(base, parameter), end, access))
    return result


def _laid_out(
    pointers: dict[int, Access], scans: list[tuple[int, int, Access]], maps: dict[int, Access]
) -> tuple[Field, ...]:
    """Fields in order of their offsets, none over another."""
    result = [Field(place, TENSOR_MAP_BYTES, access, FieldKind.TENSOR_MAP) for place, access in maps.items()]
    taken = [(place, place + TENSOR_MAP_BYTES) for place in maps]
    scanned: dict[int, Access] = {}
    for start, stop, access in scans:
        for place in range(start + -start % ADDRESS_BYTES, stop - ADDRESS_BYTES + 1, ADDRESS_BYTES):
            scanned[place] = scanned.get(place, Access.NONE) | access
    for place, access in pointers.items():
        if place in scanned:
            scanned[place] |= access
        else:
            result.append(Field(place, ADDRESS_BYTES, access, FieldKind.POINTER))
    run: list[int] = []
    for place in [*sorted(p for p in scanned if not any(a < p + 8 and p < b for a, b in taken)), -1]:
        if run and (place != run[-1] + ADDRESS_BYTES or scanned[place] != scanned[run[0]]):
            result.append(Field(run[0], run[-1] + ADDRESS_BYTES - run[0], scanned[run[0]], FieldKind.SCAN))
            run = []
        run.append(place)
    return tuple(sorted(result))
