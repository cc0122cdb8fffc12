"""What the declared things of a program hold during the analysis: stack slots, call parameters, shared memory.

Order is not kept: an object holds everything that is ever stored in it. Where the place is known, it is kept apart by
offset and size; what goes to a computed place may be anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from phos.gpu_engine.spec.ptx_steps import Declared, Kind
from phos.gpu_engine.spec.ptx_values import (
    LOADED,
    OFFSET,
    STRONG,
    WEAK,
    Anywhere,
    Atom,
    Bytes,
    Place,
    Raised,
    Value,
    join,
    narrowed,
    runs,
)

POINTER_BYTES = 8


@dataclass
class Object:
    """A declared thing with its contents."""

    declared: Declared
    cells: dict[tuple[int, int], Value] = field(default_factory=dict)
    scattered: Value = field(default_factory=dict)

    def store(self, offset: int | None, size: int, value: Value) -> bool:
        """Put a value at ``offset`` (None: somewhere); True if that was news."""
        if not value:
            return False
        if self.declared.kind in (Kind.VARIABLE, Kind.FUNCTION, Kind.PARAMETER):
            return False  # what module memory holds is not followed: it is all LOADED
        if offset is None or self.declared.kind is Kind.SHARED:
            target = self.scattered
        else:
            target = self.cells.setdefault((offset, size), {})
        changed = False
        for atom, role in list(value.items()):
            changed |= join(target, atom, role)
        return changed

    def load(self, offset: int | None, size: int, *, sure: bool = False) -> Iterator[tuple[Atom, int]]:
        """What ``size`` bytes at ``offset`` may be. ``sure``: there is no other place where they may come from."""
        kind, declared = self.declared.kind, self.declared
        if kind is Kind.PARAMETER:
            yield from self._parameter(offset, size, sure)
        elif kind is Kind.VARIABLE:
            yield LOADED, WEAK if size >= POINTER_BYTES else OFFSET
        elif kind is not Kind.FUNCTION:
            anywhere = offset is None or declared.kind is Kind.SHARED
            values = []
            for (start, length), value in self.cells.items():
                if offset is not None and start == offset and length == size and not anywhere:
                    yield from value.items()
                elif anywhere or (offset is not None and start < offset + size and offset < start + length):
                    values.append(value)
            values.append(self.scattered)
            for value in values:
                yield from value.items() if size >= POINTER_BYTES else narrowed(value)
            if size >= POINTER_BYTES:
                yield from _joined(values)

    def _parameter(self, offset: int | None, size: int, sure: bool) -> Iterator[tuple[Atom, int]]:
        declared = self.declared
        if offset is None or offset < 0 or offset + size > declared.size:
            role = WEAK if size >= POINTER_BYTES else OFFSET
            if sure and offset is not None:
                # Parameters lie side by side, and the assembler lets one be read by another's name.
                place = declared.offset + offset
                inside = declared.around[0] <= place and place + size <= declared.around[1]
                yield Bytes(place, size) if inside else LOADED, role
            elif declared.size >= POINTER_BYTES:
                # A pointer that a loop moves: where it would lead beyond the end is not followed.
                yield Anywhere(declared.offset, declared.size), role
            return
        role = (STRONG if declared.pointer else WEAK) if size >= POINTER_BYTES else OFFSET
        yield Bytes(declared.offset + offset, size), role


def _joined(values: list[Value]) -> Iterator[tuple[Atom, int]]:
    """Pointers that were stored in pieces and are loaded whole."""
    pieces = []
    for value in values:
        for atom in value:
            if isinstance(atom, Bytes) and atom.size < POINTER_BYTES:
                pieces.append(atom)
            elif not isinstance(atom, Place | Raised):
                yield atom, WEAK
    for piece in runs(pieces):
        if piece.size == POINTER_BYTES:
            yield piece, WEAK
        elif piece.size > POINTER_BYTES:
            yield Anywhere(*piece), WEAK


def everything(objects: list[Object], value: Value) -> Iterator[Value]:
    """A value, and what the stack and shared memory that it points to hold, and what that points to, and so on."""
    seen: set[int] = set()
    queue = [value]
    while queue:
        now = queue.pop()
        yield now
        for atom in now:
            if isinstance(atom, Place) and atom.object not in seen:
                seen.add(atom.object)
                thing = objects[atom.object]
                queue += [thing.scattered, *thing.cells.values()]
