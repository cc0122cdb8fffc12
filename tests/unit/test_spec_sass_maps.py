"""Data flow over machine code: tensor maps that a kernel makes in shared memory and copies to memory, as Triton."""

from __future__ import annotations

import pytest

from tests.unit.sass_snippets import P0, P1, P2, flow
from tests.unit.spec_access import BOTH, NONE, POINTER, READ, WRITE, Expected, pointers, table

SCRATCH = "LDC.64 R2, c[0x0][0x220]\nULDC.64 UR6, c[0x0][0x220]"
LOADED = "UTMALDG.2D [UR8], [UR6]"
STORED = "UIADD3 UR10, UP0, UR6, 0x80, URZ\nUIADD3.X UR11, UR7, URZ, URZ, UP0, !UPT\nUTMASTG.2D [UR8], [UR10]"


def put(parameter: int) -> str:
    """One thread puts an argument, and sizes, into the map in shared memory; the others go around that."""
    return f"""
        BSSY B0, `(.L_put_{parameter})
        @P1 BRA `(.L_around_{parameter})
        LDC.64 R4, c[0x0][{0x228 + 8 * parameter:#x}]
        STS.64 [UR8+0x20], R4
        LDC.64 R6, c[0x0][{0x210 + 8 * parameter:#x}]
        LDS R12, [UR8+0x8]
        STS [UR8+0x8], R12
        STS.64 [UR8], R6
        .L_around_{parameter}:
        BSYNC B0
        .L_put_{parameter}:
    """


def copied(number: int) -> str:
    """One warp copies it to the scratch memory, as the map with this number there."""
    return f"""
        @P0 BRA `(.L_copied_{number})
        LDS R9, [R8+UR8]
        IADD3 R14, P2, R2, R8, RZ
        IMAD.X R15, RZ, RZ, R3, P2
        ATOMG.E.EXCH.STRONG.GPU PT, RZ, [R14+{0x80 * number:#x}], R9
        UTMACCTL.IV [UR6]
        .L_copied_{number}:
        BAR.SYNC.DEFER_BLOCKING 0x0
    """


def kernel(*parts: str) -> Expected:
    """What a kernel does that is given two buffers and scratch memory, with sizes behind them."""
    return flow("\n".join(["S2R R8, SR_LANEID", SCRATCH, *parts, LOADED, STORED, "EXIT"]), P0, P1, P2)


def test_what_is_done_through_a_map_is_done_to_what_was_put_into_it() -> None:
    assert kernel(put(0), copied(0), put(1), copied(1)) == (pointers(READ, WRITE, BOTH), NONE)
    assert kernel(put(1), copied(0), put(0), copied(1)) == (pointers(WRITE, READ, BOTH), NONE)


def test_a_number_that_was_in_the_register_before_is_not_where_a_map_is() -> None:
    """Predicates that hold at the same time have different names."""
    found = kernel(put(0), copied(0), put(1), copied(1), "UMOV UR10, 0x1000", STORED.replace("UIADD3 ", "@UP1 UIADD3 "))
    assert found == (pointers(READ, WRITE, BOTH), NONE)


def test_of_addresses_put_in_before_a_map_is_copied_it_may_be_any() -> None:
    both = (pointers(BOTH, BOTH, BOTH), NONE)
    assert kernel(put(0), put(1), copied(0), copied(1)) == both
    # Which of two ways a thread went is not known.
    chosen = put(0).replace("STS.64 [UR8], R6", "@P3 LDC.64 R6, c[0x0][0x218]\nSTS.64 [UR8], R6")
    assert kernel(chosen, copied(0), copied(1)) == both


def test_a_map_that_is_made_in_turns_of_a_loop_is_any_of_them() -> None:
    loop = [".L_loop:", put(0), copied(0), put(1), copied(1), "@P4 BRA `(.L_loop)"]
    found, elsewhere = kernel(*loop)
    assert not elsewhere
    accesses = [access for _, _, _, access, _ in found]
    assert READ in accesses[0]
    assert WRITE in accesses[1]


def test_an_address_from_a_table_that_is_put_in() -> None:
    loaded = put(1).replace("STS.64 [UR8], R6", "LDG.E.64 R6, desc[UR4][R6.64]\nSTS.64 [UR8], R6")
    written = [(1, 0, 8, READ, POINTER), table(1, WRITE), (2, 0, 8, BOTH, POINTER)]
    assert kernel(put(0), copied(0), loaded, copied(1)) == ([(0, 0, 8, READ, POINTER), *written], NONE)


@pytest.mark.parametrize(
    "parts",
    [
        (),  # somebody else's
        (put(0), copied(0)),  # the second one is
        (put(0), copied(0), put(1), copied(2)),  # which lies elsewhere
    ],
)
def test_a_map_that_the_kernel_did_not_make_may_lead_anywhere(parts: tuple[str, ...]) -> None:
    _, elsewhere = kernel(*parts)
    assert WRITE in elsewhere


def test_a_map_in_which_no_address_was_put_may_lead_anywhere() -> None:
    """Sizes alone were: the address is one that was there."""
    sizes = put(0).replace("STS.64 [UR8], R6", "")
    assert kernel(sizes, copied(0), sizes, copied(1)) == (pointers(NONE, NONE, BOTH), BOTH)


def test_the_address_of_a_map_that_is_itself_from_memory() -> None:
    """Which map lies there is not known, though one was made whose place is as unknown."""
    where = "LDG.E.64 R2, desc[UR4][R2.64]\nR2UR UR6, R2\nR2UR UR7, R3"
    _, elsewhere = kernel(where, put(0), copied(0), put(1), copied(1))
    assert elsewhere == BOTH
