"""The parser of disassembled machine code: each form of operand, and any text whatever."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phos.gpu_engine.spec import sass_flow
from phos.gpu_engine.spec.descriptor import Parameter
from phos.gpu_engine.spec.sass_state import Layout
from phos.gpu_engine.spec.sass_text import UNIFORM, ZERO, Instruction, Kind, Operand, parse
from phos.gpu_engine.spec.sass_value import (
    ANY,
    MAX_ALTERNATIVES,
    NOTHING,
    Atom,
    Origin,
    add,
    join,
    join_all,
    multiply,
    number,
    of,
)

HERE = Path(__file__).parent / "spec" / "sass"


def one(line: str) -> Instruction:
    """The instruction in a line."""
    section = parse(f'.section .text.k,"ax",@progbits\n/*0010*/ {line} ;').sections["k"]
    assert len(section.instructions) == 1
    assert section.instructions[0].address == 0x10
    return section.instructions[0]


def operand(text: str) -> Operand:
    return one(f"OP {text}").operands[0]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("R4", (Kind.REGISTER, 4, ZERO, False, 0)),
        ("R4.reuse", (Kind.REGISTER, 4, ZERO, False, 0)),
        ("UR12", (Kind.REGISTER, UNIFORM + 12, ZERO, False, 0)),
        ("RZ", (Kind.REGISTER, ZERO, ZERO, False, 0)),
        ("URZ", (Kind.REGISTER, ZERO, ZERO, False, 0)),
        ("UP0", (Kind.PREDICATE, ZERO, ZERO, False, 0)),
        ("!PT", (Kind.PREDICATE, ZERO, ZERO, False, 0)),
        ("0x1f", (Kind.IMMEDIATE, ZERO, ZERO, False, 31)),
        ("-0x310", (Kind.IMMEDIATE, ZERO, ZERO, False, -0x310)),
        ("c[0x0][0x210]", (Kind.CONSTANT, ZERO, ZERO, False, 0x210)),
        ("c[0x0][R4+0x468]", (Kind.CONSTANT, 4, ZERO, False, 0x468)),
        ("c[0x4][RZ]", (Kind.CONSTANT, ZERO, ZERO, False, 0)),
        ("c[0x0][UR5+-0x10]", (Kind.CONSTANT, UNIFORM + 5, ZERO, False, -16)),
        ("[R1+0x108]", (Kind.MEMORY, 1, ZERO, False, 0x108)),
        ("[R2.64+-0x4]", (Kind.MEMORY, 2, ZERO, False, -4)),
        ("[R2.64+UR4+0x10]", (Kind.MEMORY, 2, UNIFORM + 4, False, 16)),
        ("[R2.U32+UR4]", (Kind.MEMORY, 2, UNIFORM + 4, True, 0)),
        ("desc[UR6][R2.64+0x8]", (Kind.MEMORY, 2, ZERO, False, 8)),
        ("desc[UR6][R2.U32+UR8+0x8]", (Kind.MEMORY, 2, UNIFORM + 8, True, 8)),
        ("[UR4]", (Kind.MEMORY, UNIFORM + 4, ZERO, False, 0)),
        ("SR_TID.X", (Kind.OTHER, ZERO, ZERO, False, 0)),
        ("gdesc[UR4]", (Kind.OTHER, ZERO, ZERO, False, 0)),
    ],
)
def test_an_operand_is_what_it_looks_like(text: str, expected: tuple[Kind, int, int, bool, int]) -> None:
    found = operand(text)
    assert (found.kind, found.register, found.second, found.narrow, found.value) == expected


def test_signs_and_bars_are_noticed() -> None:
    assert [operand(text).negated for text in ("-R4", "~UR7", "|R1|", "-c[0x0][0x160]", "R4")] == [True] * 4 + [False]
    assert operand("-R4").register == 4
    assert operand("-c[0x3][0x160]").bank == 3
    assert operand("cx[UR4][0x10]").bank == -1


def test_predicates_names_and_modifiers_are_told_apart() -> None:
    found = one("@!UP0 LDG.E.64.STRONG.GPU R4, desc[UR4][R2.64]")
    assert (found.predicate, found.name, found.modifiers) == ("!UP0", "LDG", ("E", "64", "STRONG", "GPU"))
    assert not found.always
    assert one("@!PT LDS RZ, [RZ]").never
    assert one("EXIT").always


def test_branches_know_where_they_go() -> None:
    assert one("@P0 BRA `(.L_x_1)").targets == (".L_x_1",)
    assert one("CALL.REL.NOINC `($k$_Z3getPKfi)").targets == ("$k$_Z3getPKfi",)
    assert one('BRX R2 -0xc0 (*"BRANCH_TARGETS .L_x_34,.L_x_35"*)').targets == (".L_x_34", ".L_x_35")
    call = one("CALL.REL.NOINC R6 `(k)")
    assert call.operands[0].register == 6
    assert call.targets == ("k",)
    assert one("RET.REL.NODEC R20 `(k)").operands[0].register == 20


def test_encodings_and_comments_are_passed_over() -> None:
    text = '.section .text.k,"ax",@progbits\n/*0000*/ MOV R1, R2 ; /* 0x0000000000017b82 */\n/* 0x000fe20000000800 */\n'
    section = parse(text).sections["k"]
    assert [i.name for i in section.instructions] == ["MOV"]
    assert [o.text for o in section.instructions[0].operands] == ["R1", "R2"]


def test_labels_stand_before_what_follows_them_and_functions_are_known() -> None:
    listing = parse((HERE / "sm_90.txt").read_text())
    section = listing.sections["calls"]
    assert section.labels["calls"] == 0
    assert section.functions == {"$calls$_Z3getPKfi", "$calls$_Z3putPfif"}
    start = section.labels["$calls$_Z3getPKfi"]
    assert section.instructions[start - 1].name == "EXIT"
    assert [i.address for i in section.instructions] == [16 * n for n in range(len(section.instructions))]


_WORDS = """
    LDG.E.64 STG.E LDC.64 ULDC IADD3 IADD3.X IMAD.WIDE LEA.HI.X MOV SEL SHF.L.U32 LOP3.LUT STL.64 LDL.64 STS LDS.128
    BRA CALL.REL.NOINC RET.REL.NODEC BSSY BSYNC EXIT UTMALDG.2D UBLKCP.S.G ATOMG.E.ADD RED.E.ADD R2UR VOTEU.ANY BRX
    HFMA2 LDGSTS.E NEWOP.64 TEX BMOV.32 SHFL.IDX PLOP3.LUT ISETP.GE.AND
"""
_words = st.sampled_from(_WORDS.split())
_OPERANDS = """
    R0 R2 R3 R4.reuse -R5 UR4 RZ URZ P0 !P1 UP2 PT 0x0 0x10 -0x8 1.875 +INF c[0x0][0x210] c[0x0][0x218]
    c[0x0][0x198] c[0x0][R2+0x210] c[0x4][0x8] c[0x3][R0] desc[UR4][R2.64] [R2] [R1+0x8] [R0] [UR4] [R2.64+UR4+0x10]
    `(.L_x_0) `(.L_x_1) `(k) B0 SR_TID.X gdesc[UR4] 0xc0 c[ [R ] `( 32@lo(k) |R7|.reuse
"""
_operands = st.sampled_from(_OPERANDS.split())


@st.composite
def _lines(draw: st.DrawFn) -> str:
    guard = draw(st.sampled_from(["", "@P0 ", "@!P0 ", "@!PT ", "@UP1 "]))
    return f"{guard}{draw(_words)} {', '.join(draw(st.lists(_operands, max_size=5)))}"


@settings(max_examples=300)
@given(st.lists(_lines(), max_size=25), st.integers(0, 24), st.integers(0, 24))
def test_any_row_of_instructions_comes_to_an_end(lines: list[str], first: int, second: int) -> None:
    text = ['.section .text.k,"ax",@progbits', "k:", "/*0000*/ LDC R1, c[0x0][0x28] ;"]
    for position, line in enumerate(lines):
        text += [f".L_x_{n}:" for n, place in enumerate((first, second)) if place == position]
        text.append(f"/*{16 * position + 16:04x}*/ {line} ;")
    parameters = (Parameter(0, 8), Parameter(8, 200))
    found = sass_flow.describe_listing(parse("\n".join(text)), {"k": (parameters, Layout(0x210, 208, 90))}, {8: "free"})
    for field in found["k"].fields:
        assert 0 <= field.offset < field.offset + field.size <= 208
    ends = [field.offset + field.size for field in found["k"].fields]
    assert all(end <= field.offset for end, field in zip(ends, found["k"].fields[1:], strict=False))


@settings(max_examples=300)
@given(st.text(max_size=400))
def test_any_text_is_parsed(text: str) -> None:
    parse('.section .text.k,"ax",@progbits\n' + text)
    parse('.section .text.k,"ax",@progbits\n/*0000*/ ' + text)


_numbers = st.integers(-(1 << 20), 1 << 20)


@given(_numbers, _numbers, st.integers(-64, 64))
def test_known_numbers_are_added_and_multiplied(a: int, b: int, factor: int) -> None:
    assert add(number(a), number(b)).offset == a + b
    assert multiply(number(a), factor).offset == a * factor
    assert multiply(number(a), factor).exact


@given(st.lists(_numbers, min_size=1, max_size=8))
def test_a_join_covers_every_number_that_went_in(values: list[int]) -> None:
    word = join_all(number(value) for value in values)
    for value in values:
        assert (value - word.offset) % word.scale == 0 if word.scale else value == word.offset
    assert join(word, word) == word


def test_very_many_alternatives_become_one_that_stands_for_all() -> None:
    atoms = [Atom(Origin.PARAMETER, 8 * n) for n in range(MAX_ALTERNATIVES + 5)]
    word = join_all(of(atom) for atom in atoms)
    assert word.atoms >= {*atoms, ANY}
    assert len(word.alternatives) <= 5
    assert join(word, of(atoms[0])) == word
    assert add(NOTHING, word) == word
