"""Fat binaries: real ones of both compressions, ones made up here, and damaged ones."""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from spec_build import LZ4, ZSTD, container, entry, host_program, image

from phos.gpu_engine.spec import fatbin, modules
from phos.gpu_engine.spec.errors import SpecError
from phos.gpu_engine.spec.fatbin import Kind


@pytest.mark.parametrize("real", [ZSTD, LZ4], ids=["zstd", "lz4"])
def test_real_ones_are_read(real: bytes) -> None:
    found = fatbin.entries(real)
    assert [(e.kind, e.arch) for e in found] == [(Kind.ELF, 90), (Kind.PTX, 90), (Kind.ELF, 80)]
    assert all(e.flags & (fatbin.COMPRESSED_LZ4 | fatbin.COMPRESSED_ZSTD) for e in found)
    elf90, ptx, elf80 = (e.read() for e in found)
    assert elf90[:4] == elf80[:4] == b"\x7fELF"
    assert b".target sm_90" in ptx
    assert (elf90, elf80) == (image(Kind.ELF, 90), image(Kind.ELF, 80))


@pytest.mark.parametrize("flags", [0, fatbin.COMPRESSED_LZ4, fatbin.COMPRESSED_ZSTD])
def test_what_was_put_in_comes_out(flags: int) -> None:
    payload = bytes(range(256)) * 40
    (found,) = fatbin.entries(container(entry(Kind.ELF, 90, payload, flags)))
    assert found.read() == payload


def test_nothing_is_uncompressed_before_it_is_asked_for() -> None:
    broken = entry(Kind.PTX, 90, b"text", fatbin.COMPRESSED_ZSTD)
    broken = broken[:64] + bytes(len(broken) - 64)
    found = fatbin.entries(container(broken, entry(Kind.ELF, 90, b"12345678")))
    assert found[1].read() == b"12345678"
    with pytest.raises(SpecError, match="does not uncompress"):
        found[0].read()


def test_a_bomb_is_not_unfolded() -> None:
    packed = bytearray(entry(Kind.PTX, 90, b"text", fatbin.COMPRESSED_ZSTD))
    struct.pack_into("<Q", packed, 56, fatbin.MAX_UNCOMPRESSED + 1)
    with pytest.raises(SpecError, match="sensible size"):
        fatbin.entries(container(bytes(packed)))[0].read()


@pytest.mark.parametrize(
    ("damaged", "sentence"),
    [
        (b"", "no fat binary"),
        (b"\x50\xed\x55\xba", "no fat binary"),
        (struct.pack("<IIQQ", fatbin.WRAPPER_MAGIC, 1, 0x1234, 0), "wrapper"),
        (ZSTD[:-1], "cut short"),
        (ZSTD[:4] + b"\2\0" + ZSTD[6:], "version 2"),
        (ZSTD[:6] + b"\3\0" + ZSTD[8:], "header"),
        (ZSTD[:20] + b"\3\0\0\0" + ZSTD[24:], "does not fit"),
        (ZSTD[:24] + b"\xff" * 8 + ZSTD[32:], "does not fit"),
        (ZSTD[:32] + b"\xff" * 4 + ZSTD[36:], "more compressed bytes"),
        (container(b"\1" * 20), "cut short"),
    ],
)
def test_damage_is_named(damaged: bytes, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        fatbin.entries(damaged)


def read_everything(data: bytes) -> None:
    """Nothing but SpecError may come out."""
    with contextlib.suppress(SpecError):
        for found in fatbin.entries(data):
            with contextlib.suppress(SpecError):
                found.read()


@settings(max_examples=300)
@given(st.data())
def test_flipped_bytes_give_spec_errors_only(data: st.DataObject) -> None:
    real = bytearray(data.draw(st.sampled_from([ZSTD, LZ4])))
    for _ in range(data.draw(st.integers(1, 8))):
        # Half of the damage to headers, which are a small part of the whole.
        at = data.draw(st.one_of(st.integers(0, 90), st.integers(0, len(real) - 1)))
        real[at] = data.draw(st.integers(0, 255))
    read_everything(bytes(real[: data.draw(st.integers(0, len(real)))]))


@given(st.binary(max_size=400))
@example(b"\x50\xed\x55\xba\x01\x00\x10\x00" + bytes(8))
def test_noise_gives_spec_errors_only(noise: bytes) -> None:
    read_everything(noise)
    read_everything(container(noise))


def test_containers_are_found_behind_padding() -> None:
    one, two = container(entry(Kind.PTX, 90, b"a")), container(entry(Kind.PTX, 80, b"b"))
    section = one + bytes(-len(one) % 8 + 16) + two + bytes(8)
    assert [bytes(found) for found in fatbin.containers(section)] == [one, two]


def test_a_wrapper_tells_its_address() -> None:
    assert fatbin.wrapped_address(struct.pack("<IIQQ", fatbin.WRAPPER_MAGIC, 1, 0x1234, 0)) == 0x1234
    with pytest.raises(SpecError, match="no wrapper"):
        fatbin.wrapped_address(bytes(24))


SPECIFIC = fatbin.ARCH_SPECIFIC
FAMILY = fatbin.FAMILY_SPECIFIC


@pytest.mark.parametrize(
    ("held", "capability", "cubins", "ptx", "matches"),
    [
        ([("elf", 80, 0), ("elf", 90, 0), ("ptx", 90, 0)], 90, [90], 90, True),
        ([("elf", 80, 0), ("elf", 86, 0), ("ptx", 80, 0)], 89, [86], 80, False),
        ([("elf", 80, 0), ("ptx", 80, 0)], 90, [], 80, True),
        ([("elf", 90, SPECIFIC), ("elf", 90, 0), ("ptx", 90, 0)], 90, [90], 90, False),
        ([("elf", 90, SPECIFIC), ("ptx", 90, SPECIFIC)], 100, [], None, False),
        ([("elf", 100, FAMILY), ("elf", 90, 0)], 103, [100], None, False),
        ([("elf", 100, FAMILY)], 120, [], None, False),
        ([("elf", 90, 0), ("elf", 100, 0)], 0, [100], None, False),
        ([("ptx", 100, 0)], 90, [], None, False),
    ],
)
def test_the_drivers_choice(
    held: list[tuple[str, int, int]], capability: int, cubins: list[int], ptx: int | None, matches: bool
) -> None:
    kinds = {"elf": Kind.ELF, "ptx": Kind.PTX}
    parts = [entry(kinds[kind], arch, f"{kind}{arch}{bool(flags)}".encode(), flags) for kind, arch, flags in held]
    (unit,) = modules.units(container(*parts), capability)
    assert [int(text[3:].rstrip(b"\0TrueFals")) for text in unit.cubins()] == cubins
    specific = [flags for kind, arch, flags in held if kind == "elf" and arch in cubins]
    assert any(b"True" in text for text in unit.cubins()) == any(specific)
    found = unit.ptx()
    assert (None if found is None else int(found[3:].rstrip("TrueFals"))) == ptx
    assert unit.ptx_matches == matches


def test_a_host_programs_units() -> None:
    program = host_program(ZSTD + bytes(16) + LZ4)
    assert [unit.arch for unit in modules.units(program, 90)] == [90, 90]
    with pytest.raises(SpecError, match="holds no GPU code"):
        list(modules.units(program.replace(b".nv_fatbin", b".nv_gatbin"), 90))
    with pytest.raises(SpecError, match="cannot be read"):
        list(modules.units(program[:70], 90))


def test_a_frame_that_claims_more_than_its_entry_is_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes the frame's own word for how much memory it needs."""
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    claims = fatbin.Entry(fatbin.Kind.ELF, 90, fatbin.COMPRESSED_ZSTD, memoryview(packed), len(packed), 100)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: pytest.fail("it was unfolded"))
    with pytest.raises(SpecError, match="1048576 bytes instead of 100"):
        claims.read()
