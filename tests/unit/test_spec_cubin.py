"""Cubins and PTX: how kernels' parameters lie, from real files, and that damaged ones are refused."""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from spec_build import SCALE, THROUGH, compiled, image

from phos.gpu_engine.spec import cubin, ptx_layout
from phos.gpu_engine.spec.descriptor import Parameter
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Kind

LAYOUTS = {
    SCALE: (Parameter(0, 8), Parameter(8, 8), Parameter(16, 4)),
    THROUGH: (Parameter(0, 16), Parameter(16, 8), Parameter(24, 8)),
}
LARGE = """
struct Big { float x[1500]; };
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void large(const Big big, float *out) { out[threadIdx.x] = big.x[threadIdx.x]; }
extern "C" __global__ void mixed(char a, const __grid_constant__ Map map, short b, double c, bool d, float4 e) {
    if (d) *(double *)(size_t)map.bytes[a] = b + c + e.x;
}
extern "C" __global__ void nothing() {}
__device__ int counter;
"""


@pytest.mark.parametrize("arch", [80, 90])
def test_layouts_of_a_real_cubin(arch: int) -> None:
    real = image(Kind.ELF, arch)
    assert cubin.is_cubin(real)
    assert cubin.architecture(real) == arch
    assert sorted(cubin.kernels(real)) == sorted(LAYOUTS)
    assert cubin.layouts(real) == LAYOUTS
    assert cubin.layouts(real, [SCALE, "missing"]) == {SCALE: LAYOUTS[SCALE]}


def test_where_parameters_lie_in_the_constant_bank() -> None:
    info = cubin.infos(image(Kind.ELF, 90))[SCALE]
    assert (info.base, info.size) == (0x210, 20)


def test_symbols() -> None:
    found = {symbol.name: symbol for symbol in cubin.symbols(image(Kind.ELF, 90))}
    assert found[SCALE].section == cubin.TEXT_PREFIX + SCALE
    assert found[SCALE].size > 0


def test_functions_are_no_kernels() -> None:
    source = """
    __device__ __noinline__ int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }
    extern "C" __global__ void k(int *out) { *out = f(*out); }
    extern "C" __global__ void nothing() {}
    """
    real = compiled(source, cubin=True, more=["--relocatable-device-code=true"])
    assert sorted(cubin.kernels(real)) == ["k", "nothing"]


def test_ptx_says_the_same() -> None:
    assert ptx_layout.layouts(image(Kind.PTX, 90).decode(), 90) == LAYOUTS


@pytest.mark.parametrize(("arch", "map_at"), [(80, 32), (90, 48), (100, 64)])
def test_large_and_odd_parameters(arch: int, map_at: int) -> None:
    """What is aligned to 64 bytes is aligned in the constant bank, where blocks begin at different places."""
    after = [map_at + more for more in (128, 136, 144, 160)]
    offsets = [(0, 1), (map_at, 128), (after[0], 2), (after[1], 8), (after[2], 1), (after[3], 16)]
    expected = {
        "large": (Parameter(0, 6000), Parameter(6000, 8)),
        "mixed": tuple(Parameter(*at) for at in offsets),
        "nothing": (),
    }
    assert cubin.layouts(compiled(LARGE, cubin=True, arch=arch)) == expected
    assert ptx_layout.layouts(compiled(LARGE, cubin=False, arch=arch).decode(), arch) == expected


def attribute(number: int, data: bytes) -> bytes:
    return struct.pack("<BBH", 4, number, len(data)) + data


def test_both_forms_of_parameter_attributes() -> None:
    old = attribute(0x17, struct.pack("<IHHI", 0, 1, 8, 8 << 18 | 0x1F000))
    new = attribute(0x45, struct.pack("<IHHI", 0, 0, 0, 7 | 0x10000))
    value = struct.pack("<BBH", 3, 0x1B, 0xFF)
    info = cubin.parse_info("k", old + value + new + attribute(0x0A, struct.pack("<IHH", 9, 0x160, 16)))
    assert info == cubin.KernelInfo((Parameter(0, 7), Parameter(8, 8)), 0x160, 16)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (attribute(0x17, bytes(12))[:-1], "cut short"),
        (attribute(0x17, bytes(8)), "described in 8 bytes"),
        (attribute(0x17, struct.pack("<IHHI", 0, 1, 8, 8 << 18)), "without a gap"),
    ],
)
def test_damaged_attributes_are_named(data: bytes, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        cubin.parse_info("k", data)


@settings(max_examples=200)
@given(st.data())
def test_damaged_cubins_give_spec_errors_only(data: st.DataObject) -> None:
    real = bytearray(image(Kind.ELF, 90))
    headers = struct.unpack_from("<Q", real, 40)[0]
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(
            st.one_of(
                st.integers(0, 63),
                st.integers(headers, len(real) - 1),
                st.integers(0, len(real) - 1),
            )
        )
        real[at] = data.draw(st.integers(0, 255))
    for read in (cubin.kernels, cubin.layouts, cubin.symbols, cubin.architecture):
        with contextlib.suppress(SpecError):
            read(bytes(real))


PTX = """
.version 8.0 .target sm_90 .address_size 64
// .entry commented(.param .u8 x)
/* .entry commented_too(
.param .u8 x) */
.visible .entry empty() { ret; }
.entry $odd_name{ ret; }
.weak .entry all(.param .u8 a, .param .align 64 .b8 b[128],
    .param .u64 .ptr .global .align 4 c, .param .b64 .ptr d, .param .f16 e , .param .texref f, .param .b128 g)
.maxntid 128, 1, 1
{ ret; }
"""


def test_forms_of_ptx_parameters() -> None:
    assert ptx_layout.is_ptx(PTX.encode())
    assert ptx_layout.layouts(PTX, 100) == {
        "empty": (),
        "$odd_name": (),
        "all": tuple(Parameter(*at) for at in [(0, 1), (64, 128), (192, 8), (200, 8), (208, 2), (216, 8), (224, 16)]),
    }


@pytest.mark.parametrize("wrong", [".param .q32 x", ".param .u32", ".u32 x", ".param .b8 x[99999999]"])
def test_unknown_ptx_parameters_are_named(wrong: str) -> None:
    with pytest.raises(SpecError, match="kernel k"):
        ptx_layout.layouts(f".entry k({wrong}) {{ ret; }}", 90)


def test_names_of_files_that_look_like_comments() -> None:
    head = '.version 8.5\n.target sm_90\n.file 1 "/tmp/*made/x.cu"\n.file 2 "http://y"'
    text = f"{head} .entry k(.param .u64 p) {{ ret; }}\n/* it */ .entry j(.param .u32 n) {{ ret; }}"
    assert ptx_layout.layouts(text, 90) == {"k": (Parameter(0, 8),), "j": (Parameter(0, 4),)}
