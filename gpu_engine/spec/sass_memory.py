"""What instructions that reach memory do: loads, stores, atomics, bulk copies, textures.

One whose address is written in a way not known here may reach any memory.
"""

from __future__ import annotations

from phos.gpu_engine.spec.descriptor import ADDRESS_BYTES, Access
from phos.gpu_engine.spec.sass_operands import (
    Handler,
    constant_word,
    destination,
    is_small,
    may_put,
    put,
    registers_in,
    word_of,
    words_in,
)
from phos.gpu_engine.spec.sass_state import WORD, Kernel, MadeMap, State, Touch
from phos.gpu_engine.spec.sass_text import Instruction, Kind, Operand
from phos.gpu_engine.spec.sass_value import (
    BLOCK,
    LOADED_NUMBER,
    LOADED_WORD,
    NOTHING,
    UNKNOWN,
    Atom,
    Atoms,
    Origin,
    Word,
    add,
    derive,
    join,
    join_all,
    number,
    of,
)

BOTH = Access.READ | Access.WRITE

_MAY_POINT = (Origin.PARAMETER, Origin.ELEMENT, Origin.LOADED, Origin.VARIABLE, Origin.MANY, Origin.KEY)

MOST_COLOURS = 4
"""Registers that one result of a texture or surface instruction takes at most."""


_KEEPS_DATA = frozenset(("PF1", "PF1_5", "PF2", "DML2", "IV", "IVALL", "IVALLP", "WB", "WBALL", "QRY1"))
"""What cache control does by fetching, writing back, or forgetting what is elsewhere as well."""


_NO_ADDRESSES = ("desc[", "gdesc[", "idesc[", "tmem[")
"""Brackets around what is no address in memory: descriptors, tensor memory."""


def _memory_operands(instruction: Instruction) -> list[Operand]:
    return [operand for operand in instruction.operands if operand.kind == Kind.MEMORY]


def _address(operand: Operand, state: State) -> tuple[Word, Word]:
    """The two halves of a 64-bit address."""
    low, high = state.read(operand.register), NOTHING
    if operand.register >= 0 and not operand.narrow:
        high = state.read(operand.register + 1)
    if operand.second >= 0:
        low, high = add(low, state.read(operand.second)), add(high, state.read(operand.second + 1))
    return add(low, number(operand.value)) if operand.value else low, high


def touch(kernel: Kernel, access: Access, address: tuple[Word, Word], tensor_map: bool = False) -> None:
    """Note an access through an address, or through the tensor map at it."""
    kernel.touches.add(_touch(access, address, tensor_map))


def _touch(access: Access, address: tuple[Word, Word], tensor_map: bool = False) -> Touch:
    low, high = address
    derived = low.derived | high.derived
    return Touch(access, low.alternatives, high.atoms, derived, low.offset, low.scale, low.rising, tensor_map)


def _pointed(low: Word, high: Word, part: int, state: State, kernel: Kernel) -> Word:
    """What is read through a generic or global address."""
    words: list[Word] = []
    for atoms in low.alternatives:
        origins = {atom.origin for atom in atoms}
        one = Word(frozenset([atoms]), frozenset(), low.offset, low.scale)
        if BLOCK in atoms:
            place = one.offset + 4 * part
            if len(atoms) > 1:  # an argument was added to it, as it is
                words.append(kernel.element(0, place, 1, False))
            elif low.scale == 0:
                words.append(kernel.constant(0, place))
            else:
                words.append(kernel.element(0, place, low.scale, low.rising))
        elif Origin.STACK in origins:
            words.append(state.load_stack(one, part))
        elif Origin.WINDOW in origins:
            words += [kernel.shared, state.load_stack(UNKNOWN, part)]
        else:
            words.append(_from_memory(atoms, low, high))
            if any(atom.origin == Origin.WINDOW for atom in high.atoms):
                words.append(kernel.shared)
    return join_all(words)


def _from_memory(atoms: Atoms, low: Word, high: Word) -> Word:
    """A word from memory; if a single argument names that memory, it is known which one."""
    pointers = [atom for atom in atoms if atom.origin in _MAY_POINT]
    if len(pointers) != 1 or any(atom.origin == Origin.MINUS for atom in low.derived):
        return LOADED_WORD
    (one,) = pointers
    upper = one._replace(place=one.place + WORD)
    if one.origin != Origin.PARAMETER or one.place % ADDRESS_BYTES or upper not in high.atoms:
        return LOADED_WORD
    return of(Atom(Origin.LOADED, one.place))


def _demoted(instruction: Instruction, word: Word) -> Word:
    """Bytes and half words are no addresses. Of those of a parameter it is kept that they may make one together."""
    if not is_small(instruction):
        return word
    found = derive([word])
    pieces = frozenset(Atom(Origin.BYTES, a.place) for a in word.atoms if a.origin == Origin.PARAMETER)
    unsigned = "U8" in instruction.modifiers or "U16" in instruction.modifiers
    return found._replace(derived=found.derived | pieces, rising=unsigned)


def anything(instruction: Instruction, state: State, kernel: Kernel) -> bool:
    """An instruction that nobody knows may do anything to what its addresses name; whether it has any."""
    operands = _memory_operands(instruction)
    for operand in operands:
        touch(kernel, BOTH, _address(operand, state))
    others = (operand.text for operand in instruction.operands if operand.kind == Kind.OTHER)
    unknown = any("[" in text and not text.startswith(_NO_ADDRESSES) for text in others)
    if unknown:
        kernel.indirect |= BOTH
    return unknown or bool(operands)


def load(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A load through a global or generic address."""
    memory = _memory_operands(instruction)
    if not memory:
        kernel.indirect |= Access.READ
        put(instruction, state, destination(instruction)[0], [LOADED_WORD] * words_in(instruction))
        return
    low, high = _address(memory[0], state)
    touch(kernel, Access.READ, (low, high))
    parts = range(words_in(instruction))
    words = [_demoted(instruction, _pointed(low, high, part, state, kernel)) for part in parts]
    registers = [destination(instruction)[0]]
    if "ENL2" in instruction.modifiers:  # two of four words each, anywhere
        before = instruction.operands[: instruction.operands.index(memory[0])]
        registers = [operand.register for operand in before if operand.kind == Kind.REGISTER] or registers
    each = len(words) // len(registers)
    for at, register in enumerate(registers):
        put(instruction, state, register, words[at * each : (at + 1) * each])


def _stored(instruction: Instruction, state: State, kernel: Kernel) -> list[Word]:
    """The words that a store writes: the operand after the address, or (``ENL2``) both.

    Of an atomic it is any of them: a compare-and-swap has the value to compare with, then the one to put there.
    """
    seen = False
    values: list[Operand] = []
    for operand in instruction.operands:
        if operand.kind == Kind.MEMORY:
            seen = True
        elif seen and operand.kind in (Kind.REGISTER, Kind.CONSTANT, Kind.IMMEDIATE):
            values.append(operand)
    if instruction.name.startswith("ATOM"):
        parts = range(words_in(instruction))
    else:
        values = values[: 2 if "ENL2" in instruction.modifiers else 1]
        parts = range(words_in(instruction) // max(1, len(values)))
    return [_demoted(instruction, word_of(value, state, kernel, part)) for value in values for part in parts]


def store(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A store through a global or generic address."""
    memory = _memory_operands(instruction)
    if not memory:
        kernel.indirect |= Access.WRITE
        return
    low, high = _address(memory[0], state)
    touch(kernel, Access.WRITE, (low, high))
    words = _stored(instruction, state, kernel)
    _spill_generic(low, high, words, state, kernel)
    _copy_map((low, high), words, state, kernel)


def _spill_generic(low: Word, high: Word, words: list[Word], state: State, kernel: Kernel) -> None:
    """Stores through a generic address may hit the stack or shared memory."""
    # Where the stack lies is in the window's place as well: by itself that is shared memory's.
    window = any(atom.origin == Origin.WINDOW for atom in high.atoms)
    origins = [{atom.origin for atom in atoms} for atoms in low.alternatives]
    on_stack = any(Origin.STACK in one for one in origins) or any(a.origin == Origin.STACK for a in high.atoms)
    elsewhere = [one for one in origins if Origin.STACK not in one or Origin.MANY in one]
    shared = any(window or Origin.WINDOW in one for one in elsewhere)
    for part, word in enumerate(words):
        if on_stack:
            state.store_stack(low, part, word, False)
        if shared:
            kernel.store_shared(word)


def atomic(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """An atomic, with a result or without: it reads and writes."""
    memory = _memory_operands(instruction)
    if not memory:
        kernel.indirect |= BOTH
        put(instruction, state, destination(instruction)[0], [LOADED_WORD] * words_in(instruction))
        return
    low, high = _address(memory[0], state)
    touch(kernel, BOTH, (low, high))
    register, _ = destination(instruction)
    word = join(_pointed(low, high, 0, state, kernel), LOADED_WORD)
    put(instruction, state, register, [word] * words_in(instruction))
    words = _stored(instruction, state, kernel)
    _spill_generic(low, high, words, state, kernel)
    if "EXCH" in instruction.modifiers:
        _copy_map((low, high), words, state, kernel)


def load_local(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A load from the stack."""
    memory = _memory_operands(instruction)
    if memory:
        register, _ = destination(instruction)
        low, _ = _address(memory[0], state)
        parts = range(words_in(instruction))
        place = low if any(a.origin == Origin.STACK for a in low.atoms) else UNKNOWN
        put(instruction, state, register, [_demoted(instruction, state.load_stack(place, p)) for p in parts])


def store_local(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A store to the stack."""
    memory = _memory_operands(instruction)
    if memory:
        low, _ = _address(memory[0], state)
        place = low if any(a.origin == Origin.STACK for a in low.atoms) else UNKNOWN
        whole = instruction.always and not is_small(instruction)  # else something of the old word stays
        for part, word in enumerate(_stored(instruction, state, kernel)):
            state.store_stack(place, part, word, whole)


def load_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A load from shared memory: any word that was stored there."""
    register, _ = destination(instruction)
    put(instruction, state, register, [_demoted(instruction, kernel.shared)] * words_in(instruction))


def store_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A store to shared memory."""
    words = _stored(instruction, state, kernel)
    for word in words:
        kernel.store_shared(word)
    if kernel.has_tensors and len(words) == ADDRESS_BYTES // WORD and all(_may_point(word) for word in words):
        # PTX's `tensormap.replace.tile.global_address` is such a store.
        state.put_address(_touch(Access.NONE, (words[0], words[1])))


def _may_point(word: Word) -> bool:
    return any(atom.origin in _MAY_POINT for atom in word.atoms)


def _copy_map(address: tuple[Word, Word], words: list[Word], state: State, kernel: Kernel) -> None:
    """What a store puts into memory may be a piece of the tensor map that was made in shared memory.

    PTX's ``tensormap.cp_fenceproxy`` is a load from there and an atomic exchange by each thread of a warp.
    """
    if state.addresses and any(word.alternatives == kernel.shared.alternatives for word in words):
        kernel.made_maps.add(MadeMap(_touch(Access.NONE, address), state.copy_map()))


def load_matrix(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A load of matrices from shared or tensor memory: any words that were stored there."""
    register, _ = destination(instruction)
    put(instruction, state, register, [kernel.shared])
    may_put(state, register + 1 if register >= 0 else register, [kernel.shared] * (registers_in(instruction) - 1))


def store_matrix(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A store of matrices to shared or tensor memory, which counts as shared memory: a warp may keep anything there."""
    registers = [operand for operand in instruction.operands if operand.kind == Kind.REGISTER]
    for operand in registers[-1:]:
        for part in range(registers_in(instruction)):
            kernel.store_shared(word_of(operand, state, kernel, part))


def atomic_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """An atomic in shared memory."""
    store_shared(instruction, state, kernel)
    load_shared(instruction, state, kernel)


def cache(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """Cache control. ``RML2`` is PTX's ``discard``, which destroys what is there; the rest leaves data as it is."""
    if not _KEEPS_DATA.intersection(instruction.modifiers):
        for operand in _memory_operands(instruction):
            touch(kernel, Access.WRITE, _address(operand, state))


def load_constant(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A load from a constant bank; without one, from memory bound by the driver."""
    register, sources = destination(instruction)
    if sources and sources[0].kind == Kind.CONSTANT:
        parts = range(words_in(instruction))
        words = [_demoted(instruction, constant_word(sources[0], state, kernel, part)) for part in parts]
        put(instruction, state, register, words)
    else:
        put(instruction, state, register, [LOADED_WORD] * words_in(instruction))


def copy_to_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """``LDGSTS [shared], [global]``."""
    memory = _memory_operands(instruction)
    if len(memory) > 1:
        touch(kernel, Access.READ, _address(memory[1], state))
    else:
        kernel.indirect |= Access.READ
    kernel.store_shared(LOADED_WORD)


def bulk_copy(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """``UBLKCP.S.G [shared], [global]`` and the other way round; ``UBLKRED`` adds to what is there."""
    memory = _memory_operands(instruction)
    spaces = [modifier for modifier in instruction.modifiers if modifier in ("S", "G", "L")][:2]
    for operand, space, written in zip(memory, spaces, (True, False), strict=False):
        if space == "G":
            both = BOTH if instruction.name == "UBLKRED" else Access.WRITE
            touch(kernel, both if written else Access.READ, _address(operand, state))
            if not written:
                kernel.store_shared(LOADED_WORD)
    if len(memory) < 2:
        kernel.indirect |= BOTH
    if len(spaces) < 2:  # another form: anything may be meant
        for operand in memory:
            touch(kernel, BOTH, _address(operand, state))


def tensor(access: Access) -> Handler:
    """Tensor copies: the second operand in brackets is the address of the tensor map."""

    def handler(instruction: Instruction, state: State, kernel: Kernel) -> None:
        memory = _memory_operands(instruction)
        if memory:
            touch(kernel, access, _address(memory[min(1, len(memory) - 1)], state), True)
        else:
            kernel.indirect |= access
        if access == Access.READ:
            kernel.store_shared(LOADED_WORD)

    return handler


def texture(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """What a texture or surface handle stands for is not to be seen here. What is there may be an address."""
    queries = instruction.name == "TXQ"
    if not queries:
        kernel.indirect |= Access.READ
    # Texture instructions have two results of up to two registers, those on surfaces one, before the coordinates in
    # brackets. How many registers are written is in a mask.
    for operand in instruction.operands[:2]:
        if operand.kind == Kind.MEMORY:
            break
        if operand.kind == Kind.REGISTER:
            may_put(state, operand.register, [LOADED_NUMBER if queries else LOADED_WORD] * MOST_COLOURS)


def surface(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """Stores and atomics on surfaces."""
    kernel.indirect |= Access.WRITE if instruction.name == "SUST" else BOTH
    if instruction.name != "SUST":
        texture(instruction, state, kernel)
