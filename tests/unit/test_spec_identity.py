"""A module is analysed in the file that the process has loaded, or not at all."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import kernels
from phos.gpu_engine.spec.identity import FileIdentity, build_id
from phos.gpu_engine.spec.speculator import Speculator

SESSION = b"s" * 16
PTX = """.version 9.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b) {{
    .reg .b64 %rd<3>; ld.param.u64 %rd1,[{}]; st.global.u32 [%rd1],5; ret; }}
"""
ID = bytes(range(20))


def note(name: bytes, kind: int, content: bytes, align: int = 4) -> bytes:
    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % align)

    return padded(struct.pack("<III", len(name), len(content), kind) + name) + padded(content)


def library(*notes: tuple[bytes, int], text: bytes = b"") -> bytes:
    """An ELF file that has these program headers of notes, with their alignment, and nothing else."""
    head = struct.pack("<6s10xHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, len(notes), 0, 0, 0)
    at = len(head) + 56 * len(notes)
    headers, contents = b"", b""
    for content, align in notes:
        headers += struct.pack("<IIQQQQQQ", 4, 4, at, at, at, len(content), len(content), align)
        contents += content
        at += len(content)
    return head + headers + contents + text


PROPERTY = note(b"GNU\0", 5, bytes(12), 8)
WITH_ID = library((PROPERTY, 8), (note(b"GNU\0", 1, bytes(16)) + note(b"GNU\0", 3, ID), 4))


def test_a_build_id_is_found_among_other_notes() -> None:
    assert build_id(WITH_ID) == ID
    assert build_id(library((note(b"XYZ\0", 3, ID), 4))) == b""
    assert build_id(library()) == build_id(b"\x7fELF") == build_id(PTX.encode()) == build_id(b"") == b""
    for end in range(len(WITH_ID)):
        assert build_id(WITH_ID[:end]) in (b"", ID, ID[: len(ID) - (len(WITH_ID) - end)])


def told(path: Path) -> wire_pb2.ModuleLoaded:
    """What a frontend says of a module in a file."""
    about = path.stat()
    return wire_pb2.ModuleLoaded(
        module=1,
        path=str(path),
        size=about.st_size,
        device=about.st_dev,
        inode=about.st_ino,
        mtime_ns=about.st_mtime_ns,
        file_size=about.st_size,
    )


def written(loaded: wire_pb2.ModuleLoaded) -> list[int]:
    """The offsets of the parameters through which its kernel writes; nothing is known: none."""
    speculator = Speculator(90, lanes=1)
    try:
        kernels.module_loaded(speculator, SESSION, os.getpid(), os.geteuid(), loaded, [])
        kernels.kernels_seen(speculator, SESSION, wire_pb2.KernelsSeen(module=1, kernel=["k"]))
        speculator.table(SESSION, 60)
        return [field.offset for found in speculator.descriptors(SESSION).values() for field in found.fields]
    finally:
        speculator.close()


def rebuilt(path: Path) -> None:
    path.with_suffix(".new").write_text(PTX.format("b"))
    os.replace(path.with_suffix(".new"), path)


def changed_in_place(path: Path) -> None:
    with open(path, "r+") as file:
        file.write(PTX.format("b"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def rebuilt_within_a_tick(path: Path) -> None:
    time = path.stat().st_mtime_ns
    os.link(path, path.with_suffix(".old"))  # or the new file gets its number
    rebuilt(path)
    os.utime(path, ns=(0, time))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHOS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PHOS_NVDISASM", "")
    path = tmp_path / "kernels.ptx"
    path.write_text(PTX.format("a"))
    return path


@pytest.mark.parametrize("change", [rebuilt, changed_in_place, rebuilt_within_a_tick])
def test_another_file_in_its_place_is_not_taken_for_it(
    module: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """phosd opens the file when it is told of it: hours after it was loaded, if it is started then."""
    loaded = told(module)
    assert written(loaded) == [0]
    change(module)
    assert written(loaded) == []
    assert "is not the one any more" in caplog.text
    assert written(told(module)) == [8]


def test_a_copy_elsewhere_is_taken_for_it_once_the_process_was_restored(module: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / module.name
    shutil.copy2(module, copy)
    loaded = told(module)
    loaded.path = str(copy)
    assert written(loaded) == []
    loaded.device = loaded.inode = 0
    assert written(loaded) == [0]
    os.utime(copy)
    assert written(loaded) == []
    loaded.file_size = loaded.mtime_ns = 0  # from an image of a frontend that did not say it
    assert written(loaded) == [0]


def test_a_build_id_says_more_than_numbers_and_times(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(WITH_ID)
    about = path.stat()
    identity = FileIdentity(about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size, ID)
    assert FileIdentity.unpacked(identity.packed()) == identity
    assert identity.is_of(about, WITH_ID)
    assert replace(identity, device=1, inode=2, mtime_ns=3).is_of(about, WITH_ID)
    # It was replaced after it had been mapped and before the module was loaded.
    assert not identity.is_of(about, WITH_ID.replace(ID, ID[::-1]))
    assert not replace(identity, size=1).is_of(about, WITH_ID)
