"""Which instructions reach memory that a launch must have been guessed to touch (PTX ISA, "Instruction Set").

An instruction with an address that is not known here keeps its kernel from having a twin: a twin that overlooks an
access would vouch for what it has not seen.
"""

from __future__ import annotations

from typing import NamedTuple

from phos.gpu_engine.ptx_instrument.operands import Address, Immediate, Name, Operand
from phos.gpu_engine.ptx_instrument.statements import Instruction
from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.ptx_opcodes import Opcode, opcode

READ, WRITE = Access.READ, Access.WRITE


class Unsuited(Exception):
    """A function can have no twin; the message says why."""


class Reach(NamedTuple):
    """An access to global memory: what is at ``address``, and as many bytes from there on as ``length`` says.

    ``length`` None: no more than an aligned 128 bytes, which never are in two chunks.
    """

    address: Name
    access: Access
    length: Operand | None = None


_ELSEWHERE = frozenset(("shared", "local", "param", "const"))
_NO_DATA = frozenset(("prefetch", "prefetchu", "applypriority", "createpolicy"))
"""They name an address, and no data comes or goes."""
_ON_CHIP = frozenset(
    ("ldmatrix", "stmatrix", "mbarrier", "mapa", "getctarank", "tcgen05", "wgmma", "clusterlaunchcontrol")
)
_THROUGH_HANDLES = frozenset(("tex", "tld4", "suld", "sust", "sured", "txq", "suq", "istypep"))


def reaches(instruction: Instruction) -> list[Reach]:
    """The accesses of an instruction. Raises Unsuited."""
    op = opcode(instruction.opcode)
    addresses = [operand for operand in instruction.operands if isinstance(operand, Address)]
    if op.base in _THROUGH_HANDLES:
        raise Unsuited("it uses textures or surfaces")
    if op.base == "setmaxnreg":
        raise Unsuited("it divides registers between its warps")
    if op.base == "isspacep" and "const" in op.words:
        raise Unsuited("it asks for the space of an address")
    if not addresses or op.base in _NO_DATA or op.base in _ON_CHIP:
        return []
    spaces = {word.split("::")[0] for word in op.words}
    if op.base == "cp":
        return _copies(op, instruction, addresses)
    if op.base in ("tensormap", "multimem", "fence", "membar"):
        raise Unsuited("it works on tensor maps or multicast memory")
    if op.base in ("st", "red") and "async" in op.words and len(addresses) > 1:
        return []  # with a barrier they only reach shared memory
    if op.base == "st" and "bulk" in op.words:
        return []
    if op.base in ("ld", "ldu", "st", "atom", "red", "discard"):
        if spaces & _ELSEWHERE:
            return []
        does = {"ld": READ, "ldu": READ, "st": WRITE, "discard": WRITE}.get(op.base, READ | WRITE)
        return [Reach(_name(addresses[0]), does)]
    if op.base == "wmma" and "shared" in spaces:
        return []
    raise Unsuited(f"nothing is known of {instruction.opcode}")


def _copies(op: Opcode, instruction: Instruction, addresses: list[Address]) -> list[Reach]:
    """``cp.async``, ``cp.async.bulk``, ``cp.reduce.async.bulk``, and what belongs to them."""
    spaces = [word.split("::")[0] for word in op.words if word.split("::")[0] in ("global", "shared")]
    if "tensor" in op.words:
        raise Unsuited("it copies by tensor maps")
    if not spaces and "arrive" not in op.words:
        raise Unsuited(f"nothing is known of {instruction.opcode}")
    if "global" not in spaces or "prefetch" in op.words:
        return []
    if len(addresses) < 2:
        raise Unsuited(f"nothing is known of {instruction.opcode}")
    bulk = "bulk" in op.words
    length = instruction.operands[2] if bulk and len(instruction.operands) > 2 else None
    if bulk and not isinstance(length, Name | Immediate):
        raise Unsuited(f"nothing is known of {instruction.opcode}")
    if spaces[0] == "global":
        return [Reach(_name(addresses[0]), WRITE | (READ if op.first == "reduce" else Access.NONE), length)]
    return [Reach(_name(addresses[1]), READ, length)]


def _name(address: Address) -> Name:
    inner = address.inner[0] if len(address.inner) == 1 else None
    if not isinstance(inner, Name):
        raise Unsuited(f"nothing is known of the address {address}")
    return inner
