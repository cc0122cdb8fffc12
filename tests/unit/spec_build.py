"""Modules for the tests of speculation: fat binaries put together here, cubins and PTX from NVRTC if installed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import lz4.block
import pytest
import zstandard

from phos.gpu_engine.spec import fatbin

DATA = Path(__file__).parent / "spec_data"
ZSTD = (DATA / "kernels.zstd.fatbin").read_bytes()
LZ4 = (DATA / "kernels.lz4.fatbin").read_bytes()
SCALE = "scale"
THROUGH = "_Z7throughIfEv4PairPKT_d"


def entry(kind: int, arch: int, payload: bytes, flags: int = 0) -> bytes:
    """One entry of a fat binary, compressed as its flags say."""
    packed = payload
    if flags & fatbin.COMPRESSED_ZSTD:
        packed = zstandard.ZstdCompressor().compress(payload)
    elif flags & fatbin.COMPRESSED_LZ4:
        packed = lz4.block.compress(payload, store_size=False)
    compressed = flags & (fatbin.COMPRESSED_ZSTD | fatbin.COMPRESSED_LZ4)
    padded = packed + bytes(-len(packed) % 8)
    sizes = (len(packed), len(payload)) if compressed else (0, 0)
    header = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(padded), sizes[0], 0, 0, 1, arch, 0, 0, flags, 0, sizes[1]
    )
    return header + padded


def container(*entries: bytes) -> bytes:
    """A fat binary of these entries."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", fatbin.CONTAINER_MAGIC, 1, 16, len(body)) + body


def image(kind: int, arch: int) -> bytes:
    """What the fat binary that is kept beside the tests holds for an architecture."""
    return next(e.read() for e in fatbin.entries(ZSTD) if (e.kind, e.arch) == (kind, arch))


def host_program(section: bytes) -> bytes:
    """A host ELF file with nothing but this .nv_fatbin section."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at_names = 64 + len(section)
    at_headers = (at_names + len(names) + 7) & ~7
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at_headers, 0, 64, 56, 0, 64, 3, 2)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, 64, len(section), 0, 0, 8, 0)
    sections += struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, at_names, len(names), 0, 0, 1, 0)
    return (header + section + names).ljust(at_headers, b"\0") + sections


def compiled(source: str, *, cubin: bool, arch: int = 90, more: Sequence[str] = ()) -> bytes:
    """CUDA C through NVRTC, for one architecture. Skips the test where NVRTC is not installed."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, None, None)
    except RuntimeError as error:  # cuda.bindings without the compiler's library
        if "nvrtc" not in str(error).lower():
            raise
        pytest.skip("NVRTC is not installed")
    options = [
        f"--gpu-architecture={'sm' if cubin else 'compute'}_{arch}".encode(),
        b"--std=c++17",
        *(option.encode() for option in more),
    ]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    get_size, get = (
        (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if cubin else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    _, size = get_size(program)
    code = bytearray(size)
    get(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)
