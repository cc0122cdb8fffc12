"""Data flow over machine code: a pointer beside a 64-bit number that may be one by its place, and is none."""

from __future__ import annotations

import pytest

from phos.gpu_engine.spec.descriptor import Access, Parameter
from tests.unit.sass_snippets import P0, P1, P2, flow
from tests.unit.spec_access import BOTH, NONE, POINTER, READ, WRITE, Expected, pointers, table

STORE = """
    IADD3 R2, P0, R2, UR4, RZ
    IADD3.X R3, R3, UR5, RZ, P0, !PT
    STG.E desc[UR6][R2.64], R0
    EXIT
"""


def beside(code: str) -> Expected:
    """What a kernel does that stores through the sum of what the code has put into R2 and R3 and into UR4 and UR5."""
    return flow(code + STORE, P0, P1)


def test_a_pointer_on_the_stack_was_never_0() -> None:
    found = beside(
        """
        LDC R1, c[0x0][0x28]
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        STL.64 [R1+0x40], R4
        LDL.64 R2, [R1+0x40]
        """
    )
    assert found == (pointers(WRITE, WRITE), NONE)


def test_a_pointer_that_may_be_0_does_not_make_the_number_beside_it_one() -> None:
    """`(p > limit ? p : 0) + n`, and a pointer out of an array on the stack."""
    found = beside(
        """
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        SEL R2, R4, RZ, P1
        SEL R3, R5, RZ, P1
        """
    )
    assert found == (pointers(WRITE, WRITE), NONE)
    found = beside(
        """
        LDC R1, c[0x0][0x28]
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        STL.64 [R1+0x40], R4
        STL.64 [R1+0x48], R4
        IMAD R6, R9, 0x8, R1
        LDL.64 R2, [R6+0x40]
        """
    )
    assert found == (pointers(WRITE, WRITE), NONE)
    # Where the pointer is used by itself elsewhere, it is the one.
    found = beside(
        """
        LDC.64 R4, c[0x0][0x210]
        LDG.E R0, desc[UR6][R4.64]
        ULDC.64 UR4, c[0x0][0x218]
        SEL R2, R4, RZ, P1
        SEL R3, R5, RZ, P1
        """
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
    assert beside(halves) == (pointers(WRITE, WRITE), NONE)
    halves = (
        halves.replace("0x210", "0x214")
        .replace("0x212", "0x216")
        .replace("LDC R3, c[0x0][0x214]", "LDC R2, c[0x0][0x210]")
    )
    halves = halves.replace("PRMT R2", "PRMT R3")
    assert beside(halves) == (pointers(WRITE, WRITE), NONE)


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
    assert (table(1, WRITE) in found[0]) == bool(indirect)
    assert (0, 0, 8, WRITE, POINTER) in found[0]
    assert not found[1] & WRITE


@pytest.mark.parametrize("name", ["STS.64", "STAS.64", "ATOMS.EXCH.64 R20,", "REDAS.ADD.64", "REDS.ADD.64"])
def test_a_pointer_that_went_through_shared_memory_is_the_address_and_not_the_number(name: str) -> None:
    found = beside(
        f"""
        LDC.64 R4, c[0x0][0x210]
        ULDC.64 UR4, c[0x0][0x218]
        {name} [R30], R4
        LDS.64 R2, [R30]
        """
    )
    assert found == (pointers(WRITE, WRITE), NONE)


def test_a_sum_of_two_words_is_doubtful_where_nothing_says_which_is_the_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R6, c[0x0][0x218]
        IADD3 R2, P0, R2, R6, RZ
        IADD3.X R3, R3, R7, RZ, P0, !PT
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)


def test_a_distance_on_the_stack_is_an_index() -> None:
    """``for (e = s; *e; e++); a[e - s] = 1;`` of an array s on the stack."""
    code = """
        LDC R1, c[0x0][0x28]
        LDC.64 R2, c[0x0][0x210]
        IADD3 R6, P1, R1, c[0x0][0x20], RZ
        IADD3.X R7, RZ, c[0x0][0x24], RZ, P1, !PT
        IADD3 R8, P1, R6, 0x4, RZ
        IADD3.X R9, RZ, R7, RZ, P1, !PT
        IADD3 R4, P0, P1, R8, R2, -R6
        IADD3.X R5, R9, R3, ~R7, P0, P1
        STG.E desc[UR4][R4.64], R0
        EXIT
    """
    assert flow(code, P0) == (pointers(WRITE), NONE)
    # Without the difference it is the stack.
    assert flow(code.replace("-R6", "RZ").replace("~R7", "RZ"), P0) == ([], NONE)


DISTANCE = """
    LDC.64 R2, c[0x0][0x210]
    LDC.64 R6, c[0x0][0x218]
    IADD3 R8, P0, -R2, R6, RZ
    IADD3.X R9, ~R3, R7, RZ, P0, !PT
    LDG.E R0, desc[UR4][R2.64]
    IADD3 R4, P0, R2, R8, RZ
    IADD3.X R5, R3, R9, RZ, P0, !PT
    STG.E desc[UR4][R4.64], R0
    EXIT
"""


def test_a_pointer_and_the_distance_to_another_are_the_other() -> None:
    """A loop over two arrays that counts up one pointer; the first is a pointer elsewhere, but not what is written."""
    assert flow(DISTANCE, P0, P1) == (pointers(BOTH, WRITE), NONE)
    # In elements it passes through a shift.
    shifted = DISTANCE.replace("LDG.E", "SHF.R.S64 R8, R8, 0x2, R9\nSHF.R.S32.HI R9, RZ, 0x2, R9\nLDG.E")
    assert flow(shifted, P0, P1) == (pointers(BOTH, WRITE), NONE)
    # The distance of two pointers is an index of a third.
    third = DISTANCE.replace("LDG.E R0, desc[UR4][R2.64]", "LDC.64 R2, c[0x0][0x220]\nSHF.R.U64 R8, R8, 0x2, R9")
    assert flow(third, P0, P1, P2)[0][-1] == (2, 0, 8, WRITE, POINTER)


def test_a_pointer_and_the_distance_from_its_memory_to_another_are_the_other() -> None:
    """``for (q = begin; q < end; q++) out[q - in] = *q;``: only begin is a pointer elsewhere."""
    code = """
        LDC.64 R2, c[0x0][0x220]
        LDC.64 R6, c[0x0][0x218]
        LDC.64 R8, c[0x0][0x210]
        LDG.E R0, desc[UR4][R2.64]
        IADD3 R4, P0, P1, R2, R6, -R8
        IADD3.X R5, R3, R7, ~R9, P0, P1
        STG.E desc[UR4][R4.64], R0
        EXIT
    """
    assert flow(code, P0, P1, P2) == ([(1, 0, 8, WRITE, POINTER), (2, 0, 8, BOTH, POINTER)], NONE)
    # Nothing subtracted, what is no pointer elsewhere is a number.
    plain = code.replace("-R8", "RZ").replace("~R9", "RZ")
    assert flow(plain, P0, P1, P2) == ([(2, 0, 8, BOTH, POINTER)], NONE)


MOVED = """
    LDC.64 R2, c[0x0][0x210]
    LDG.E.64 R4, desc[UR4][R2.64]
    LDG.E.64 R6, desc[UR4][R2.64+0x8]
    LDC.64 R8, c[0x0][0x218]
    IADD3 R4, P0, R4, -R8, RZ
    IADD3.X R5, R5, ~R9, RZ, P0, !PT
    IADD3 R6, P0, R6, -R4, RZ
    IADD3.X R7, R7, ~R5, RZ, P0, !PT
    STG.E desc[UR4][R6.64], R0
    EXIT
"""


def test_an_address_from_memory_less_how_far_that_memory_was_moved_is_where_it_was_moved_to() -> None:
    """``moved = header->base - pool; *(header->root - moved) = 1``."""
    assert flow(MOVED, P0, P1) == (sorted([*pointers(READ, WRITE), table(0, WRITE)]), NONE)
    # In elements it passes through a shift.
    shifted = MOVED.replace("IADD3 R6, P0, R6, -R4", "SHF.R.U64 R4, R4, 0x2, R5\nIADD3 R6, P0, R6, -R4")
    assert flow(shifted, P0, P1) == (sorted([*pointers(READ, WRITE), table(0, WRITE)]), NONE)
    # Added, it leads from the pool to that memory.
    added = MOVED.replace("R6, -R4", "R6, R4").replace("R7, ~R5", "R7, R5")
    assert flow(added, P0, P1) == (sorted([*pointers(READ), table(0, WRITE)]), NONE)


def test_a_distance_in_elements_that_is_kept_in_shared_memory() -> None:
    code = """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R6, c[0x0][0x218]
        IADD3 R8, P0, R2, -R6, RZ
        IADD3.X R9, R3, ~R7, RZ, P0, !PT
        SHF.R.S64 R8, R8, 0x2, R9
        SHF.R.S32.HI R9, RZ, 0x2, R9
        STS.64 [R20], R8
        LDS.64 R10, [R20]
        LDG.E R0, desc[UR4][R2.64]
        LEA R4, P0, -R10, R2, 0x2
        LEA.HI.X R5, -R10, R3, ~R11, 0x2, P0
        STG.E desc[UR4][R4.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(BOTH, WRITE), NONE)


def test_flags_side_by_side_are_no_address() -> None:
    """`p[a + b]` with two of one byte each, in neighbouring words."""
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.U8 R6, c[0x0][0x218]
        LDC.U8 R7, c[0x0][0x21c]
        IADD3 R6, R6, R7, RZ
        IMAD.WIDE R2, R6, 0x4, R2
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        Parameter(8, 1),
        Parameter(12, 1),
    )
    assert found == (pointers(WRITE), NONE)


def test_what_was_computed_of_bytes_by_floating_point_is_no_part_of_an_address() -> None:
    """As in FlashAttention 3 for numbers of 8 bits: factors, and where the next tile is, lie in shared memory."""
    code = """
        LDC.64 R8, c[0x0][0x218]
        STS.64 [R20], R8
        LDS.U16 R10, [R21]
        IMAD.U32 R10, R10, 0x10000, RZ
        FMUL R10, R10, R12
        STS [R20+0x10], R10
        LDS R11, [R20]
        LDC.64 R2, c[0x0][0x210]
        IMAD.WIDE R2, R11, 0x4, R2
        STG.E desc[UR4][R2.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(WRITE), NONE)
    # Put where it was as it is, it may be.
    assert flow(code.replace("FMUL R10, R10, R12", "SHF.R.U32.HI R10, RZ, 0x10, R10"), P0, P1) == (
        pointers(WRITE, WRITE),
        NONE,
    )
