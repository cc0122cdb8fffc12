"""Files that have grown since the dump are cut, if that is asked for: gpu_engine/restore/grown_files.py."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.errors import RestoreFailed, UsageError
from phos.gpu_engine.restore import grown_files
from phos.images.criu_open_files import written_files
from phos.images.errors import ImageError
from tests.unit.criu_pages_files import with_bytes, write_image

from pycriu.images import fdinfo_pb2, remap_file_path_pb2  # isort: skip (criu_pages_files.py skips these tests where there is none)


def regular(path: Path | str, flags: int, size: int | None = 4) -> Any:
    entry = fdinfo_pb2.file_entry(type=fdinfo_pb2.REG, id=1)
    entry.reg.id, entry.reg.flags, entry.reg.pos, entry.reg.name = 1, flags, 0, str(path)
    if size is not None:
        entry.reg.size = size
    entry.reg.fown.uid = entry.reg.fown.euid = entry.reg.fown.signum = entry.reg.fown.pid_type = entry.reg.fown.pid = 0
    return entry


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "image").mkdir()
    descriptor = os.open(tmp_path / "image", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def grown(tmp_path: Path, directory: int) -> Path:
    """A file that had four bytes."""
    path = tmp_path / "train.log"
    path.write_bytes(b"1\n2\n3\nTraceback\n")
    path.chmod(0o640)
    write_image(tmp_path / "image" / "files.img", "FILES", [regular(path, os.O_WRONLY)])
    return path


def cut(directory: int) -> list[str]:
    return grown_files.cut(directory, os.getpid())


def kept(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{path.name}.cut-*"))


def test_what_came_since_is_kept_beside_it(grown: Path, directory: int) -> None:
    """Under a name of its own each time."""
    for number in range(2):
        with open(grown, "ab") as file:
            file.write(bytes([number]))
        assert cut(directory) == [str(grown)]
        assert grown.read_bytes() == b"1\n2\n"
        assert len(kept(grown)) == number + 1
    assert {path.read_bytes() for path in kept(grown)} == {b"3\nTraceback\n\0", b"\1"}
    assert {path.stat().st_mode & 0o7777 for path in kept(grown)} == {0o640}
    assert cut(directory) == []
    assert len(kept(grown)) == 2


def test_a_name_may_be_any_bytes(tmp_path: Path, directory: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # xdist carries no such name
    path = tmp_path / os.fsdecode(b"\xff\xfe.log")
    path.write_bytes(b"1\n2\n3\n")
    entry = with_bytes(regular(tmp_path / "ab.log", os.O_WRONLY), "ab.log", b"\xff\xfe.log")
    write_image(tmp_path / "image" / "files.img", "FILES", [entry])
    assert cut(directory) == [str(path)]
    assert path.read_bytes() == b"1\n2\n"
    assert len(kept(path)) == 1


def test_other_files_are_criu_s_to_judge(tmp_path: Path, directory: int) -> None:
    """Read, changed in place, appended to, of another mount namespace, external; gone, shorter, no file, and links."""
    path = tmp_path / "file"
    path.write_bytes(b"123456")
    elsewhere, external = regular(path, os.O_WRONLY), regular(path, os.O_WRONLY)
    elsewhere.reg.mnt_id, external.reg.ext = 7, True
    pipe, link, shorter = tmp_path / "pipe", tmp_path / "link", tmp_path / "shorter"
    os.mkfifo(pipe)
    shorter.write_bytes(b"123")
    event = fdinfo_pb2.file_entry(type=fdinfo_pb2.EVENTFD, id=2)
    entries = [
        regular(path, os.O_RDONLY),
        regular(path, os.O_RDWR),
        regular(path, os.O_WRONLY | os.O_APPEND, None),
        elsewhere,
        external,
        event,
        regular(tmp_path / "gone", os.O_WRONLY),
        regular(shorter, os.O_WRONLY),
        regular(pipe, os.O_WRONLY, 0),
    ]
    image = tmp_path / "image" / "files.img"
    write_image(image, "FILES", entries)
    assert written_files(directory) == {str(tmp_path / "gone"): 4, str(shorter): 4, str(pipe): 0}
    assert cut(directory) == []
    link.symlink_to(path)
    write_image(image, "FILES", [regular(link, os.O_WRONLY)])
    assert cut(directory) == []
    nameless = regular(path, os.O_WRONLY)  # what has its name is another file
    write_image(image, "FILES", [nameless])
    remap = remap_file_path_pb2.remap_file_path_entry(orig_id=nameless.id, remap_id=5, remap_type=1)
    write_image(tmp_path / "image" / "remap-fpath.img", "REMAP_FPATH", [remap])
    assert cut(directory) == []
    assert path.read_bytes() == b"123456"
    assert not kept(path)


def test_what_somebody_else_writes_to_is_not_cut(grown: Path, directory: int) -> None:
    before = grown.read_bytes()
    with subprocess.Popen(["sleep", "60"], stdout=grown.open("ab")) as process:
        with pytest.raises(RestoreFailed, match=f"process {process.pid} .* writes to it"):
            cut(directory)
        process.kill()
    assert grown.read_bytes() == before
    with subprocess.Popen(["sleep", "60"], stdin=grown.open("rb")) as process:  # who reads does not mind
        assert cut(directory) == [str(grown)]
        process.kill()


def test_what_cannot_be_kept_is_not_cut(grown: Path, directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = grown.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(RestoreFailed, match="cannot be put aside: No space left on device"):
        cut(directory)
    assert grown.read_bytes() == before
    assert not kept(grown)


def test_a_damaged_image_is_said(tmp_path: Path, grown: Path, directory: int) -> None:
    image = tmp_path / "image" / "files.img"
    image.write_bytes(image.read_bytes()[:-2])
    with pytest.raises(ImageError, match=r"files\.img"):
        cut(directory)


def test_a_choice_without_a_meaning() -> None:
    for choice in ("", *grown_files.CHOICES):
        grown_files.check(choice)
    with pytest.raises(UsageError, match="PHOS_GROWN_FILES=yes means nothing: choose one of refuse, cut"):
        grown_files.check("yes")
