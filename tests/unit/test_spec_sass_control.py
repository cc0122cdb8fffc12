"""Data flow over machine code: predicates, votes, branches, calls, and where code ends."""

from __future__ import annotations

import pytest

from phos.gpu_engine.spec.descriptor import Parameter
from tests.unit.sass_snippets import P0, P1, flow
from tests.unit.spec_access import BOTH, NONE, POINTER, READ, SCAN, TENSOR_MAP, WRITE, Expected, pointers, table

ANYTHING: Expected = ([(0, 0, 8, BOTH, SCAN), (1, 0, 8, BOTH, SCAN)], NONE)
"""Of a kernel with two pointers whose code cannot be followed."""


def test_a_predicated_move_may_leave_the_old_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        @P0 LDC.64 R2, c[0x0][0x218]
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)


def test_what_is_set_and_used_under_one_predicate_is_nothing_else() -> None:
    code = """
        LDC.64 R2, c[0x0][0x210]
        ISETP.NE.AND P0, PT, R9, RZ, PT
        @P0 LDC.64 R2, c[0x0][0x218]
        @P0 STG.E desc[UR4][R2.64], R0
        LDG.E R1, desc[UR4][R2.64]
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(READ, BOTH), NONE)
    # Not so once the predicate was changed in between, or under the opposite one.
    changed = code.replace("@P0 STG", "ISETP.NE.AND P0, PT, R8, RZ, PT\n@P0 STG")
    assert flow(changed, P0, P1) == (pointers(BOTH, BOTH), NONE)
    assert flow(code.replace("@P0 STG", "@!P0 STG"), P0, P1) == (pointers(BOTH, BOTH), NONE)


COMPARED_AGAIN = """
    LDG.E.64 R2, desc[UR4][R6.64]
    ISETP.NE.AND P0, PT, R9.reuse, R8, PT
    @P0 LDC.64 R2, c[0x0][0x218]
    ISETP.NE.AND P0, PT, R5, RZ, PT
    MOV R10, R11
    ISETP.NE.AND P1, PT, R9, R8.reuse, PT
    @P1 STG.E desc[UR4][R2.64], R0
    EXIT
"""


def test_a_comparison_that_is_made_again_is_the_same_predicate() -> None:
    """Compilers make it anew, in another one, where they have none left to keep it in."""
    code = "LDC.64 R6, c[0x0][0x210]\n" + COMPARED_AGAIN
    assert flow(code, P0, P1) == (pointers(READ, WRITE), NONE)
    both: Expected = ([(0, 0, 8, READ, POINTER), table(0, WRITE), (1, 0, 8, WRITE, POINTER)], NONE)
    for changed in (
        code.replace("MOV R10", "MOV R9"),
        code.replace("MOV R10, R11", "@P2 IADD3 R8, R8, 0x1, RZ"),
        code.replace("@P1 STG", "@!P1 STG"),
        code.replace("P1, PT, R9, R8", "P1, PT, R8, R9"),
        code.replace("ISETP.NE.AND P1", "ISETP.NE.U32.AND P1"),
        code.replace("ISETP.NE.AND P1", "@P3 ISETP.NE.AND P1"),
        code.replace("R8.reuse, PT", "R8, P3"),
    ):
        assert flow(changed, P0, P1) == both, changed


def test_a_comparison_that_is_made_again_after_one_of_two_ways_changed_what_is_compared() -> None:
    around = "@P4 BRA `(.L_x_0)\nMOV R10, R11\n.L_x_0:"
    code = "LDC.64 R6, c[0x0][0x210]\n" + COMPARED_AGAIN.replace("MOV R10, R11", around)
    assert flow(code, P0, P1) == (pointers(READ, WRITE), NONE)
    both: Expected = ([(0, 0, 8, READ, POINTER), table(0, WRITE), (1, 0, 8, WRITE, POINTER)], NONE)
    assert flow(code.replace("MOV R10", "MOV R9"), P0, P1) == both


def test_a_predicate_that_is_put_into_a_register_and_brought_back() -> None:
    code = """
        LDC.64 R6, c[0x0][0x210]
        LDG.E.64 R2, desc[UR4][R6.64]
        ISETP.LT.OR P2, PT, R9, R8, P3
        @!P2 LDC R2, c[0x0][0x218]
        P2R R12, PR, RZ, 0x4
        @!P2 LDC R3, c[0x0][0x21c]
        ISETP.NE.AND P2, PT, R5, RZ, PT
        ISETP.NE.AND P0, PT, R12, RZ, PT
        @!P0 STG.E desc[UR4][R2.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(READ, WRITE), NONE)
    for changed in (code.replace("0x4", "0xc"), code.replace("0x4", "0x8"), code.replace("P2R R12", "P2R R13")):
        assert flow(changed, P0, P1) != (pointers(READ, WRITE), NONE)


def test_what_is_set_under_a_predicate_holds_beyond_branches_that_do_not_change_it() -> None:
    code = """
        LDC.64 R2, c[0x0][0x210]
        ISETP.NE.AND P0, PT, R9, RZ, PT
        @P0 LDC.64 R2, c[0x0][0x218]
        BSSY B0, `(.L_x_0)
        @P1 BRA `(.L_x_1)
        MOV R8, R9
        .L_x_1:
        @P0 STG.E desc[UR4][R2.64], R0
        .L_x_0:
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(NONE, WRITE), NONE)
    kept = code.replace("MOV R8, R9", "P2R R8, PR, RZ, 0x1")
    assert flow(kept, P0, P1) == (pointers(NONE, WRITE), NONE)
    # Changed on one of the ways there, by a loop, or by a function that cannot be seen: not so.
    changed = code.replace("MOV R8, R9", "ISETP.NE.AND P0, PT, R8, RZ, PT")
    assert flow(changed, P0, P1) == (pointers(WRITE, WRITE), NONE)
    packed = code.replace("MOV R8, R9", "R2P PR, R8, 0x1")
    assert flow(packed, P0, P1) == (pointers(WRITE, WRITE), NONE)
    looped = code.replace(".L_x_0:\n", "ISETP.NE.AND P0, PT, R8, RZ, PT\n@P2 BRA `(.L_x_1)\n.L_x_0:\n")
    assert flow(looped, P0, P1) == (pointers(WRITE, WRITE), NONE)
    called = code.replace("MOV R8, R9", "CALL.ABS.NOINC `(vprintf)")
    assert flow(called, P0, P1) == (pointers(WRITE, WRITE), NONE)


def test_ways_that_set_other_pointers_under_one_predicate_leave_either() -> None:
    code = """
        ISETP.NE.AND P0, PT, R9, RZ, PT
        @P1 BRA `(.L_x_0)
        @P0 LDC.64 R2, c[0x0][0x210]
        BRA `(.L_x_1)
        .L_x_0:
        @P0 LDC.64 R2, c[0x0][0x218]
        .L_x_1:
        @P0 STG.E desc[UR4][R2.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(WRITE, WRITE), NONE)
    one = code.replace("@P0 LDC.64 R2, c[0x0][0x218]", "@!P0 LDC.64 R2, c[0x0][0x218]")
    assert flow(one, P0, P1) == (pointers(WRITE, WRITE), NONE), "the predicates differ: nothing is sure"


def test_a_vote_stands_for_the_predicate_it_was_taken_on() -> None:
    code = """
        ULDC.64 UR6, c[0x0][0x198]
        UMOV UR4, 0x1
        UMOV UR5, 0x2
        VOTEU.ANY UP3, P5
        @P5 R2UR UR4, UR6
        @P5 R2UR UR5, UR7
        @UP3 UTMALDG.2D [UR20], [UR4]
        EXIT
    """
    assert flow(code, Parameter(0, 128)) == ([(0, 0, 128, READ, TENSOR_MAP)], NONE)


@pytest.mark.parametrize("sign", ["", "!"])
def test_a_vote_is_worth_nothing_once_its_predicate_has_changed(sign: str) -> None:
    code = f"""
        ULDC.64 UR6, c[0x0][0x210]
        ISETP.NE.AND P0, PT, R9, RZ, PT
        VOTEU.ANY UP0, {sign}P0
        ISETP.NE.AND P0, PT, R8, RZ, PT
        @{sign}P0 ULDC.64 UR6, c[0x0][0x218]
        @UP0 STG.E desc[UR4][UR6.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(WRITE, WRITE), NONE)


def test_a_call_of_a_place_in_the_same_function_is_a_jump() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        .L_x_0:
        @P0 CALL.REL.NOINC `(.L_x_1)
        LDG.E R0, desc[UR4][R2.64]
        BRA `(.L_x_0)
        .L_x_1:
        LDC.64 R2, c[0x0][0x218]
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)


def test_threads_go_on_where_their_own_barrier_says() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        BSSY B0, `(.L_x_0)
        BSYNC B0
        .L_x_0:
        LDG.E R0, desc[UR4][R2.64]
        LDC.64 R2, c[0x0][0x218]
        BSSY B0, `(.L_x_1)
        BSYNC B0
        .L_x_1:
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)


def test_an_instruction_that_is_never_executed_does_nothing() -> None:
    assert flow("LDC.64 R2, c[0x0][0x210]\n@!PT STG.E desc[UR4][R2.64], R0\nEXIT", P0) == ([], NONE)


def test_code_after_an_unconditional_exit_is_not_reached() -> None:
    assert flow("LDC.64 R2, c[0x0][0x210]\nEXIT\nSTG.E desc[UR4][R2.64], R0", P0) == ([], NONE)


def test_a_pointer_changed_in_a_loop_stays_that_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R6, c[0x0][0x218]
        .L_x_0:
        STG.E desc[UR4][R2.64], R0
        IADD3 R2, P0, R2, R6, RZ
        IADD3.X R3, R3, R7, RZ, P0, !PT
        @P1 BRA `(.L_x_0)
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE), NONE)


@pytest.mark.parametrize(
    "code",
    [
        "CALL.ABS.NOINC R2\nEXIT",
        "CALL.REL.NOINC `(elsewhere)\nEXIT",
        "BRX R2 -0x10\nEXIT",
        "RET.REL.NODEC R2 `(k)",
        "again:\nMOV R20, 0x20\nCALL.REL.NOINC `(again)\nEXIT",
        "@P0?Q1 STG.E desc[UR4][R2.64], R0\nEXIT",
        "<unknown>\nEXIT",
    ],
)
def test_code_that_cannot_be_followed_may_do_anything_to_what_its_arguments_name(code: str) -> None:
    assert flow(code, P0, Parameter(8, 4), Parameter(16, 40)) == (
        [(0, 0, 8, BOTH, SCAN), (2, 0, 40, BOTH, SCAN)],
        NONE,
    )


def test_printing_and_failing_assertions_touch_nothing() -> None:
    code = """
        LDC.64 R16, c[0x0][0x210]
        MOV R0, 0x8
        LDC.64 R2, c[0x4][R0]
        LEPC R20, `(.L_x_1)
        CALL.ABS.NOINC R2
        .L_x_1:
        STG.E desc[UR4][R16.64], R4
        EXIT
    """
    assert flow(code, P0, slots={8: "vprintf"}) == (pointers(WRITE), NONE)
    assert flow(code, P0, slots={8: "__assertfail"}) == ([], NONE)
    assert flow(code, P0, slots={8: "cudaLaunchDeviceV2"}) == ([(0, 0, 8, BOTH, SCAN)], NONE)


def test_a_vote_says_nothing_of_a_thread() -> None:
    """A thread for which P0 is false keeps the first address, and stores if P0 is true for another one."""
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        ISETP.NE.AND P0, PT, R8, RZ, PT
        @P0 MOV R2, R4
        @P0 MOV R3, R5
        VOTEU.ANY UP0, P0
        @UP0 STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(WRITE, WRITE), NONE)


def test_a_copy_of_a_register_holds_under_a_predicate_what_that_held() -> None:
    code = """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        ISETP.NE.AND P0, PT, R8, RZ, PT
        @P0 MOV R2, R4
        @P0 MOV R3, R5
        IMAD.MOV.U32 R6, RZ, RZ, R2
        MOV R7, R3
        @P0 STG.E desc[UR4][R6.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(NONE, WRITE), NONE)
    other = code.replace("IMAD.MOV.U32 R6, RZ, RZ, R2", "IMAD.U32 R6, R9, R10, R2")
    other = other.replace("MOV R7, R3", "IMAD.X R7, RZ, RZ, R3, P1")
    assert flow(other, P0, P1) == (pointers(WRITE, WRITE), NONE), "no copy"
    changed = code.replace("MOV R7, R3", "MOV R7, R3\nISETP.NE.AND P0, PT, R9, RZ, PT")
    assert flow(changed, P0, P1) == (pointers(WRITE, WRITE), NONE)
    # The warp's register has the word of some thread, for which P0 may be false.
    warp = code.replace("IMAD.MOV.U32 R6, RZ, RZ, R2", "R2UR UR6, R2").replace("MOV R7, R3", "R2UR UR7, R3")
    assert flow(warp.replace("R6.64", "UR6.64"), P0, P1) == (pointers(WRITE, WRITE), NONE)


def test_a_tensor_map_that_one_thread_is_elected_to_use() -> None:
    """As Triton's compiler has it: halves that one thread has go through registers of all, and back."""
    code = """
        ULDC.64 UR4, c[0x0][0x208]
        LDC.64 R2, c[0x0][0x198]
        UMOV UR8, 0x400
        ELECT P0, URZ, PT
        VOTEU.ANY UP0, P0
        @P0 R2UR UR4, R2
        @P0 R2UR UR7, R3
        IMAD.U32 R12, RZ, RZ, UR4
        IMAD.U32 R13, RZ, RZ, UR7
        @P0 R2UR UR8, R12
        @P0 R2UR UR9, R13
        ISETP.NE.AND P1, PT, R5, RZ, PT
        @UP0 UTMAREDG.2D.ADD [UR20], [UR8]
        EXIT
    """
    expected = ([(0, 0, 128, BOTH, TENSOR_MAP)], NONE)
    assert flow(code, Parameter(0, 128)) == expected
    # The predicate is used again; whether it was true for any thread is known by the vote still.
    later = code.replace("P1, PT, R5", "P0, PT, R5")
    assert flow(later, Parameter(0, 128)) == expected
    # Or not: the number that was there before is no map's address; an address from memory may be.
    revoted = code.replace("ISETP.NE.AND P1, PT, R5, RZ, PT", "VOTEU.ANY UP0, P1")
    assert flow(revoted, Parameter(0, 128)) == expected
    loaded = revoted.replace("UMOV UR8, 0x400", "LDG.E R6, desc[UR6][R10.64]\nR2UR UR8, R6")
    assert flow(loaded, Parameter(0, 128)) == ([(0, 0, 128, BOTH, TENSOR_MAP)], BOTH)


@pytest.mark.parametrize("branch", ["BRA.CONV ~URZ,", "BRA.CONV", "BRA.DIV UR4,", "BRA.U UP0,"])
def test_a_branch_that_some_warps_take_leaves_the_way_behind_it(branch: str) -> None:
    """`BRA.CONV` stands before `shfl` and the like at the ends of loops (ptxas 13.0 for sm_75, sm_80, sm_86)."""
    code = f"""
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        {branch} `(.L_x_0)
        STG.E desc[UR6][R4.64], R0
        .L_x_0:
        STG.E desc[UR6][R2.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(WRITE, WRITE), NONE)
    assert flow(code.replace(branch, "BRA"), P0, P1) == (pointers(WRITE, NONE), NONE)


def test_a_kernel_that_ends_with_a_trap_does_not_go_on_into_the_function_behind_it() -> None:
    """`__trap()` ends a kernel; `brkpt` does not."""
    code = """
        LDC.64 R2, c[0x0][0x210]
        MOV R20, 0x30
        CALL.REL.NOINC `(helper)
        @!P0 EXIT
        BPT.TRAP 0x1
        helper:
        STG.E desc[UR4][R2.64], R0
        RET.REL.NODEC R20 `(k)
    """
    assert flow(code, P0, P1) == (pointers(WRITE), NONE)
    assert flow(code.replace("BPT.TRAP", "@P1 BPT.TRAP"), P0, P1) == ANYTHING
    assert flow(code.replace("BPT.TRAP", "BPT.INT"), P0, P1) == ANYTHING


@pytest.mark.parametrize("helper", ["helper", ".L_x_1"])
def test_helpers_are_followed_apart_for_each_caller(helper: str) -> None:
    """One that the assembler made of the kernel's own code has no name."""
    found = flow(
        f"""
        LDC.64 R2, c[0x0][0x210]
        MOV R20, 0x30
        CALL.REL.NOINC `({helper})
        LDG.E R0, desc[UR4][R2.64]
        LDC.64 R2, c[0x0][0x218]
        MOV R20, 0x70
        CALL.REL.NOINC `({helper})
        STG.E desc[UR4][R2.64], R0
        EXIT
        {helper}:
        IADD3 R2, P0, R2, 0x10, RZ
        IADD3.X R3, R3, RZ, RZ, P0, !PT
        RET.REL.NODEC R20 `(k)
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)
