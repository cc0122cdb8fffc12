"""Disassembled machine code as instructions: a parser of what ``nvdisasm -c`` prints.

One line is one instruction; labels and directives stand between them::

    \t.target\tsm_90
    \t.section\t.text.scale,"ax",@progbits
    scale:
            /*0000*/                   LDC R1, c[0x0][0x28] ;
            /*0010*/              @!P0 LDG.E.64 R4, desc[UR4][R2.64+0x8] ;
            /*0020*/                   BRA `(.L_x_0) ;

The JSON that newer disassemblers print is no use to us: it leaves labels out and cuts functions off from the kernel
that they belong to. Instructions are 16 bytes long since sm_70, which is as old as CUDA 13 knows.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

UNIFORM = 256
"""Uniform registers (UR) are numbered from here, so that one table holds both kinds."""

ZERO = -1
"""The registers that always read 0: RZ and URZ."""


UNREADABLE = "?"
"""The name of an instruction of which only the address could be read."""


class Kind(enum.IntEnum):
    """What an operand is."""

    REGISTER = 0
    PREDICATE = 1
    IMMEDIATE = 2
    CONSTANT = 3
    """``c[bank][register + offset]``."""
    MEMORY = 4
    """``[register + uniform register + offset]``."""
    LABEL = 5
    OTHER = 6
    """Special registers, barriers, floating-point numbers, matrix descriptors: of no use to us but their text."""


@dataclass(frozen=True)
class Operand:
    """One operand. Fields that its kind does not have keep their defaults."""

    kind: Kind
    text: str
    register: int = ZERO
    second: int = ZERO
    """The uniform register added in a memory operand."""
    narrow: bool = False
    """A memory operand whose first register is a 32-bit offset, not half of an address."""
    value: int = 0
    """The immediate, or the offset."""
    bank: int = 0
    """Constant bank; -1 where a register names it."""
    negated: bool = False
    """Minus, complement or absolute value: whatever stood there, it is no address any more."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``modifiers`` are what follows the name, separated by dots."""

    address: int
    predicate: str
    """Empty, or as in ``!P0``."""
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    targets: tuple[str, ...] = ()
    """Labels that it names, those that a disassembler found for an indirect branch included."""

    @property
    def never(self) -> bool:
        """Whether the predicate is never true: the assembler writes such instructions to keep distances."""
        return self.predicate in ("!PT", "!UPT")

    @property
    def always(self) -> bool:
        """Whether there is nothing that could keep it from being executed."""
        return self.predicate in ("", "PT", "UPT")


@dataclass
class Section:
    """One executable section: a kernel with the functions that belong to it, or one function."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Position in ``instructions``."""
    functions: set[str] = field(default_factory=set)
    """Labels of functions in here, the section's own name not among them."""


@dataclass
class Listing:
    """All that was disassembled."""

    architecture: int = 0
    """As in 90 for sm_90; 0 where the text does not say."""
    sections: dict[str, Section] = field(default_factory=dict)


_TARGET = re.compile(r'\s*\.target\s+"?sm_(\d+)')
_SECTION = re.compile(r'\s*\.section\s+"?\.text\.([^",\s]+)')
_OTHER_SECTION = re.compile(r"\s*\.section\s")
_FUNCTION = re.compile(r"\s*\.type\s+\"?([^\",\s]+)\"?,\s*@function")
_LABEL = re.compile(r"\s*([^\s:/]+):\s*$")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-fA-F]+)\*/\s*[{]?\s*(?:@(!?U?P[0-9T]+)\s+)?([A-Za-z_][\w.]*)\s*(.*)$")
_ADDRESS = re.compile(r"\s*/\*([0-9a-fA-F]+)\*/")
_ENCODING = re.compile(r"/\*\s*0x[0-9a-fA-F]+\s*\*/")
_TARGETS = re.compile(r'\(\*"BRANCH_TARGETS\s+([^"]*)"\*\)')
_NOTE = re.compile(r"\(\*.*?\*\)")
_REGISTER = re.compile(r"(U?)R(Z|\d+)((?:\.\w+)*)$")
_PREDICATE = re.compile(r"!?U?P(?:T|R|\d+)$")
_IMMEDIATE = re.compile(r"(-?)(?:0x([0-9a-fA-F]+)|(\d+))$")
_CONSTANT = re.compile(r"c(x?)\[([^\]]*)\]\[([^\]]*)\]((?:\.\w+)*)$")
_MEMORY = re.compile(r"(?:desc\[[^\]]*\])?\[([^\]]*)\]((?:\.\w+)*)$")
_TERM = re.compile(r"(-?)(?:(U?)R(Z|\d+)((?:\.\w+)*)|0x([0-9a-fA-F]+))")
_JUMPS = frozenset(("CALL", "RET", "BRX", "BRXU", "JMX", "JMXU"))
_APART = re.compile(r"(?<=[\w\]])\s+(?=[`0-9-])")  # "CALL.REL.NOINC R6 `(f)" has no comma
_SYMBOL = re.compile(r"(?:\d+@\w+|fun@\w+|`)\((.*)\)$")


def parse(text: str) -> Listing:
    """Read what the disassembler printed. Lines that are none of the above are passed over, if they have no address.

    An instruction written in a way not known here may be a store: it must not get lost.
    """
    listing = Listing()
    section: Section | None = None
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is not None:
            if section is not None:
                section.instructions.append(_instruction(*found.groups()))
            continue
        found = _SECTION.match(line)
        if found is not None:
            section = listing.sections.setdefault(found[1], Section(found[1]))
        elif _OTHER_SECTION.match(line):
            section = None
        elif (found := _TARGET.match(line)) is not None:
            listing.architecture = int(found[1])
        elif section is not None and (found := _FUNCTION.match(line)) is not None:
            if found[1] != section.name:
                section.functions.add(found[1])
        elif section is not None and (found := _LABEL.match(line)) is not None:
            section.labels[found[1]] = len(section.instructions)
        elif section is not None and (found := _ADDRESS.match(line)) is not None:
            section.instructions.append(Instruction(int(found[1], 16), "", UNREADABLE, (), ()))
    return listing


def _instruction(address: str, predicate: str | None, opcode: str, rest: str) -> Instruction:
    rest = _ENCODING.sub("", rest)
    targets: list[str] = []
    noted = _TARGETS.search(rest)
    if noted is not None:
        targets += [name.strip() for name in noted[1].split(",") if name.strip()]
    rest = _NOTE.sub("", rest).strip().rstrip(";}").strip()
    name, *modifiers = opcode.split(".")
    if name in _JUMPS:
        rest = _APART.sub(", ", rest)
    operands = tuple(_operand(part) for part in _split(rest))
    targets += [operand.text for operand in operands if operand.kind == Kind.LABEL]
    return Instruction(int(address, 16), predicate or "", name, tuple(modifiers), operands, tuple(targets))


def _split(text: str) -> list[str]:
    """Split at commas that stand in no bracket."""
    parts: list[str] = []
    depth = start = 0
    for position, character in enumerate(text):
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        elif character == "," and depth <= 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


_known: dict[str, Operand] = {}
"""Operands by their text: a listing of a million lines has a few thousand of them. Only ever added to."""


def _operand(text: str) -> Operand:
    found = _known.get(text)
    if found is None:
        if len(_known) > 100_000:
            _known.clear()
        found = _known[text] = _read_operand(text)
    return found


def _read_operand(text: str) -> Operand:
    if _PREDICATE.match(text):
        return Operand(Kind.PREDICATE, text)
    symbol = _SYMBOL.match(text)
    if symbol is not None:
        return Operand(Kind.LABEL, symbol[1])
    immediate = _IMMEDIATE.match(text)
    if immediate is not None:
        value = int(immediate[2], 16) if immediate[2] is not None else int(immediate[3])
        return Operand(Kind.IMMEDIATE, text, value=-value if immediate[1] else value)
    bare = text.lstrip("-~|!").rstrip("|")
    negated = bare != text
    # "|R4|.reuse" would leave the closing bar inside; nothing of ours depends on such an operand.
    register = _REGISTER.match(bare)
    if register is not None:
        return Operand(Kind.REGISTER, text, _number(register[1], register[2]), negated=negated)
    constant = _CONSTANT.match(bare)
    if constant is not None:
        return _constant(text, constant[1], constant[2], constant[3], negated)
    memory = _MEMORY.match(bare)
    if memory is not None:
        return _memory(text, memory[1])
    return Operand(Kind.OTHER, text)


def _number(uniform: str, digits: str) -> int:
    if digits == "Z":
        return ZERO
    return int(digits) + (UNIFORM if uniform else 0)


def _constant(text: str, indexed: str, bank: str, inner: str, negated: bool) -> Operand:
    register, _, _, offset = _terms(inner)
    number = -1 if indexed or not bank.startswith("0x") else int(bank, 16)
    return Operand(Kind.CONSTANT, text, register, value=offset, bank=number, negated=negated)


def _memory(text: str, inner: str) -> Operand:
    register, second, narrow, offset = _terms(inner)
    return Operand(Kind.MEMORY, text, register, second, narrow, offset)


def _terms(inner: str) -> tuple[int, int, bool, int]:
    """The registers and the offset of ``R2.U32+UR4+0x10``; a lone uniform register comes first."""
    registers: list[int] = []
    narrow = False
    offset = 0
    for minus, uniform, digits, suffix, number in _TERM.findall(inner):
        if number:
            offset += -int(number, 16) if minus else int(number, 16)
        else:
            narrow = narrow or ".U32" in suffix or ".S32" in suffix
            registers.append(_number(uniform, digits))
    registers += [ZERO, ZERO]
    return registers[0], registers[1], narrow, offset
