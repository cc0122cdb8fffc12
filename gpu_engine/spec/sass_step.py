"""What one machine instruction does to registers, stack and memory, as far as addresses go.

NVIDIA documents no more than the names of instructions (CUDA Binary Utilities, "Instruction Set Reference"); the
meaning of operands is from compiled kernels. An instruction that is not known here is taken to mix all that it reads
into its first register, and to read and write what its addresses name, so a new one can cost precision but loses no
address and no access.

Instructions of the uniform data path (``UIADD3``) mean what their namesakes mean and are treated as one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from phos.gpu_engine.spec import sass_memory as memory
from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.sass_operands import Handler, destination, put, word_of, words_in
from phos.gpu_engine.spec.sass_state import WINDOW_WORD, Kernel, State
from phos.gpu_engine.spec.sass_text import UNIFORM, Instruction, Kind, Operand
from phos.gpu_engine.spec.sass_value import (
    COUNT,
    KEY,
    LOADED_WORD,
    NOTHING,
    UNKNOWN,
    Origin,
    Word,
    add,
    derive,
    join,
    join_all,
    mix,
    multiply,
    number,
    without_tables,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Results that are no addresses whatever went in. Floating point, conversions and counting; the matrix units.
_NUMBERS = _names(
    """
    BMSK BREV FLO POPC I2F I2FP F2I F2F F2FP F2IP FRND I2I I2IP IABS IDP IDP4A SGXT MUFU IMMA BMMA DMMA HMMA HGMMA
    IGMMA QGMMA BGMMA OMMA QMMA FADD FMUL FFMA FADD32I FMUL32I FFMA32I FSET FSWZADD FMNMX FMNMX3 FSEL2 DADD DMUL
    DFMA DSET HADD2 HMUL2 HFMA2 HMNMX2 HSET2 HADD2_32I HMUL2_32I HFMA2_32I VOTE VOTEU MATCH FADD2 FMUL2
    FFMA2 BF16_V2 VHMNMX SHF SHL SHR P2R ISCADD2
    """
)

# Those of floating point that compute: what they make has none of the bytes of what they were given.
_COMPUTED = _names(
    """
    MUFU HMMA HGMMA QGMMA QMMA OMMA DMMA FADD FMUL FFMA FADD32I FMUL32I FFMA32I FSWZADD DADD DMUL DFMA HADD2 HMUL2
    HFMA2 HADD2_32I HMUL2_32I HFMA2_32I FADD2 FMUL2 FFMA2
    """
)

# Instructions that write predicates only, or nothing that could become an address.
_SILENT = _names(
    """
    ISETP FSETP DSETP HSETP2 PLOP3 PSETP FCHK R2P NOP BAR BSSY BSYNC BREAK BMOV DEPBAR LDGDEPBAR LDTDEPBAR MEMBAR
    ERRBAR CCTLL CCTLT EXIT BRA BRX JMP JMX RET KILL BPT YIELD NANOSLEEP WARPSYNC WARPGROUP WARPGROUPSET FENCE
    ARRIVES PREEXIT ACQBULK CGABAR_ARV CGABAR_WAIT CGABAR_GET CGABAR_SET UTMACCTL UTMAPF UTMACMDFLUSH
    UTMAREDCMDFLUSH BLKPF ELECT SETMAXREG ENDCOLLECTIVE PMTRIG QSPC SETCTAID SETLMEMBASE UTCBAR UTCATOMSWS
    UTCHMMA UTCIMMA UTCQMMA UTCOMMA UTCCP UTCSHIFT SYNCS CALL MEMSETS
    GETNEXTWORKID
    """
)

# What multiplies 0 by 0 and adds a register, as compilers copy one.
_COPIES = (("U32",), ("MOV", "U32"), ("MOV",), ())

_COMPARES = ("ISETP", "UISETP")
COMPARISON_OPERANDS = 5

_TEXTURES = ("TEX", "TLD", "TXD", "TMML", "TXQ", "SULD")

_RETURN = {"Rpc": 1024, "Rpc.LO": 1024, "Rpc.HI": 1025}
"""The halves of the register that says where to return to, numbered above all others."""


def step(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """Carry out one instruction on a state; branches and calls do nothing here."""
    if instruction.never:
        return
    name = instruction.name
    handler = _handlers.get(name)
    if handler is None:
        handler = _handlers[name] = _find(name)
    guards = _moved(instruction, state) if state.guarded else {}
    state.predicate = "" if instruction.always else instruction.predicate
    handler(instruction, state, kernel)
    state.predicate = ""
    state.guarded.update(guards)
    if state.guarded or state.voted or state.tests or name in _COMPARES or name in ("P2R", "VOTEU"):
        _change_predicates(instruction, state)


def _moved(instruction: Instruction, state: State) -> dict[int, tuple[str, Word]]:
    """What registers hold under a predicate once an instruction has copied others, which hold it, to them.

    A uniform register has the word of some thread of the warp, for which the predicate may be another than for those
    that read it.
    """
    name, operands = instruction.name.removeprefix("U"), instruction.operands
    copies = name in ("MOV", "R2UR") or (name == "IMAD" and instruction.modifiers in _COPIES)
    if not copies or not instruction.always or operands[0].kind != Kind.REGISTER:
        return {}
    zeros, source = operands[1:-1], operands[-1]
    if source.kind != Kind.REGISTER or source.negated or any(zero.register >= 0 for zero in zeros):
        return {}
    to, register = operands[0].register, source.register
    if to < 0 or register < 0 or to >= UNIFORM > register:
        return {}
    parts = range(2 if "64" in instruction.modifiers else 1)
    return {to + part: state.guarded[register + part] for part in parts if register + part in state.guarded}


def _change_predicates(instruction: Instruction, state: State) -> None:
    """Predicates written stand first, or right behind the first register; those read stand last."""
    if instruction.name in ("P2R", "UP2UR"):
        if instruction.name == "P2R" and instruction.always:
            _note_saved(instruction, state)
        return  # puts them into a register
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
    if instruction.name in _COMPARES and instruction.always:
        _note_comparison(instruction, state)


def _note_saved(instruction: Instruction, state: State) -> None:
    """``P2R R1, PR, RZ, 0x4``: P2 by itself, which ``ISETP.NE.AND P0, PT, R1, RZ, PT`` brings back."""
    kinds = [operand.kind for operand in instruction.operands]
    if kinds != [Kind.REGISTER, Kind.PREDICATE, Kind.REGISTER, Kind.IMMEDIATE] or instruction.modifiers:
        return
    to, _, rest, mask = instruction.operands
    if rest.register < 0 <= to.register and mask.value.bit_count() == 1:
        number = mask.value.bit_length() - 1
        state.compare(f"P{number}", f"ISETP.NE.AND {to.text} RZ", frozenset([to.register]))


def _note_comparison(instruction: Instruction, state: State) -> None:
    """``ISETP.NE.AND P0, PT, R1, R2, PT``: of two numbers, and nothing else goes in."""
    if len(instruction.operands) != COMPARISON_OPERANDS:
        return
    result, opposite, *compared, also = instruction.operands
    if result.kind != Kind.PREDICATE or (opposite.text, also.text) not in (("PT", "PT"), ("UPT", "UPT")):
        return
    if any(operand.kind not in (Kind.REGISTER, Kind.IMMEDIATE) for operand in compared):
        return
    words = [".".join((instruction.name, *instruction.modifiers)), *(o.text.removesuffix(".reuse") for o in compared)]
    registers = frozenset(operand.register for operand in compared if operand.register >= 0)
    state.compare(result.text, " ".join(words), registers)


def _find(name: str) -> Handler:
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


# Arithmetic.


def _silent(instruction: Instruction, state: State, kernel: Kernel) -> None:
    pass


def _each(combine: Callable[[list[Word]], Word]) -> Handler:
    """A handler that combines the operands word by word."""

    def handler(instruction: Instruction, state: State, kernel: Kernel) -> None:
        register, sources = destination(instruction)
        parts = range(words_in(instruction))  # IMNMX.U64 has two, as SEL.64
        words = [combine([word_of(source, state, kernel, part) for source in sources]) for part in parts]
        put(instruction, state, register, words)

    return handler


def _sum(words: list[Word]) -> Word:
    result = words[0] if words else NOTHING
    for word in words[1:]:
        result = add(result, word)
    return result


def _addition(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """A sum. A register that is added to itself keeps its scale better than two registers of which nothing is known."""
    register, sources = destination(instruction)
    counts: dict[Operand, int] = {}
    for source in sources:
        counts[source] = counts.get(source, 0) + 1
    parts = range(2 if "64" in instruction.modifiers else 1)
    words = [
        _sum([multiply(word_of(source, state, kernel, part), times) for source, times in counts.items()])
        for part in parts
    ]
    put(instruction, state, register, words)


def _unknown(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    words = [mix([word_of(source, state, kernel, part) for source in sources]) for part in range(words_in(instruction))]
    words = [without_tables(word) for word in words]
    if memory.anything(instruction, state, kernel):
        words = [join(word, LOADED_WORD) for word in words]
    put(instruction, state, register, words)


def _number(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    wide = instruction.name.startswith("D") or words_in(instruction) == 2
    parts = range(2 if wide else 1)
    word = derive([word_of(source, state, kernel, part) for source in sources for part in parts])
    if instruction.name in _COMPUTED and word.derived:
        word = word._replace(derived=frozenset(atom for atom in word.derived if atom.origin != Origin.BYTES))
    put(instruction, state, register, [word] * (2 if _wide_result(instruction) else 1))


def _wide_result(instruction: Instruction) -> bool:
    """Conversions name the type that they make, the one they take, or both: ``I2F.U64 R5, R2`` makes 32 bits."""
    modifiers = instruction.modifiers
    name = instruction.name.removeprefix("U")
    if name == "I2F":
        return "F64" in modifiers
    if name == "F2I":
        return "S64" in modifiers or "U64" in modifiers
    if name == "F2F":
        return modifiers[:1] == ("F64",)
    if name == "MATCH":
        return False  # a mask of threads
    return name.startswith("D") or words_in(instruction) == 2


def _product(first: Word, second: Word) -> Word:
    if second.exact:
        return multiply(first, second.offset)
    if first.exact:
        return multiply(second, first.offset)
    word = derive([first, second])
    scale = (first.scale if first.plain and first.offset % max(first.scale, 1) == 0 else 1) or 1
    other = (second.scale if second.plain and second.offset % max(second.scale, 1) == 0 else 1) or 1
    rising = all(one.plain and one.upwards and one.offset >= 0 for one in (first, second))
    return Word(word.alternatives, word.derived, 0, scale * other, rising)


def _imad(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    if len(sources) < 3:
        _unknown(instruction, state, kernel)
        return
    first, second = (word_of(source, state, kernel) for source in sources[:2])
    low = word_of(sources[2], state, kernel)
    if second.exact and first.plain and sources[0] == sources[2] and not instruction.modifiers:
        put(instruction, state, register, [multiply(first, second.offset + 1)])
        return
    if "WIDE" in instruction.modifiers:
        high = word_of(sources[2], state, kernel, 1)
        carried = NOTHING if _small_product(first, second) else derive([first, second])
        put(instruction, state, register, [add(_product(first, second), low), add(carried, high)])
    elif "HI" in instruction.modifiers:
        high = word_of(sources[2], state, kernel, 1)
        put(instruction, state, register, [add(derive([first, second, low]), high)])
    else:
        put(instruction, state, register, [add(_product(first, second), low)])


def _small_product(first: Word, second: Word) -> bool:
    """Whether the upper half of a product is known to be 0."""
    return first.exact and second.exact and 0 <= first.offset * second.offset < 1 << 31


def _lea(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    if len(sources) < 2:
        _unknown(instruction, state, kernel)
        return
    shift = sources[-1].value if len(sources) > 2 and sources[-1].kind == Kind.IMMEDIATE else 0
    index, base = (word_of(source, state, kernel) for source in sources[:2])
    if "HI" in instruction.modifiers:
        above = word_of(sources[2], state, kernel) if len(sources) > 3 else NOTHING
        upper = above if shift == 0 else derive([above])
        put(instruction, state, register, [add(add(derive([index]), upper), base)])
        return
    low = add(multiply(index, 1 << (shift & 31)), base)
    if "64" in instruction.modifiers:
        parts = derive([index, word_of(sources[0], state, kernel, 1)])
        if shift == 0:
            parts = word_of(sources[0], state, kernel, 1)
        put(instruction, state, register, [low, add(parts, word_of(sources[1], state, kernel, 1))])
    else:
        put(instruction, state, register, [low])


def _shift(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    modifiers = instruction.modifiers
    left = instruction.name.endswith("SHL") or "L" in modifiers
    plain_left = left and "HI" not in modifiers and len(sources) >= 2
    amount = word_of(sources[1], state, kernel) if len(sources) >= 2 else UNKNOWN
    if plain_left and amount.exact and 0 <= amount.offset < 32 and "64" not in modifiers:
        put(instruction, state, register, [multiply(word_of(sources[0], state, kernel), 1 << amount.offset)])
        return
    words = [word_of(source, state, kernel) for source in sources]
    word = derive(words)
    if not left and all(one.plain and one.upwards and one.offset >= 0 for one in words):
        word = word._replace(rising=True)
    put(instruction, state, register, [word] * (2 if modifiers[:1] == ("64",) else 1))


# Truth tables of two operands' exclusive or, and of three's.
_EXCLUSIVE = (0x3C, 0x5A, 0x66, 0x96)
_OF_TWO = 0x3C


def _registers_tied(instruction: Instruction, table: int | None, values: list[Operand]) -> tuple[int, int] | None:
    """The two registers whose exclusive or this is."""
    if table != _OF_TWO or not instruction.always or "64" in instruction.modifiers:
        return None
    first, second = values[:2]
    if any(o.kind != Kind.REGISTER or o.register < 0 or o.negated for o in (first, second)):
        return None
    return (first.register, second.register) if first.register != second.register else None


def _untied(state: State, tied: tuple[int, int]) -> tuple[Word, int, int] | None:
    """If one of them is the exclusive or of a word and of the other: the word, the one and the other."""
    for mixed, other in (tied, tied[::-1]):
        word, partner = state.exclusive.get(mixed, (NOTHING, -1))
        if partner == other:
            return word, mixed, other
    return None


def _lop3(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    numeric = [s for s in sources if s.kind in (Kind.REGISTER, Kind.CONSTANT, Kind.IMMEDIATE)]
    # The last number is the truth table; 0xc0 is "first and second".
    table = numeric[-1].value if len(numeric) > 3 and numeric[-1].kind == Kind.IMMEDIATE else None
    values = numeric[:3]
    tied = _registers_tied(instruction, table, values)
    if tied is not None and (untied := _untied(state, tied)) is not None:
        word, mixed, other = untied
        left = state.read(other)
        put(instruction, state, register, [word])
        if register == other:
            state.exclusive[mixed] = left, other
        return
    words = []
    for part in range(2 if "64" in instruction.modifiers else 1):
        parts = [word_of(source, state, kernel, part) for source in values]
        word = mix(parts)
        mask = next((p.offset for p in parts[:2] if p.exact and p.offset), 0)
        if table == 0xC0 and mask and not all(p.exact for p in parts[:2]):
            word = Word(word.alternatives, word.derived, 0, mask & -mask, word.plain and mask > 0)
        if table in _EXCLUSIVE and sum(not one.plain for one in set(parts)) > 1:
            word = word._replace(alternatives=frozenset(atoms | {KEY} for atoms in word.alternatives))
        # An address with its lowest bits masked off is in its table still, near enough; one with a key is not.
        masked = table not in _EXCLUSIVE and sum(not one.exact for one in parts) == 1
        words.append(word if masked else without_tables(word))
    if tied is None:
        put(instruction, state, register, words)
        return
    kept, partner = tied[::-1] if register == tied[1] else tied
    held = state.read(kept)
    put(instruction, state, register, words)
    state.exclusive[register] = held, partner


def _either(words: list[Word]) -> Word:
    return join_all(words)


def _extremum(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """Minimum or maximum of a sum and a bound."""
    register, sources = destination(instruction)
    words = [word_of(source, state, kernel) for source in sources]
    put(instruction, state, register, [join(_sum(words[:2]), _sum(words[2:3]))])


def _shuffle(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    if sources:
        put(instruction, state, register, [word_of(sources[0], state, kernel)])


def _across(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """What the threads of a warp have, put together: where they all have the same address, that may be it."""
    register, sources = destination(instruction)
    if sources:
        put(instruction, state, register, [mix([word_of(sources[0], state, kernel)])])


def _aside(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """``RPCMOV``: where a function is to return to; compilers put other words aside there, too."""
    operands = [operand for operand in instruction.operands if operand.kind != Kind.PREDICATE]
    if len(operands) < 2:
        return
    to, source = operands[:2]
    place, origin = _RETURN.get(to.text), _RETURN.get(source.text)
    for part in range(words_in(instruction)):
        if origin is None:
            word = word_of(source, state, kernel, part)
        else:
            word = state.registers.get(origin + part, UNKNOWN)
        if place is None:
            put(instruction, state, to.register + part, [word])
        else:
            old = state.registers.get(place + part)
            state.registers[place + part] = word if instruction.always or old is None else join(old, word)


def _special(instruction: Instruction, state: State, kernel: Kernel) -> None:
    register, sources = destination(instruction)
    text = sources[0].text if sources else ""
    word = WINDOW_WORD if "WIN" in text else NOTHING if text == "SRZ" else COUNT if text.startswith("SR_") else UNKNOWN
    wide = instruction.name == "CS2R" and "32" not in instruction.modifiers
    put(instruction, state, register, [word] * (2 if wide else 1))


def _constant_halves(instruction: Instruction, state: State, kernel: Kernel) -> None:
    """``HFMA2 R, -RZ, RZ, high, low`` is how compilers load a number into a register on the floating-point side."""
    register, sources = destination(instruction)
    zero = len(sources) == 4 and all(s.kind == Kind.REGISTER and s.register < 0 for s in sources[:2])
    if zero:
        try:
            low, high = (struct.unpack("<H", struct.pack("<e", float(s.text)))[0] for s in (sources[3], sources[2]))
        except (ValueError, OverflowError):
            zero = False  # infinities and the like have spellings of their own; they are no addresses
        else:
            put(instruction, state, register, [number(high << 16 | low)])
    if not zero:
        _number(instruction, state, kernel)


_TABLE: dict[str, Handler] = {
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
    **dict.fromkeys(("REDUX", "CREDUX", "MOVM"), _across),
    "HFMA2": _constant_halves,
    **dict.fromkeys(("S2R", "S2UR", "CS2R", "B2R", "LEPC"), _special),
    "RPCMOV": _aside,
    **dict.fromkeys(("LDC", "LDCU", "ULDC"), memory.load_constant),
    "LDGSTS": memory.copy_to_shared,
    "CCTL": memory.cache,
    **dict.fromkeys(("LD", "LDG"), memory.load),
    **dict.fromkeys(("ST", "STG"), memory.store),
    **dict.fromkeys(("ATOM", "ATOMG", "RED", "REDG"), memory.atomic),
    "LDL": memory.load_local,
    "STL": memory.store_local,
    "LDS": memory.load_shared,
    **dict.fromkeys(("LDSM", "LDTM"), memory.load_matrix),
    **dict.fromkeys(("STS", "STAS", "REDS", "REDAS"), memory.store_shared),
    **dict.fromkeys(("STSM", "STTM"), memory.store_matrix),
    **dict.fromkeys(("ATOMS", "ATOMSM"), memory.atomic_shared),
    **dict.fromkeys(("BLKCP", "BLKRED"), memory.bulk_copy),
    "UTMALDG": memory.tensor(Access.READ),
    "UTMASTG": memory.tensor(Access.WRITE),
    "UTMAREDG": memory.tensor(memory.BOTH),
    **dict.fromkeys(("SUST", "SURED", "SUATOM"), memory.surface),
    **dict.fromkeys(_TEXTURES, memory.texture),
}

_PREFIXES: tuple[tuple[str, Handler], ...] = (
    ("LDG", memory.load),
    ("STG", memory.store),
    ("ATOMG", memory.atomic),
    ("REDG", memory.atomic),
    ("UTMA", memory.tensor(memory.BOTH)),
    ("TLD", memory.texture),
    ("SU", memory.surface),
)

_handlers: dict[str, Handler] = {}
"""Handlers by name, filled as names are met. Any thread may add one; they all add the same."""
