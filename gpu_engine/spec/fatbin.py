"""Fat binaries: what nvcc, NVRTC's callers and the CUDA libraries hand to the driver (several images of one module).

All numbers are little-endian. No public description exists; the form was read from what CUDA 12 and 13 write::

    wrapper (24 bytes, in .nvFatBinSegment of a host program)
      0  u32 magic 0x466243b1    4  u32 version    8  u64 address of the container    16  u64 address of a file name
    container
      0  u32 magic 0xBA55ED50    4  u16 version 1    6  u16 header size 16    8  u64 bytes that follow
    entry, one after another
      0  u16 kind    2  u16 version    4  u32 header size (≥ 64)    8  u64 payload size, padded
     16  u32 compressed size
     28  u32 arch (90 = compute capability 9.0)    40  u64 flags    56  u64 size when uncompressed

Flags: 0x2000 an LZ4 block, 0x8000 a zstd frame, 0x100000 for this very architecture only (sm_90a), 0x200000 for its
family.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from phos.gpu_engine.spec.errors import SpecError

Buffer: TypeAlias = "bytes | bytearray | memoryview"

WRAPPER_MAGIC = 0x466243B1
CONTAINER_MAGIC = 0xBA55ED50
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

COMPRESSED_LZ4 = 0x2000
COMPRESSED_ZSTD = 0x8000
ARCH_SPECIFIC = 0x100000
FAMILY_SPECIFIC = 0x200000

MAX_UNCOMPRESSED = 1 << 30
"""Bytes that one entry may unfold to. The largest seen in CUDA's own libraries is a tenth of this."""

_WRAPPER = struct.Struct("<IIQQ")
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")


class Kind(enum.IntEnum):
    """What an entry holds. Others exist (8: code for link-time optimisation); nobody can launch those as they are."""

    PTX = 1
    ELF = 2


@dataclass(frozen=True)
class Entry:
    """One image of a fat binary. ``kind`` is a :class:`Kind` or a number that this module does not know."""

    kind: int
    arch: int
    flags: int
    payload: memoryview
    compressed_size: int
    uncompressed_size: int

    @property
    def specific(self) -> bool:
        """It runs on its own architecture (or family) and not on later ones."""
        return bool(self.flags & (ARCH_SPECIFIC | FAMILY_SPECIFIC))

    def read(self) -> bytes:
        """The image itself, uncompressed. Raises SpecError if it cannot be unfolded."""
        if not self.flags & (COMPRESSED_LZ4 | COMPRESSED_ZSTD):
            return bytes(self.payload)
        # Here, as phosd, which finds out only where a container ends, needs neither.
        import lz4.block  # type: ignore[import-untyped]
        import zstandard

        packed, size = self.payload[: self.compressed_size], self.uncompressed_size
        if not 0 < size <= MAX_UNCOMPRESSED:
            raise SpecError(
                f"An entry of a fat binary claims {size} bytes when uncompressed; that is no sensible size."
            )
        try:
            if self.flags & COMPRESSED_ZSTD:
                # What the frame itself claims is allocated at once, whatever the limit.
                claimed = zstandard.frame_content_size(packed)
                if claimed > size:
                    raise SpecError(f"An entry of a fat binary would uncompress to {claimed} bytes instead of {size}.")
                image = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
            else:
                image = lz4.block.decompress(packed, uncompressed_size=size)
        except (zstandard.ZstdError, lz4.block.LZ4BlockError, ValueError, MemoryError) as error:
            raise SpecError(f"An entry of a fat binary (flags {self.flags:#x}) does not uncompress: {error}.") from None
        if len(image) != size:
            raise SpecError(f"An entry of a fat binary uncompresses to {len(image)} bytes instead of {size}.")
        return image


def is_container(image: Buffer) -> bool:
    """Whether this begins with a container's magic number."""
    return len(image) >= 4 and int.from_bytes(image[:4], "little") == CONTAINER_MAGIC


def container_size(image: Buffer) -> int:
    """Bytes of the container that begins here, its header included. Raises SpecError if none begins here."""
    if len(image) >= 4 and int.from_bytes(image[:4], "little") == WRAPPER_MAGIC:
        raise SpecError(
            "This is the wrapper of a fat binary; it holds the address of the binary and not the binary itself."
        )
    if len(image) < _CONTAINER.size or not is_container(image):
        raise SpecError("This is no fat binary: it does not begin with the magic number of one.")
    _, version, header, size = _CONTAINER.unpack_from(image)
    if version != 1:
        raise SpecError(f"The fat binary has version {version}; this version of PhOS reads version 1.")
    if header < _CONTAINER.size:
        raise SpecError(f"The header of the fat binary claims {header} bytes; it has at least {_CONTAINER.size}.")
    return int(header + size)


def entries(image: Buffer) -> list[Entry]:
    """The images in one container, in its order. Nothing is uncompressed yet. Raises SpecError where malformed."""
    end = container_size(image)
    if end > len(image):
        raise SpecError(f"The fat binary is cut short: it has {len(image)} of {end} bytes.")
    view = memoryview(image)
    offset = int(_CONTAINER.unpack_from(image)[2])
    found = []
    while offset < end:
        if end - offset < _ENTRY.size:
            # nvcc pads containers of several entries; padding is zero.
            if not any(view[offset:end]):
                break
            raise SpecError(f"An entry of the fat binary at offset {offset} is cut short.")
        fields = _ENTRY.unpack_from(view, offset)
        kind, _, header, padded, compressed = fields[:5]
        arch, flags, uncompressed = fields[8], fields[11], fields[13]
        if header < _ENTRY.size or padded > end - offset or header > end - offset - padded:
            raise SpecError(f"The entry of the fat binary at offset {offset} does not fit into it.")
        if compressed > padded:
            raise SpecError(f"The entry of the fat binary at offset {offset} claims more compressed bytes than it has.")
        payload = view[offset + header : offset + header + padded]
        found.append(Entry(kind, arch, flags, payload, compressed, uncompressed))
        offset += header + padded
    return found


def containers(section: Buffer) -> Iterator[memoryview]:
    """The containers in a host program's ``.nv_fatbin`` section: one per translation unit, padded."""
    view = memoryview(section)
    offset = 0
    while offset + _CONTAINER.size <= len(view):
        if not is_container(view[offset:]):
            offset += 8
            continue
        size = container_size(view[offset:])
        yield view[offset : offset + size]
        offset += (size + 7) & ~7


def wrapped_address(image: Buffer) -> int:
    """The address of the container that a wrapper names, in the address space it was read from."""
    if len(image) < _WRAPPER.size:
        raise SpecError("The wrapper of a fat binary is cut short.")
    magic, _, address, _ = _WRAPPER.unpack_from(image)
    if magic != WRAPPER_MAGIC:
        raise SpecError("This is no wrapper of a fat binary: it does not begin with the magic number of one.")
    return int(address)
