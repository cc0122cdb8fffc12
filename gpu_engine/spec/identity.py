"""Which file a process has loaded a module from, and whether the one at that path is still that file."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phos.gpu_engine.spec.fatbin import Buffer

BUILD_ID_MOST = 64
"""Bytes of a linker's build ID that are looked at; they have 20."""
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3


@dataclass(frozen=True)
class FileIdentity:
    """A file as the process saw it that loaded it (message ModuleLoaded).

    A library's build ID was read from its mapping. Linkers make it from the library's content, so it knows the file
    wherever it is copied to, and also when the path led to another one before the module was loaded from the mapping.

    A file without one is known by its number, its time and its size; by the latter two alone (``inode`` 0) once the
    process has been restored, maybe on another host, to where files are copied together with their times.
    """

    device: int
    inode: int
    mtime_ns: int
    size: int
    build_id: bytes = b""

    def is_of(self, about: os.stat_result, content: Buffer) -> bool:
        """Whether a file is that one, by what the kernel says of it and its bytes."""
        if about.st_size != self.size:
            return False
        if self.build_id:
            return build_id(content) == self.build_id
        if about.st_mtime_ns != self.mtime_ns:
            return False
        return not self.inode or (about.st_dev, about.st_ino) == (self.device, self.inode)

    def packed(self) -> list[int | str]:
        """As JSON can hold it."""
        return [self.device, self.inode, self.mtime_ns, self.size, self.build_id.hex()]

    @staticmethod
    def unpacked(packed: Sequence[Any]) -> FileIdentity:
        """What :meth:`packed` made."""
        device, inode, mtime_ns, size, build_id = packed
        return FileIdentity(device, inode, mtime_ns, size, bytes.fromhex(build_id))


def build_id(content: Buffer) -> bytes:
    """The build ID of a 64-bit ELF file; empty if it has none."""
    view = memoryview(content)
    try:
        return next(_build_ids(view), b"")
    except struct.error:
        return b""


def _build_ids(view: memoryview) -> Iterator[bytes]:
    if bytes(view[:6]) != b"\x7fELF\x02\x01":
        return
    (headers,) = struct.unpack_from("<Q", view, 32)
    size, count = struct.unpack_from("<HH", view, 54)
    for number in range(count):
        kind, _, offset, _, _, length, _, align = struct.unpack_from("<IIQQQQQQ", view, headers + number * size)
        if kind == _PT_NOTE:
            yield from _in_notes(view[offset : offset + length], 8 if align == 8 else 4)


def _in_notes(notes: memoryview, align: int) -> Iterator[bytes]:
    """ELF-64: u32 sizes of name and content, u32 type; both are padded."""
    at = 0
    while at + 12 <= len(notes):
        name, size, kind = struct.unpack_from("<III", notes, at)
        content = at + 12 + name + -(12 + name) % align
        if kind == _NT_GNU_BUILD_ID and bytes(notes[at + 12 : at + 12 + name]) == b"GNU\0":
            yield bytes(notes[content : content + min(size, BUILD_ID_MOST)])
        at = content + size + -size % align
