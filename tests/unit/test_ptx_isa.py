"""What the PTX ISA defines and compilers seldom emit, on the PTX interpreter; and that what it lacks is refused."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ptx"))
from ptx_machine import HEADER, ILLEGAL_INSTRUCTION, LAUNCH_FAILED, NOT_SUPPORTED, Buffer, Module

U32 = ctypes.c_uint32
PROLOGUE = """
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .f32 %f<9>; .reg .b64 %d<20>; .shared .b32 s[128];
ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d1, %d0, %d1;
"""


def program(body: str, directives: str = "") -> Module:
    """A kernel k(o): %r0 is the thread, %d1 the address of its word of the buffer."""
    return Module(f"{HEADER}.visible .entry k(.param .u64 o) {directives} {{{PROLOGUE}{body} ret; }}")


def words(body: str, block: int = 32) -> list[int]:
    """What each thread leaves in %r1."""
    out = Buffer(4 * block)
    program(body + "st.global.u32 [%d1], %r1;").run("k", 1, block, out)
    return out.array(U32)


# Each thread takes what its counterpart in another warp has put into shared memory.
EXCHANGE = """
mov.u32 %r2, s; mad.lo.u32 %r3, %r0, 4, %r2; st.shared.u32 [%r3], %r0;
{arrive}
{wait}
xor.b32 %r4, %r0, 96; mad.lo.u32 %r3, %r4, 4, %r2; ld.shared.u32 %r1, [%r3];
"""
ARRIVE, WAIT = "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"


def test_the_barrier_of_a_cluster_of_one_block_waits_for_the_block() -> None:
    assert words(EXCHANGE.format(arrive=ARRIVE, wait=WAIT), 128) == [i ^ 96 for i in range(128)]


def test_the_barrier_of_a_cluster_is_used_again_and_waits_for_diverged_threads_and_none_that_ended() -> None:
    body = """
    mov.u32 %r2, s; mad.lo.u32 %r3, %r0, 4, %r2; setp.ge.u32 %p3, %r0, 120; @%p3 exit;
    mov.u32 %r1, %r0; mov.u32 %r7, 0; and.b32 %r5, %r0, 1; setp.eq.u32 %p1, %r5, 0;
    again: st.shared.u32 [%r3], %r1; @%p1 bra even; barrier.cluster.arrive; bra met; even: barrier.cluster.arrive;
    met: barrier.cluster.wait;
    xor.b32 %r4, %r0, 32; and.b32 %r4, %r4, 63; mad.lo.u32 %r6, %r4, 4, %r2; ld.shared.u32 %r1, [%r6];
    add.u32 %r1, %r1, 1;
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    add.u32 %r7, %r7, 1; setp.lt.u32 %p2, %r7, 5; @%p2 bra again;
    """
    held = list(range(120))
    for _ in range(5):
        held = [held[(i ^ 32) & 63] + 1 for i in range(120)]
    assert words(body, 128)[:120] == held


def test_a_thread_that_waits_at_a_cluster_barrier_for_one_that_waits_elsewhere_is_reported() -> None:
    body = f"setp.lt.u32 %p1, %r0, 32; @%p1 bra first; {ARRIVE} {WAIT} bra.uni out; first: bar.sync 0, 64; out:"
    code, fault = program(body).launch("k", 1, 64, Buffer(256))
    assert code == LAUNCH_FAILED
    assert b"barrier" in fault.message


def test_a_kernel_that_must_run_in_clusters_of_several_blocks_is_refused() -> None:
    code, fault = program("", ".explicitcluster .reqnctapercluster 2, 1, 1").launch("k", 2, 32, Buffer(4))
    assert code == NOT_SUPPORTED
    assert b"clusters" in fault.message
    program("", ".explicitcluster .reqnctapercluster 1, 1, 1").run("k", 2, 32, Buffer(4))


def test_the_address_of_an_element_of_an_array() -> None:
    """PTX ISA, "Arrays as Operands": `mov.u32 s, a[1]` moves the address of a[1] into s."""
    body = """
    .shared .align 8 .b64 wide[4]; .shared .b8 bytes[9];
    mov.u32 %r1, wide[1+2]; mov.u32 %r2, wide; sub.u32 %r1, %r1, %r2;
    mov.u32 %r3, bytes[5]; mov.u32 %r4, bytes; sub.u32 %r3, %r3, %r4; mad.lo.u32 %r1, %r1, 1000, %r3;
    """
    assert words(body)[0] == 24005


SATFINITE = {
    "cvt.rn.satfinite.f16.f32 %h1, %f1; cvt.u32.u16 %r1, %h1": (0x7BFF, 0xFBFF, 0x3C00, 0x7FFF),
    "cvt.rz.satfinite.bf16.f32 %h1, %f1; cvt.u32.u16 %r1, %h1": (0x7F7F, 0xFF7F, 0x3F80, 0x7FFF),
    "cvt.rna.satfinite.tf32.f32 %r1, %f1": (0x7F7FE000, 0xFF7FE000, 0x3F800000, None),
    "cvt.rn.satfinite.f16x2.f32 %r1, %f1, 0f3F800000": (0x7BFF3C00, 0xFBFF3C00, 0x3C003C00, 0x7FFF3C00),
    "cvt.rn.f16.f32 %h1, %f1; cvt.u32.u16 %r1, %h1": (0x7C00, 0xFC00, 0x3C00, 0x7FFF),
}


@pytest.mark.parametrize("instruction", SATFINITE)
def test_a_conversion_that_saturates_to_finite_values(instruction: str) -> None:
    """PTX ISA, "cvt": infinities and what is too large become the largest finite value, and a NaN stays one."""
    for bits, expected in zip((0x7F800000, 0xFF800000, 0x3F800000, 0x7FC00000), SATFINITE[instruction], strict=True):
        if expected is not None:
            assert words(f"mov.b32 %f1, 0f{bits:08X}; {instruction};")[0] == expected


@pytest.mark.parametrize(
    "instruction",
    [
        "fma.rn.oob.f16 %h1, %h2, %h3, %h4",
        "fma.rn.f32.f16 %f1, %h2, %h3, %f4",
        "min.relu.s32 %r1, %r2, %r3",
        "max.s32.relu %r1, %r2, %r3",
        "slct.ftz.f32.f32 %f1, %f2, %f3, %f4",
        "add.frobnicate.u32 %r1, %r2, %r3",
        "ld.global.frobnicate.u32 %r1, [%d1]",
        "st.global.frobnicate.u32 [%d1], %r1",
        "mul.lo.frobnicate.u32 %r1, %r2, %r3",
        "shfl.sync.idx.frobnicate.b32 %r1, %r2, 0, 31, -1",
    ],
)
def test_a_modifier_that_is_not_known_is_refused_where_it_is_executed(instruction: str) -> None:
    program(f"setp.ne.u32 %p1, 0, 0; @%p1 {instruction};").run("k", 1, 32, Buffer(128))
    code, fault = program(f"{instruction};").launch("k", 1, 32, Buffer(128))
    assert code == ILLEGAL_INSTRUCTION
    assert instruction.split(maxsplit=1)[0] in fault.message.decode()


@pytest.mark.parametrize(
    ("types", "bits"),
    [
        *(("s32.f32", 0), ("u16.f32", 0), ("s64.f32", 1 << 63), ("u64.f32", 1 << 63), ("u64.f16", 1 << 63)),
        *(("s32.f64", 1 << 31), ("u32.f64", 1 << 31), ("s64.f64", 1 << 63), ("u16.f64", 1 << 15)),
    ],
)
def test_what_a_nan_becomes_as_an_integer(types: str, bits: int) -> None:
    """PTX ISA 9.0, "cvt": 0, or where the source has 64 bits or the result has, the upper bit alone."""
    to, source = types.split(".")
    nan = {"f16": "mov.b16 %h1, 0x7fff", "f32": "mov.b32 %f1, 0f7FFFFFFF", "f64": "mov.b64 %d2, 0d7FFFFFFFFFFFFFFF"}
    register = {"f16": "%h1", "f32": "%f1", "f64": "%d2"}[source]
    result = {"16": "%h2", "32": "%r2", "64": "%d3"}[to[1:]]
    convert = f"{nan[source]}; cvt.rzi.{types} {result}, {register}; cvt.u64.u{to[1:]} %d4, {result};"
    assert words(f"{convert} cvt.u32.u64 %r1, %d4;")[0] == bits & 0xFFFFFFFF
    assert words(f"{convert} shr.u64 %d4, %d4, 32; cvt.u32.u64 %r1, %d4;")[0] == bits >> 32


FLUSHED = {
    # A subnormal input is 0: 2^-24 * 1024 would be 2^-14, which is normal.
    "mul.ftz.f16 %h1, %h2, %h3": 0,
    "fma.rn.ftz.f16 %h1, %h2, %h3, %h4": 0x3C00,
    "add.rn.ftz.f16 %h1, %h5, %h2": 0x8400,
    "min.ftz.f16 %h1, %h2, %h4": 0,
    "mul.f16 %h1, %h2, %h3": 0x0400,
}


@pytest.mark.parametrize("instruction", FLUSHED)
def test_subnormal_inputs_in_half_precision_are_flushed(instruction: str) -> None:
    numbers = "mov.b16 %h2, 0x0001; mov.b16 %h3, 0x6400; mov.b16 %h4, 0x3c00; mov.b16 %h5, 0x8400;"
    assert words(f"{numbers} {instruction}; cvt.u32.u16 %r1, %h1;")[0] == FLUSHED[instruction]


def test_comparisons_in_half_precision_flush_subnormal_inputs() -> None:
    body = (
        "mov.b32 %r2, 0x00013c00; setp.gt{}.f16x2 %p1|%p2, %r2, 0; selp.u32 %r1, 1, 0, %p1; @%p2 add.u32 %r1, %r1, 2;"
    )
    assert words(body.format(""))[0] == 3
    assert words(body.format(".ftz"))[0] == 1


# Each half of the warp is a group of its own: %r2 is its mask.
HALVES = "setp.lt.u32 %p8, %r0, 16; selp.b32 %r2, 0x0000ffff, 0xffff0000, %p8;"
GROUPS = {
    "setp.eq.u32 %p1, %r0, 20; vote.sync.any.pred %p2, %p1, %r2; selp.u32 %r1, 1, 0, %p2;": (0, 1),
    "setp.ne.u32 %p1, %r0, 20; vote.sync.all.pred %p2, %p1, %r2; selp.u32 %r1, 1, 0, %p2;": (1, 0),
    "setp.ne.u32 %p1, %r0, 99; vote.sync.ballot.b32 %r1, %p1, %r2;": (0xFFFF, 0xFFFF0000),
    "redux.sync.add.u32 %r1, %r0, %r2;": (sum(range(16)), sum(range(16, 32))),
    "match.any.sync.b32 %r1, 7, %r2;": (0xFFFF, 0xFFFF0000),
    "match.all.sync.b32 %r1|%p1, %r2, %r2;": (0xFFFF, 0xFFFF0000),
    "elect.sync %r1|%p1, %r2;": (0, 16),
}


@pytest.mark.parametrize("diverged", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("instruction", GROUPS)
def test_groups_of_a_warp_exchange_among_themselves(instruction: str, diverged: bool) -> None:
    before = after = ""
    if diverged:  # thread 20 comes late, and thread 3 when the second half has gone on
        before = (
            "st.shared.u32 [s], 0; setp.eq.u32 %p7, %r0, 20; @%p7 bra soon;"
            "setp.eq.u32 %p7, %r0, 3; @%p7 bra late; here:"
        )
        after = (
            "@!%p8 st.volatile.shared.u32 [s], 1; bra done; soon: mov.u32 %r4, 1; bra here;"
            "late: ld.volatile.shared.u32 %r4, [s]; setp.eq.u32 %p7, %r4, 0; @%p7 bra late; bra here; done:"
        )
    first, second = GROUPS[instruction]
    assert words(f"{HALVES} {before} {instruction} {after}") == [first] * 16 + [second] * 16


NANS = [
    "add.f32 %f1, 0f7F800000, 0fFF800000",
    "sub.rz.f32 %f1, 0f7F800000, 0f7F800000",
    "mul.f32 %f1, 0f7FC12345, 0f3F800000",
    "mul.ftz.f32 %f1, 0f00000000, 0fFF800000",
    "fma.rn.f32 %f1, 0fFFC12345, 0f3F800000, 0f3F800000",
    "div.rn.f32 %f1, 0f00000000, 0f00000000",
    "sqrt.rn.f32 %f1, 0fBF800000",
    "rsqrt.approx.f32 %f1, 0fBF800000",
    "rcp.rn.f32 %f1, 0fFFC00001",
    "lg2.approx.f32 %f1, 0fBF800000",
    "mov.b16 %h1, 0xfe01; cvt.f32.f16 %f1, %h1",
    "mov.b64 %d3, 0xfff8000000000001; cvt.rn.f32.f64 %f1, %d3",
    "st.shared.u32 [s], 0x7f800000; atom.shared.add.f32 %f2, [s], 0fFF800000; ld.shared.f32 %f1, [s]",
]


@pytest.mark.parametrize("instruction", NANS)
def test_a_nan_in_single_precision_is_the_canonical_one(instruction: str) -> None:
    """CUDA C++ Programming Guide, "Floating-Point Standard": 0x7fffffff, whatever NaN went in."""
    assert words(f"{instruction}; mov.b32 %r1, %f1;", 1) == [0x7FFFFFFF]
