"""Mappings of device files are taken out of CRIU's images (images/criu_mappings.py), and nothing else is."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import pytest

from phos.images.criu_mappings import leave_out_device_mappings
from phos.images.errors import ImageError
from tests.unit.criu_pages_files import PAGE, TASK, bodies_of, content, mm_pb2, write_image, write_memory

from pycriu.images import pstree_pb2  # isort: skip (criu_pages_files.py skips these tests where there is none)

PRIVATE = (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 1 << 0 | 1 << 9)  # VMA_AREA_REGULAR, VMA_ANON_PRIVATE
FILE = (mmap.MAP_SHARED, 1 << 0 | 1 << 7)  # VMA_FILE_SHARED
DEVICE = (mmap.MAP_SHARED, FILE[1] | 1 << 27)  # VMA_EXT_PLUGIN


def leave_out(folder: Path) -> dict[int, int]:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return leave_out_device_mappings(directory)
    finally:
        os.close(directory)


def write_tree(folder: Path, *tasks: int) -> None:
    entries = [pstree_pb2.pstree_entry(pid=task, ppid=0, pgid=task, sid=task, threads=[task]) for task in tasks]
    write_image(folder / "pstree.img", "PSTREE", entries)


def starts(path: Path) -> list[int]:
    (body,) = bodies_of(path)
    return [vma.start // PAGE for vma in mm_pb2.mm_entry.FromString(body).vmas]


def test_only_what_was_left_to_a_plugin_goes(tmp_path: Path) -> None:
    """And only of the tasks that have any; what else is said of a task stays as it was."""
    write_memory(tmp_path, [(10, 2, PRIVATE)])
    others = tmp_path / f"mm-{TASK}.img"
    others = others.rename(tmp_path / "mm-5.img")
    before = others.read_bytes()
    write_tree(tmp_path, 5, 6, TASK)  # 6 is a zombie
    (tmp_path / "mm-9.img").write_text("of a dump that failed")
    (tmp_path / f"mm-{TASK}.img.new").write_text("of a phosd that was killed")
    write_memory(tmp_path, [(10, 2, PRIVATE), (20, 1, DEVICE), (30, 4, FILE), (40, 1, DEVICE)])
    image = tmp_path / f"mm-{TASK}.img"
    image.chmod(0o640)
    said = mm_pb2.mm_entry.FromString(bodies_of(image)[0])
    assert leave_out(tmp_path) == {TASK: 2}
    assert starts(image) == [10, 30]
    left = mm_pb2.mm_entry.FromString(bodies_of(image)[0])
    for field in mm_pb2.mm_entry.DESCRIPTOR.fields:
        assert field.name == "vmas" or getattr(left, field.name) == getattr(said, field.name)
    assert stat.S_IMODE(image.stat().st_mode) == 0o640
    assert others.read_bytes() == before
    assert set(content(tmp_path)) == {"mm-5.img", "mm-9.img", "pstree.img", image.name}
    assert leave_out(tmp_path) == {}


def test_without_images_of_criu_s(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"pstree\.img"):
        leave_out(tmp_path)


def test_a_private_mapping_is_refused(tmp_path: Path) -> None:
    """Pages of it may be in the pagemap."""
    write_tree(tmp_path, TASK)
    write_memory(tmp_path, [(20, 1, (mmap.MAP_PRIVATE, DEVICE[1]))])
    before = content(tmp_path)
    with pytest.raises(ImageError, match="private mapping of a device"):
        leave_out(tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize("damage", ["cut", "kind", "two"])
def test_a_damaged_image_is_named_and_stays(tmp_path: Path, damage: str) -> None:
    write_tree(tmp_path, TASK)
    write_memory(tmp_path, [(20, 1, DEVICE)])
    image = tmp_path / f"mm-{TASK}.img"
    if damage == "cut":
        image.write_bytes(image.read_bytes()[:-3])
    elif damage == "kind":
        image.write_bytes(b"\0\0\0\0" + image.read_bytes()[4:])
    else:
        write_image(image, "MM", bodies_of(image) * 2)
    before = content(tmp_path)
    with pytest.raises(ImageError, match=image.name):
        leave_out(tmp_path)
    assert content(tmp_path) == before


def test_a_full_disk_leaves_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path, TASK)
    write_memory(tmp_path, [(20, 1, DEVICE)])
    before = content(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"mm-\d+.img.new"):
        leave_out(tmp_path)
    assert content(tmp_path) == before


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    write_tree(tmp_path, TASK)
    write_memory(tmp_path, [(20, 1, DEVICE)])
    image = tmp_path / f"mm-{TASK}.img"
    image.rename(tmp_path / "elsewhere")
    image.symlink_to("elsewhere")
    with pytest.raises(OSError, match=image.name):
        leave_out(tmp_path)
    assert starts(tmp_path / "elsewhere") == [20]
