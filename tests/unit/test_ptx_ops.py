"""Each arithmetic instruction of the PTX interpreter against Python's integers and struct's floats."""

# ruff: noqa: E501, E731, PLR0124, PT018, SIM201
from __future__ import annotations

import ctypes
import math
import random
import struct
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "ptx"))
from ptx_machine import HEADER, Buffer, Module, array

WIDTHS = {"u16": 16, "s16": 16, "b16": 16, "u32": 32, "s32": 32, "b32": 32, "u64": 64, "s64": 64, "b64": 64}
EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
EDGES += [0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF0]
N = 128


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def f32_bits(value: float) -> int:
    """To nearest even, with overflow to infinity, which struct refuses."""
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def f64(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def f64_bits(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def kernel(instruction: str, d: str, operands: list[str]) -> str:
    """A kernel that applies one instruction to each element of up to four arrays of 64-bit words."""
    names = "abce"
    regs = {"16": "%h", "32": "%r", "64": "%d"}

    def width(t: str) -> str:
        return {"f16x2": "32", "bf16x2": "32", "bf16": "16"}.get(t, t.lstrip("usbf"))

    lines = [
        ".visible .entry k(.param .u64 o, " + ", ".join(f".param .u64 p{i}" for i in range(len(operands))) + ")",
        "{",
    ]
    lines += [".reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %d<20>; .reg .b32 %t<4>; .reg .b64 %q<4>; .reg .pred %p<4>;"]
    lines += ["mov.u32 %t0, %tid.x; mad.lo.u32 %t0, %ctaid.x, 32, %t0; mul.wide.u32 %q0, %t0, 8;"]
    text = instruction
    for i, t in enumerate(operands):
        register = f"{regs[width(t)]}{i}"
        lines += [f"ld.param.u64 %q1, [p{i}]; add.u64 %q1, %q1, %q0; ld.global.b{width(t)} {register}, [%q1];"]
        text = text.replace("{" + names[i] + "}", register)
    target = f"{regs[width(d)]}8"
    lines += [text.replace("{d}", target) + ";", "ld.param.u64 %q2, [o]; add.u64 %q2, %q2, %q0;"]
    lines += ["mov.b64 %q3, 0; st.global.b64 [%q2], %q3;", f"st.global.b{width(d)} [%q2], {target}; ret;", "}"]
    return HEADER + "\n".join(lines)


def apply(module: Module, columns: list[list[int]]) -> list[int]:
    out = Buffer(8 * N)
    module.run("k", N // 32, 32, out, *[array(ctypes.c_uint64, c) for c in columns])
    return out.array(ctypes.c_uint64)


def values(seed: int, kind: str) -> list[int]:
    rng = random.Random(seed)
    if kind == "f32":
        special = [0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x007FFFFF, 0x7F7FFFFF]
        return [rng.choice(special) if rng.random() < 0.3 else rng.getrandbits(32) for _ in range(N)]
    if kind == "f32n":
        return [f32_bits(rng.uniform(-1e4, 1e4)) for _ in range(N)]
    if kind == "f64":
        special = [f64_bits(x) for x in (0.0, -0.0, 1.0, math.inf, -math.inf, 5e-324, 1e308)]
        return [rng.choice(special) if rng.random() < 0.3 else f64_bits(rng.uniform(-1e9, 1e9)) for _ in range(N)]
    return [rng.choice(EDGES) if rng.random() < 0.5 else rng.getrandbits(64) for _ in range(N)]


Case = tuple[str, str, list[str], Callable[..., int]]


def integer_cases() -> list[Case]:
    cases: list[Case] = []

    def add(
        name: str, t: str, function: Callable[..., int], count: int = 2, d: str | None = None, last: str | None = None
    ) -> None:
        kinds = [t] * (count - 1) + [last or t] if count > 1 else [last or t]
        names = ", ".join("{" + n + "}" for n in "abce"[:count])
        cases.append((f"{name} {{d}}, {names}", d or t, kinds, function))

    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        w, s = WIDTHS[t], t[0] == "s"

        def v(x: int, w: int = w, s: bool = s) -> int:
            return signed(x, w) if s else x & ((1 << w) - 1)

        add(f"add.{t}", t, lambda a, b: a + b)
        add(f"sub.{t}", t, lambda a, b: a - b)
        add(f"mul.lo.{t}", t, lambda a, b: a * b)
        add(f"mul.hi.{t}", t, lambda a, b, v=v, w=w: v(a) * v(b) >> w)
        add(f"mad.lo.{t}", t, lambda a, b, c: a * b + c, 3)
        add(f"mad.hi.{t}", t, lambda a, b, c, v=v, w=w: (v(a) * v(b) >> w) + c, 3)
        add(f"min.{t}", t, lambda a, b, v=v: min(v(a), v(b)))
        add(f"max.{t}", t, lambda a, b, v=v: max(v(a), v(b)))
        add(f"sad.{t}", t, lambda a, b, c, v=v: abs(v(a) - v(b)) + c, 3)
        add(f"shr.{t}", t, lambda a, b, v=v: v(a) >> min(b & 0xFFFFFFFF, 200), 2, last="u32")
        quotient = lambda a, b, v=v: (abs(v(a)) // abs(v(b))) * (1 if (v(a) < 0) == (v(b) < 0) else -1) if v(b) else -1
        add(f"div.{t}", t, quotient)
        add(f"rem.{t}", t, lambda a, b, v=v, q=quotient: v(a) - q(a, b) * v(b) if v(b) else v(a))
        if w < 64:
            add(f"mul.wide.{t}", t, lambda a, b, v=v: v(a) * v(b), d=f"u{w * 2}")
            add(f"mad.wide.{t}", t, lambda a, b, c, v=v: v(a) * v(b) + c, 3, d=f"u{w * 2}", last=f"u{w * 2}")
    for t in ("b16", "b32", "b64"):
        w = WIDTHS[t]
        add(f"and.{t}", t, lambda a, b: a & b)
        add(f"or.{t}", t, lambda a, b: a | b)
        add(f"xor.{t}", t, lambda a, b: a ^ b)
        add(f"not.{t}", t, lambda a: ~a, 1)
        add(f"cnot.{t}", t, lambda a, w=w: int(a & ((1 << w) - 1) == 0), 1)
        add(f"shl.{t}", t, lambda a, b: a << min(b & 0xFFFFFFFF, 200), 2, last="u32")
        add(f"neg.s{w}", f"s{w}", lambda a: -a, 1)
        add(f"abs.s{w}", f"s{w}", lambda a, w=w: abs(signed(a, w)), 1)
    for w in (32, 64):
        m = (1 << w) - 1
        add(f"popc.b{w}", f"b{w}", lambda a, m=m: (a & m).bit_count(), 1, d="u32")
        add(f"clz.b{w}", f"b{w}", lambda a, m=m, w=w: w - (a & m).bit_length(), 1, d="u32")
        add(f"brev.b{w}", f"b{w}", lambda a, m=m, w=w: int(f"{a & m:0{w}b}"[::-1], 2), 1)
        add(f"bfind.u{w}", f"u{w}", lambda a, m=m: (a & m).bit_length() - 1, 1, d="u32")
        find = lambda a, w=w: (~signed(a, w) if signed(a, w) < 0 else signed(a, w)).bit_length() - 1
        add(f"bfind.s{w}", f"s{w}", find, 1, d="u32")
        cases.append(
            (
                f"bfe.u{w} {{d}}, {{a}}, {{b}}, {{c}}",
                f"u{w}",
                [f"u{w}", "u32", "u32"],
                lambda a, b, c, m=m: (a & m) >> (b & 255) & ((1 << (c & 255)) - 1),
            )
        )

        def bfe_signed(a: int, b: int, c: int, w: int = w) -> int:
            b, c, x = b & 255, c & 255, signed(a, w)
            return signed(x >> b, c) if c else 0

        cases.append((f"bfe.s{w} {{d}}, {{a}}, {{b}}, {{c}}", f"u{w}", [f"u{w}", "u32", "u32"], bfe_signed))

        def bfi(a: int, b: int, c: int, e: int, w: int = w) -> int:
            c, e = c & 255, e & 255
            mask = ((1 << e) - 1) << c
            return (b & ~mask) | (a << c & mask)

        cases.append((f"bfi.b{w} {{d}}, {{a}}, {{b}}, {{c}}, {{e}}", f"b{w}", [f"b{w}", f"b{w}", "u32", "u32"], bfi))
    both = lambda a, b: (b & 0xFFFFFFFF) << 32 | (a & 0xFFFFFFFF)
    add("shf.l.wrap.b32", "b32", lambda a, b, c: both(a, b) << (c & 31) >> 32, 3)
    add("shf.r.wrap.b32", "b32", lambda a, b, c: both(a, b) >> (c & 31), 3)
    add("shf.l.clamp.b32", "b32", lambda a, b, c: both(a, b) << min(c & 0xFFFFFFFF, 32) >> 32, 3)
    add("shf.r.clamp.b32", "b32", lambda a, b, c: both(a, b) >> min(c & 0xFFFFFFFF, 32), 3)

    def lop3(table: int) -> Callable[..., int]:
        def f(a: int, b: int, c: int) -> int:
            return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

        return f

    for table in (0x96, 0xE8, 0x01, 0x80, 0xCA):
        cases.append((f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table}", "b32", ["b32"] * 3, lop3(table)))

    def prmt(a: int, b: int, c: int) -> int:
        r = 0
        for i in range(4):
            pick = c >> 4 * i & 15
            byte = both(a, b) >> 8 * (pick & 7) & 255
            r |= (255 if byte & 128 else 0 if pick & 8 else byte) << 8 * i if pick & 8 else byte << 8 * i
        return r

    add("prmt.b32", "b32", prmt, 3)
    byte = lambda x, i: signed(x >> 8 * i, 8)
    add("dp4a.s32.s32", "s32", lambda a, b, c: c + sum(byte(a, i) * byte(b, i) for i in range(4)), 3)
    add("dp4a.u32.u32", "u32", lambda a, b, c: c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4)), 3)
    clamp = lambda x: max(-(1 << 31), min((1 << 31) - 1, x))
    add("add.sat.s32", "s32", lambda a, b: clamp(signed(a, 32) + signed(b, 32)))
    add("sub.sat.s32", "s32", lambda a, b: clamp(signed(a, 32) - signed(b, 32)))
    add("mul24.lo.u32", "u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))
    add("mul24.hi.s32", "s32", lambda a, b: signed(a, 24) * signed(b, 24) >> 16)
    add("slct.u32.s32", "u32", lambda a, b, c: a if signed(c, 32) >= 0 else b, 3)
    for source in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        for target in ("u16", "s16", "u32", "s32", "u64", "s64"):
            w = int(source[1:])
            held = f"u{max(w, 16)}"
            value = (lambda x, w=w: signed(x, w)) if source[0] == "s" else (lambda x, w=w: x & ((1 << w) - 1))
            cases.append((f"cvt.{target}.{source} {{d}}, {{a}}", target, [held], value))
            tw = int(target[1:])
            low, high = (-(1 << tw - 1), (1 << tw - 1) - 1) if target[0] == "s" else (0, (1 << tw) - 1)
            if source != target:
                cases.append(
                    (
                        f"cvt.sat.{target}.{source} {{d}}, {{a}}",
                        target,
                        [held],
                        lambda a, f=value, low=low, high=high: max(low, min(high, f(a))),
                    )
                )
    cases.append(
        (
            "{ add.cc.u32 {d}, {a}, {b}; addc.u32 {d}, {c}, {e}; }",
            "u32",
            ["u32"] * 4,
            lambda a, b, c, e: c + e + ((a & 0xFFFFFFFF) + (b & 0xFFFFFFFF) >> 32),
        )
    )
    cases.append(
        (
            "{ sub.cc.u64 {d}, {a}, {b}; subc.u64 {d}, {c}, {e}; }",
            "u64",
            ["u64"] * 4,
            lambda a, b, c, e: c - e - (a < b),
        )
    )
    cases.append(
        (
            "{ mad.lo.cc.u32 {d}, {a}, {b}, {c}; madc.hi.u32 {d}, {a}, {b}, {e}; }",
            "u32",
            ["u32"] * 4,
            lambda a, b, c, e: (
                (((a & 0xFFFFFFFF) * (b & 0xFFFFFFFF)) >> 32) + e + ((((a * b) & 0xFFFFFFFF) + (c & 0xFFFFFFFF)) >> 32)
            ),
        )
    )
    return cases


@pytest.mark.parametrize("case", integer_cases(), ids=lambda c: c[0].replace(" {d}", "").split(",")[0])
def test_integer_instructions_agree_with_python(case: Case) -> None:
    text, d, kinds, oracle = case
    columns = [values(17 * i + len(text), k) for i, k in enumerate(kinds)]
    if kinds[-1] == "u32" and len(kinds) > 1 and ("sh" in text or "bf" in text):  # amounts near the widths
        columns[-1] = [x % 80 for x in columns[-1]]
        if len(kinds) > 2:
            columns[-2] = columns[-2] if kinds[-2] != "u32" else [x % 80 for x in columns[-2]]
    got = apply(Module(kernel(text.strip("{} ") if text.startswith("{ ") else text, d, kinds)), columns)
    mask = (1 << WIDTHS.get(d, 32)) - 1
    for i, row in enumerate(zip(*columns, strict=True)):
        row_masked = [x & ((1 << WIDTHS[k]) - 1) for x, k in zip(row, kinds, strict=True)]
        assert got[i] == oracle(*row_masked) & mask, (text, [hex(x) for x in row_masked])


def exact_f32(value: Fraction, negative_zero: bool = False) -> int:
    """An exact value to the nearest float, ties to even, through scaled integers: no float arithmetic takes part."""
    if value == 0:
        return 0x80000000 if negative_zero else 0
    sign, value = (0x80000000, -value) if value < 0 else (0, value)
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length() - 1, -126)
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    scaled = value / Fraction(2) ** (exponent - 23)
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    whole += rest * 2 > scaled.denominator or (rest * 2 == scaled.denominator and whole & 1)
    if whole >= 1 << 24:
        whole, exponent = whole >> 1, exponent + 1
    if exponent > 127:
        return sign | 0x7F800000
    return sign | (whole if whole < 1 << 23 else (exponent + 127) << 23 | whole & 0x7FFFFF)


finite32 = st.integers(0, 0xFFFFFFFF).filter(lambda b: b >> 23 & 255 != 255)


@pytest.fixture(scope="module")
def float_modules() -> dict[str, Module]:
    texts = {
        "add": ("add.f32 {d}, {a}, {b}", 2), "sub": ("sub.rn.f32 {d}, {a}, {b}", 2), "mul": ("mul.f32 {d}, {a}, {b}", 2),
        "div": ("div.rn.f32 {d}, {a}, {b}", 2), "fma": ("fma.rn.f32 {d}, {a}, {b}, {c}", 3), "rcp": ("rcp.rn.f32 {d}, {a}", 1),
    }  # fmt: skip
    return {k: Module(kernel(t, "f32", ["f32"] * n)) for k, (t, n) in texts.items()}


@settings(max_examples=40)
@given(st.lists(st.tuples(finite32, finite32, finite32), min_size=N, max_size=N))
def test_f32_arithmetic_is_correctly_rounded(
    float_modules: dict[str, Module], rows: list[tuple[int, int, int]]
) -> None:
    a, b, c = ([r[i] for r in rows] for i in range(3))
    sums, products, fused = (
        apply(float_modules["add"], [a, b]),
        apply(float_modules["mul"], [a, b]),
        apply(float_modules["fma"], [a, b, c]),
    )
    quotients = apply(float_modules["div"], [a, b])
    for i in range(N):
        x, y, z = Fraction(f32(a[i])), Fraction(f32(b[i])), Fraction(f32(c[i]))
        sign = (a[i] ^ b[i]) >> 31
        assert sums[i] == exact_f32(x + y, bool(a[i] >> 31 and b[i] >> 31))
        assert products[i] == exact_f32(x * y, bool(sign))
        assert fused[i] == exact_f32(
            x * y + z, bool(sign and c[i] >> 31 and x * y == 0) or bool(x * y == 0 and z == 0 and sign and c[i] >> 31)
        )
        if y != 0:
            assert quotients[i] == exact_f32(x / y, bool(sign))


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding_brackets_the_exact_result(mode: str) -> None:
    a, b = values(3, "f32n"), values(4, "f32n")
    for name, op in (("add", lambda x, y: x + y), ("mul", lambda x, y: x * y), ("div", lambda x, y: x / y)):
        got = apply(Module(kernel(f"{name}.{mode}.f32 {{d}}, {{a}}, {{b}}", "f32", ["f32", "f32"])), [a, b])
        near = apply(Module(kernel(f"{name}.rn.f32 {{d}}, {{a}}, {{b}}", "f32", ["f32", "f32"])), [a, b])
        for i in range(N):
            exact, r = op(Fraction(f32(a[i])), Fraction(f32(b[i]))), Fraction(f32(got[i]))
            assert abs(got[i] - near[i]) <= 1
            assert r <= exact if mode == "rm" else r >= exact if mode == "rp" else abs(r) <= abs(exact)


def test_f64_arithmetic_is_ieee() -> None:
    a, b, c = values(5, "f64"), values(6, "f64"), values(7, "f64")
    for name, op in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y), ("mul", lambda x, y: x * y)):
        got = apply(Module(kernel(f"{name}.f64 {{d}}, {{a}}, {{b}}", "f64", ["f64", "f64"])), [a, b])
        for i in range(N):
            want = op(f64(a[i]), f64(b[i]))
            assert math.isnan(want) == math.isnan(f64(got[i])) and (math.isnan(want) or f64_bits(want) == got[i])
    got = apply(Module(kernel("fma.rn.f64 {d}, {a}, {b}, {c}", "f64", ["f64"] * 3)), [a, b, c])
    for i in range(N):
        x, y, z = f64(a[i]), f64(b[i]), f64(c[i])
        if all(map(math.isfinite, (x, y, z))):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            if exact != 0 and abs(exact) < Fraction(10) ** 300:
                assert f64(got[i]) == float(exact)


def test_minimum_and_maximum_prefer_numbers_and_order_zeros() -> None:
    nan, zero, minus = 0x7FC00000, 0, 0x80000000
    a, b = [nan, zero, minus, f32_bits(2.0), nan] * 26, [f32_bits(1.0), minus, zero, f32_bits(3.0), nan] * 26
    a, b = a[:N], b[:N]
    low = apply(Module(kernel("min.f32 {d}, {a}, {b}", "f32", ["f32"] * 2)), [a, b])[:5]
    high = apply(Module(kernel("max.f32 {d}, {a}, {b}", "f32", ["f32"] * 2)), [a, b])[:5]
    assert low == [f32_bits(1.0), minus, minus, f32_bits(2.0), 0x7FFFFFFF]
    assert high == [f32_bits(1.0), zero, zero, f32_bits(3.0), 0x7FFFFFFF]
    wins = apply(Module(kernel("max.NaN.f32 {d}, {a}, {b}", "f32", ["f32"] * 2)), [a, b])[:1]
    assert wins == [0x7FFFFFFF]


def test_float_to_integer_conversions_clamp_and_round() -> None:
    cases = [2.5, 3.5, -2.5, -0.75, 1e20, -1e20, math.nan, 0.49999997, 300.7]
    bits = [f32_bits(x) for x in cases] + [0] * (N - len(cases))
    for mode, rounder in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
        for t, low, high in (
            ("s32", -(1 << 31), (1 << 31) - 1),
            ("u32", 0, (1 << 32) - 1),
            ("u16", 0, 65535),
            ("s64", -(1 << 63), (1 << 63) - 1),
        ):
            got = apply(Module(kernel(f"cvt.{mode}.{t}.f32 {{d}}, {{a}}", t, ["f32"])), [bits])
            for i, x in enumerate(cases):
                nan = low if t == "s64" else 0
                want = nan if math.isnan(x) else max(low, min(high, rounder(f32(bits[i]))))
                assert got[i] == want & ((1 << WIDTHS[t]) - 1), (mode, t, x)


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def half_bits(value: float) -> int:
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


def test_half_precision_agrees_with_struct_for_every_bit_pattern() -> None:
    widen, narrow = (
        Module(kernel("cvt.f32.f16 {d}, {a}", "f32", ["b16"])),
        Module(kernel("cvt.rn.f16.f32 {d}, {a}", "b16", ["f32"])),
    )
    for start in range(0, 65536, 65536 // 16):
        bits = list(range(start, start + N))
        floats = apply(widen, [bits])
        for b, r in zip(bits, floats, strict=True):
            assert f32(r) == half(b) or (math.isnan(half(b)) and math.isnan(f32(r)))
    rng = random.Random(9)
    source = [f32_bits(rng.choice([1, -1]) * 2.0 ** rng.uniform(-26, 17)) for _ in range(N)]
    for s, r in zip(source, apply(narrow, [source]), strict=True):
        assert r == half_bits(f32(s)), hex(s)


def test_half_arithmetic_rounds_once() -> None:
    rng = random.Random(2)
    a, b, c = ([half_bits(rng.uniform(-60, 60)) for _ in range(N)] for _ in range(3))
    for name, op in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y), ("mul", lambda x, y: x * y)):
        got = apply(Module(kernel(f"{name}.f16 {{d}}, {{a}}, {{b}}", "b16", ["b16", "b16"])), [a, b])
        for i in range(N):
            assert got[i] == half_bits(op(half(a[i]), half(b[i])))
    got = apply(Module(kernel("fma.rn.f16 {d}, {a}, {b}, {c}", "b16", ["b16"] * 3)), [a, b, c])
    for i in range(N):
        assert got[i] == half_bits(half(a[i]) * half(b[i]) + half(c[i]))  # exact in a double
    pairs = [x | y << 16 for x, y in zip(a, b, strict=True)]
    got = apply(Module(kernel("add.f16x2 {d}, {a}, {b}", "f16x2", ["f16x2", "f16x2"])), [pairs, pairs])
    for i in range(N):
        assert got[i] == half_bits(half(a[i]) * 2) | half_bits(half(b[i]) * 2) << 16


def test_packed_conversions_put_the_first_operand_above() -> None:
    a, b = [f32_bits(1.5)] * N, [f32_bits(-2.0)] * N
    assert apply(Module(kernel("cvt.rn.f16x2.f32 {d}, {a}, {b}", "f16x2", ["f32", "f32"])), [a, b])[0] == 0x3E00C000
    assert apply(Module(kernel("cvt.rn.bf16x2.f32 {d}, {a}, {b}", "bf16x2", ["f32", "f32"])), [a, b])[0] == 0x3FC0C000
    assert (
        apply(Module(kernel("cvt.rn.satfinite.e4m3x2.f32 {d}, {a}, {b}", "b16", ["f32", "f32"])), [a, b])[0] == 0x3CC0
    )


@pytest.mark.parametrize("name, function, low, high", [
    ("sin.approx.f32", math.sin, -3.0, 3.0), ("cos.approx.f32", math.cos, -3.0, 3.0), ("ex2.approx.f32", lambda x: 2.0**x, -20.0, 20.0),
    ("lg2.approx.f32", math.log2, 0.1, 1000.0), ("rsqrt.approx.f32", lambda x: x**-0.5, 0.1, 1000.0), ("sqrt.rn.f32", math.sqrt, 0.0, 1e9),
    ("tanh.approx.f32", math.tanh, -3.0, 3.0), ("rcp.approx.ftz.f32", lambda x: 1 / x, 0.1, 100.0), ("ex2.approx.ftz.f32", lambda x: 2.0**x, -20.0, 20.0),
])  # fmt: skip
def test_approximate_functions_are_close(
    name: str, function: Callable[[float], float], low: float, high: float
) -> None:
    rng = random.Random(1)
    a = [f32_bits(rng.uniform(low, high)) for _ in range(N)]
    for x, r in zip(a, apply(Module(kernel(f"{name} {{d}}, {{a}}", "f32", ["f32"])), [a]), strict=True):
        assert f32(r) == pytest.approx(function(f32(x)), rel=2e-6, abs=1e-6)


def test_flushing_turns_subnormals_into_zeros() -> None:
    a, b = [1, 0x80000001, 0x00800000, 0x3F800000] * 32, [f32_bits(1.0), f32_bits(1.0), f32_bits(0.5), 1] * 32
    got = apply(Module(kernel("mul.ftz.f32 {d}, {a}, {b}", "f32", ["f32", "f32"])), [a, b])[:4]
    assert got == [0, 0x80000000, 0, 0]
    kept = apply(Module(kernel("mul.f32 {d}, {a}, {b}", "f32", ["f32", "f32"])), [a, b])[:4]
    assert kept == [1, 0x80000001, 0x00400000, 1]


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y and x == x and y == y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y, "equ": lambda x, y: not (x < y or x > y), "neu": lambda x, y: not x == y,
    "ltu": lambda x, y: not x >= y, "leu": lambda x, y: not x > y, "gtu": lambda x, y: not x <= y, "geu": lambda x, y: not x < y,
    "num": lambda x, y: x == x and y == y, "nan": lambda x, y: x != x or y != y,
}  # fmt: skip


@pytest.mark.parametrize("cmp", COMPARISONS)
def test_float_comparisons_treat_nans_as_unordered(cmp: str) -> None:
    a, b = values(1, "f32"), values(2, "f32")
    b = [x if i % 5 == 0 else y for i, (x, y) in enumerate(zip(a, b, strict=True))]
    got = apply(
        Module(kernel(f"setp.{cmp}.f32 %p0, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p0", "u32", ["f32", "f32"])), [a, b]
    )
    for i in range(N):
        assert bool(got[i]) == COMPARISONS[cmp](f32(a[i]), f32(b[i])), (hex(a[i]), hex(b[i]))


def test_set_and_combined_predicates() -> None:
    a, b = values(1, "u32"), values(2, "u32")
    text = "setp.lt.u32 %p0, {a}, {b}; setp.gt.and.s32 %p1|%p2, {a}, {b}, %p0; selp.u32 {d}, 1, 0, %p1; @%p2 add.u32 {d}, {d}, 2"
    got = apply(Module(kernel(text, "u32", ["u32", "u32"])), [a, b])
    for i in range(N):
        x, y = a[i] & 0xFFFFFFFF, b[i] & 0xFFFFFFFF
        greater = signed(x, 32) > signed(y, 32)
        assert got[i] == (x < y and greater) + 2 * (x < y and not greater)
    got = apply(Module(kernel("set.le.f32.u32 {d}, {a}, {b}", "f32", ["u32", "u32"])), [a, b])
    assert all(f32(g) == float((x & 0xFFFFFFFF) <= (y & 0xFFFFFFFF)) for g, x, y in zip(got, a, b, strict=True))
