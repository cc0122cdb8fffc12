"""What a thread's registers and stack may hold at one place of a kernel, and what the kernel did to memory so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.sass_text import UNIFORM
from phos.gpu_engine.spec.sass_value import (
    ANY,
    BLOCK,
    COUNT,
    LOADED_WORD,
    NOT_THE_PROGRAMS,
    NOTHING,
    STACK,
    UNKNOWN,
    WINDOW,
    Atom,
    Atoms,
    Origin,
    Word,
    add,
    join,
    join_all,
    number,
    of,
)

WORD = 4

BLOCK_WORD, STACK_WORD, WINDOW_WORD = of(BLOCK), of(STACK), of(WINDOW)
_STACK = (Origin.STACK, Origin.WINDOW)


def _is_loaded(atoms: Atoms) -> bool:
    return len(atoms) == 1 and next(iter(atoms)).origin == Origin.LOADED


class Driver(NamedTuple):
    """Where constant bank 0 holds what the driver puts there; bytes. Found by compiling kernels that use it."""

    first: int
    """The first architecture that does it so."""
    block: int
    """The slot with an address in the bank itself: kernels reach their parameters by address with it."""
    target: int
    """The offset in the bank that this address is of."""
    window: int
    """The slot with the place of local memory in the generic address space."""
    stack: int
    """The slot with the top of the stack."""
    barrier: tuple[int, int]
    """The slots with the halves of the address at which the blocks of a cooperative launch wait for each other, the
    upper half first: %envreg1 and %envreg2. The memory is the driver's."""
    cluster: int = 0
    """Bytes from what it says of the grid for one number of blocks in a cluster to that for the next, downwards."""


_DRIVER = (
    Driver(100, 0x348, 0x380, 0x2F8, 0x37C, (0x254, 0x258), 0xA0),
    Driver(90, 0x198, 0x210, 0x20, 0x28, (0x44, 0x48)),
    Driver(0, 0x40, 0, 0x20, 0x28, (0x8C, 0x90)),
)


class Layout(NamedTuple):
    """Where the parameter block lies in constant bank 0; bytes."""

    base: int
    size: int
    architecture: int

    @property
    def driver(self) -> Driver:
        """Where the driver's own words lie."""
        return next(driver for driver in _DRIVER if self.architecture >= driver.first)


class Touch(NamedTuple):
    """One access to memory: through which address, and what is done."""

    access: Access
    low: frozenset[Atoms]
    high: Atoms
    derived: Atoms
    offset: int
    scale: int
    rising: bool
    tensor_map: bool


class MadeMap(NamedTuple):
    """A tensor map that the kernel itself puts into memory."""

    place: Touch
    """How it is written there."""
    addresses: frozenset[Touch]
    """One of these is in it."""


@dataclass
class Kernel:
    """What is known about one kernel whatever the place: the layout, shared memory, the accesses seen."""

    layout: Layout
    touches: set[Touch] = field(default_factory=set)
    has_tensors: bool = False
    """It copies through tensor maps."""
    made_maps: set[MadeMap] = field(default_factory=set)
    shared: Word = NOTHING
    """Any word that was ever stored into shared memory."""
    indirect: Access = Access.NONE
    """Done through texture and surface handles, or in functions that cannot be seen."""

    def store_shared(self, word: Word) -> None:
        """Note that a word is in shared memory somewhere.

        Which half of an address a load finds there is not known: without the mark, an upper half that is added to a
        number would pass for an index of the number. What was loaded from memory has no halves of its own.
        """
        if not word.plain:
            loaded = frozenset(atoms for atoms in word.alternatives if _is_loaded(atoms))
            others = word.alternatives - loaded
            marked = frozenset([frozenset().union(*others, [ANY])]) if others else frozenset()
            self.shared = join(self.shared, Word(loaded | marked, word.derived, 0, 1))
        pieces = frozenset(atom for atom in word.derived if atom.origin == Origin.BYTES)
        if word.plain and any(atom.origin == Origin.MINUS for atom in word.derived):
            pieces = word.derived  # the distance of two pointers
        if not pieces <= self.shared.derived:
            self.shared = self.shared._replace(derived=self.shared.derived | pieces, scale=1)

    def constant(self, bank: int, place: int) -> Word:
        """The word at ``place`` of a constant bank."""
        if bank == 0:
            inside = place - self.layout.base
            if 0 <= inside < self.layout.size:
                return of(Atom(Origin.PARAMETER, inside & ~3))
            driver = self.layout.driver
            if place == driver.block:
                return add(BLOCK_WORD, number(driver.target))
            if place == driver.block + WORD:
                return of(Atom(Origin.BLOCK, WORD))  # the upper half
            if place == driver.stack:
                return STACK_WORD
            if place in (driver.window, driver.window + WORD):
                return WINDOW_WORD
            if place in driver.barrier:
                return NOT_THE_PROGRAMS
            return COUNT  # dimensions and the like
        if bank == 4:
            return of(Atom(Origin.VARIABLE, place))
        if bank in (1, 2):
            return UNKNOWN  # the compiler's own numbers
        return LOADED_WORD

    def element(self, bank: int, place: int, stride: int, rising: bool) -> Word:
        """The word at ``place`` plus an unknown multiple of ``stride``, if ``rising`` none below it, of a bank."""
        if bank == 0 and place in self.layout.driver.barrier:
            return NOT_THE_PROGRAMS  # one for each size that a cluster may have
        if bank == 0 and stride == self.layout.driver.cluster and place < self.layout.base - stride:
            return COUNT  # how many blocks there are, for example
        if bank == 0:
            return of(Atom(Origin.ELEMENT, place - self.layout.base, stride, rising))
        if bank == 4:
            return NOT_THE_PROGRAMS
        return self.constant(bank, place)


class State:
    """Registers and stack. Registers never written hold nothing that matters."""

    __slots__ = (
        "addresses",
        "barriers",
        "comparisons",
        "copied",
        "exclusive",
        "guarded",
        "predicate",
        "registers",
        "slots",
        "spread",
        "tests",
        "voted",
    )

    def __init__(self) -> None:
        self.addresses: frozenset[Touch] = frozenset()
        """What was put into shared memory as an address: it may be in the tensor map that is being made there."""
        self.copied: frozenset[Touch] = frozenset()
        """Those in a map that has been copied to memory since: the next address is another map's."""
        self.barriers: dict[str, frozenset[int]] = {}
        """Where the threads that wait at a convergence barrier (B0 to B15) go on together."""
        self.exclusive: dict[int, tuple[Word, int]] = {}
        """Registers that hold the exclusive or of this word and of what that other register holds, in straight code:
        compilers exchange two registers by three exclusive ors in turn."""
        self.guarded: dict[int, tuple[str, Word]] = {}
        """What was last put into a register under a predicate, which holds for whoever reads it under the same."""
        self.predicate = ""
        """That of the instruction being carried out."""
        self.tests: dict[str, str] = {}
        """Predicates that hold what a comparison says, whose registers are as they were: compilers make one anew, in
        another predicate, where they have none left."""
        self.comparisons: dict[str, frozenset[int]] = {}
        """The registers of these, and of those that no predicate holds any more."""
        self.voted: dict[str, str] = {}
        """Uniform predicates that are true if another predicate is true for any thread of the warp."""
        self.registers: dict[int, Word] = {}
        self.slots: dict[int, Word] = {}
        """Words on the stack by their offset from its top, as it was when the kernel began."""
        self.spread: Word = NOTHING
        """Any word stored to an unknown place of the stack."""

    def copy(self) -> State:
        """Another state, which can be changed without changing this one."""
        other = State()
        other.barriers = self.barriers.copy()
        other.guarded = self.guarded.copy()
        other.tests = self.tests.copy()
        other.comparisons = self.comparisons.copy()
        other.registers = self.registers.copy()
        other.slots = self.slots.copy()
        other.spread = self.spread
        other.addresses, other.copied = self.addresses, self.copied
        return other

    def merge(self, other: State) -> bool:
        """Take in what may hold on another way here. Returns whether that was anything new."""
        changed = _merge(self.registers, other.registers)
        changed |= _merge(self.slots, other.slots)
        changed |= self._agree(other)
        for name, places in other.barriers.items():
            both = self.barriers.get(name, frozenset()) | places
            changed |= both != self.barriers.get(name)
            self.barriers[name] = both
        spread = join(self.spread, other.spread)
        changed |= spread != self.spread
        self.spread = spread
        changed |= not (other.addresses <= self.addresses and other.copied <= self.copied)
        self.addresses |= other.addresses
        self.copied |= other.copied
        return changed

    def put_address(self, address: Touch) -> None:
        """An address is put into shared memory, perhaps into a tensor map."""
        self.addresses = self.addresses - self.copied | {address}
        self.copied -= {address}

    def copy_map(self) -> frozenset[Touch]:
        """What is in shared memory is copied to memory. If that is a tensor map, one of the addresses given is in it.

        They are those that were put there since another map was copied, or the same ones. Who went around the place
        where that was done is another thread, which waits for it.
        """
        now = self.addresses - self.copied or self.addresses
        self.copied |= self.addresses
        return now

    def write(self, register: int, word: Word) -> None:
        """Put a word into a register; under a predicate the old one may stay."""
        if register < 0:
            return
        if self.exclusive:
            self._untie(register)
        if self.comparisons:
            self._forget_comparisons(register)
        if self.predicate:
            self.guarded[register] = (self._held(self.predicate), word)
            old = self.registers.get(register)
            if old is not None:
                word = join(old, word)
        elif self.guarded:
            self.guarded.pop(register, None)
        self.registers[register] = word

    def _untie(self, register: int) -> None:
        for mixed in [m for m, (_, other) in self.exclusive.items() if register in (m, other)]:
            del self.exclusive[mixed]

    def read(self, register: int) -> Word:
        """A register's word, as the instruction that is being carried out sees it."""
        if register < 0:
            return NOTHING
        if self.predicate and self.guarded:
            guarded = self.guarded.get(register)
            # What a vote makes sure of holds in the registers of the warp, and not in those of each thread.
            voted = self.voted.get(self.predicate) if register >= UNIFORM else None
            if guarded is not None and guarded[0] in (
                self.predicate,
                self._held(self.predicate),
                voted and self._held(voted),
            ):
                return guarded[1]
        return self.registers.get(register, NOTHING)

    def _held(self, predicate: str) -> str:
        """What a predicate stands for: the comparison that it holds, else itself."""
        name = predicate.lstrip("!")
        return predicate[: -len(name)] + self.tests.get(name, name)

    def compare(self, predicate: str, comparison: str, registers: frozenset[int]) -> None:
        """A predicate holds what a comparison of these registers says."""
        before = self._held(predicate)
        for register, (held, word) in self.guarded.items():
            if held.lstrip("!") == before:
                self.guarded[register] = held[: -len(before)] + comparison, word
        self.tests[predicate] = comparison
        self.comparisons[comparison] = registers

    def _forget_comparisons(self, register: int) -> None:
        """A register is changed: of what was put under a comparison of it predicates know that hold that one still."""
        gone = [comparison for comparison, registers in self.comparisons.items() if register in registers]
        if gone:
            self._keep_comparisons(self.comparisons.keys() - gone)

    def _keep_comparisons(self, kept: Collection[str]) -> None:
        self.guarded = self._named(kept)
        self.tests = {name: comparison for name, comparison in self.tests.items() if comparison in kept}
        self.comparisons = {comparison: self.comparisons[comparison] for comparison in kept}

    def _named(self, kept: Collection[str]) -> dict[int, tuple[str, Word]]:
        """What was put into registers under predicates, without comparisons but these."""
        names = {comparison: name for name, comparison in self.tests.items()}
        result: dict[int, tuple[str, Word]] = {}
        for register, (held, word) in self.guarded.items():
            comparison = held.lstrip("!")
            if comparison in kept or comparison not in self.comparisons:
                result[register] = held, word
            elif comparison in names:
                result[register] = held[: -len(comparison)] + names[comparison], word
        return result

    def _agree(self, other: State) -> bool:
        """What was put into registers under the same predicate on both ways; the rest is in the registers as well."""
        if self.comparisons == other.comparisons and self.tests == other.tests:
            return _keep_common(self.guarded, other.guarded)
        # What a predicate holds on one way only is known by its name on both.
        apart = {held for _, held in self.tests.items() ^ other.tests.items()}
        kept = (self.comparisons.keys() & other.comparisons.keys()) - apart
        before = len(self.comparisons), len(self.tests)
        theirs = other._named(kept)
        self._keep_comparisons(kept)
        return _keep_common(self.guarded, theirs) or (len(self.comparisons), len(self.tests)) != before

    def forget(self, predicates: Iterable[str]) -> None:
        """Predicates have changed: what was put into registers under them is not sure any more."""
        for name in predicates:
            # What was sure in the warp's registers for the threads of a vote is so still by the vote itself.
            votes = {self._held(held): one for one, held in self.voted.items() if held.lstrip("!") == name}
            for register, (held, word) in self.guarded.items() if votes else ():
                if register >= UNIFORM and held in votes:
                    self.guarded[register] = votes[held], word
            # PR stands for all of them.
            gone = [r for r, (held, _) in self.guarded.items() if name in ("PR", "UPR", held.lstrip("!"))]
            for register in gone:
                del self.guarded[register]
            for uniform, held in list(self.voted.items()):
                if name in ("PR", "UPR", uniform, held.lstrip("!")):
                    del self.voted[uniform]
            for predicate in list(self.tests) if name in ("PR", "UPR") else [name]:
                self.tests.pop(predicate, None)

    def load_stack(self, place: Word, part: int) -> Word:
        """The word ``part`` words after an address on the stack."""
        if _one_slot(place):
            found = self.slots.get((place.offset + part * WORD) & ~3)
            words = [] if found is None else [found]
        else:
            words = list(self.slots.values())
        if self.spread != NOTHING:  # else nothing was stored there: a 0 would be an address that never is
            words.append(self.spread)
        return join_all(words)

    def store_stack(self, place: Word, part: int, word: Word, always: bool) -> None:
        """Store a word ``part`` words after an address on the stack."""
        if _one_slot(place):
            slot = (place.offset + part * WORD) & ~3
            old = self.slots.get(slot)
            self.slots[slot] = word if always or old is None else join(old, word)
        else:
            self.spread = join(self.spread, Word(word.alternatives, word.derived, 0, 1))


def _one_slot(place: Word) -> bool:
    """Whether an address on the stack is a known one: an argument may have been added to it, as it is."""
    return place.scale == 0 and len(place.alternatives) == 1 and all(atom.origin in _STACK for atom in place.atoms)


def _keep_common(mine: dict[int, tuple[str, Word]], theirs: dict[int, tuple[str, Word]]) -> bool:
    """What was put into registers under the same predicate on both ways here; the rest is in the registers as well."""
    changed = False
    for register, (predicate, word) in list(mine.items()):
        other = theirs.get(register)
        if other is None or other[0] != predicate:
            del mine[register]
            changed = True
        elif (new := join(word, other[1])) != word:
            mine[register] = predicate, new
            changed = True
    return changed


def _merge(mine: dict[int, Word], theirs: dict[int, Word]) -> bool:
    changed = False
    for key, word in theirs.items():
        old = mine.get(key)
        if old is word:
            continue
        if old is None:
            mine[key] = word
            changed = True
        else:
            new = join(old, word)
            if new != old:
                mine[key] = new
                changed = True
    return changed
