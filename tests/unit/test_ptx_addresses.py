"""Addresses that a kernel computes in unusual ways: what it touches is said, or said to be unknown."""

from __future__ import annotations

import pytest

from phos.gpu_engine.spec.descriptor import Access, FieldKind
from phos.gpu_engine.spec.ptx_flow import describe

W = Access.WRITE
HEAD = """.version 8.5
.target sm_90
.address_size 64
.entry k(.param .u64 p, .param .u64 q, .param .u64 n, .param .align 4 .b8 packed[28], .param .align 8 .b8 s[32]) {
.reg .b64 %a, %b, %c, %d, %x, %y, %z; .reg .b32 %r<9>; .reg .f32 %f; .reg .pred %p;
ld.param.u64 %a, [p]; ld.param.u64 %b, [q]; ld.param.u64 %c, [n]; mov.u32 %r1, %tid.x;
"""
P, Q, N = 0, 8, 16

FOLLOWED = {
    "chosen by the sign of a number": ("slct.u64.s32 %d, %a, %b, %r1;", {P, Q}),
    "chosen by the sign of a floating-point number": ("slct.u64.f32 %d, %a, %b, %f;", {P, Q}),
    "in a register whose name has a digit more": (".reg .b64 %e1<3>; mov.b64 %e12, %a; mov.b64 %d, %e12;", {P}),
    "by its distance in words from an address negated twice": (
        ".reg .b64 %w; neg.s64 %w, %b; neg.s64 %x, %w; sub.s64 %y, %a, %x; shr.s64 %z, %y, 2;mad.lo.s64 %d, %z, 4, %x;",
        {P, Q},
    ),
    "behind the distance of two numbers": ("sad.u64 %d, %b, 5, %a;", {P}),
    "beside an element of an array, which is named by its index": (
        ".shared .align 8 .b64 t[8]; mov.u32 %r2, t[3]; st.shared.u64 [%r2], 1; mov.b64 %d, %a;",
        {P},
    ),
}
"""What is added to an index that might be an address itself."""


def touched(body: str) -> tuple[set[int], Access]:
    """Where the addresses that the kernel writes through lie among its arguments, and what it does through others."""
    found = describe(HEAD + body + " st.global.u32 [%d], 1; ret; }")["k"]
    return {field.offset for field in found.fields if field.kind is FieldKind.POINTER}, found.indirect


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_address_that_is_chosen_is_followed(name: str) -> None:
    body, places = FOLLOWED[name]
    assert touched(f"{body} add.u64 %d, %d, %c;") == ({*places, N}, Access.NONE)


COMPUTED = {
    "in units of so many bytes": "shl.b64 %d, %c, 12;",
    "its bits in the other order": "brev.b64 %d, %a;",
    "the upper half of a product": "mul.hi.u64 %d, %a, %b;",
    "halves, the upper one first": "ld.param.v2.u32 {%r2, %r3}, [packed]; mov.b64 %d, {%r3, %r2};",
    "with a key in the code": "xor.b64 %d, %a, 0x5deece66d1234567;",
    "with a key in a register": "mov.b64 %x, 0x5deece66d1234567; xor.b64 %d, %x, %a;",
}
"""Addresses that no argument holds as they are."""


@pytest.mark.parametrize("conversion", ["", "cvta.to.global.u64 %d, %d;"], ids=["generic", "converted"])
@pytest.mark.parametrize("name", COMPUTED)
def test_an_address_that_no_argument_holds_is_indirect(name: str, conversion: str) -> None:
    assert touched(f"{COMPUTED[name]} {conversion}")[1] == W


@pytest.mark.parametrize("mask", ["-1", "0x8000000000000000", "16"])
def test_a_mark_in_an_address_is_no_key(mask: str) -> None:
    assert touched(f"xor.b64 %d, %a, {mask};")[1] == Access.NONE


APART = {
    "packed": "ld.param.u32 %r2, [packed]; ld.param.u32 %r3, [packed+8]; mov.b64 %d, {%r2, %r3};",
    "packed, the upper one first": "ld.param.v2.u32 {%r2, %r3}, [packed]; mov.b64 %d, {%r3, %r2};",
    "shifted": (
        "ld.param.u32 %r2, [packed]; ld.param.u32 %r3, [packed+8]; cvt.u64.u32 %x, %r2; cvt.u64.u32 %y, %r3;"
        "shl.b64 %z, %y, 32; or.b64 %d, %x, %z;"
    ),
}


@pytest.mark.parametrize("name", APART)
def test_an_address_of_halves_that_do_not_lie_side_by_side_is_indirect_beside_an_index(name: str) -> None:
    assert touched(f"{APART[name]} add.u64 %d, %d, %c;") == ({N}, W)


def test_a_number_made_of_its_halves_is_no_address() -> None:
    body = "ld.param.v2.u32 {%r2, %r3}, [packed]; mul.wide.u32 %x, %r2, %r3; mov.b64 {%r4, %r5}, %x;"
    assert touched(f"{body} mov.b64 %y, {{%r4, %r5}}; add.u64 %d, %a, %y;")[1] == Access.NONE
    assert touched("ld.param.u32 %r2, [packed]; mov.b64 %x, {%r2, 0}; add.u64 %d, %a, %x;") == ({P}, Access.NONE)


ELEMENT = "mov.b64 %x, ARRAY; mad.wide.u32 %y, %r1, 8, %x; ld.param.v2.u32 {%r2, %r3}, [%y]; mov.b64 %d, {%r2, %r3};"


def test_an_element_of_an_array_that_is_not_aligned_to_addresses_is_indirect() -> None:
    """Scans look at multiples of 8 bytes only."""
    assert touched(ELEMENT.replace("ARRAY", "packed"))[1] == W
    assert touched(ELEMENT.replace("ARRAY", "s"))[1] == Access.NONE
