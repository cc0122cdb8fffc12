"""Data flow over machine code: arrays of addresses and tensor maps among the arguments, and indices into them."""

from __future__ import annotations

import pytest

from phos.gpu_engine.spec.descriptor import Access, Parameter
from tests.unit.sass_snippets import P0, P1, flow
from tests.unit.spec_access import BOTH, NONE, POINTER, READ, SCAN, TENSOR_MAP, WRITE, pointers

# Pointers by value: 32 of them and their number.
RING = Parameter(0, 264)


ELEMENT = """
    {index}
    LDC.64 R2, c[0x0][R0+{place}]
    STG.E desc[UR4][R2.64], R5
    EXIT
"""


@pytest.mark.parametrize(
    ("index", "place", "start"),
    [
        ("S2R R0, SR_CTAID.X\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x210, 0),
        ("S2R R0, SR_CTAID.X\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x250, 64),
        ("S2R R0, SR_CTAID.X\nLEA R0, R0, 0x10, 0x3", 0x210, 16),
        ("S2R R0, SR_CTAID.X\nLOP3.LUT R0, R0, 0x7, RZ, 0xc0, !PT\nIMAD.SHL R0, R0, 0x8, RZ", 0x250, 64),
        ("S2R R0, SR_CTAID.X\nSHF.R.U32.HI R0, RZ, 0x5, R0\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x250, 64),
        ("LDG.E.U8 R0, desc[UR4][R8.64]\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x250, 64),
        # Downwards, or as it comes.
        ("S2R R0, SR_CTAID.X\nIADD3 R0, -R0, 0x1f, RZ\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x210, 0),
        ("S2R R0, SR_CTAID.X\nIMAD R0, R0, -0x8, RZ", 0x308, 0),
        ("LDC R0, c[0x0][0x310]\nIADD3 R0, -R0, 0x1f, RZ\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x210, 0),
        ("S2R R0, SR_CTAID.X\nLOP3.LUT R0, RZ, R0, RZ, 0x33, !PT\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x310, 0),
        ("S2R R0, SR_CTAID.X\nIADD3 R0, ~R0, 0x20, RZ\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x210, 0),
        ("LDG.E R0, desc[UR4][R8.64]\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x250, 0),
        ("LDG.E.S8 R0, desc[UR4][R8.64]\nIMAD.SHL.U32 R0, R0, 0x8, RZ", 0x250, 0),
        ("LDC R0, c[0x0][0x310]", 0x250, 0),
    ],
)
def test_an_array_begins_where_its_index_may_lead(index: str, place: int, start: int) -> None:
    fields = flow(ELEMENT.format(index=index, place=hex(place)), RING)[0]
    assert fields == [(0, start, 264 - start, WRITE, SCAN)]


def test_a_loop_that_counts_down_is_not_over_at_its_first_element() -> None:
    code = """
        MOV R0, 0xf8
        .L_x_1:
        LDC.64 R2, c[0x0][R0+0x210]
        STG.E desc[UR4][R2.64], R5
        IADD3 R0, R0, -0x8, RZ
        ISETP.GE.AND P0, PT, R0, RZ, PT
        @P0 BRA `(.L_x_1)
        EXIT
    """
    assert flow(code, RING) == ([(0, 0, 264, WRITE, SCAN)], NONE)
    # Upwards it begins there.
    up = code.replace("0xf8", "0x40").replace("-0x8", "0x8")
    assert flow(up, RING) == ([(0, 64, 200, WRITE, SCAN)], NONE)


def test_two_places_of_one_array_may_lie_far_apart() -> None:
    """``p[i] = p[i + 8]``."""
    code = """
        S2R R0, SR_CTAID.X
        IMAD.SHL.U32 R0, R0, 0x8, RZ
        LDC.64 R2, c[0x0][R0+0x250]
        LDG.E R6, desc[UR4][R2.64]
        LDC.64 R4, c[0x0][R0+0x210]
        STG.E desc[UR4][R4.64], R6
        EXIT
    """
    assert flow(code, RING) == ([(0, 0, 64, WRITE, SCAN), (0, 64, 200, BOTH, SCAN)], NONE)


def test_an_array_may_begin_behind_the_place_or_end_before_it_in_another_parameter() -> None:
    one, other = Parameter(0, 256), Parameter(256, 256)
    up = "S2R R0, SR_CTAID.X\nIMAD.SHL.U32 R0, R0, 0x8, RZ"
    # b.p[i - 1]
    assert flow(ELEMENT.format(index=up, place="0x308"), one, other)[0] == [(0, 248, 264, WRITE, SCAN)]
    assert flow(ELEMENT.format(index=up, place="0x310"), one, other)[0] == [(1, 0, 256, WRITE, SCAN)]
    # a.p[32 - i]
    down = up + "\nIADD3 R0, -R0, RZ, RZ"
    assert flow(ELEMENT.format(index=down, place="0x310"), one, other)[0] == [(0, 0, 512, WRITE, SCAN)]
    assert flow(ELEMENT.format(index=down, place="0x380"), one, other)[0] == [(1, 0, 256, WRITE, SCAN)]


def test_elements_of_packed_structs_are_found_by_no_search() -> None:
    packed = ELEMENT.format(index="S2R R0, SR_CTAID.X\nIMAD R0, R0, 0xc, RZ", place="0x210")
    packed = packed.replace("LDC.64 R2, c[0x0][R0+0x210]", "LDC R2, c[0x0][R0+0x210]\nLDC R3, c[0x0][R0+0x214]")
    assert flow(packed, RING) == ([(0, 0, 264, WRITE, SCAN)], WRITE)
    shifted = packed.replace("0xc, RZ", "0x8, RZ").replace("0x214", "0x218").replace("R0+0x210", "R0+0x214")
    assert flow(shifted, RING)[1] == WRITE


def test_a_number_of_bytes_among_the_arguments_leads_anywhere_in_an_array() -> None:
    by_address = """
        LDC R0, c[0x0][0x318]
        ULDC.64 UR6, c[0x0][0x198]
        IADD3 R2, R0, UR6, RZ
        MOV R3, UR7
        LD.E.64 R2, desc[UR4][R2.64]
        STG.E desc[UR4][R2.64], R5
        EXIT
    """
    assert flow(by_address, RING, Parameter(264, 4)) == ([(0, 0, 264, WRITE, SCAN)], NONE)
    on_stack = """
        LDC R1, c[0x0][0x28]
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        STL.64 [R1], R2
        STL.64 [R1+0x8], R4
        LDC R0, c[0x0][0x220]
        IADD3 R0, R1, R0, RZ
        LDL.64 R6, [R0]
        STG.E desc[UR4][R6.64], R5
        EXIT
    """
    assert flow(on_stack, P0, P1, Parameter(16, 4)) == (pointers(WRITE, WRITE), NONE)


@pytest.mark.parametrize(
    ("index", "place", "maps"),
    [
        ("S2UR UR6, SR_CTAID.X\nUIMAD UR6, UR6, -0x80, URZ", "0x180", [0, 128, 256, 384]),
        ("S2UR UR6, SR_CTAID.X\nUIMAD UR6, UR6, 0x80, URZ", "0x80", [128, 256, 384]),
        ("ULDC UR6, c[0x0][0x410]", "0x80", [0, 128, 256, 384]),
    ],
)
def test_tensor_maps_lie_on_both_sides_of_the_place_unless_the_index_is_not_negative(
    index: str, place: str, maps: list[int]
) -> None:
    code = f"""
        ULDC.64 UR8, c[0x0][0x198]
        {index}
        UIADD3 UR4, UR8, {place}, UR6
        UMOV UR5, UR9
        UTMASTG.2D [UR12], [UR4]
        EXIT
    """
    found = flow(code, Parameter(0, 512), Parameter(512, 4))
    assert found == ([(0, at, 128, WRITE, TENSOR_MAP) for at in maps], NONE)


def test_a_tensor_map_in_memory_may_stand_for_anything_whatever_else_is_written() -> None:
    """As in cuDNN's attention: the maps lie in the workspace, sums go out through an argument."""
    code = """
        LDC.64 R2, c[0x0][0x210]
        STG.E desc[UR8][R2.64], R0
        ULDC.64 UR6, c[0x0][0x218]
        UIADD3 UR4, UP0, UR6, 0x80, URZ
        UIADD3.X UR5, URZ, UR7, URZ, UP0, !UPT
        UTMASTG.4D [UR12], [UR4]
        UTMACMDFLUSH
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(WRITE, READ), WRITE)
    # The address of the map itself may have been loaded, too.
    loaded = code.replace("ULDC.64 UR6, c[0x0][0x218]", "LDG.E.64 R4, desc[UR8][R2.64]\nR2UR UR6, R4\nR2UR UR7, R5")
    assert flow(loaded, P0, P1) == (pointers(BOTH), BOTH)
    # Among the arguments it is not: the frontend knows what it was made of.
    argument = code.replace("c[0x0][0x218]", "c[0x0][0x198]").replace("UR6, 0x80", "UR6, 0x40")
    assert flow(argument, P0, Parameter(64, 128)) == (
        [(0, 0, 8, WRITE, POINTER), (1, 0, 128, WRITE, TENSOR_MAP)],
        NONE,
    )


@pytest.mark.parametrize(
    ("other", "reads_pointer"),
    [
        ("ULDC.64 UR6, c[0x0][0x290]", True),
        # A variable of the module: what was put there may stand for anything, too.
        ("ULDC.64 UR6, c[0x4][0x0]", False),
    ],
)
@pytest.mark.parametrize(("copy", "access"), [("UTMASTG.2D [UR12], [UR4]", WRITE), ("UTMALDG.2D [UR12], [UR4]", READ)])
def test_a_tensor_map_may_be_an_argument_or_lie_in_memory(
    other: str, reads_pointer: bool, copy: str, access: Access
) -> None:
    """`single ? &map : &maps[i]`, as Transformer Engine's kernels for groups of matrices have it."""
    code = f"""
        ULDC.64 UR4, c[0x0][0x198]
        {other}
        UISETP.NE.AND UP0, UPT, UR8, URZ, UPT
        USEL UR4, UR4, UR6, UP0
        USEL UR5, UR5, UR7, UP0
        {copy}
        EXIT
    """
    fields = [(0, 0, 128, access, TENSOR_MAP)]
    if reads_pointer:
        fields.append((1, 0, 8, READ, POINTER))
    assert flow(code, Parameter(0, 128), Parameter(128, 8)) == (fields, access)


def test_how_many_blocks_there_are_is_no_argument() -> None:
    """sm_100: the driver says it for each size of a cluster, one below the other."""
    code = """
        S2UR UR4, SR_CgaSize
        UIMAD UR4, UR4, -0xa0, URZ
        LDCU.64 UR4, c[0x0][UR4+{place:#x}]
        LDC.64 R2, c[0x0][0x380]
        IADD3 R2, P0, PT, R2, UR4, RZ
        IADD3.X R3, PT, PT, R3, UR5, RZ, P0, !PT
        STG.E desc[UR6][R2.64], R0
        EXIT
    """
    both = Parameter(0, 8), Parameter(8, 256)
    assert flow(code.format(place=0x2B0), *both, architecture=100, base=0x380) == (pointers(WRITE), NONE)
    # One element before an array among the arguments, which is counted from 1.
    fields, _ = flow(code.format(place=0x2E8), *both, architecture=100, base=0x380)
    assert (1, 0, 256, WRITE, SCAN) in fields
