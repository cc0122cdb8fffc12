"""Opcodes by what they do with addresses (PTX ISA, "Instruction Set"). An opcode that is in no table here is computed
with, if it has no address among its operands; if it has, it reads and writes there."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from phos.gpu_engine.ptx_instrument.statements import TYPE_BYTES
from phos.gpu_engine.spec.ptx_steps import Space

KEEP = frozenset(("and", "or", "xor", "not", "lop3", "min", "max", "abs", "selp", "slct", "elect", "vmin", "vmax"))
"""The result may still be one of the operands, or it with a few bits changed: an aligned pointer."""

_NOTHING = (
    "setp set testp isspacep bra brx ret exit trap brkpt bar barrier membar vote match activemask nanosleep"
    " pmevent griddepcontrol setmaxnreg mbarrier wgmma mma createpolicy istypep"
    " clusterlaunchcontrol stackrestore getctarank txq suq applypriority"
)
NOTHING = frozenset(_NOTHING.split())
"""No address outside shared and tensor memory goes in, and none comes out."""

_SPACES = {
    "global": Space.GLOBAL,
    "shared": Space.SHARED,
    "local": Space.LOCAL,
    "param": Space.PARAM,
    "const": Space.CONST,
}
_INTEGERS = frozenset(("b128", *(f"{letter}{bits}" for letter in "bus" for bits in (8, 16, 32, 64))))


@dataclass(frozen=True)
class Opcode:
    """An opcode taken apart."""

    base: str
    words: tuple[str, ...]
    """The modifiers."""
    space: Space
    """The first state space named."""
    size: int
    """Bytes of the last type named; 8 if there is none."""
    integer: bool
    """Is the last type a whole number or plain bits?"""
    types: tuple[str, ...]

    @property
    def first(self) -> str:
        """The first modifier."""
        return self.words[0] if self.words else ""

    def has(self, *words: str) -> bool:
        """Are all of these among the modifiers?"""
        return all(word in self.words for word in words)


@functools.lru_cache(maxsize=4096)
def opcode(text: str) -> Opcode:
    """Take an opcode apart."""
    base, *words = text.split(".")
    types = tuple(word for word in words if f".{word}" in TYPE_BYTES)
    space = Space.GENERIC
    for word in words:
        found = _SPACES.get(word.split("::")[0])
        if found is not None:
            space = found
            break
    last = types[-1] if types else "b64"
    return Opcode(base, tuple(words), space, TYPE_BYTES[f".{last}"], last in _INTEGERS, types)
