"""Data flow over machine code: a pointer beside a 64-bit number that may be one by its place, and is none."""

from __future__ import annotations

import pytest

from phos.gpu_engine.spec.descriptor import Access, Parameter
from tests.unit.spec_access import BOTH, NONE, POINTER, WRITE, pointers
from tests.unit.test_spec_sass_instructions import P0, P1, P2, flow

STORE = """
    IADD3 R2, P0, R2, UR4, RZ
    IADD3.X R3, R3, UR5, RZ, P0, !PT
    STG.E desc[UR6][R2.64], R0
    EXIT
"""


def test_a_pointer_on_the_stack_was_never_0() -> None:
    found = flow(
        f"""
        LDC R1, c[0x0][0x28]
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        STL.64 [R1+0x40], R4
        LDL.64 R2, [R1+0x40]
        {STORE}
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)


def test_a_pointer_that_may_be_0_does_not_make_the_number_beside_it_one() -> None:
    """`(p > limit ? p : 0) + n`, and a pointer out of an array on the stack."""
    found = flow(
        f"""
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        SEL R2, R4, RZ, P1
        SEL R3, R5, RZ, P1
        {STORE}
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)
    found = flow(
        f"""
        LDC R1, c[0x0][0x28]
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        STL.64 [R1+0x40], R4
        STL.64 [R1+0x48], R4
        IMAD R6, R9, 0x8, R1
        LDL.64 R2, [R6+0x40]
        {STORE}
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)
    # Where the pointer is used by itself elsewhere, it is the one.
    found = flow(
        f"""
        LDC.64 R4, c[0x0][0x210]
        LDG.E R0, desc[UR6][R4.64]
        ULDC.64 UR4, c[0x0][0x218]
        SEL R2, R4, RZ, P1
        SEL R3, R5, RZ, P1
        {STORE}
        """,
        P0,
        P1,
    )
    assert found[1] == NONE
    assert (0, 0, 8, BOTH, POINTER) in found[0]


def test_a_scaled_distance_beside_a_number_leads_to_the_other_pointer() -> None:
    """`q + (p - q) / 4 * 4 + n`, with nothing else done through p or q."""
    found = flow(
        f"""
        ULDC.64 UR8, c[0x0][0x218]
        ULDC.64 UR4, c[0x0][0x210]
        UIADD3 UR6, UP0, -UR8, UR4, URZ
        UIADD3.X UR7, UR5, ~UR9, URZ, UP0, !UPT
        USHF.R.S64 UR6, UR6, 0x2, UR7
        USHF.R.S32.HI UR7, URZ, 0x2, UR7
        UMOV UR10, 0x4
        UIMAD.WIDE.U32 UR4, UR6, UR10, UR8
        USHF.L.U32 UR7, UR7, 0x2, URZ
        UIADD3 UR5, UR5, UR7, URZ
        MOV R2, UR4
        MOV R3, UR5
        ULDC.64 UR4, c[0x0][0x220]
        {STORE}
        """,
        P0,
        P1,
        P2,
    )
    assert found == (pointers(WRITE, WRITE, WRITE), NONE)


def test_an_address_of_which_one_half_is_made_of_bytes() -> None:
    halves = "LDC.U16 R4, c[0x0][0x210]\nLDC.U16 R5, c[0x0][0x212]\nPRMT R2, R4, 0x5410, R5\nLDC R3, c[0x0][0x214]\n"
    halves += "ULDC.64 UR4, c[0x0][0x218]"
    assert flow(halves + STORE, P0, P1) == (pointers(WRITE, WRITE), NONE)
    halves = (
        halves.replace("0x210", "0x214")
        .replace("0x212", "0x216")
        .replace("LDC R3, c[0x0][0x214]", "LDC R2, c[0x0][0x210]")
    )
    halves = halves.replace("PRMT R2", "PRMT R3")
    assert flow(halves + STORE, P0, P1) == (pointers(WRITE, WRITE), NONE)


MOVED = """
    UIADD3 UR4, UP0, UR4, -UR8, URZ
    UIADD3.X UR5, UR5, ~UR9, URZ, UP0, !UPT
"""
SCALED = """
    LDC.64 R6, c[0x0][0x220]
    IMAD.WIDE.U32 R2, R6, 0x4, R2
    IMAD R9, R7, 0x4, RZ
    IADD3 R3, R9, R3, RZ
"""
LESS = """
    LDC R6, c[0x0][0x228]
    IADD3 R6, -R6, RZ, RZ
    IMAD.WIDE R2, R6, 0x4, R2
"""


@pytest.mark.parametrize(
    ("name", "between", "indirect"),
    [
        ("_Z7scatterPfPKlmi", "", NONE),
        ("_Z7scatterPfPKlmi", SCALED, NONE),
        ("_Z7scatterPfPKlmi", LESS, NONE),
        ("scatter", "", WRITE),
        ("_Z7scattermPKlmi", "", WRITE),
        ("_Z7scatterPKfPKlmi", "", WRITE),  # nothing is written through that one
        ("_Z7scatterPfPKlmi", MOVED, WRITE),
    ],
)
def test_what_the_name_calls_a_pointer_is_one_beside_a_number_from_memory(
    name: str, between: str, indirect: Access
) -> None:
    """`scatter(float *p, const long *places, size_t n, int m)`: `p + places[0]`, and with 4 * n, or less 4 * m.

    Moved, `places[0] + (p - places)`.
    """
    found = flow(
        f"""
        LDC.64 R4, c[0x0][0x218]
        ULDC.64 UR8, c[0x0][0x218]
        LDG.E.64 R2, desc[UR6][R4.64]
        ULDC.64 UR4, c[0x0][0x210]
        {between}
        {STORE}
        """,
        P0,
        P1,
        P2,
        Parameter(24, 4),
        name=name,
    )
    assert found[1] & WRITE == indirect
    assert (0, 0, 8, WRITE, POINTER) in found[0]


@pytest.mark.parametrize("name", ["STS.64", "STAS.64", "ATOMS.EXCH.64 R20,", "REDAS.ADD.64", "REDS.ADD.64"])
def test_a_pointer_that_went_through_shared_memory_is_the_address_and_not_the_number(name: str) -> None:
    found = flow(
        f"""
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        {name} [R30], R4
        LDS.64 R2, [R30]
        {STORE}
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)
