"""Module images the software GPU takes and refuses: PTX text, fatbins, machine code."""

from __future__ import annotations

import ctypes.util

import pytest

from .softgpu_host import needs_softgpu, run

pytestmark = needs_softgpu

# Fatbins are written here after the layout in softgpu/image.c: an oracle of its own, independent of nvcc.
FATBIN = """
import struct
def entry(kind, payload, flags=0, arch=70, plain=None):
    packed = len(payload) if plain is not None else 0
    body = payload + bytes(-len(payload) % 8)
    fields = kind, 0x101, 64, len(body), packed, 0, 0, 7, arch, 0, 0, flags, 0, len(plain or b"")
    return struct.pack("<HHIQIIHHIIIQQQ", *fields) + body
def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
def lz4_literals(data):
    more = len(data) - 15
    return bytes([0xF0]) + bytes([255]) * (more // 255) + bytes([more % 255]) + data
"""


def test_ptx_loads_with_its_globals_and_its_parameter_layout() -> None:
    run(
        """
        start()
        module = ok(cu.cuModuleLoadData(PTX + bytes(1)))
        at, size = ok(cu.cuModuleGetGlobal(module, b"counter"))
        assert (size, get(at, 4)) == (4, bytes([41, 0, 0, 0]))
        kernel = ok(cu.cuModuleGetFunction(module, b"addn"))
        assert [ok(cu.cuFuncGetParamInfo(kernel, i)) for i in range(3)] == [(0, 8), (8, 4), (12, 4)]
        assert cu.cuFuncGetParamInfo(kernel, 3)[0] == E.CUDA_ERROR_INVALID_VALUE
        assert cu.cuModuleGetFunction(module, b"nothing")[0] == E.CUDA_ERROR_NOT_FOUND
        ok(cu.cuModuleUnload(module))
        assert cu.cuModuleUnload(module)[0] == E.CUDA_ERROR_INVALID_HANDLE
        assert launch(kernel, at, 1, 1)[0] == E.CUDA_ERROR_INVALID_HANDLE
        """
    )


def test_bad_ptx_is_refused_with_its_line() -> None:
    run(
        """
        start()
        bad = PTX.replace(b"mul.wide.u32 %rd2,%r6,4;", b"mul.wide.u32 %rd2,%nosuch,4;") + bytes(1)
        assert cu.cuModuleLoadData(bad)[0] == E.CUDA_ERROR_INVALID_PTX
        assert cu.cuModuleLoadData(b"not a module" + bytes(1))[0] == E.CUDA_ERROR_INVALID_IMAGE
        """,
        error="line 12",
    )


@pytest.mark.parametrize("form", ["plain", "lz4", "zstd", "wrapped"])
def test_fatbins_are_unpacked(form: str) -> None:
    if form == "zstd" and not ctypes.util.find_library("zstd"):
        pytest.skip("libzstd is not installed")
    run(
        FATBIN
        + f"""
form = "{form}"
start()
machine_code = entry(2, b"\\x7fELF" + bytes(60), arch=90)
if form in ("plain", "wrapped"):
    image = container(machine_code, entry(1, PTX + bytes(1)))
elif form == "lz4":
    image = container(machine_code, entry(1, lz4_literals(PTX), 0x2000, plain=PTX))
else:
    z = ctypes.CDLL("libzstd.so.1")
    z.ZSTD_compress.restype = ctypes.c_size_t
    room = ctypes.create_string_buffer(len(PTX) + 512)
    n = z.ZSTD_compress(room, ctypes.c_size_t(len(room)), PTX, ctypes.c_size_t(len(PTX)), 3)
    image = container(machine_code, entry(1, room.raw[:n], 0x8000, plain=PTX))
if form == "wrapped":
    held = ctypes.create_string_buffer(image, len(image))
    image = struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(held), 0)
library = ok(cu.cuLibraryLoadData(image, None, None, 0, None, None, 0))
kernel = ok(cu.cuLibraryGetKernel(library, b"addn"))
assert ok(cu.cuKernelGetParamInfo(kernel, 1)) == (8, 4)
assert ok(cu.cuLibraryGetKernelCount(library)) == 1
p = ok(cu.cuMemAlloc(64))
ok(cu.cuMemsetD8(p, 0, 64))
ok(launch(ok(cu.cuKernelGetFunction(kernel)), p, 16, 4))
assert words(p, 16) == [4] * 16
ok(cu.cuLibraryUnload(library))
"""
    )


def test_machine_code_alone_is_refused_with_a_sentence() -> None:
    for image in ('entry(2, b"\\x7fELF" + bytes(60))', ""):
        run(
            FATBIN
            + f"""
start()
image = container({image}) if {bool(image)} else b"\\x7fELF" + bytes(200)
assert cu.cuModuleLoadData(image)[0] == E.CUDA_ERROR_NO_BINARY_FOR_GPU
""",
            error="the software GPU runs PTX only",
        )


def test_damaged_fatbins_are_refused() -> None:
    run(
        FATBIN
        + """
start()
good = container(entry(1, lz4_literals(PTX), 0x2000, plain=PTX))
refused = 0
for at in range(16, 16 + 64):
    bad = bytearray(good + bytes(64))
    bad[at] ^= 0xFF
    refused += cu.cuModuleLoadData(bytes(bad))[0] != E.CUDA_SUCCESS
assert refused > 10
"""
    )


def test_ptx_is_linked_from_several_texts() -> None:
    run(
        """
        start()
        second = PTX.replace(b"addn", b"addm").replace(b"counter", b"other")
        state = ok(cu.cuLinkCreate(0, None, None))
        kind = cu.CUjitInputType.CU_JIT_INPUT_PTX
        for text in (PTX, second):
            ok(cu.cuLinkAddData(state, kind, text + bytes(1), len(text) + 1, b"x", 0, None, None))
        image, size = ok(cu.cuLinkComplete(state))
        module = ok(cu.cuModuleLoadData(image))
        ok(cu.cuModuleGetFunction(module, b"addn"))
        ok(cu.cuModuleGetFunction(module, b"addm"))
        ok(cu.cuLinkDestroy(state))
        """
    )
