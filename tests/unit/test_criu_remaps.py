"""Files by a name that is gone are named again in CRIU's images (images/criu_remaps.py), and nothing else changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from phos.images.criu_remaps import Replaced, name_again
from phos.images.errors import ImageError
from tests.unit.criu_pages_files import bodies_of, content, with_bytes, write_image

from pycriu.images import fdinfo_pb2, remap_file_path_pb2  # isort: skip (criu_pages_files.py skips these tests)

NAMES = {"/dev/shm/link_remap.3": "/dev/shm/sem.mp-1", "/dev/shm/b": "/dev/shm/c"}


def replace(folder: Path) -> Replaced:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return name_again(directory, lambda link: NAMES.get(link, ""))
    finally:
        os.close(directory)


def regular(number: int, name: str) -> Any:
    entry = fdinfo_pb2.file_entry(type=fdinfo_pb2.REG, id=number)
    entry.reg.id, entry.reg.flags, entry.reg.pos, entry.reg.name, entry.reg.size = number, 2, 0, name, 32
    entry.reg.fown.uid = entry.reg.fown.euid = entry.reg.fown.signum = entry.reg.fown.pid_type = entry.reg.fown.pid = 0
    return entry


def event(number: int) -> Any:
    entry = fdinfo_pb2.file_entry(type=fdinfo_pb2.EVENTFD, id=number)
    entry.efd.id, entry.efd.flags, entry.efd.counter = number, 0, 7
    entry.efd.fown.uid = entry.efd.fown.euid = entry.efd.fown.signum = entry.efd.fown.pid_type = entry.efd.fown.pid = 0
    return entry


def remap(file: int, other: int, kind: int = 0) -> Any:
    return remap_file_path_pb2.remap_file_path_entry(orig_id=file, remap_id=other, remap_type=kind)


def names_of(folder: Path) -> dict[int, str]:
    entries = [fdinfo_pb2.file_entry.FromString(body) for body in bodies_of(folder / "files.img")]
    return {entry.id: entry.reg.name for entry in entries}


def remaps_of(folder: Path) -> list[tuple[int, int]]:
    bodies = bodies_of(folder / "remap-fpath.img")
    entries = [remap_file_path_pb2.remap_file_path_entry.FromString(body) for body in bodies]
    return [(entry.orig_id, entry.remap_id) for entry in entries]


FILES = (
    regular(1, "/dev/shm/sem.a"),
    event(2),
    regular(3, "/dev/shm/link_remap.3"),
    regular(4, "/tmp/gone"),
    regular(5, "/tmp/link_remap.5"),
    regular(6, "/dev/shm/b"),
    regular(7, "/dev/shm/b"),
)


def test_a_file_with_another_name_is_called_by_it(tmp_path: Path) -> None:
    """Its link goes; a file without a name, and one that merely is called alike, stay as they are."""
    ghost = 1
    write_image(tmp_path / "files.img", "FILES", FILES)
    write_image(tmp_path / "remap-fpath.img", "REMAP_FPATH", [remap(1, 3), remap(4, 5), remap(7, 1, ghost)])
    before = dict(zip(names_of(tmp_path), bodies_of(tmp_path / "files.img"), strict=True))
    assert replace(tmp_path) == Replaced(["/dev/shm/link_remap.3"], {"/tmp/gone": "/tmp/link_remap.5"})
    assert names_of(tmp_path) == {
        1: "/dev/shm/sem.mp-1",
        2: "",
        4: "/tmp/gone",
        5: "/tmp/link_remap.5",
        6: "/dev/shm/b",
        7: "/dev/shm/b",
    }
    assert remaps_of(tmp_path) == [(4, 5), (7, 1)]
    after = dict(zip(names_of(tmp_path), bodies_of(tmp_path / "files.img"), strict=True))
    assert {number: body for number, body in after.items() if number != 1} == {
        number: body for number, body in before.items() if number not in (1, 3)
    }
    changed = fdinfo_pb2.file_entry.FromString(after[1])
    changed.reg.name = "/dev/shm/sem.a"
    assert changed.SerializeToString() == before[1]
    assert set(content(tmp_path)) == {"files.img", "remap-fpath.img"}


def test_a_name_may_be_any_bytes(tmp_path: Path) -> None:
    link = with_bytes(regular(5, "/tmp/ab/link_remap.5"), "/ab", b"/\xff\xfe")
    write_image(tmp_path / "files.img", "FILES", [with_bytes(regular(4, "/tmp/ab/gone"), "/ab", b"/\xff\xfe"), link])
    write_image(tmp_path / "remap-fpath.img", "REMAP_FPATH", [remap(4, 5)])
    folder = os.fsdecode(b"/tmp/\xff\xfe")
    assert replace(tmp_path) == Replaced([], {f"{folder}/gone": f"{folder}/link_remap.5"})


def test_where_there_is_nothing_to_name_nothing_is_written(tmp_path: Path) -> None:
    assert replace(tmp_path) == Replaced()  # CRIU writes no images that are empty
    write_image(tmp_path / "files.img", "FILES", FILES)
    write_image(tmp_path / "remap-fpath.img", "REMAP_FPATH", [remap(4, 5), remap(6, 1, 1)])
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    assert replace(tmp_path) == Replaced([], {"/tmp/gone": "/tmp/link_remap.5"})
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", ["no such file", "no such link", "cut", "no files"])
def test_what_is_damaged_is_named(tmp_path: Path, damage: str) -> None:
    write_image(tmp_path / "files.img", "FILES", FILES)
    remaps = {"no such file": [remap(9, 3)], "no such link": [remap(1, 9)]}.get(damage, [remap(1, 3)])
    write_image(tmp_path / "remap-fpath.img", "REMAP_FPATH", remaps)
    files = tmp_path / "files.img"
    if damage == "cut":
        files.write_bytes(files.read_bytes()[:-1])
    elif damage == "no files":
        files.unlink()
    before = content(tmp_path)
    with pytest.raises((ImageError, OSError), match=r"files\.img|remap-fpath\.img names file 9"):
        replace(tmp_path)
    assert content(tmp_path) == before
