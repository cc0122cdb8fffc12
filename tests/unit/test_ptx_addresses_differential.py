"""Random chains of instructions that keep an address, run on the PTX interpreter: what is written was predicted."""

# ruff: noqa: E501
from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "ptx"))
from ptx_machine import HEADER, OK, Buffer, Module

from phos.gpu_engine.spec.descriptor import Access
from phos.gpu_engine.spec.ptx_flow import describe

# OUT becomes IN, or OTHER where a condition says so. Each has a block of its own, and 16 bytes at SLOT.
WHOLE = """
add.u64 OUT, IN, %n; sub.u64 OUT, OUT, %n;
sub.s64 %t, IN, OTHER; add.s64 OUT, OTHER, %t;
sub.s64 %t, IN, OTHER; sub.s64 OUT, IN, %t;
sub.s64 %t, OTHER, IN; sub.s64 OUT, OTHER, %t;
sub.s64 %t, OTHER, IN; neg.s64 %u, %t; add.s64 OUT, OTHER, %u;
sub.s64 %t, IN, OTHER; shr.s64 %u, %t, 2; mad.lo.s64 OUT, %u, 4, OTHER;
sub.s64 %t, IN, OTHER; div.s64 %u, %t, 4; shl.b64 %u, %u, 2; add.s64 OUT, %u, OTHER;
add.s64 %t, IN, OTHER; sub.s64 OUT, %t, OTHER;
xor.b64 %t, IN, OTHER; xor.b64 OUT, %t, OTHER;
xor.b64 %t, IN, %n; xor.b64 OUT, %t, %n;
neg.s64 %t, IN; neg.s64 OUT, %t;
not.b64 %t, IN; not.b64 OUT, %t;
mul.lo.s64 %t, IN, -1; mul.lo.s64 OUT, %t, -1;
shr.u64 %t, IN, 3; shl.b64 OUT, %t, 3;
bfe.u64 OUT, IN, 0, 48;
and.b64 %t, IN, -4; or.b64 OUT, %t, 0;
max.u64 OUT, IN, 5;
sad.u64 OUT, %n, 64, IN;
selp.b64 OUT, IN, OTHER, %p;
slct.b64.f32 OUT, IN, OTHER, %f;
slct.b64.s32 OUT, IN, OTHER, %s;
mov.b64 %g, IN; mov.b64 OUT, %g;
st.shared.u64 [tile+SLOT], IN; ld.shared.u64 OUT, [tile+SLOT];
st.shared.u64 [tile+SLOT], 0; bar.warp.sync -1; atom.shared.exch.b64 %t, [tile+SLOT], IN; ld.shared.u64 OUT, [tile+SLOT];
st.local.u64 [own+SLOT], IN; ld.local.u64 OUT, [own+SLOT];
mov.u64 %t, own; cvta.local.u64 %t, %t; st.u64 [%t+SLOT], IN; st.u64 [%t+SLOT+8], OTHER; mad.lo.u64 %u, %i, 8, %t; ld.u64 OUT, [%u+SLOT];
mov.u64 %t, own; cvta.local.u64 %t, %t; st.u64 [%t+SLOT], OTHER; st.u64 [%t+SLOT+8], IN; add.u64 %t, %t, SLOT; .param .b64 a; st.param.b64 [a], %t; call.uni swap, (a); ld.u64 OUT, [%t];
.param .b64 a; .param .b64 r; st.param.b64 [a], IN; call.uni (r), same, (a); ld.param.b64 OUT, [r];
mov.u64 %t, same; .param .b64 a; .param .b64 r; st.param.b64 [a], IN; call (r), %t, (a), prototype; ld.param.b64 OUT, [r];
mov.u32 %c, 0; mov.b64 OUT, IN; again: add.u64 OUT, OUT, 4; add.u32 %c, %c, 1; setp.lt.u32 %q, %c, 3; @%q bra again; sub.u64 OUT, OUT, 12;
"""
HALF = """
mov.b32 TO, FROM;
shfl.sync.idx.b32 TO, FROM, 0, 31, -1;
prmt.b32 TO, FROM, 0, 0x3210;
lop3.b32 TO, FROM, 0, 0, 0xf0;
shf.l.wrap.b32 TO, FROM, FROM, 0;
redux.sync.max.u32 TO, FROM, -1;
xor.b32 TO, FROM, %s; xor.b32 TO, TO, %s;
add.u32 TO, FROM, %s; sub.u32 TO, TO, %s;
mov.b32 {%h, %k}, FROM; mov.b32 TO, {%h, %k};
st.shared.u32 [tile+SLOT], FROM; ld.shared.u32 TO, [tile+SLOT];
"""
JOINED = """
mov.b64 OUT, {%c, %d};
cvt.u64.u32 %t, %c; cvt.u64.u32 %u, %d; shl.b64 %u, %u, 32; or.b64 OUT, %t, %u;
cvt.u64.u32 %t, %c; cvt.u64.u32 %u, %d; shl.b64 %u, %u, 32; add.u64 OUT, %u, %t;
cvt.u64.u32 %t, %c; cvt.u64.u32 %u, %d; bfi.b64 OUT, %u, %t, 32, 32;
cvt.u64.u32 %t, %c; cvt.u64.u32 %u, %d; mad.lo.u64 OUT, %u, 0x100000000, %t;
st.shared.v2.u32 [tile+SLOT], {%c, %d}; ld.shared.u64 OUT, [tile+SLOT];
st.local.u32 [own+SLOT], %c; st.local.u32 [own+SLOT+4], %d; ld.local.u64 OUT, [own+SLOT];
add.cc.u32 %c, %c, %s; addc.u32 %d, %d, 0; mov.b64 %t, {%c, %d}; cvt.u64.u32 %u, %s; sub.u64 OUT, %t, %u;
.param .b32 a; .param .b32 b; .param .b64 r; st.param.b32 [a], %c; st.param.b32 [b], %d; call.uni (r), glue, (a, b); ld.param.b64 OUT, [r];
"""
USES = ("add.u64 OUT, IN, %n;", "mad.wide.u32 OUT, %thread, 4, IN;", "mov.b64 OUT, IN;")

FUNCTIONS = """
.func (.param .b64 r) same(.param .b64 a) { .reg .b64 %x; ld.param.b64 %x, [a]; st.param.b64 [r], %x; ret; }
.func (.param .b64 r) glue(.param .b32 a, .param .b32 b) { .reg .b32 %x, %y; .reg .b64 %z;
  ld.param.b32 %x, [a]; ld.param.b32 %y, [b]; mov.b64 %z, {%x, %y}; st.param.b64 [r], %z; ret; }
.func swap(.param .b64 a) { .reg .b64 %x, %y, %z; ld.param.b64 %z, [a]; ld.u64 %x, [%z]; ld.u64 %y, [%z+8];
  st.u64 [%z], %y; st.u64 [%z+8], %x; ret; }
"""
HEAD = """
.visible .entry k(.param .u64 p, .param .u64 q, .param .u64 n, .param .u32 s, .param .align 8 .b8 v[16]) {
.reg .b64 %a<40>, %n, %i; .reg .b32 %s, %b, %thread; .reg .f32 %f; .reg .pred %p;
.shared .align 16 .b8 tile[640]; .local .align 16 .b8 own[640];
prototype: .callprototype (.param .b64 _) _ (.param .b64 _);
ld.param.u64 %a0, [p]; ld.param.u64 %a1, [q]; ld.param.u64 %a2, [v]; ld.param.u64 %a3, [v+8];
ld.param.u64 %n, [n]; ld.param.u32 %s, [s]; mov.u32 %thread, %tid.x; and.b32 %b, %s, 1; cvt.u64.u32 %i, %b;
setp.eq.u32 %p, %b, 0; cvt.rn.f32.u32 %f, %b; sub.f32 %f, %f, 0f3F000000;
"""
BLOCK = ".reg .b64 %t, %u; .reg .b32 %c, %d, %e, %l; .reg .b16 %h, %k; .reg .f64 %g; .reg .pred %q;"
OFFSETS = {"p": 0, "q": 8, "v": 32, "w": 40}


def program(chance: random.Random) -> str:
    """A kernel whose address goes through some of these, and is written through."""
    lines = []
    known = 4

    def ways(text: str) -> str:
        return chance.choice(text.strip().splitlines())

    def add(code: str) -> None:
        nonlocal known
        first, other = (f"%a{chance.randrange(known)}" for _ in range(2))
        names = {"IN": first, "OTHER": other, "OUT": f"%a{known}", "SLOT": str(16 * known)}
        for name, register in names.items():
            code = code.replace(name, register)
        lines.append(f"{{ {BLOCK} {code} }}")
        known += 1

    for _ in range(chance.randint(2, 8)):
        if chance.random() < 0.6:
            add(ways(WHOLE))
        else:
            low, high = (
                ways(HALF).replace("FROM", source).replace("TO", target)
                for source, target in (("%e", "%c"), ("%l", "%d"))
            )
            add(f"mov.b64 {{%e, %l}}, IN; {low} {high} {ways(JOINED)}")
    add(chance.choice(USES).replace("IN", f"%a{known - 1}"))
    conversion = chance.choice(("", f"cvta.to.global.u64 %a{known - 1}, %a{known - 1};"))
    return HEADER + FUNCTIONS + HEAD + "\n".join(lines) + f"\n{conversion} st.global.u32 [%a{known - 1}], 77; ret; }}"


@pytest.mark.parametrize("batch", range(8))
def test_addresses_are_followed_wherever_they_go(batch: int) -> None:
    for seed in range(40 * batch, 40 * batch + 40):
        text = program(random.Random(seed))
        machine, found = Module(text), describe(text)["k"]
        for condition in (4, 5):
            buffers = {name: Buffer(1024) for name in OFFSETS}
            v = b"".join(buffers[name].address.to_bytes(8, "little") for name in ("v", "w"))
            arguments = (buffers["p"], buffers["q"], 64, condition, v)
            code, fault = machine.launch("k", 1, 32, *arguments, extra=list(buffers.values()))
            assert code == OK, f"{fault.message.decode()}\n{text}"
            written = {name for name, buffer in buffers.items() if any(buffer.bytes())}
            assert len(written) == 1, text
            said = {field.offset for field in found.fields if field.access & Access.WRITE}
            assert found.indirect & Access.WRITE or {OFFSETS[name] for name in written} <= said, f"{found}\n{text}"
