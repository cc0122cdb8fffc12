"""The instructions that reach memory, as steps (PTX ISA, "Data Movement and Conversion Instructions" and others)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phos.gpu_engine.ptx_instrument.operands import Address, Name, Operand
from phos.gpu_engine.ptx_instrument.statements import VECTOR_LENGTH
from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.ptx_opcodes import Opcode
from phos.gpu_engine.spec.ptx_steps import Fill, Indirect, Load, MadeMap, Move, Space, Store, Tensor, Touch

if TYPE_CHECKING:
    from phos.gpu_engine.spec.ptx_compile import Compiler

READ, WRITE = Access.READ, Access.WRITE
BOTH = READ | WRITE

WORD_BYTES = 4
"""Of the registers that matrix instructions work on."""

_THROUGH_HANDLES = {"tex": READ, "tld4": READ, "suld": READ, "sust": WRITE, "sured": BOTH}


def memory_steps(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...]) -> bool:
    """Add the steps of an instruction that reaches memory; False if it is none of those."""
    base = op.base
    if base in ("ld", "ldu"):
        _load(compiler, op, operands)
    elif base in ("st", "atom", "red"):
        _store(compiler, op, operands)
    elif base == "cp":
        _copy(compiler, op, operands)
    elif base == "multimem":
        _multimem(compiler, op, operands)
    elif base in _THROUGH_HANDLES:
        compiler.add(Indirect(_THROUGH_HANDLES[base]))
        if base in ("tex", "tld4", "suld"):
            # What they fetch comes from memory, and register 0 holds no address of it.
            compiler.add(Load(compiler.several(operands[0]), 0, 0, op.size, Space.GENERIC))
    elif base in ("prefetch", "prefetchu", "fence"):
        # A prefetched tensor map is not read by the kernel: what it uses, it names again.
        if "tensormap" not in op.words:
            _touch(compiler, op, operands, READ)
    elif base == "discard":
        _touch(compiler, op, operands, WRITE)
    elif base == "wmma":
        if op.first == "load":
            _fetch(compiler, operands, op.space)
        elif op.first == "store":
            _touch(compiler, op, operands, WRITE)
    elif base in ("ldmatrix", "stmatrix", "tcgen05"):
        _on_chip(compiler, op, operands)
    elif base == "tensormap":
        _tensormap(compiler, op, operands)
    elif base == "alloca":
        compiler.add(Move(compiler.use(operands[0]), (compiler.stack(),)))
    else:
        return False
    return True


def _touch(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...], access: Access) -> None:
    for operand in operands:
        if isinstance(operand, Address):
            compiler.add(Touch(compiler.place(operand)[0], access, op.space))
            return


def _fetch(compiler: Compiler, operands: tuple[Operand, ...], space: Space) -> None:
    """Words of memory go into registers; which word into which is not followed."""
    at = next((i for i, operand in enumerate(operands) if isinstance(operand, Address)), 0)
    if at:
        targets = tuple(register for operand in operands[:at] for register in compiler.several(operand))
        compiler.add(Load(targets, *compiler.place(operands[at]), WORD_BYTES, space))


def _on_chip(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...]) -> None:
    """``ldmatrix``, ``stmatrix``, ``tcgen05.ld``, ``tcgen05.st``. Tensor memory is taken for shared memory.

    A warp may keep anything there: what comes out may be an address that went in.
    """
    if op.base == "ldmatrix" or (op.base == "tcgen05" and op.first == "ld"):
        _fetch(compiler, operands, Space.SHARED)
    elif op.base == "stmatrix" or op.first == "st":
        for operand in operands:
            if not isinstance(operand, Address):
                compiler.add(Store(compiler.several(operand), 0, 0, WORD_BYTES, Space.SHARED, WRITE))


def _elements(compiler: Compiler, op: Opcode, operand: Operand) -> tuple[int, ...]:
    """The registers of a vector. One that is declared as a vector is one register, which holds all of its elements."""
    registers = compiler.several(operand)
    length = next((VECTOR_LENGTH[f".{word}"] for word in op.words if f".{word}" in VECTOR_LENGTH), 1)
    return registers * length if isinstance(operand, Name) else registers


def _load(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...]) -> None:
    if len(operands) >= 2:
        register, number = compiler.place(operands[1])
        compiler.add(Load(_elements(compiler, op, operands[0]), register, number, op.size, op.space))


def _store(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...]) -> None:
    """``st [a], b``; ``red [a], b``; ``atom d, [a], b, c``."""
    at = next((i for i, operand in enumerate(operands) if isinstance(operand, Address)), None)
    if at is None or op.has("bulk"):
        return
    # `st.async` and `red.async` that name a barrier reach shared memory. Those that release have none (PTX ISA 8.7),
    # and theirs is a generic address where they do not say that it is global.
    barrier = op.has("async") and sum(isinstance(operand, Address) for operand in operands) > 1
    space = Space.SHARED if barrier else op.space
    register, number = compiler.place(operands[at])
    sources = tuple(source for operand in operands[at + 1 :] for source in _elements(compiler, op, operand))
    if at:
        compiler.add(Load(_elements(compiler, op, operands[0]), register, number, op.size, space))
        # Compare-and-swap: any of its operands may be what is stored, all in the one place.
        for source in sources:
            compiler.add(Store((source,), register, number, op.size, space, BOTH))
        if sources:
            return
    compiler.add(Store(sources, register, number, op.size, space, WRITE if op.base == "st" else BOTH))


def _copy(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...]) -> None:
    """``cp.async``, ``cp.async.bulk``, ``cp.async.bulk.tensor``, ``cp.reduce.async.bulk`` and the prefetches."""
    places = [compiler.place(operand) for operand in operands if isinstance(operand, Address)]
    if not places or "arrive" in op.words:
        return
    spaces = [word.split("::")[0] for word in op.words if word.split("::")[0] in ("global", "shared")]
    reduces = op.first == "reduce"
    to_global = spaces[:1] == ["global"] and "prefetch" not in op.words
    write = BOTH if reduces else WRITE
    if "tensor" in op.words:
        if "prefetch" in op.words or to_global:
            compiler.add(Tensor(*places[0], write if to_global else READ))
        elif len(places) > 1:
            compiler.add(Tensor(*places[1], READ))
            compiler.add(Fill())
    elif "prefetch" in op.words:
        compiler.add(Touch(places[0][0], READ, Space.GLOBAL))
    elif to_global:
        compiler.add(Touch(places[0][0], write, Space.GLOBAL))
    elif "global" in spaces and len(places) > 1:
        compiler.add(Touch(places[1][0], READ, Space.GLOBAL))
        compiler.add(Fill())
    elif "shared" not in spaces:
        # A form not known here. (Between shared memories no address goes that did not before.)
        for place, _ in places:
            compiler.add(Touch(place, BOTH, Space.GLOBAL))
        compiler.add(Indirect(BOTH))


def _multimem(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...]) -> None:
    """``multimem.ld_reduce`` reads the replicas, ``.st`` writes, ``.red`` does both; ``.cp`` copies in bulk."""
    kind = op.first
    if kind == "ld_reduce":
        _load(compiler, op, operands)
        return
    _touch(compiler, op, operands, WRITE if kind == "st" else BOTH)


def _tensormap(compiler: Compiler, op: Opcode, operands: tuple[Operand, ...]) -> None:
    """A tensor map made by the kernel: an address put into one may be used later, by anybody, for anything."""
    places = [compiler.place(operand)[0] for operand in operands if isinstance(operand, Address)]
    in_memory = places[0] if places and op.space is not Space.SHARED else 0
    if op.first == "replace":
        if "global_address" in op.words and len(operands) > 1:
            target = compiler.use(operands[1])
            compiler.add(Touch(target, BOTH, Space.GLOBAL))
            compiler.add(MadeMap(in_memory, target))
        if in_memory:
            compiler.add(Touch(in_memory, BOTH, op.space))
    elif places:
        # tensormap.cp_fenceproxy.global.shared::cta… [to], [from], 128
        compiler.add(Touch(places[0], WRITE, Space.GLOBAL))
        compiler.add(MadeMap(places[0], 0))
