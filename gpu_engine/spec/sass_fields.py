"""From the accesses that a walk over machine code saw to the fields of a kernel's parameter block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from phos.gpu_engine.spec.descriptor import (
    ADDRESS_BYTES,
    TENSOR_MAP_BYTES,
    Access,
    Field,
    FieldKind,
    Parameter,
)
from phos.gpu_engine.spec.sass_state import WORD, Layout, Touch
from phos.gpu_engine.spec.sass_value import ANY, BLOCK, LOADED, Atom, Atoms, Origin

# Arrays of pointers further apart than this, with the same index, are taken for different ones. Less is what unrolled
# loops over one array look like.
_SEPARATE = 64

_OWN = frozenset((Origin.BLOCK, Origin.VARIABLE, Origin.STACK, Origin.WINDOW))


class Base(NamedTuple):
    """Something that may be the base of an address: 8 bytes of the parameter block, or with a stride many such."""

    place: int
    stride: int


class Found:
    """What is done through each base. ``indirect`` is what is done through addresses from memory."""

    def __init__(self) -> None:
        self.bases: dict[Base, Access] = {}
        self.maps: dict[Base, Access] = {}
        self.indirect = Access.NONE

    def note(self, base: Base | None, access: Access) -> None:
        """Note an access through a base; None is memory."""
        if base is None:
            self.indirect |= access
        else:
            self.bases[base] = self.bases.get(base, Access.NONE) | access


def resolve(touches: Iterable[Touch], layout: Layout) -> Found:
    """Decide which bases the accesses go through."""
    found = Found()
    doubtful: list[tuple[frozenset[Base | None], Access, frozenset[Base | None]]] = []
    for touch in touches:
        if touch.tensor_map:
            _resolve_map(touch, layout, found)
            continue
        candidates = _candidates(touch)
        if not candidates and not _is_own(touch):
            found.indirect |= touch.access  # an address from nowhere: a number in the code itself, for example
        # What went in as a number too: from a pointer to another, and added to the first, it leads to the other.
        distances = _pairs(touch.derived, touch.derived) - {None}
        alternatives = [base for bases, several in candidates if len(bases) == 1 or several for base in bases]
        # Of a store that may go to a parameter or to an address from memory the latter is mostly what the register
        # held on ways that do not come here. Taken seriously, it would make common kernels write anywhere.
        leftover = any(base is not None for base in alternatives)
        for base in alternatives:
            found.note(base, touch.access & ~Access.WRITE if base is None and leftover else touch.access)
            for other in distances if base in distances else ():
                found.note(other, touch.access)
        doubtful += [
            (bases, touch.access, distances) for bases, several in candidates if len(bases) > 1 and not several
        ]
    # A sum of two words that both look like addresses: the one that is a pointer elsewhere is the pointer here, unless
    # it was subtracted before.
    certain = frozenset(found.bases)
    for bases, access, distances in doubtful:
        known = bases & certain
        if known & distances:
            known = bases - {None}
        for base in known or bases:
            found.note(base, access)
    return found


def _candidates(touch: Touch) -> list[tuple[frozenset[Base | None], bool]]:
    """Per alternative, what may be its base, and whether these are many alternatives thrown together."""
    result: list[tuple[frozenset[Base | None], bool]] = []
    own = False
    for atoms in touch.low:
        mine = frozenset(atom for atom in atoms if atom.origin in _OWN) if ANY not in atoms else frozenset()
        if not mine <= touch.derived:
            own = True
            continue
        # From one place on the stack to another is an index of something else: what is added was subtracted before.
        rest = atoms - mine
        bases, straddling = _pairs(rest, touch.high), _straddling(rest, touch.high)
        if bases or straddling:
            result.append((bases | straddling, bool(straddling) or ANY in rest))
    # An address in a packed struct, put together from bytes: what is found so far is what was added to it.
    pieces = frozenset(Atom(Origin.PARAMETER, atom.place) for atom in touch.derived if atom.origin == Origin.BYTES)
    if assembled := _pairs(pieces, pieces) | _straddling(pieces, pieces):
        result.append((assembled, True))
    if result or own or _is_own(touch):
        return result
    # Structs may be packed: words that make no aligned address may make one that is not.
    packed = frozenset().union(*(_pairs(atoms, touch.high, WORD) for atoms in touch.low))
    if packed:
        return [(packed, True)]
    # No base is left. Whatever went into the address some other way is all there is to go by.
    low = frozenset().union(*touch.low) | touch.derived
    high = touch.high | touch.derived
    bases = _pairs(low, high) | _straddling(low, high)
    return [(bases, True)] if bases else []


def _is_own(touch: Touch) -> bool:
    """Whether it may be memory that no argument names: the stack, shared memory, a module's variable."""
    return any(atom.origin in _OWN for atoms in (touch.high, *touch.low) for atom in atoms)


def _pairs(low: Atoms, high: Atoms, alignment: int = ADDRESS_BYTES) -> frozenset[Base | None]:
    """The 8-byte words of which ``low`` has the lower and ``high`` the upper half."""
    bases: set[Base | None] = set()
    for atom in low:
        if atom.origin in (Origin.PARAMETER, Origin.ELEMENT):
            upper = Atom(atom.origin, atom.place + 4, atom.stride)
            if upper in high and (atom.place % alignment == 0 or atom.stride):
                bases.add(Base(atom.place, atom.stride))
        elif atom == LOADED and atom in high:
            bases.add(None)
    return frozenset(bases)


def _straddling(low: Atoms, high: Atoms) -> frozenset[Base | None]:
    """Places within words, of structs packed tighter than these: both halves have bits of the word that they share."""
    bases: set[Base | None] = set()
    for atom in low:
        following, last = (atom._replace(place=atom.place + distance) for distance in (WORD, ADDRESS_BYTES))
        if atom.origin == Origin.PARAMETER and following in low and following in high and last in high:
            bases.update(Base(atom.place + byte, 0) for byte in range(1, WORD))
    return frozenset(bases)


def _resolve_map(touch: Touch, layout: Layout, found: Found) -> None:
    """Tensor copies: the address is that of a tensor map, among the parameters or in memory."""
    for atoms in touch.low:
        if BLOCK not in atoms and any(BLOCK in others for others in touch.low):
            continue  # what the register held before it was set, on ways that do not come here
        if BLOCK in atoms:
            base = Base(touch.offset - layout.base, touch.scale)
            found.maps[base] = found.maps.get(base, Access.NONE) | touch.access
            continue
        found.indirect |= touch.access
        for pointer in _pairs(atoms, touch.high):
            found.note(pointer, Access.READ)


def fields(found: Found, parameters: tuple[Parameter, ...]) -> tuple[tuple[Field, ...], Access]:
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
    scans += _scans({b: a for b, a in found.bases.items() if b.stride}, parameters)
    return _laid_out(pointers, scans, maps), indirect


def _containing(place: int, parameters: tuple[Parameter, ...]) -> Parameter | None:
    return next((p for p in parameters if p.offset <= place < p.offset + p.size), None)


def _map_places(base: Base, parameters: tuple[Parameter, ...]) -> list[int]:
    parameter = _containing(base.place, parameters)
    if parameter is None:
        return []
    end = parameter.offset + parameter.size
    if not base.stride:
        return [base.place] if base.place + TENSOR_MAP_BYTES <= end else []
    # Maps do not overlap, so a smaller step is that of the bytes, not of the maps.
    stride = base.stride if base.stride >= TENSOR_MAP_BYTES else TENSOR_MAP_BYTES
    return list(range(base.place, end - TENSOR_MAP_BYTES + 1, stride))


def _scans(bases: dict[Base, Access], parameters: tuple[Parameter, ...]) -> list[tuple[int, int, Access]]:
    """The ranges in which elements of arrays of pointers lie."""
    inside: dict[Parameter, dict[Base, Access]] = {}
    result: list[tuple[int, int, Access]] = []
    for base, access in bases.items():
        # An index that starts at 1 puts the place before its array: the next element says which parameter it is.
        parameter = _containing(base.place, parameters) or _containing(base.place + base.stride, parameters)
        if parameter is None:
            result += [(p.offset, p.offset + p.size, access) for p in parameters if p.size >= ADDRESS_BYTES]
        else:
            inside.setdefault(parameter, {})[base] = access
    for parameter, elements in inside.items():
        result += _arrays(parameter, elements)
    return result


def _arrays(parameter: Parameter, elements: dict[Base, Access]) -> list[tuple[int, int, Access]]:
    end = parameter.offset + parameter.size
    if any(base.stride % ADDRESS_BYTES for base in elements):
        every = Access.NONE
        for access in elements.values():
            every |= access
        return [(parameter.offset, end, every)]
    places = sorted({base.place for base in elements})
    groups = [[places[0]]]
    for place in places[1:]:
        if place - groups[-1][-1] >= _SEPARATE and all(base.stride == ADDRESS_BYTES for base in elements):
            groups.append([place])
        else:
            groups[-1].append(place)
    result = []
    for position, group in enumerate(groups):
        access = Access.NONE
        for base, done in elements.items():
            if base.place in group:
                access |= done
        stop = groups[position + 1][0] if position + 1 < len(groups) else end
        result.append((max(group[0], parameter.offset), stop, access))
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
