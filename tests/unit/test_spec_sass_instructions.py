"""Data flow over machine code: what instructions do with addresses."""

from __future__ import annotations

import pytest

from phos.gpu_engine.spec import sass_flow
from phos.gpu_engine.spec.descriptor import Access, Parameter
from phos.gpu_engine.spec.sass_state import Layout
from phos.gpu_engine.spec.sass_text import parse
from tests.unit.sass_snippets import P0, P1, P2, flow
from tests.unit.spec_access import BOTH, NONE, POINTER, READ, SCAN, WRITE, Expected, as_expected, pointers, table


def test_a_register_used_again_loses_what_it_held() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        LDG.E R0, desc[UR4][R2.64]
        MOV R2, R4
        MOV R3, R5
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert found == (pointers(READ, WRITE), NONE)


def test_an_address_in_a_packed_struct() -> None:
    """struct { int n; float *p; } under `#pragma pack(4)`."""
    found = flow(
        """
        LDC R2, c[0x0][0x214]
        LDC R3, c[0x0][0x218]
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        Parameter(0, 12),
    )
    assert found == ([(0, 4, 8, WRITE, POINTER)], NONE)


PACKED = Parameter(0, 13), Parameter(16, 8)
"""struct { char c; float *p; int n; } under `#pragma pack(1)`, and a pointer."""


BYTES = "\n".join(f"LDC.U8 R{8 + byte}, c[0x0][{0x211 + byte:#x}]" for byte in range(8))


@pytest.mark.parametrize(
    "code",
    [
        # Bytes put together.
        BYTES
        + """
        PRMT R2, R9, 0x7604, R8
        PRMT R4, R11, 0x7604, R10
        PRMT R2, R4, 0x1054, R2
        PRMT R3, R13, 0x7604, R12
        PRMT R4, R15, 0x7604, R14
        PRMT R3, R4, 0x1054, R3
        """,
        # Bytes through the stack.
        "LDC R1, c[0x0][0x28]\n"
        + BYTES
        + "".join(f"\nSTL.U8 [R1+{byte:#x}], R{8 + byte}" for byte in range(8))
        + "\nLDL.64 R2, [R1]",
        # Words, of which bytes are taken.
        """
        LDC R8, c[0x0][0x210]
        LDC R9, c[0x0][0x214]
        LDC R10, c[0x0][0x218]
        PRMT R2, R8, 0x4321, R9
        PRMT R3, R9, 0x4321, R10
        """,
        """
        LDC R8, c[0x0][0x210]
        LDC R9, c[0x0][0x214]
        LDC R10, c[0x0][0x218]
        SHF.R.U64 R2, R8, 0x8, R9
        SHF.R.U64 R3, R9, 0x8, R10
        """,
    ],
    ids=["bytes", "bytes on the stack", "words", "words shifted"],
)
def test_an_address_that_begins_within_a_word(code: str) -> None:
    places, indirect = flow(code + "\nSTG.E desc[UR4][R2.64], R0\nEXIT", *PACKED)
    assert (0, 1, 8, WRITE, POINTER) in places
    assert all(parameter == 0 and place + size <= 13 for parameter, place, size, *_ in places)
    # Words that are shifted may be an address of another form as well.
    assert indirect == (WRITE if "SHF" in code else NONE)


@pytest.mark.parametrize(
    "code",
    [
        "PRMT R2, R8, 0x7604, R10\nPRMT R2, R2, 0x7604, R11\nPRMT R3, R12, 0x7604, R15",
        "\n".join(f"STS.U8 [R30+{byte:#x}], R{8 + byte}" for byte in range(8)) + "\nLDS.64 R2, [R30]",
    ],
    ids=["in registers", "in shared memory"],
)
def test_an_address_made_of_bytes_with_a_number_added_to_it(code: str) -> None:
    """The number is the parameter behind the struct; it passes for an address, too."""
    places, indirect = flow(
        f"""
        {BYTES}
        {code}
        LDC.64 R4, c[0x0][0x220]
        IADD3 R6, P0, R2, R4, RZ
        IADD3.X R7, R3, R5, RZ, P0, !PT
        STG.E desc[UR4][R6.64], R0
        EXIT
        """,
        *PACKED,
    )
    assert (0, 1, 8, WRITE, POINTER) in places
    assert indirect == NONE


@pytest.mark.parametrize(("first", "second"), [(8, 12), (12, 8), (8, 16)])
def test_wide_accesses_have_two_registers_anywhere(first: int, second: int) -> None:
    loaded = f"""
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R20, c[0x0][0x218]
        LDG.E.ENL2.256 R{first}, R{second}, desc[UR4][R2.64]
        LDG.E R1, desc[UR4][R{second}.64]
        STG.E desc[UR4][R20.64], R0
        EXIT
    """
    assert flow(loaded, P0, P1, architecture=100) == (sorted([*pointers(READ, WRITE), table(0, READ)]), NONE)
    stored = f"""
        LDC R1, c[0x0][0x37c]
        LDC.64 R{second}, c[0x0][0x218]
        MOV R2, R1
        MOV R3, RZ
        STG.E.ENL2.256 desc[UR4][R2.64], R{first}, R{second}
        LDL.64 R6, [R1+0x10]
        STG.E desc[UR4][R6.64], R0
        EXIT
    """
    assert flow(stored, P0, P1, architecture=100)[0] == pointers(NONE, WRITE)


CHOICES = {
    "by bits": """
        LOP3.LUT R8, R6, R4, R2, 0xac, !PT
        LOP3.LUT R9, R6, R5, R3, 0xac, !PT
    """,
    "by bits of each": """
        LOP3.LUT R10, R2, R6, RZ, 0xc0, !PT
        LOP3.LUT R11, R3, R6, RZ, 0xc0, !PT
        LOP3.LUT R12, R4, R6, RZ, 0x30, !PT
        LOP3.LUT R13, R5, R6, RZ, 0x30, !PT
        LOP3.LUT R8, R10, R12, RZ, 0xfc, !PT
        LOP3.LUT R9, R11, R13, RZ, 0xfc, !PT
    """,
    "by bytes": "PRMT R8, R2, R6, R4\nPRMT R9, R3, R6, R5",
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
def test_bits_of_one_address_or_of_another_are_either(choice: str) -> None:
    """The first is a pointer elsewhere, which in a sum would make the second an index."""
    code = f"""
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        LDC R6, c[0x0][0x220]
        LDG.E R0, desc[UR4][R2.64]
        {choice.strip()}
        STG.E desc[UR4][R8.64], R0
        EXIT
    """
    assert flow(code, P0, P1, Parameter(16, 4)) == (pointers(BOTH, WRITE), NONE)


# A number of 64 bits is added besides, which passes for the address where nothing better is there.
INDEXED = """
    LDC.64 R2, c[0x0][0x210]
    LDC.64 R4, c[0x0][0x218]
    {code}
    IADD3 R8, P0, R6, R4, RZ
    IADD3.X R9, R7, R5, RZ, P0, !PT
    STG.E desc[UR4][R8.64], R0
    EXIT
"""


def indexed(code: str) -> Expected:
    """What a kernel does that has an address in R2 and R3, a number in R4 and R5, and stores through R6 and R7."""
    return flow(INDEXED.format(code=code.strip()), P0, P1)


@pytest.mark.parametrize(
    "code",
    [
        "REDUX.OR UR6, R2\nREDUX.MAX UR7, R3\nMOV R6, UR6\nMOV R7, UR7",
        "CREDUX.MIN UR6, R2\nCREDUX.MIN UR7, R3\nMOV R6, UR6\nMOV R7, UR7",
        "SHFL.IDX PT, R6, R2, RZ, 0x1f\nSHFL.IDX PT, R7, R3, RZ, 0x1f",
        "MOVM.16.MT88 R6, R2\nMOVM.16.MT88 R7, R3",
    ],
    ids=["reduced", "reduced and copied", "shuffled", "transposed"],
)
def test_an_address_that_goes_through_the_warp(code: str) -> None:
    assert indexed(code) == (pointers(WRITE, WRITE), NONE)


@pytest.mark.parametrize(
    "code",
    [
        "STS.64 [R10], R2\nLDS.64 R6, [R10]",
        "STS.64 [R10], R2\nLDSM.16.M88.2 R6, [R10]",
        "ATOMS.EXCH.64 RZ, [R10], R2\nLDS.64 R6, [R10]",
        "ATOMS.CAS.64 RZ, [R10], R12, R2\nLDS.64 R6, [R10]",
        "STS.64 [R10], R2\nLDSM.16.MT88.4 R4, [R10]\nLDC.64 R4, c[0x0][0x218]",
        "STS.64 [R10], R2\nLDSM.8.MT1616 R6, [R10]",
        "STSM.16.M88.2 [R10], R2\nLDS.64 R6, [R10]",
        "MOV R12, R2\nMOV R13, R3\nSTSM.16.M88.4 [R16], R10\nLDS.64 R6, [R16]",
        "STTM.x2 tmem[UR4], R2\nLDTM.x2 R6, tmem[UR4]",
        "STTM.16dp128bit tmem[UR4+0x8], R2\nLDTM.16dp256bit R4, tmem[UR4]\nLDC.64 R4, c[0x0][0x218]",
    ],
)
def test_an_address_that_goes_through_shared_memory(code: str) -> None:
    assert indexed(code) == (pointers(WRITE, WRITE), NONE)


@pytest.mark.parametrize(
    "code",
    [
        "TLD.LZ R8, R6, R0, UR4, 0x0, 1D",
        "TLD.LZ R7, R6, R0, UR4, 0x0, 1D, 0xd",
        "TEX.SCR.LL RZ, R6, R4, 0x0, UR4, 2D, 0x3",
        "SULD.D.BA.1D.64.TRAP R6, [R0], UR4, 0x0",
        "SULD.D.BA.1D.128.TRAP R12, [R0], UR4, 0x0\nMOV R6, R14\nMOV R7, R15",
    ],
)
def test_an_address_from_a_texture_or_a_surface_is_one_from_memory(code: str) -> None:
    """The number that is added passes for one, too: nothing tells the two apart."""
    assert indexed(code) == (pointers(NONE, WRITE), BOTH)


def test_an_atomic_on_a_surface_leaves_registers_alone() -> None:
    """The register after the coordinates is what is added."""
    assert indexed("MOV R6, R2\nMOV R7, R3\n@P0 SURED.D.BA.1D.ADD [R0], R6, UR4, 0x0")[0] == pointers(WRITE, WRITE)


def test_a_conversion_from_64_bits_leaves_the_register_behind_its_result_alone() -> None:
    assert indexed("MOV R6, R2\nMOV R7, R3\nI2F.U64 R5, R10\nLDC R5, c[0x0][0x21c]")[0] == pointers(WRITE, WRITE)


@pytest.mark.parametrize("code", ["MATCH.ANY.U64 R6, R10", "MATCH.ALL.U64 P1, R6, R10"])
def test_a_comparison_of_64_bits_leaves_the_register_behind_its_result_alone(code: str) -> None:
    """It makes a mask of the warp's threads."""
    assert indexed(f"MOV R7, R3\n{code}\nMOV R6, R2")[0] == pointers(WRITE, WRITE)


@pytest.mark.parametrize("kind", ["U64", "S64"])
def test_the_lower_or_the_higher_of_two_addresses(kind: str) -> None:
    """As sm_120 has it in one instruction."""
    code = f"""
        LDC.64 R2, c[0x0][0x210]
        LDC.64 R4, c[0x0][0x218]
        IMNMX.{kind} PT, PT, R2, R2, R4, PT, !PT
        STG.E desc[UR4][R2.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(WRITE, WRITE), NONE)


def test_cache_control_may_destroy_what_is_in_memory() -> None:
    code = "LDC.64 R2, c[0x0][0x210]\nCCTL.E.RML2 [R2]\nEXIT"
    assert flow(code, P0) == (pointers(WRITE), NONE)
    for harmless in ("CCTL.E.PF2 [R2]", "CCTL.E.DML2 [R2]", "CCTL.IVALL"):
        assert flow(code.replace("CCTL.E.RML2 [R2]", harmless), P0) == ([], NONE)


@pytest.mark.parametrize("code", ["UMEMSETS.64 [UR4], URZ, UR5", "UGETNEXTWORKID.SELFCAST [UR4], [UR5]"])
def test_what_only_writes_to_shared_memory_is_no_access(code: str) -> None:
    assert flow(f"UMOV UR4, 0x400\nUMOV UR5, 0x80\n{code}\nEXIT", P0, architecture=100) == ([], NONE)


@pytest.mark.parametrize(
    ("code", "access"),
    [
        ("STG.E <R2>, R0", WRITE),
        ("ATOMG.E.ADD PT, R4, <R2>, R0", BOTH),
        ("REDG.E.ADD <R2>, R0", BOTH),
        ("LDG.E R4, <R2>", READ),
        ("LDGSTS.E [R6], <R2>", READ),
        ("UBLKCP.G.S <UR4>, [UR8], UR6", BOTH),
        ("UTMASTG.2D <UR4>, <UR8>", WRITE),
        ("UTMALDG.2D <UR4>, <UR8>", READ),
    ],
)
def test_an_access_whose_address_cannot_be_read_may_go_anywhere(code: str, access: Access) -> None:
    assert flow(f"LDC.64 R2, c[0x0][0x210]\n{code}\nEXIT", P0) == ([], access)


@pytest.mark.parametrize(
    ("upper", "lower"),
    [(0x210, 0x214), (0x210, 0x21C), (0x214, 0x218)],
    ids=["swapped", "swapped apart", "side by side"],
)
def test_halves_of_an_address_that_do_not_lie_in_order(upper: int, lower: int) -> None:
    code = f"""
        LDC R2, c[0x0][{lower if upper != 0x214 else upper:#x}]
        LDC R3, c[0x0][{upper if upper != 0x214 else lower:#x}]
        LDC.64 R4, c[0x0][0x220]
        IADD3 R6, P0, R2, R4, RZ
        IADD3.X R7, R3, R5, RZ, P0, !PT
        STG.E desc[UR4][R6.64], R0
        EXIT
    """
    found = flow(code, Parameter(0, 16), P2)
    if upper == 0x214:  # they are an address in a packed struct
        assert found == ([(0, 4, 8, WRITE, POINTER), (1, 0, 8, WRITE, POINTER)], NONE)
    else:
        assert found == ([(1, 0, 8, WRITE, POINTER)], WRITE)


def test_a_packed_address_of_bytes_that_lies_on_a_word() -> None:
    code = "\n".join(f"LDC.U8 R{8 + byte}, c[0x0][{0x214 + byte:#x}]" for byte in range(8))
    code += "\nPRMT R2, R8, 0x7604, R9\nPRMT R3, R12, 0x7604, R13\n"
    assert (0, 4, 8, WRITE, POINTER) in flow(code + "STG.E desc[UR4][R2.64], R0\nEXIT", Parameter(0, 16))[0]


def test_an_address_with_a_key_is_none_among_the_arguments() -> None:
    assert indexed("LOP3.LUT R6, R2, R4, RZ, 0x3c, !PT\nLOP3.LUT R7, R3, R5, RZ, 0x3c, !PT")[1] == WRITE
    # A number is no key: bits of the address are changed.
    assert indexed("LOP3.LUT R6, R2, 0x40, RZ, 0x3c, !PT\nMOV R7, R3")[1] == NONE
    # Nor is one of 32 bits: the elements of a tile are put in another order.
    swizzled = """
        LDC R9, c[0x0][0x214]
        LOP3.LUT R8, R9, R4, RZ, 0x3c, !PT
        IADD3 R6, P0, R2, R8, RZ
        IADD3.X R7, R3, RZ, RZ, P0, !PT
    """
    assert indexed(swizzled)[1] == NONE


ELSEWHERE = """
        LOP3.LUT R8, R2, R3, RZ, 0x3c, !PT
        LOP3.LUT R2, R8, R2, RZ, 0x3c, !PT
        LOP3.LUT R3, R8, R2, RZ, 0x3c, !PT
        """


EXCHANGE = """
        LOP3.LUT R2, R2, R3, RZ, 0x3c, !PT
        LOP3.LUT R3, R2, R3, RZ, 0x3c, !PT
        LOP3.LUT R2, R2, R3, RZ, 0x3c, !PT
        """


@pytest.mark.parametrize(
    ("between", "again", "known"),
    [
        (EXCHANGE, "", True),
        (EXCHANGE.replace("R2, R3, RZ", "R3, R2, RZ"), "", True),
        # In another register, and back with what it was mixed with.
        (ELSEWHERE, "", True),
        # One that something else was put into on the way, or may have been.
        (EXCHANGE.replace("\n        LOP3.LUT R3", "\nIMAD.MOV.U32 R3, RZ, RZ, R6\n LOP3.LUT R3"), "", False),
        (EXCHANGE.replace("\n        LOP3.LUT R3", "\n@P0 LOP3.LUT R3"), "", False),
        # Straight code ends where others may come from.
        (EXCHANGE.replace("\n        LOP3.LUT R3", "\n.L_1:\n LOP3.LUT R3"), "@P1 BRA `(.L_1)", False),
    ],
)  # fmt: skip
def test_registers_are_exchanged_by_exclusive_ors(between: str, again: str, known: bool) -> None:
    found = flow(
        f"""
        LDC R3, c[0x0][0x210]
        LDC R2, c[0x0][0x214]
        LDC R6, c[0x0][0x218]
        {between}
        {again}
        STG.E desc[UR4][R2.64], R0
        EXIT
        """,
        P0,
        P1,
    )
    assert (found == (pointers(WRITE), NONE)) == known


@pytest.mark.parametrize(
    ("architecture", "address"),
    [
        (80, "MOV R2, c[0x0][0x90]\nIMAD.MOV.U32 R3, RZ, RZ, c[0x0][0x8c]"),
        (90, "ULDC UR7, c[0x0][0x48]\nULDC UR6, c[0x0][0x44]\nIMAD.U32 R2, RZ, RZ, UR7\nIMAD.U32 R3, RZ, RZ, UR6"),
        (
            100,
            """
            CS2R.32 R2, SR_CgaSize
            IMAD R2, R2, -0xa0, RZ
            R2UR UR7, R2
            LDCU UR7, c[0x0][UR7+0x258]
            LDCU UR6, c[0x0][UR7+0x254]
            IMAD.U32 R2, RZ, RZ, UR7
            IMAD.U32 R3, RZ, RZ, UR6
            """,
        ),
    ],
)
def test_the_barrier_of_a_cooperative_launch_is_the_drivers(architecture: int, address: str) -> None:
    """As ptxas 13.0 has `%envreg1` and `%envreg2`, of which `grid.sync()` makes an address."""
    code = "LDC.64 R4, c[0x0][0x210]\nSTG.E desc[UR4][R4.64], R0\n" + address
    code += "\nATOM.E.ADD.STRONG.GPU PT, R7, desc[UR4][R2.64+0x4], R7\nEXIT"
    assert flow(code, P0, architecture=architecture) == (pointers(WRITE), NONE)


ASIDE = """
    {code}
    RPCMOV.32 Rpc.LO, R2
    CS2R.32 R2, SR_CgaSize
    IMAD R2, R2, -0xa0, RZ
    R2UR UR7, R2
    RPCMOV.32 R2, Rpc.LO
    {use}
    STG.E desc[UR4][R2.64], R0
    EXIT
"""


def test_a_register_that_is_put_aside_has_its_word_again() -> None:
    """As ptxas 13.0 does it for sm_100 where it asks for the size of a cluster and has no register left."""
    found = flow(ASIDE.format(code="LDC.64 R2, c[0x0][0x380]", use=""), P0, architecture=100, base=0x380)
    assert found == (pointers(WRITE), NONE)
    # An index stays in units of addresses.
    many = ASIDE.format(code="LDC R2, c[0x0][0x400]\nIMAD R2, R2, 0x8, RZ", use="LDC.64 R2, c[0x0][R2+0x3c0]")
    both = Parameter(0, 128), Parameter(128, 4)
    assert flow(many, *both, architecture=100, base=0x380) == ([(0, 0, 128, WRITE, SCAN)], NONE)
    # What is there from before is no address, and nothing that is known.
    never = ASIDE.format(code="", use="").replace("RPCMOV.32 Rpc.LO, R2", "LDC.64 R2, c[0x0][0x380]")
    assert flow(never, P0, architecture=100, base=0x380)[1] == WRITE


def test_a_store_through_a_parameter_or_an_address_from_memory_may_go_through_either() -> None:
    """`float *p = many ? many[i] : one`, as cuBLAS's products of many matrices have it."""
    code = """
        LDC.64 R6, c[0x0][0x210]
        LDC.64 R2, c[0x0][0x218]
        @P0 LDG.E.64 R2, desc[UR4][R6.64]
        STG.E desc[UR4][R2.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (sorted([*pointers(READ, WRITE), table(0, WRITE)]), NONE)
    branch = code.replace("@P0 LDG.E.64 R2, desc[UR4][R6.64]", "@!P0 BRA `(.L)\nLDG.E.64 R2, desc[UR4][R6.64]\n.L:")
    assert flow(branch, P0, P1) == (sorted([*pointers(READ, WRITE), table(0, WRITE)]), NONE)
    assert flow(code.replace("STG.E desc[UR4][R2.64], R0", "LDG.E R0, desc[UR4][R2.64]"), P0, P1) == (
        sorted([*pointers(READ, READ), table(0, READ)]),
        NONE,
    )


def test_a_store_through_a_parameter_and_an_index_from_shared_memory_does_not_go_anywhere() -> None:
    """As in CUB's sort by radix: addresses, and what was loaded, lie in shared memory, and so does the index."""
    code = """
        LDC.64 R6, c[0x0][0x210]
        LDG.E.64 R8, desc[UR4][R6.64]
        LDC.64 R2, c[0x0][0x218]
        STS.64 [R20], R8
        STS.64 [R20+0x8], R2
        LDS.64 R10, [R21]
        STG.E desc[UR4][R10.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (sorted([*pointers(READ, WRITE), table(0, WRITE)]), NONE)
    marked = code.replace(
        "LDS.64 R10, [R21]",
        "LDS.64 R10, [R21]\nLOP3.LUT R10, R10, R2, RZ, 0xfc, !PT\nLOP3.LUT R11, R11, R3, RZ, 0xfc, !PT",
    )
    assert flow(marked, P0, P1) == (pointers(READ, WRITE), NONE)


def test_what_a_register_held_before_is_none_of_what_is_done_under_the_predicate_that_it_was_set_under() -> None:
    code = """
        LDC.64 R6, c[0x0][0x210]
        LDG.E.64 R2, desc[UR4][R6.64]
        @P0 LDC.64 R2, c[0x0][0x218]
        @P0 STG.E desc[UR4][R2.64], R0
        EXIT
    """
    assert flow(code, P0, P1) == (pointers(READ, WRITE), NONE)


def test_an_instruction_that_nobody_knows_keeps_the_pointer() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        NEWOP.64 R4, R2, 0x10, RZ
        STG.E desc[UR4][R4.64], R0
        EXIT
        """,
        P0,
    )
    assert found == (pointers(WRITE), NONE)


def test_an_instruction_that_nobody_knows_may_do_anything_to_what_it_is_given() -> None:
    store = """
        LDC.64 R2, c[0x0][0x210]
        NEWST.E desc[UR4][R2.64], R0
        EXIT
    """
    assert flow(store, P0) == (pointers(BOTH), NONE)
    # What it loads may be an address.
    load = """
        LDC.64 R2, c[0x0][0x210]
        NEWLD.E.64 R4, desc[UR4][R2.64+0x8]
        STG.E desc[UR4][R4.64], R0
        EXIT
    """
    assert flow(load, P0) == (pointers(BOTH), WRITE)
    # Tensor memory is no memory of the application's.
    assert flow("LDC.64 UR4, c[0x0][0x210]\nLDTM.x8 R4, tmem[UR4+0x40]\nEXIT", P0) == ([], NONE)


def test_an_address_without_a_base_is_laid_to_whatever_went_into_it() -> None:
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        SHF.R.U64 R4, R2, 0x3, R3
        SHF.R.U32.HI R5, RZ, 0x3, R3
        SHF.L.U64.HI R7, R4, 0x3, R5
        IMAD.SHL.U32 R6, R4, 0x8, RZ
        IADD3 R7, R7, R3, RZ
        IADD3 R7, R7, -R3, RZ
        STG.E desc[UR4][R6.64], R0
        EXIT
        """,
        P0,
    )
    # It may be one that no argument is, too: in units of so many bytes, or above a tag.
    assert found == (pointers(WRITE), WRITE)


def test_a_generic_address_of_the_stack_or_of_shared_memory_is_either() -> None:
    """A function that is given room for its result now in one, now in the other."""
    code = """
        LDC R1, c[0x0][0x28]
        LDC.64 R2, c[0x0][0x210]
        IADD3 R6, P1, R1, c[0x0][0x20], RZ
        IADD3.X R7, RZ, c[0x0][0x24], RZ, P1, !PT
        @P0 MOV R6, 0x10
        @P0 S2R R7, SR_SWINHI
        ST.E.64 desc[UR4][R6.64], R2
        LDS.64 R8, [0x10]
        STG.E desc[UR4][R8.64], R0
        EXIT
    """
    assert flow(code, P0) == (pointers(WRITE), NONE)
    assert flow(code.replace("LDS.64 R8, [0x10]", "LDL.64 R8, [R1]"), P0) == (pointers(WRITE), NONE)
    # What is on the stack for sure is not in shared memory, so that the address stored through is from nowhere.
    assert flow(code.replace("@P0", "@!PT"), P0) == ([], WRITE)


def test_texture_and_surface_handles_are_indirect() -> None:
    assert flow("TEX.SCR.LL R0, R2, R4, 0x0, UR4, 2D\nEXIT", P0) == ([], READ)
    assert flow("SURED.D.BA.2D.ADD [R2], R4, UR4, 0x0\nEXIT", P0) == ([], BOTH)


def test_an_address_in_the_code_itself() -> None:
    """Compilers that run with the program write addresses of its buffers into the code."""
    found = flow(
        """
        LDC.64 R2, c[0x0][0x210]
        LDG.E R0, desc[UR4][R2.64]
        MOV R4, 0x1000
        MOV R5, 0x7f00
        STG.E desc[UR4][R4.64], R0
        EXIT
        """,
        P0,
    )
    assert found == (pointers(READ), WRITE)


@pytest.mark.parametrize("size", [0, 8])
def test_a_kernel_that_does_not_say_where_its_parameters_lie(size: int) -> None:
    text = '.section .text.k,"ax",@progbits\nk:\n/*0000*/ LDC.64 R2, c[0x0][0x218] ;\n'
    text += "/*0010*/ STG.E desc[UR4][R2.64], R0 ;\n/*0020*/ EXIT ;\n"
    found = sass_flow.describe_listing(parse(text), {"k": ((P0, P1), Layout(0x210, size, 90))}, {})["k"]
    assert as_expected(found) == ([(0, 0, 8, BOTH, SCAN), (1, 0, 8, BOTH, SCAN)], NONE)
    assert found.guessed


@pytest.mark.parametrize("brackets", ["xdesc[UR4][R2.64]", "[R2.64][UR8]"])
def test_an_instruction_and_an_address_that_nobody_knows_may_be_a_store_to_anywhere(brackets: str) -> None:
    assert flow(f"STNEW.E {brackets}, R0\nEXIT", P0) == ([], BOTH)
    assert flow("NEW.E R4, gdesc[UR4], tmem[UR8], R0\nEXIT", P0) == ([], NONE)
