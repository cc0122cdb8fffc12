"""Control flow, exchange between threads, memory and faults of the PTX interpreter, with PTX written by hand."""

# ruff: noqa: E501, E741, PT018
from __future__ import annotations

import ctypes
import random
import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ptx"))
from ptx_machine import (
    ASSERT,
    HEADER,
    ILLEGAL_ADDRESS,
    ILLEGAL_INSTRUCTION,
    INVALID_PTX,
    INVALID_VALUE,
    LAUNCH_FAILED,
    MISALIGNED_ADDRESS,
    OUT_OF_RESOURCES,
    STACK_ERROR,
    Buffer,
    Module,
    PtxError,
    array,
)

I32, U32, F32, U64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_uint64

PROLOGUE = """
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<9>; .reg .b64 %d<20>;
ld.param.u64 %d0, [o]; mov.u32 %r0, %tid.x; mov.u32 %r9, %ntid.x; mad.lo.u32 %r1, %ctaid.x, %r9, %r0;
mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d0, %d1;
"""


def program(body: str, extra: str = "", before: str = "") -> Module:
    """A kernel k(o, …): %r0 thread, %r1 global thread, %d0 the buffer, %d1 this thread's word of it."""
    return Module(HEADER + before + f".visible .entry k(.param .u64 o{extra}) {{" + PROLOGUE + body + "}")


def words(
    body: str,
    block: int = 32,
    grid: int = 1,
    extra: str = "",
    before: str = "",
    arguments: tuple = (),
    **options: object,
) -> list[int]:
    out = Buffer(4 * block * grid)
    program(body, extra, before).run("k", grid, block, out, *arguments, **options)
    return out.array(U32)


def test_lanes_meet_again_after_nested_branches() -> None:
    body = """
    mov.u32 %r2, 0; and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; @%p0 bra EVEN;
    add.u32 %r2, %r2, 1; and.b32 %r4, %r0, 2; setp.eq.u32 %p1, %r4, 0; @%p1 bra INNER; add.u32 %r2, %r2, 10;
    INNER: add.u32 %r2, %r2, 100; bra.uni JOIN;
    EVEN: add.u32 %r2, %r2, 1000;
    JOIN: activemask.b32 %r5; popc.b32 %r6, %r5; mad.lo.u32 %r2, %r6, 10000, %r2; st.global.u32 [%d1], %r2; ret;
    """
    want = [320000 + (1000 if t % 2 == 0 else 101 + (10 if t & 2 else 0)) for t in range(32)]
    assert words(body) == want


def test_loops_with_a_trip_count_per_lane() -> None:
    body = """
    mov.u32 %r2, 0; mov.u32 %r3, 0;
    LOOP: setp.ge.u32 %p0, %r3, %r0; @%p0 bra DONE; add.u32 %r2, %r2, %r3; add.u32 %r3, %r3, 1; bra LOOP;
    DONE: st.global.u32 [%d1], %r2; ret;
    """
    assert words(body, 70) == [t * (t - 1) // 2 for t in range(70)]


def test_irreducible_control_flow() -> None:
    """Two entries into one loop: lanes come in at either label and must all get the sum they would get alone."""
    body = """
    mov.u32 %r2, 0; mov.u32 %r3, 0; and.b32 %r4, %r0, 1; setp.eq.u32 %p0, %r4, 0; @%p0 bra B;
    A: add.u32 %r2, %r2, 3;
    B: add.u32 %r2, %r2, 5; add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r0; @%p1 bra A;
    st.global.u32 [%d1], %r2; ret;
    """

    def alone(t: int) -> int:
        total, count, at = 0, 0, "B" if t % 2 == 0 else "A"
        while True:
            total += 3 if at == "A" else 0
            total, count, at = total + 5, count + 1, "A"
            if count >= t:
                return total

    assert words(body) == [alone(t) for t in range(32)]


def test_random_control_flow_graphs_agree_with_one_thread_at_a_time() -> None:
    rng = random.Random(5)
    for _ in range(25):
        blocks = rng.randint(3, 9)
        plan = [
            (rng.randrange(blocks + 1), rng.randrange(blocks + 1), rng.choice([3, 5, 7]), rng.randrange(3))
            for _ in range(blocks)
        ]
        body = "mov.u32 %r2, %r0; mov.u32 %r3, 0;\n"
        for i, (yes, no, divisor, bias) in enumerate(plan):
            body += f"L{i}: add.u32 %r3, %r3, 1; setp.gt.u32 %p1, %r3, 60; @%p1 bra L{blocks};\n"
            body += f"mad.lo.u32 %r2, %r2, 5, {i + 1}; rem.u32 %r4, %r2, {divisor}; setp.le.u32 %p0, %r4, {bias}; @%p0 bra L{yes}; bra L{no};\n"
        body += f"L{blocks}: st.global.u32 [%d1], %r2; ret;"

        def alone(t: int, plan: list = plan, blocks: int = blocks) -> int:
            x, steps, at = t, 0, 0
            while at < blocks:
                steps += 1
                if steps > 60:
                    break
                yes, no, divisor, bias = plan[at]
                x = (x * 5 + at + 1) & 0xFFFFFFFF
                at = yes if x % divisor <= bias else no
            return x

        assert words(body, 64) == [alone(t) for t in range(64)]


def test_lanes_that_leave_early_do_not_hold_up_a_barrier() -> None:
    body = """
    setp.ge.u32 %p0, %r0, 40; @%p0 exit;
    .shared .u32 s; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [s], 77;
    bar.sync 0; ld.shared.u32 %r2, [s]; st.global.u32 [%d1], %r2; ret;
    """
    assert words(body, 100) == [77] * 40 + [0] * 60


def test_barriers_keep_warps_in_step() -> None:
    body = """
    .shared .align 4 .b32 s[256]; mov.u64 %d2, s; mul.wide.u32 %d3, %r0, 4; add.u64 %d4, %d2, %d3; st.shared.u32 [%d4], %r0;
    mov.u32 %r5, 128;
    LOOP: bar.sync 0; setp.ge.u32 %p0, %r0, %r5; @%p0 bra SKIP;
    mul.wide.u32 %d5, %r5, 4; add.u64 %d5, %d4, %d5; ld.shared.u32 %r6, [%d5]; ld.shared.u32 %r7, [%d4]; add.u32 %r7, %r6, %r7; st.shared.u32 [%d4], %r7;
    SKIP: shr.u32 %r5, %r5, 1; setp.ne.u32 %p1, %r5, 0; @%p1 bra LOOP;
    bar.sync 0; ld.shared.u32 %r8, [s]; st.global.u32 [%d1], %r8; ret;
    """
    assert words(body, 256, 3) == [255 * 128] * 768


def test_named_barriers_with_counts_and_arrival() -> None:
    """Warp 0 produces and only arrives; warp 1 waits for it at barrier 3."""
    body = """
    .shared .u32 s; setp.ge.u32 %p0, %r0, 32; @%p0 bra CONSUME;
    st.shared.u32 [s], 41; bar.arrive 3, 64; st.global.u32 [%d1], 1; ret;
    CONSUME: bar.sync 3, 64; ld.shared.u32 %r2, [s]; st.global.u32 [%d1], %r2; ret;
    """
    assert words(body, 64) == [1] * 32 + [41] * 32


def test_barrier_reductions() -> None:
    body = """
    setp.lt.u32 %p0, %r0, 37; bar.red.popc.u32 %r2, 0, %p0; bar.red.and.pred %p1, 0, %p0; bar.red.or.pred %p2, 0, %p0; setp.lt.u32 %p3, %r0, 999;
    barrier.cta.red.and.aligned.pred %p4, 1, %p3; selp.u32 %r3, 100, 0, %p1; selp.u32 %r4, 1000, 0, %p2; selp.u32 %r5, 10000, 0, %p4;
    add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; add.u32 %r2, %r2, %r5; st.global.u32 [%d1], %r2; ret;
    """
    assert words(body, 96) == [11037] * 96


def test_a_barrier_nobody_can_reach_is_reported() -> None:
    code, fault = program("setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 1, 128; ret;").launch("k", 1, 64, Buffer(256))
    assert code == LAUNCH_FAILED
    assert b"barrier" in fault.message


def test_a_lock_between_lanes_of_one_warp_makes_progress() -> None:
    body = """
    .shared .u32 lock; setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.u32 [lock], 0; bar.sync 0;
    TRY: atom.shared.cas.b32 %r2, [lock], 0, 1; setp.ne.u32 %p1, %r2, 0; @%p1 bra TRY;
    ld.volatile.global.u32 %r3, [%d0]; add.u32 %r3, %r3, 1; st.volatile.global.u32 [%d0], %r3; membar.cta; atom.shared.exch.b32 %r4, [lock], 0;
    ret;
    """
    assert words(body, 96)[0] == 96


def test_warp_barriers_join_lanes_from_different_places() -> None:
    body = """
    .shared .align 4 .b32 s[32]; mov.u64 %d2, s; mul.wide.u32 %d3, %r0, 4; add.u64 %d4, %d2, %d3; and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0;
    @%p0 bra EVEN; st.shared.u32 [%d4], %r0; bar.warp.sync -1; xor.b32 %r5, %r0, 1; bra READ;
    EVEN: mul.lo.u32 %r4, %r0, 10; st.shared.u32 [%d4], %r4; bar.warp.sync -1; xor.b32 %r5, %r0, 1;
    READ: mul.wide.u32 %d5, %r5, 4; add.u64 %d5, %d2, %d5; ld.shared.u32 %r6, [%d5]; st.global.u32 [%d1], %r6; ret;
    """
    assert words(body) == [(t ^ 1) * (10 if t % 2 else 1) for t in range(32)]


@pytest.mark.parametrize("mode, source", [
    ("up", lambda l: l - 3 if l >= 3 else l), ("down", lambda l: l + 3 if l + 3 < 32 else l), ("bfly", lambda l: l ^ 3), ("idx", lambda l: 3),
])  # fmt: skip
def test_shuffles(mode: str, source: object) -> None:
    clamp = 0 if mode == "up" else 31
    body = f"mul.lo.u32 %r2, %r0, 7; shfl.sync.{mode}.b32 %r3|%p0, %r2, 3, {clamp}, -1; selp.u32 %r4, 1000, 0, %p0; add.u32 %r3, %r3, %r4; st.global.u32 [%d1], %r3; ret;"
    inside = {"up": lambda l: l >= 3, "down": lambda l: l + 3 < 32, "bfly": lambda _: True, "idx": lambda _: True}[mode]
    assert words(body) == [source(t) * 7 + 1000 * inside(t) for t in range(32)]  # type: ignore[operator]


def test_shuffles_inside_segments() -> None:
    body = "shfl.sync.idx.b32 %r2, %r0, 2, 0x181f, -1; shfl.sync.down.b32 %r3, %r0, 1, 0x181f, -1; mad.lo.u32 %r2, %r2, 100, %r3; st.global.u32 [%d1], %r2; ret;"
    assert words(body) == [(t // 8 * 8 + 2) * 100 + (t + 1 if t % 8 < 7 else t) for t in range(32)]


def test_votes_matches_and_reductions() -> None:
    body = """
    setp.lt.u32 %p0, %r0, 5; vote.sync.ballot.b32 %r2, %p0, -1; vote.sync.any.pred %p1, %p0, -1; vote.sync.all.pred %p2, %p0, -1; vote.sync.uni.pred %p3, %p0, -1;
    selp.u32 %r3, 0x100, 0, %p1; selp.u32 %r4, 0x200, 0, %p2; selp.u32 %r5, 0x400, 0, %p3; or.b32 %r2, %r2, %r3; or.b32 %r2, %r2, %r4; or.b32 %r2, %r2, %r5;
    redux.sync.add.u32 %r6, %r0, -1; redux.sync.max.s32 %r7, %r0, -1; redux.sync.or.b32 %r8, %r0, -1; shl.b32 %r6, %r6, 16; add.u32 %r2, %r2, %r6;
    elect.sync %r10|%p4, -1; @%p4 add.u32 %r2, %r2, 1; and.b32 %r11, %r0, 3; match.any.sync.b32 %r12, %r11, -1; popc.b32 %r12, %r12; shl.b32 %r12, %r12, 12; add.u32 %r2, %r2, %r12;
    setp.ne.u32 %p5, %r7, 31; @%p5 mov.u32 %r2, 0; setp.ne.u32 %p5, %r8, 31; @%p5 mov.u32 %r2, 0; st.global.u32 [%d1], %r2; ret;
    """
    assert words(body) == [0x1F + 0x100 + (496 << 16) + (8 << 12) + (t == 0) for t in range(32)]


def test_exchange_among_the_lanes_of_one_side_of_a_branch() -> None:
    body = """
    setp.lt.u32 %p0, %r0, 16; mov.u32 %r2, 0; @!%p0 bra OTHER;
    shfl.sync.bfly.b32 %r2, %r0, 1, 31, 0xffff; bra JOIN;
    OTHER: shfl.sync.bfly.b32 %r2, %r0, 2, 31, 0xffff0000;
    JOIN: shfl.sync.idx.b32 %r3, %r2, 20, 31, -1; mad.lo.u32 %r2, %r3, 100, %r2; st.global.u32 [%d1], %r2; ret;
    """
    assert words(body) == [2200 + (t ^ 1 if t < 16 else t ^ 2) for t in range(32)]


@pytest.mark.parametrize("op, t, start, value, want", [
    ("add", "u32", 5, lambda t: t, 5 + 127 * 64), ("min", "s32", 50, lambda t: t - 40, -40), ("max", "u32", 3, lambda t: t, 127), ("and", "b32", -1, lambda t: ~(1 << t % 8), -256),
    ("or", "b32", 0, lambda t: 1 << t % 5, 31), ("xor", "b32", 0, lambda t: t, 0), ("inc", "u32", 0, lambda t: 9, 8), ("dec", "u32", 0, lambda t: 9, 2),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 3])
def test_atomics(op: str, t: str, start: int, value: object, want: int, threads: int) -> None:
    out, inputs = array(I32, [start]), array(U32, [value(i) & 0xFFFFFFFF for i in range(128)])  # type: ignore[operator]
    body = f"ld.param.u64 %d2, [v]; mul.wide.u32 %d3, %r1, 4; add.u64 %d2, %d2, %d3; ld.global.u32 %r2, [%d2]; atom.global.{op}.{t} %r3, [%d0], %r2; ret;"
    program(body, ", .param .u64 v").run("k", 4, 32, out, inputs, threads=threads)
    assert out.array(I32)[0] == want


def test_float_and_wide_atomics() -> None:
    body = """
    cvt.rn.f32.u32 %f0, %r1; red.global.add.f32 [%d0], %f0; cvt.u64.u32 %d5, %r1; atom.add.u64 %d6, [%d0+8], %d5; cvt.rn.f64.u32 %q0, %r1; atom.global.add.f64 %q1, [%d0+16], %q0;
    atom.global.add.noftz.f16x2 %r4, [%d0+24], 0x3c004000; ret;
    """
    out = Buffer(32)
    program(".reg .f64 %q<3>;" + body).run("k", 4, 32, out, threads=2)
    total, _, wide, double, low, high = struct.unpack("<fIQdee", out.bytes()[:28])
    assert (total, wide, double, low, high) == (8128.0, 8128, 8128.0, 256.0, 128.0)


CALLS = """
.func (.param .b32 r) fib(.param .b32 n) {
  .reg .b32 %r<9>; .reg .pred %p<2>; ld.param.u32 %r1, [n]; setp.lt.u32 %p1, %r1, 2; @%p1 bra LEAF;
  { .param .b32 a; .param .b32 b; add.u32 %r2, %r1, -1; st.param.b32 [a], %r2; call.uni (b), fib, (a); ld.param.b32 %r3, [b]; }
  { .param .b32 a; .param .b32 b; add.u32 %r2, %r1, -2; st.param.b32 [a], %r2; call.uni (b), fib, (a); ld.param.b32 %r4, [b]; }
  add.u32 %r1, %r3, %r4; LEAF: st.param.b32 [r], %r1; ret;
}
.func (.param .align 8 .b8 r[16]) swap(.param .align 8 .b8 s[16]) {
  .reg .b64 %d<3>; ld.param.b64 %d1, [s]; ld.param.b64 %d2, [s+8]; st.param.b64 [r], %d2; st.param.b64 [r+8], %d1; ret;
}
.func twice(.param .b64 p) { .reg .b64 %d<2>; .reg .b32 %r<2>; ld.param.b64 %d1, [p]; ld.u32 %r1, [%d1]; add.u32 %r1, %r1, %r1; st.u32 [%d1], %r1; ret; }
.func (.param .b32 r) plus(.param .b32 n) { .reg .b32 %r<2>; ld.param.u32 %r1, [n]; add.u32 %r1, %r1, 1000; st.param.b32 [r], %r1; ret; }
.global .u64 table[2] = { fib, plus };
"""


def test_recursion_in_diverged_lanes() -> None:
    body = "{ .param .b32 a; .param .b32 b; and.b32 %r2, %r0, 15; st.param.b32 [a], %r2; call.uni (b), fib, (a); ld.param.b32 %r3, [b]; } st.global.u32 [%d1], %r3; ret;"
    fib = [0, 1]
    while len(fib) < 16:
        fib.append(fib[-1] + fib[-2])
    assert words(body, 40, before=CALLS) == [fib[t % 16] for t in range(40)]


def test_structs_pointers_to_locals_and_indirect_calls() -> None:
    body = """
    .local .align 8 .b8 here[8]; mov.u64 %d2, here; cvta.local.u64 %d3, %d2; st.local.u32 [%d2+4], %r0; add.u64 %d4, %d3, 4;
    { .param .b64 p; st.param.b64 [p], %d4; call.uni twice, (p); }
    ld.local.u32 %r2, [%d2+4];
    { .param .align 8 .b8 s[16]; .param .align 8 .b8 t[16]; cvt.u64.u32 %d5, %r2; st.param.b64 [s], %d5; st.param.b64 [s+8], 5; call.uni (t), swap, (s); ld.param.b64 %d6, [t+8]; ld.param.b64 %d7, [t]; add.u64 %d6, %d6, %d7; }
    cvt.u32.u64 %r3, %d6; and.b32 %r4, %r0, 1; mul.wide.u32 %d8, %r4, 8; mov.u64 %d9, table; add.u64 %d9, %d9, %d8; ld.global.u64 %d10, [%d9];
    { .param .b32 a; .param .b32 b; st.param.b32 [a], 7; PROTO: .callprototype (.param .b32 _) _ (.param .b32 _); call (b), %d10, (a), PROTO; ld.param.b32 %r5, [b]; }
    add.u32 %r3, %r3, %r5; st.global.u32 [%d1], %r3; ret;
    """
    assert words(body, before=CALLS) == [2 * t + 5 + (1007 if t % 2 else 13) for t in range(32)]


def test_endless_recursion_is_a_fault() -> None:
    before = ".func deep() { call.uni deep; ret; }"
    code, fault = program("call.uni deep; ret;", before=before).launch("k", 1, 32, Buffer(128))
    assert code == STACK_ERROR
    assert b"deep" in fault.message


def test_branch_tables() -> None:
    body = """
    and.b32 %r2, %r0, 3; T: .branchtargets A, B, C, D; brx.idx %r2, T;
    A: mov.u32 %r3, 10; bra E; B: mov.u32 %r3, 20; bra E; C: mov.u32 %r3, 30; bra E; D: mov.u32 %r3, 40;
    E: activemask.b32 %r4; popc.b32 %r4, %r4; mad.lo.u32 %r3, %r4, 100, %r3; st.global.u32 [%d1], %r3; ret;
    """
    assert words(body) == [3200 + 10 * (t % 4 + 1) for t in range(32)]


def test_vectors_and_narrow_loads() -> None:
    body = """
    st.global.v4.u8 [%d1], {1, 2, 255, %h0}; mov.u16 %h0, 0x80fe; st.global.u8 [%d1+3], %h0; ld.global.v2.u16 {%h1, %h2}, [%d1]; ld.global.s8 %r2, [%d1+3]; ld.global.u8 %r3, [%d1+2];
    mov.b32 %r4, {%h1, %h2}; mov.b32 {%h3, %h4}, %r4; mov.b64 %d5, {%r4, %r2}; mov.b64 {%r5, %r6}, %d5; cvt.u32.u16 %r7, %h4; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r7; sub.u32 %r6, %r6, 0xfffffffe;
    add.u32 %r2, %r2, %r6; st.global.u32 [%d1], %r2; ret;
    """
    assert words(body) == [(-2 + 255 + 0xFEFF) & 0xFFFFFFFF] * 32


def test_special_registers_of_a_three_dimensional_launch() -> None:
    body = """
    .reg .b32 %s<20>; mov.u32 %s0, %tid.y; mov.u32 %s1, %tid.z; mov.u32 %s2, %ntid.y; mov.u32 %s3, %ctaid.y; mov.u32 %s4, %nctaid.x; mov.u32 %s5, %ctaid.z;
    mad.lo.u32 %s6, %s1, %s2, %s0; mad.lo.u32 %s6, %s6, %r9, %r0; mad.lo.u32 %s7, %s5, %nctaid.y, %s3; mad.lo.u32 %s7, %s7, %s4, %ctaid.x; mad.lo.u32 %s8, %s7, 24, %s6;
    mul.wide.u32 %d2, %s8, 4; add.u64 %d2, %d0, %d2; mov.u32 %s9, %laneid; mov.u32 %s10, %warpid; mad.lo.u32 %s9, %s10, 32, %s9; mad.lo.u32 %s9, %s9, 1000, %s8; st.global.u32 [%d2], %s9; ret;
    """
    out = Buffer(4 * 24 * 12)
    program(body).run("k", (2, 3, 2), (2, 3, 4), out)
    assert out.array(U32) == [i % 24 * 1000 + i for i in range(24 * 12)]


def test_globals_have_initial_values_and_relocations() -> None:
    before = """
    .global .align 4 .b32 numbers[4] = {10, 20, 30, 40}; .global .align 8 .u64 pointer = generic(numbers)+8; .const .f32 third = 0f3EAAAAAB; .global .align 1 .b8 text[4] = "ab";
    .global .align 8 .u64 pointers[2] = {numbers, pointer}; .global .align 1 .b8 bytes[8] = {0xFF(numbers), 0xFF00(numbers), 0xFF0000(numbers), 0, 0, 0, 0, 0};
    """
    body = "ld.global.u64 %d2, [pointer]; ld.global.u32 %r2, [%d2]; ld.const.u32 %r3, [third]; setp.eq.u32 %p0, %r0, 0; selp.u32 %r2, %r2, %r3, %p0; st.global.u32 [%d1], %r2; ret;"
    m, out = program(body, before=before), Buffer(128)
    m.run("k", 1, 32, out)
    assert out.array(U32)[:2] == [30, 0x3EAAAAAB]
    assert m.globals["text"].bytes() == b"ab\0\0"
    assert m.globals["pointers"].array(U64) == [m.globals["numbers"].address, m.globals["pointer"].address]
    assert m.globals["bytes"].bytes()[:3] == m.globals["numbers"].address.to_bytes(8, "little")[:3]


def test_dynamic_shared_memory_follows_the_static() -> None:
    body = """
    .shared .align 4 .b32 fixed[8]; mov.u32 %r2, more; mov.u32 %r3, %dynamic_smem_size; mul.lo.u32 %r4, %r0, 4; add.u32 %r4, %r4, %r2; st.shared.u32 [%r4], %r0; bar.sync 0;
    xor.b32 %r5, %r0, 5; mad.lo.u32 %r5, %r5, 4, %r2; ld.shared.u32 %r6, [%r5]; mad.lo.u32 %r6, %r3, 1000, %r6; mad.lo.u32 %r6, %r2, 1000000, %r6; st.global.u32 [%d1], %r6; ret;
    """
    got = words(body, before=".extern .shared .align 16 .b8 more[];", shared=128)
    assert got == [32 * 1000000 + 128000 + (t ^ 5) for t in range(32)]


def test_blocks_that_wait_for_each_other_run_side_by_side() -> None:
    """A barrier across the grid, made by hand: every block adds one and spins until all have."""
    body = """
    setp.ne.u32 %p0, %r0, 0; @%p0 bra WAIT; atom.global.add.u32 %r2, [counter], 1;
    SPIN: ld.acquire.gpu.global.u32 %r3, [counter]; setp.lt.u32 %p1, %r3, %nctaid.x; @%p1 bra SPIN;
    WAIT: bar.sync 0; ld.global.u32 %r4, [counter]; st.global.u32 [%d1], %r4; ret;
    """
    assert words(body, 64, 10, before=".global .u32 counter = 0;") == [10] * 640


def test_results_do_not_depend_on_the_number_of_host_threads() -> None:
    body = "mov.u32 %r2, %r1; mov.u32 %r3, 50; L: mad.lo.u32 %r2, %r2, 1664525, 1013904223; add.u32 %r3, %r3, -1; setp.ne.u32 %p0, %r3, 0; @%p0 bra L; st.global.u32 [%d1], %r2; ret;"
    assert words(body, 96, 40, threads=1) == words(body, 96, 40, threads=4)


def test_matrix_products_of_a_warp() -> None:
    """A (16 x 16, rows) through ldmatrix, B (16 x 8, rows) through its transposing form, C = 1."""
    rng = random.Random(3)
    a, b = [rng.randint(-8, 8) for _ in range(256)], [rng.randint(-8, 8) for _ in range(128)]
    memory = Buffer(struct.pack("<256e", *a) + struct.pack("<128e", *b))
    body = """
    .reg .f32 %c<4>; .shared .align 16 .b8 s[768]; mov.u32 %r2, s; mul.lo.u32 %r3, %r0, 16; add.u32 %r2, %r2, %r3; ld.param.u64 %d2, [m]; cvt.u64.u32 %d3, %r3; add.u64 %d2, %d2, %d3;
    cp.async.cg.shared.global [%r2], [%d2], 16; setp.lt.u32 %p0, %r0, 16; @%p0 cp.async.cg.shared.global [%r2+512], [%d2+512], 16; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    and.b32 %r4, %r0, 15; shl.b32 %r4, %r4, 5; shr.u32 %r5, %r0, 4; shl.b32 %r5, %r5, 4; add.u32 %r4, %r4, %r5; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r4];
    and.b32 %r6, %r0, 15; shl.b32 %r6, %r6, 4; ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%r14, %r15}, [%r6+512];
    mov.f32 %f0, 0f3f800000; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%c0, %c1, %c2, %c3}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f0, %f0, %f0, %f0};
    shr.u32 %r7, %r0, 2; and.b32 %r8, %r0, 3; mul.lo.u32 %r7, %r7, 32; mad.lo.u32 %r7, %r8, 8, %r7; cvt.u64.u32 %d5, %r7; add.u64 %d6, %d0, %d5;
    st.global.v2.f32 [%d6], {%c0, %c1}; st.global.v2.f32 [%d6+256], {%c2, %c3}; ret;
    """
    out = Buffer(512)
    program(body, ", .param .u64 m").run("k", 1, 32, out, memory)
    assert out.array(F32) == [
        1.0 + sum(a[r * 16 + i] * b[i * 8 + c] for i in range(16)) for r in range(16) for c in range(8)
    ]


# faults


def fault_of(body: str, *arguments: object, before: str = "", extra: str = "", block: int = 64) -> tuple[int, object]:
    return program(body, extra, before).launch("k", 2, block, *arguments)


def test_an_address_outside_every_allocation_names_thread_and_block() -> None:
    out = Buffer(4 * 100)
    code, fault = fault_of("st.global.u32 [%d1], 1; ret;", out)
    assert code == ILLEGAL_ADDRESS
    assert (fault.write, fault.block[0], fault.thread[0]) == (True, 1, 36)  # type: ignore[attr-defined]
    assert fault.address == out.address + 400  # type: ignore[attr-defined]
    assert out.array(U32)[:64] == [1] * 64


@pytest.mark.parametrize("body, want", [
    ("ld.global.u32 %r2, [%d0+2]; ret;", MISALIGNED_ADDRESS), ("ld.global.v2.u32 {%r2, %r3}, [%d0+4]; ret;", MISALIGNED_ADDRESS), ("mov.u64 %d3, 0; ld.u32 %r2, [%d3]; ret;", ILLEGAL_ADDRESS),
    (".shared .b32 s[4]; mov.u64 %d3, s; ld.shared.u32 %r2, [%d3+16]; ret;", ILLEGAL_ADDRESS), (".local .b32 s[4]; mov.u64 %d3, s; st.local.u32 [%d3+1048576], 1; ret;", ILLEGAL_ADDRESS),
    ("ld.global.u64 %d3, [%d0+-8]; ret;", ILLEGAL_ADDRESS), ("atom.global.add.u32 %r2, [%d0+1], 1; ret;", MISALIGNED_ADDRESS), ("trap;", LAUNCH_FAILED),
    ("wgmma.fence.sync.aligned; ret;", ILLEGAL_INSTRUCTION), ("bar.sync 16; ret;", ILLEGAL_INSTRUCTION), ("mov.u64 %d3, 3; .reg .b64 %x; PROTO: .callprototype _ (); call %d3, PROTO; ret;", ILLEGAL_INSTRUCTION),
])  # fmt: skip
def test_faults(body: str, want: int) -> None:
    code, fault = fault_of(body, Buffer(1024))
    assert code == want, fault.message  # type: ignore[attr-defined]
    assert b"line" in fault.message  # type: ignore[attr-defined]


def test_writing_to_read_only_memory_is_a_fault_and_reading_is_not() -> None:
    locked = Buffer(b"\x07" * 512, writable=False)
    assert fault_of("ld.global.u32 %r2, [%d1]; ret;", locked)[0] == 0
    assert fault_of("ld.global.u32 %r2, [%d1]; st.global.u32 [%d1], 0; ret;", locked)[0] == ILLEGAL_ADDRESS
    assert locked.bytes() == b"\x07" * 512


def test_assertions_say_what_failed_where() -> None:
    before = '.extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 c);\n.global .align 1 .b8 m[6] = "x > 0"; .global .align 1 .b8 f[5] = "a.cu";'
    body = """
    setp.ne.u32 %p0, %r0, 9; @%p0 bra OK; mov.u64 %d2, m; mov.u64 %d3, f;
    { .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e; st.param.b64 [a], %d2; st.param.b64 [b], %d3; st.param.b32 [c], 12; st.param.b64 [d], 0; st.param.b64 [e], 1; call.uni __assertfail, (a, b, c, d, e); }
    OK: ret;
    """
    code, fault = fault_of(body, Buffer(1024), before=before)
    assert code == ASSERT
    assert b"x > 0" in fault.message and b"a.cu:12" in fault.message and fault.thread[0] == 9  # type: ignore[attr-defined]


def test_unknown_instructions_only_matter_when_executed() -> None:
    assert (
        words(
            "setp.eq.u32 %p0, %r0, 99; @%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; st.global.u32 [%d1], 3; ret;"
        )
        == [3] * 32
    )


@pytest.mark.parametrize(
    "grid, block, shared, want",
    [
        (1, 1025, 0, INVALID_VALUE),
        (0, 32, 0, INVALID_VALUE),
        (1, 32, 1 << 20, INVALID_VALUE),
        (1, 96, 0, OUT_OF_RESOURCES),
    ],
)
def test_launches_that_cannot_be(grid: int, block: int, shared: int, want: int) -> None:
    m = Module(HEADER + ".visible .entry k() .maxntid 64, 1, 1 { ret; }")
    assert m.launch("k", grid, block, shared=shared)[0] == want


@pytest.mark.parametrize("text, line, words_in_it", [
    ("hello", 1, "version"), (".version 9.0\n.target sm_90\n.visible .entry k() {\n add.u32 %r1, %r2, %r3; ret; }", 4, "not declared"),
    (".version 9.0\n.visible .entry k() { bra NOWHERE; }", 2, "no label"), (".version 9.0\n.entry k() { ret;", 2, "ends inside"), ("", 1, "empty"),
    (".version 9.0\n.reg .b32 x", 2, "not known"), (".version 9.0\n/* no end", 2, "no end"), (".version 9.0\n.entry k() { .reg .b32 %r<3>; mov.u32 %r1, 99999999999999999999; }", 2, "64 bits"),
    (".version 9.0\n.entry k() { .reg .b32 %r; .reg .b32 %r; }", 2, "twice"), (".version 9.0\n.entry k() { call nobody; }", 2, "not declared"),
    (".version 9.0\n.entry k() { .reg .pred %p; @%q ret; }", 2, "not declared"), (".version 9.0\n.address_size 32", 2, "64 bits"),
])  # fmt: skip
def test_bad_texts_are_refused_with_line_and_sentence(text: str, line: int, words_in_it: str) -> None:
    with pytest.raises(PtxError) as caught:
        Module(text)
    assert caught.value.code == INVALID_PTX
    assert str(caught.value).startswith(f"line {line}: ")
    assert words_in_it in str(caught.value)
