"""Abstract values of data flow over machine code: what a 32-bit register may hold, as far as addresses go.

A value is a set of *alternatives* (a pointer chosen by a condition has two), each a set of *atoms* that are added up,
plus an offset and a multiple of some scale. An atom is something whose origin matters: a word of the parameter block, a
word loaded from memory, the address of a module's variable. What was multiplied, shifted or converted is no address any
more; it is remembered apart, as *derived*, for the case that nothing better is found.

So ``p + 4 * i`` with ``p`` the parameter at 0x10 and ``i`` the one at 0x18 is, in its lower word, one alternative
{word 0x10}, derived {word 0x18}, offset 0, scale 4.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

MAX_ALTERNATIVES = 32
"""Above this many alternatives they are thrown together into one that is marked with :data:`ANY`."""


class Origin(enum.IntEnum):
    """Where an atom comes from."""

    PARAMETER = 0
    """The word of the parameter block at ``place``."""
    ELEMENT = 1
    """A word of the parameter block at ``place`` plus an unknown multiple of ``stride``."""
    BLOCK = 2
    """The address of constant bank 0 itself."""
    LOADED = 3
    """A word loaded from device memory, or from a module's constants. ``place``: where in the parameter block the
    address of that memory lies, or -1."""
    VARIABLE = 4
    """The address of a variable or function of the module; ``place`` is where in bank 4 it stood, or -1."""
    STACK = 5
    """The thread's own stack."""
    WINDOW = 6
    """The place of shared or local memory in the generic address space."""
    MANY = 7
    """Marks an alternative that stands for several."""
    BYTES = 8
    """Among what was derived: bytes of the word of the parameter block at ``place``, loaded or stored by themselves."""
    MINUS = 9
    """Among what was derived: the word of the parameter block at ``place`` was subtracted."""
    KEY = 10
    """Marks an alternative that is the exclusive or of several origins."""


class Atom(NamedTuple):
    """An origin; ``place`` and ``stride`` in bytes. ``rising``: the multiple of the stride is not negative."""

    origin: Origin
    place: int = 0
    stride: int = 0
    rising: bool = False


LOADED = Atom(Origin.LOADED, -1)
STACK = Atom(Origin.STACK)
WINDOW = Atom(Origin.WINDOW)
BLOCK = Atom(Origin.BLOCK)
ANY = Atom(Origin.MANY)
KEY = Atom(Origin.KEY)

Atoms = frozenset[Atom]
_NONE: Atoms = frozenset()
_PLAIN: frozenset[Atoms] = frozenset([_NONE])


class Word(NamedTuple):
    """What a register may hold: one of the alternatives, plus ``offset``, plus a multiple of ``scale`` (0: none).

    ``rising``: the multiple is known not to be negative, unless it overflows.
    """

    alternatives: frozenset[Atoms]
    derived: Atoms
    offset: int
    scale: int
    rising: bool = False

    @property
    def plain(self) -> bool:
        """Whether no origin is left in it that could make it an address."""
        return self.alternatives == _PLAIN

    @property
    def exact(self) -> bool:
        """Whether it is a known number."""
        return self.scale == 0 and self.alternatives == _PLAIN

    @property
    def upwards(self) -> bool:
        """Whether it is nowhere below its offset."""
        return self.rising or self.scale == 0

    @property
    def atoms(self) -> Atoms:
        """Every atom of every alternative."""
        if len(self.alternatives) == 1:
            return next(iter(self.alternatives))
        return frozenset().union(*self.alternatives)


UNKNOWN = Word(_PLAIN, _NONE, 0, 1)
"""A number that is no address."""

COUNT = Word(_PLAIN, _NONE, 0, 1, True)
"""One that is not negative: a thread's index, for example."""


def number(value: int) -> Word:
    """A known number, taken as signed 32-bit."""
    value &= 0xFFFFFFFF
    return Word(_PLAIN, _NONE, value - (1 << 32) if value >> 31 else value, 0)


NOTHING = number(0)


def of(atom: Atom) -> Word:
    """A word that is just this."""
    return Word(frozenset([frozenset([atom])]), _NONE, 0, 0)


LOADED_WORD = of(LOADED)
NOT_THE_PROGRAMS = of(Atom(Origin.VARIABLE, -1))
"""An address of memory that is the module's or the driver's."""
LOADED_NUMBER = Word(_PLAIN, frozenset([LOADED]), 0, 1)
"""Less than a word, loaded from memory: an index at most."""


def without_tables(word: Word) -> Word:
    """A word that was computed from this one: as from any memory, as it is not found anywhere as it is."""
    if not any(atom.origin == Origin.LOADED and atom.place >= 0 for atom in word.atoms):
        return word
    return word._replace(
        alternatives=frozenset(
            frozenset(LOADED if atom.origin == Origin.LOADED else atom for atom in atoms) for atoms in word.alternatives
        )
    )


def _limited(alternatives: frozenset[Atoms]) -> frozenset[Atoms]:
    if len(alternatives) <= MAX_ALTERNATIVES:
        return alternatives
    return frozenset([frozenset().union(*alternatives, [ANY])])


def join(first: Word, second: Word) -> Word:
    """Either of two words."""
    if first is second or first == second:
        return first
    alternatives = first.alternatives
    if alternatives != second.alternatives:
        # A merged alternative swallows what it already stands for, so that joins come to an end.
        alternatives = _limited(_absorbed(alternatives | second.alternatives))
    derived = first.derived | second.derived
    rising = first.upwards and second.upwards
    if first.offset == second.offset and first.scale == second.scale:
        return Word(alternatives, derived, first.offset, first.scale, rising and first.scale > 0)
    one, two = _rank(first), _rank(second)
    if one != two:
        # Only addresses in the parameter block and on the stack need exact places: they keep theirs.
        kept = second if one < two else first
        return Word(alternatives, derived, kept.offset, kept.scale, kept.rising)
    difference = second.offset - first.offset
    scale = gcd(first.scale, second.scale, abs(difference))
    # A loop that counts up from an offset keeps it; anything else keeps only what is left modulo the scale.
    offset = first.offset if difference >= 0 else second.offset % scale
    return Word(alternatives, derived, offset, scale, rising and difference >= 0)


def _rank(word: Word) -> int:
    """How much depends on a word's offset."""
    if word.plain:
        return 0
    return 2 if any(BLOCK in atoms or STACK in atoms for atoms in word.alternatives) else 1


def _absorbed(alternatives: frozenset[Atoms]) -> frozenset[Atoms]:
    merged = [atoms for atoms in alternatives if ANY in atoms]
    if not merged:
        return alternatives
    whole: Atoms = frozenset().union(*merged)
    rest = [atoms for atoms in alternatives if ANY not in atoms and not atoms <= whole]
    return frozenset([*rest, whole])


def join_all(words: Iterable[Word]) -> Word:
    """Any of several words; 0 where there are none."""
    result: Word | None = None
    for word in words:
        result = word if result is None else join(result, word)
    return NOTHING if result is None else result


def add(first: Word, second: Word) -> Word:
    """The sum of two words."""
    one, two = first.alternatives, second.alternatives
    if two == _PLAIN:
        alternatives = one
    elif one == _PLAIN:
        alternatives = two
    else:
        alternatives = _limited(_absorbed(frozenset(a | b for a in one for b in two)))
    derived = first.derived | second.derived if second.derived else first.derived
    scale = gcd(first.scale, second.scale)
    rising = scale > 0 and first.upwards and second.upwards
    return Word(alternatives, derived, first.offset + second.offset, scale, rising)


def subtracted(word: Word) -> Atoms:
    """What is derived from a word when it is subtracted."""
    return word.derived | word.atoms | {Atom(Origin.MINUS, a.place) for a in word.atoms if a.origin == Origin.PARAMETER}


def multiply(word: Word, factor: int) -> Word:
    """The word times a known number."""
    if factor == 1:
        return word
    if factor == 0:
        return NOTHING
    if word.exact:
        return number(word.offset * factor)
    scale = abs(factor) if not word.plain else word.scale * abs(factor)
    rising = word.plain and word.rising and factor > 0
    derived = subtracted(word) if factor < 0 else word.derived | word.atoms
    return Word(_PLAIN, derived, word.offset * factor, scale, rising)


def derive(words: Iterable[Word]) -> Word:
    """Some number computed from these words, which is no address."""
    derived = _NONE
    for word in words:
        if word.derived or not word.plain:
            derived = derived | word.derived | word.atoms
    return Word(_PLAIN, derived, 0, 1) if derived else UNKNOWN


def mix(words: Iterable[Word]) -> Word:
    """Some bits of these words put together: an address may be in it still, of each of them."""
    result = NOTHING
    origins = set()
    for word in words:
        result = add(result, word)
        if not word.plain:
            origins.add(word.alternatives)
    alternatives = result.alternatives
    if len(origins) > 1:
        # Bits of one or bits of the other: a choice between two addresses looks like this, and is no sum.
        alternatives = frozenset([frozenset().union(*alternatives, [ANY])])
    return Word(alternatives, result.derived, 0, 1)
