"""What one machine instruction does to registers, stack and memory, as far as addresses go.

NVIDIA documents no more than the names of instructions (CUDA Binary Utilities, "Instruction Set Reference"); the
meaning of operands is from compiled kernels. An instruction that is not known here is taken to mix all that it reads
into its first register, so a new one can cost precision but loses no address.

Instructions of the uniform data path (``UIADD3``) mean what their namesakes mean and are treated as one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.sass_state import WINDOW_WORD, Kernel, State, Touch
from phos.gpu_engine.spec.sass_text import ZERO, Instruction, Kind, Operand
from phos.gpu_engine.spec.sass_value import (
    BLOCK,
    LOADED_NUMBER,
    LOADED_WORD,
    NOTHING,
    UNKNOWN,
    Atom,
    Origin,
    Word,
    add,
    derive,
    join,
    join_all,
    mix,
    multiply,
    number,
    of,
)

BOTH = Access.READ | Access.WRITE

_VARIABLE = of(Atom(Origin.VARIABLE, -1))

_Handler = Callable[[Instruction, State, Kernel], None]

_SMALL = frozenset(("U8", "S8", "U16", "S16", "I8"))
_WIDTHS = {"64": 2, "128": 4, "256": 8, "U64": 2, "S64": 2, "F64": 2, "ENL2": 8}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Results that are no addresses whatever went in. Floating point, conversions and counting; the matrix units.
_NUMBERS = _names(
    """
    BMSK BREV FLO POPC I2F I2FP F2I F2F F2FP F2IP FRND I2I I2IP IABS IDP IDP4A SGXT MUFU IMMA BMMA DMMA HMMA HGMMA
    IGMMA QGMMA BGMMA OMMA QMMA FADD FMUL FFMA FADD32I FMUL32I FFMA32I FSET FSWZADD FMNMX FMNMX3 FSEL2 DADD DMUL
    DFMA DSET HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HADD2_32I HMUL2_32I HFMA2_32I REDUX CREDUX VOTE VOTEU MATCH MOVM FADD2
    FMUL2 FFMA2 BF16_V2 VHMNMX SHF SHL SHR P2R ISCADD2
    """
)

# Instructions that write predicates only, or nothing that could become an address.
_SILENT = _names(
    """
    ISETP FSETP DSETP HSETP2 PLOP3 PSETP FCHK R2P NOP BAR BSSY BSYNC BREAK BMOV DEPBAR LDGDEPBAR LDTDEPBAR MEMBAR
    ERRBAR CCTL CCTLL CCTLT EXIT BRA BRX JMP JMX RET KILL BPT YIELD NANOSLEEP WARPSYNC WARPGROUP WARPGROUPSET FENCE
    ARRIVES PREEXIT ACQBULK CGABAR_ARV CGABAR_WAIT CGABAR_GET CGABAR_SET UTMACCTL UTMAPF UTMACMDFLUSH
    UTMAREDCMDFLUSH BLKPF ELECT SETMAXREG ENDCOLLECTIVE PMTRIG QSPC SETCTAID SETLMEMBASE UTCBAR STTM UTCATOMSWS
    UTCHMMA UTCIMMA UTCQMMA UTCOMMA UTCCP UTCSHIFT SYNCS CALL RPCMOV REDS
    """
)

_TEXTURES = ("TEX", "TLD", "TXD", "TMML", "TXQ", "SULD")


def step(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """Carry out one instruction on a state; branches and calls do nothing here."""
    if instruction.never:
        return
    name = instruction.name
    handler = _handlers.get(name)
    if handler is None:
        handler = _handlers[name] = _find(name)
    state.predicate = "" if instruction.always else instruction.predicate
    handler(instruction, state, kernel)
    state.predicate = ""
    if state.guarded or name == "VOTEU":
        _change_predicates(instruction, state)


def _change_predicates(instruction: Instruction, state: State) -> None:
    """Predicates written stand first, or right behind the first register; those read stand last."""
    written = []
    others = 0
    for operand in instruction.operands:
        if operand.kind == Kind.PREDICATE:
            written.append(operand.text.lstrip("!"))
        else:
            others += 1
            if others > 1:
                break
    kinds = [operand.kind for operand in instruction.operands]
    if instruction.name == "VOTEU" and kinds == [Kind.PREDICATE, Kind.PREDICATE]:
        state.forget(written[:1])
        if "ANY" in instruction.modifiers:
            state.voted[written[0]] = instruction.operands[1].text
        return
    if instruction.name in ("PLOP3", "UPLOP3"):
        written = written[:2]
    state.forget(written)


def _find(name: str) -> _Handler:
    """The handler for an instruction's name, its uniform twin's where it has none of its own."""
    for spelling in (name, name[1:]) if name.startswith("U") else (name,):
        if spelling in _TABLE:
            return _TABLE[spelling]
        if spelling in _SILENT:
            return _silent
        if spelling in _NUMBERS:
            return _number
    for prefix, handler in _PREFIXES:
        if name.startswith(prefix):
            return handler
    return _unknown


# Operands.


def _destination(instruction: Instruction) -> tuple[int, list[Operand]]:
    """The register that an instruction writes, and its other operands without the predicates."""
    operands = [operand for operand in instruction.operands if operand.kind != Kind.PREDICATE]
    if operands and operands[0].kind == Kind.REGISTER:
        return operands[0].register, operands[1:]
    return ZERO, operands


def _word(operand: Operand, state: State, kernel: Kernel, part: int = 0) -> Word:
    """The ``part``-th word of an operand."""
    kind = operand.kind
    if kind == Kind.REGISTER:
        if operand.register < 0:
            return NOTHING
        word = state.read(operand.register + part)
    elif kind == Kind.IMMEDIATE:
        return number(operand.value >> (32 * part))
    elif kind == Kind.CONSTANT:
        word = _constant(operand, state, kernel, part)
    elif kind == Kind.LABEL:
        return _VARIABLE  # a variable or function of the module by name
    else:
        return UNKNOWN
    if operand.negated and not (word.exact and operand.text.startswith("-")):
        return (
            Word(NOTHING.alternatives, word.derived | word.atoms, -word.offset, word.scale)
            if part == 0
            else derive([word])
        )
    return multiply(word, -1) if operand.negated else word


def _constant(operand: Operand, state: State, kernel: Kernel, part: int = 0) -> Word:
    if operand.bank < 0:
        return LOADED_WORD
    place = operand.value + 4 * part
    if operand.register < 0:
        return kernel.constant(operand.bank, place)
    index = state.read(operand.register)
    if index.exact:
        return kernel.constant(operand.bank, index.offset + place)
    stride = index.scale if index.plain else 1
    return kernel.element(operand.bank, index.offset + place, stride)


def _width(instruction: Instruction) -> int:
    for modifier in instruction.modifiers:
        if modifier in _WIDTHS:
            return _WIDTHS[modifier]
    return 1


def _put(instruction: Instruction, state: State, register: int, words: list[Word]) -> None:
    if register < 0:
        return
    for part, word in enumerate(words):
        state.write(register + part, word)


# Arithmetic.


def _silent(instruction: Instruction, state: State, kernel: Kernel) -> None:
    pass


def _each(combine: Callable[[list[Word]], Word]) -> _Handler:
    """A handler that combines the operands word by word."""

    def handler(instruction: Instruction, state: State, kernel: Kernel) -> None:
        register, sources = _destination(instruction)
        width = 2 if "64" in instruction.modifiers else 1
        words = [combine([_word(source, state, kernel, part) for source in sources]) for part in range(width)]
        _put(instruction, state, register, words)

    return handler


def _sum(words: list[Word]) -> Word:
    result = words[0] if words else NOTHING
    for word in words[1:]:
        result = add(result, word)
    return result


def _addition(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A sum. A register that is added to itself keeps its scale better than two registers of which nothing is known."""
    register, sources = _destination(instruction)
    counts: dict[Operand, int] = {}
    for source in sources:
        counts[source] = counts.get(source, 0) + 1
    parts = range(2 if "64" in instruction.modifiers else 1)
    words = [
        _sum([multiply(_word(source, state, kernel, part), times) for source, times in counts.items()])
        for part in parts
    ]
    _put(instruction, state, register, words)


def _unknown(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    words = [mix([_word(source, state, kernel, part) for source in sources]) for part in range(_width(instruction))]
    _put(instruction, state, register, words)


def _number(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    wide = instruction.name.startswith("D") or _width(instruction) == 2
    parts = range(2 if wide else 1)
    word = derive([_word(source, state, kernel, part) for source in sources for part in parts])
    _put(instruction, state, register, [word] * len(parts))


def _product(first: Word, second: Word) -> Word:
    if second.exact:
        return multiply(first, second.offset)
    if first.exact:
        return multiply(second, first.offset)
    word = derive([first, second])
    scale = (first.scale if first.plain and first.offset % max(first.scale, 1) == 0 else 1) or 1
    other = (second.scale if second.plain and second.offset % max(second.scale, 1) == 0 else 1) or 1
    return Word(word.alternatives, word.derived, 0, scale * other)


def _imad(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    if len(sources) < 3:
        _unknown(instruction, state, kernel)
        return
    first, second = (_word(source, state, kernel) for source in sources[:2])
    low = _word(sources[2], state, kernel)
    if second.exact and first.plain and sources[0] == sources[2] and not instruction.modifiers:
        _put(instruction, state, register, [multiply(first, second.offset + 1)])
        return
    if "WIDE" in instruction.modifiers:
        high = _word(sources[2], state, kernel, 1)
        carried = NOTHING if _small_product(first, second) else derive([first, second])
        _put(instruction, state, register, [add(_product(first, second), low), add(carried, high)])
    elif "HI" in instruction.modifiers:
        high = _word(sources[2], state, kernel, 1)
        _put(instruction, state, register, [add(derive([first, second, low]), high)])
    else:
        _put(instruction, state, register, [add(_product(first, second), low)])


def _small_product(first: Word, second: Word) -> bool:
    """Whether the upper half of a product is known to be 0."""
    return first.exact and second.exact and 0 <= first.offset * second.offset < 1 << 31


def _lea(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    if len(sources) < 2:
        _unknown(instruction, state, kernel)
        return
    shift = sources[-1].value if len(sources) > 2 and sources[-1].kind == Kind.IMMEDIATE else 0
    index, base = (_word(source, state, kernel) for source in sources[:2])
    if "HI" in instruction.modifiers:
        above = _word(sources[2], state, kernel) if len(sources) > 3 else NOTHING
        upper = above if shift == 0 else derive([above])
        _put(instruction, state, register, [add(add(derive([index]), upper), base)])
        return
    low = add(multiply(index, 1 << (shift & 31)), base)
    if "64" in instruction.modifiers:
        parts = derive([index, _word(sources[0], state, kernel, 1)])
        if shift == 0:
            parts = _word(sources[0], state, kernel, 1)
        _put(instruction, state, register, [low, add(parts, _word(sources[1], state, kernel, 1))])
    else:
        _put(instruction, state, register, [low])


def _shift(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    modifiers = instruction.modifiers
    left = instruction.name.endswith("SHL") or "L" in modifiers
    plain_left = left and "HI" not in modifiers and len(sources) >= 2
    amount = _word(sources[1], state, kernel) if len(sources) >= 2 else UNKNOWN
    if plain_left and amount.exact and 0 <= amount.offset < 32 and "64" not in modifiers:
        _put(instruction, state, register, [multiply(_word(sources[0], state, kernel), 1 << amount.offset)])
        return
    word = derive([_word(source, state, kernel) for source in sources])
    _put(instruction, state, register, [word] * (2 if modifiers[:1] == ("64",) else 1))


def _lop3(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    numeric = [s for s in sources if s.kind in (Kind.REGISTER, Kind.CONSTANT, Kind.IMMEDIATE)]
    # The last number is the truth table; 0xc0 is "first and second".
    table = numeric[-1].value if len(numeric) > 3 and numeric[-1].kind == Kind.IMMEDIATE else None
    values = numeric[:3]
    words = []
    for part in range(2 if "64" in instruction.modifiers else 1):
        parts = [_word(source, state, kernel, part) for source in values]
        word = mix(parts)
        mask = next((p.offset for p in parts[:2] if p.exact and p.offset), 0)
        if table == 0xC0 and mask and not all(p.exact for p in parts[:2]):
            word = Word(word.alternatives, word.derived, 0, mask & -mask)
        words.append(word)
    _put(instruction, state, register, words)


def _either(words: list[Word]) -> Word:
    return join_all(words)


def _extremum(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """Minimum or maximum of a sum and a bound."""
    register, sources = _destination(instruction)
    words = [_word(source, state, kernel) for source in sources]
    _put(instruction, state, register, [join(_sum(words[:2]), _sum(words[2:3]))])


def _shuffle(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    if sources:
        _put(instruction, state, register, [_word(sources[0], state, kernel)])


def _special(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    text = sources[0].text if sources else ""
    word = WINDOW_WORD if "WIN" in text else NOTHING if text == "SRZ" else UNKNOWN
    wide = instruction.name == "CS2R" and "32" not in instruction.modifiers
    _put(instruction, state, register, [word] * (2 if wide else 1))


def _constant_halves(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """``HFMA2 R, -RZ, RZ, high, low`` is how compilers load a number into a register on the floating-point side."""
    register, sources = _destination(instruction)
    zero = len(sources) == 4 and all(s.kind == Kind.REGISTER and s.register < 0 for s in sources[:2])
    if zero:
        try:
            low, high = (struct.unpack("<H", struct.pack("<e", float(s.text)))[0] for s in (sources[3], sources[2]))
        except (ValueError, OverflowError):
            zero = False  # infinities and the like have spellings of their own; they are no addresses
        else:
            _put(instruction, state, register, [number(high << 16 | low)])
    if not zero:
        _number(instruction, state, kernel)


# Memory.


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
    low, high = address
    derived = low.derived | high.derived
    kernel.touches.add(Touch(access, low.alternatives, high.atoms, derived, low.offset, low.scale, tensor_map))


def _pointed(low: Word, high: Word, part: int, state: State, kernel: Kernel) -> Word:
    """What is read through a generic or global address."""
    words: list[Word] = []
    for atoms in low.alternatives:
        origins = {atom.origin for atom in atoms}
        one = Word(frozenset([atoms]), frozenset(), low.offset, low.scale)
        if BLOCK in atoms:
            place = one.offset + 4 * part
            exact = low.scale == 0
            words.append(kernel.constant(0, place) if exact else kernel.element(0, place, low.scale))
        elif Origin.STACK in origins:
            words.append(state.load_stack(one, part))
        elif Origin.WINDOW in origins:
            words += [kernel.shared, state.load_stack(UNKNOWN, part)]
        else:
            words.append(LOADED_WORD)
            if any(atom.origin == Origin.WINDOW for atom in high.atoms):
                words.append(kernel.shared)
    return join_all(words)


def _demoted(instruction: Instruction, word: Word) -> Word:
    """Bytes and half words are no addresses."""
    return derive([word]) if _SMALL & set(instruction.modifiers) else word


def _load(instruction: Instruction, state: State, kernel: Kernel) -> None:
    memory = _memory_operands(instruction)
    if not memory:
        return
    register, _ = _destination(instruction)
    low, high = _address(memory[0], state)
    touch(kernel, Access.READ, (low, high))
    parts = range(_width(instruction))
    words = [_demoted(instruction, _pointed(low, high, part, state, kernel)) for part in parts]
    _put(instruction, state, register, words)


def _stored(instruction: Instruction, state: State, kernel: Kernel) -> list[Word]:
    """The words that a store writes: the operand after the address."""
    seen = False
    for operand in instruction.operands:
        if operand.kind == Kind.MEMORY:
            seen = True
        elif seen and operand.kind in (Kind.REGISTER, Kind.CONSTANT, Kind.IMMEDIATE):
            parts = range(_width(instruction))
            return [_demoted(instruction, _word(operand, state, kernel, part)) for part in parts]
    return []


def _store(instruction: Instruction, state: State, kernel: Kernel) -> None:
    memory = _memory_operands(instruction)
    if not memory:
        return
    low, high = _address(memory[0], state)
    touch(kernel, Access.WRITE, (low, high))
    _spill_generic(low, high, _stored(instruction, state, kernel), state, kernel)


def _spill_generic(low: Word, high: Word, words: list[Word], state: State, kernel: Kernel) -> None:
    """Stores through a generic address may hit the stack or shared memory."""
    origins = {atom.origin for atom in low.atoms | high.atoms}
    for part, word in enumerate(words):
        if Origin.STACK in origins:
            state.store_stack(low, part, word, False)
        elif Origin.WINDOW in origins:
            kernel.store_shared(word)


def _atomic(instruction: Instruction, state: State, kernel: Kernel) -> None:
    memory = _memory_operands(instruction)
    if not memory:
        return
    low, high = _address(memory[0], state)
    touch(kernel, BOTH, (low, high))
    register, _ = _destination(instruction)
    word = join(_pointed(low, high, 0, state, kernel), LOADED_WORD)
    _put(instruction, state, register, [word] * _width(instruction))
    _spill_generic(low, high, _stored(instruction, state, kernel), state, kernel)


def _load_local(instruction: Instruction, state: State, kernel: Kernel) -> None:
    memory = _memory_operands(instruction)
    if memory:
        register, _ = _destination(instruction)
        low, _ = _address(memory[0], state)
        parts = range(_width(instruction))
        place = low if any(a.origin == Origin.STACK for a in low.atoms) else UNKNOWN
        _put(instruction, state, register, [_demoted(instruction, state.load_stack(place, p)) for p in parts])


def _store_local(instruction: Instruction, state: State, kernel: Kernel) -> None:
    memory = _memory_operands(instruction)
    if memory:
        low, _ = _address(memory[0], state)
        place = low if any(a.origin == Origin.STACK for a in low.atoms) else UNKNOWN
        for part, word in enumerate(_stored(instruction, state, kernel)):
            state.store_stack(place, part, word, instruction.always)


def _load_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, _ = _destination(instruction)
    _put(instruction, state, register, [_demoted(instruction, kernel.shared)] * _width(instruction))


def _store_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    for word in _stored(instruction, state, kernel):
        kernel.store_shared(word)


def _atomic_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    _store_shared(instruction, state, kernel)
    _load_shared(instruction, state, kernel)


def _load_constant(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = _destination(instruction)
    if sources and sources[0].kind == Kind.CONSTANT:
        parts = range(_width(instruction))
        words = [_demoted(instruction, _constant(sources[0], state, kernel, part)) for part in parts]
        _put(instruction, state, register, words)
    else:
        _put(instruction, state, register, [LOADED_WORD] * _width(instruction))


def _copy_to_shared(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """``LDGSTS [shared], [global]``."""
    memory = _memory_operands(instruction)
    if len(memory) > 1:
        touch(kernel, Access.READ, _address(memory[1], state))
        kernel.store_shared(LOADED_WORD)


def _bulk_copy(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """``UBLKCP.S.G [shared], [global]`` and the other way round; ``UBLKRED`` adds to what is there."""
    memory = _memory_operands(instruction)
    spaces = [modifier for modifier in instruction.modifiers if modifier in ("S", "G", "L")][:2]
    for operand, space, written in zip(memory, spaces, (True, False), strict=False):
        if space == "G":
            both = BOTH if instruction.name == "UBLKRED" else Access.WRITE
            touch(kernel, both if written else Access.READ, _address(operand, state))
            if not written:
                kernel.store_shared(LOADED_WORD)
    if len(spaces) < 2:  # another form: anything may be meant
        for operand in memory:
            touch(kernel, BOTH, _address(operand, state))


def _tensor(access: Access) -> _Handler:
    """Tensor copies: the second operand in brackets is the address of the tensor map."""

    def handler(instruction: Instruction, state: State, kernel: Kernel) -> None:
        memory = _memory_operands(instruction)
        if memory:
            touch(kernel, access, _address(memory[min(1, len(memory) - 1)], state), True)
        if access == Access.READ:
            kernel.store_shared(LOADED_WORD)

    return handler


def _texture(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """What a texture or surface handle stands for is not to be seen here."""
    if instruction.name != "TXQ":
        kernel.indirect |= Access.READ
    for operand in instruction.operands[:2]:
        if operand.kind == Kind.REGISTER:
            _put(instruction, state, operand.register, [LOADED_NUMBER] * 2)


def _surface(instruction: Instruction, state: State, kernel: Kernel) -> None:
    kernel.indirect |= Access.WRITE if instruction.name == "SUST" else BOTH
    if instruction.name != "SUST":
        _texture(instruction, state, kernel)


_TABLE: dict[str, _Handler] = {
    **dict.fromkeys(("MOV", "MOV32I", "R2UR", "IADD3", "IADD", "IADD32I", "VIADD"), _addition),
    **dict.fromkeys(("SEL", "FSEL", "IMNMX", "VIMNMX", "VIMNMX3"), _each(_either)),
    "IMAD": _imad,
    "LEA": _lea,
    "SHF": _shift,
    "SHL": _shift,
    "SHR": _shift,
    "LOP3": _lop3,
    "VIADDMNMX": _extremum,
    "SHFL": _shuffle,
    "HFMA2": _constant_halves,
    **dict.fromkeys(("S2R", "S2UR", "CS2R", "B2R", "LEPC"), _special),
    **dict.fromkeys(("LDC", "LDCU", "ULDC"), _load_constant),
    "LDGSTS": _copy_to_shared,
    **dict.fromkeys(("LD", "LDG"), _load),
    **dict.fromkeys(("ST", "STG"), _store),
    **dict.fromkeys(("ATOM", "ATOMG", "RED", "REDG"), _atomic),
    "LDL": _load_local,
    "STL": _store_local,
    **dict.fromkeys(("LDS", "LDSM"), _load_shared),
    **dict.fromkeys(("STS", "STSM", "STAS", "REDAS"), _store_shared),
    **dict.fromkeys(("ATOMS", "ATOMSM"), _atomic_shared),
    **dict.fromkeys(("BLKCP", "BLKRED"), _bulk_copy),
    "UTMALDG": _tensor(Access.READ),
    "UTMASTG": _tensor(Access.WRITE),
    "UTMAREDG": _tensor(BOTH),
    **dict.fromkeys(("SUST", "SURED", "SUATOM"), _surface),
    **dict.fromkeys(_TEXTURES, _texture),
}

_PREFIXES: tuple[tuple[str, _Handler], ...] = (
    ("LDG", _load),
    ("STG", _store),
    ("ATOMG", _atomic),
    ("REDG", _atomic),
    ("UTMA", _tensor(BOTH)),
    ("TLD", _texture),
    ("SU", _surface),
)

_handlers: dict[str, _Handler] = {}
"""Handlers by name, filled as names are met. Any thread may add one; they all add the same."""
