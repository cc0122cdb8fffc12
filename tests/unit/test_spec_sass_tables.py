"""Data flow over machine code: addresses that lie in memory, and which argument names that memory."""

from __future__ import annotations

import pytest

from tests.unit.sass_snippets import P0, P1, flow
from tests.unit.spec_access import BOTH, NONE, POINTER, READ, WRITE, Expected, pointers, table

LOAD = """
    LDC.64 R6, c[0x0][0x210]
    IMAD.WIDE R6, R0, 0x8, R6
    LDG.E.64 R2, desc[UR4][R6.64]
"""
STORE = """
    STG.E desc[UR4][R2.64], R0
    EXIT
"""
THROUGH: Expected = ([(0, 0, 8, READ, POINTER), table(0, WRITE)], NONE)
ANYWHERE: Expected = (pointers(READ), WRITE)


def through(between: str) -> Expected:
    """What a kernel does that loads an address from a table, changes it, and stores there."""
    return flow(LOAD + between + STORE, P0, P1)


@pytest.mark.parametrize(
    "between",
    [
        "",
        "IMAD.WIDE R2, R1, 0x4, R2",  # further on in what it names
        "LOP3.LUT R2, R2, 0xfffffff8, RZ, 0xc0, !PT",  # without its tag
        "SHFL.IDX PT, R2, R2, RZ, 0x1f\nSHFL.IDX PT, R3, R3, RZ, 0x1f",
        "STS.64 [UR4], R2\nLDS.64 R2, [UR4]",
        "LDC R1, c[0x0][0x28]\nSTL.64 [R1], R2\nLDL.64 R2, [R1]",
    ],
)
def test_an_address_from_a_table_is_known_by_the_argument_that_names_the_table(between: str) -> None:
    assert through(between) == THROUGH


@pytest.mark.parametrize(
    "between",
    [
        "LDG.E.64 R2, desc[UR4][R2.64]",  # from memory that only memory names
        "LDC R9, c[0x0][0x218]\nLOP3.LUT R2, R2, R9, RZ, 0x3c, !PT\nLOP3.LUT R3, R3, R9, RZ, 0x3c, !PT",
        "LOP3.LUT R3, R3, 0x7fff0000, RZ, 0x3c, !PT",  # with a key, too
        "PRMT R2, R2, 0x123, RZ\nPRMT R3, R3, 0x123, RZ",
        "SHF.L.U64.HI R3, R2, 0x4, R3\nIMAD.SHL.U32 R2, R2, 0x10, RZ",
        "MOV R9, R2\nMOV R2, R3\nMOV R3, R9\nIMAD R3, R3, 0x3, RZ",
    ],
)
def test_what_was_computed_from_an_address_in_a_table_is_not_in_it(between: str) -> None:
    fields, indirect = through(between)
    assert indirect & WRITE
    assert table(0, WRITE) not in fields


def test_a_table_that_the_kernel_writes_to_says_nothing_of_what_it_finds_there() -> None:
    assert through("STG.E.64 desc[UR4][R6.64+0x8], R8") == (pointers(BOTH), WRITE)


def test_halves_from_two_tables_are_no_address_of_either() -> None:
    other = "LDC.64 R8, c[0x0][0x218]\nLDG.E R3, desc[UR4][R8.64]"
    assert through(other) == (pointers(READ, READ), WRITE)


def test_a_choice_between_two_tables_is_both() -> None:
    other = "LDC.64 R8, c[0x0][0x218]\n@P0 LDG.E.64 R2, desc[UR4][R8.64]"
    assert through(other) == (sorted([*pointers(READ, READ), table(0, WRITE), table(1, WRITE)]), NONE)


def test_a_table_in_shared_memory_is_from_anywhere() -> None:
    """A bulk copy brings it there."""
    code = """
        LDC.64 R6, c[0x0][0x210]
        LDGSTS.E.64 [UR8], desc[UR4][R6.64]
        LDS.64 R2, [UR8]
    """
    assert flow(code + STORE, P0) == ANYWHERE


def test_of_a_sum_of_two_arguments_it_is_not_known_which_names_the_table() -> None:
    sum_ = LOAD.replace("IMAD.WIDE R6, R0, 0x8, R6", "LDC.64 R8, c[0x0][0x218]\nIADD3 R6, P0, R6, R8, RZ").replace(
        "LDG", "IADD3.X R7, R7, R9, RZ, P0, !PT\nLDG"
    )
    assert flow(sum_ + STORE, P0, P1) == (pointers(READ, READ), WRITE)
