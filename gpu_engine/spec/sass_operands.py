"""Operands of machine instructions: which register is written, and what the others hold."""

from __future__ import annotations

from collections.abc import Callable

from phos.gpu_engine.spec.sass_state import Kernel, State
from phos.gpu_engine.spec.sass_text import ZERO, Instruction, Kind, Operand
from phos.gpu_engine.spec.sass_value import (
    LOADED_WORD,
    NOT_THE_PROGRAMS,
    NOTHING,
    UNKNOWN,
    Word,
    derive,
    join,
    multiply,
    number,
    subtracted,
)

MOST_REGISTERS = 128
"""What one instruction moves at most: PTX ISA, ``tcgen05.ld``."""

Handler = Callable[[Instruction, State, Kernel], None]
"""Carries out an instruction on a state."""

_SMALL = frozenset(("U8", "S8", "U16", "S16", "I8"))
_WIDTHS = {"64": 2, "128": 4, "256": 8, "U64": 2, "S64": 2, "F64": 2, "ENL2": 8}


def destination(instruction: Instruction) -> tuple[int, list[Operand]]:
    """The register that an instruction writes, and its other operands without the predicates."""
    operands = [operand for operand in instruction.operands if operand.kind != Kind.PREDICATE]
    if operands and operands[0].kind == Kind.REGISTER:
        return operands[0].register, operands[1:]
    return ZERO, operands


def word_of(operand: Operand, state: State, kernel: Kernel, part: int = 0) -> Word:
    """The ``part``-th word of an operand."""
    kind = operand.kind
    if kind == Kind.REGISTER:
        if operand.register < 0:
            return NOTHING
        word = state.read(operand.register + part)
    elif kind == Kind.IMMEDIATE:
        return number(operand.value >> (32 * part))
    elif kind == Kind.CONSTANT:
        word = constant_word(operand, state, kernel, part)
    elif kind == Kind.LABEL:
        return NOT_THE_PROGRAMS  # a variable or function of the module by name
    else:
        return UNKNOWN
    if operand.negated and not (word.exact and operand.text.startswith("-")):
        if part:
            return derive([word])
        # Less than a word that nobody knows is no number that is known; a complement or an absolute value no multiple.
        keeps = word.plain and operand.text.startswith("-")
        offset, scale = (-word.offset, word.scale) if keeps else (0, 1)
        return Word(NOTHING.alternatives, subtracted(word), offset, scale)
    return multiply(word, -1) if operand.negated else word


def constant_word(operand: Operand, state: State, kernel: Kernel, part: int = 0) -> Word:
    if operand.bank < 0:
        return LOADED_WORD
    place = operand.value + 4 * part
    if operand.register < 0:
        return kernel.constant(operand.bank, place)
    index = state.read(operand.register)
    if index.exact:
        return kernel.constant(operand.bank, index.offset + place)
    if index.plain:
        return kernel.element(operand.bank, index.offset + place, index.scale, index.rising)
    return kernel.element(operand.bank, index.offset + place, 1, False)


def words_in(instruction: Instruction) -> int:
    for modifier in instruction.modifiers:
        if modifier in _WIDTHS:
            return _WIDTHS[modifier]
    return 1


def put(instruction: Instruction, state: State, register: int, words: list[Word]) -> None:
    if register < 0:
        return
    for part, word in enumerate(words):
        state.write(register + part, word)


def may_put(state: State, register: int, words: list[Word]) -> None:
    """Put words into registers that may keep what they hold."""
    for part, word in enumerate(words if register >= 0 else ()):
        old = state.registers.get(register + part)
        state.write(register + part, word if old is None else join(old, word))


def registers_in(instruction: Instruction) -> int:
    """How many registers of matrices an instruction moves: ``LDSM.16.M88.4``, ``STTM.16dp128bit.x2``."""
    count = 1
    for modifier in instruction.modifiers:
        if modifier in ("2", "4"):
            count *= int(modifier)
        elif modifier.endswith(("T1616", "dp128bit")):
            count *= 2
        elif modifier.endswith("dp256bit"):
            count *= 4
        elif modifier.startswith("x") and modifier[1:].isdecimal():
            count *= min(int(modifier[1:]), MOST_REGISTERS)
    return count


def is_small(instruction: Instruction) -> bool:
    """Whether it moves bytes or half words, which are no addresses."""
    return not _SMALL.isdisjoint(instruction.modifiers)
