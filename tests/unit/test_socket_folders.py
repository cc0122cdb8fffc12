"""Folders are made that restored sockets need: gpu_engine/restore/socket_folders.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.errors import RestoreFailed
from phos.gpu_engine.restore.socket_folders import SocketFolders
from phos.images.criu_open_files import socket_folders
from tests.unit.criu_pages_files import with_bytes, write_image

from pycriu.images import fdinfo_pb2  # isort: skip (criu_pages_files.py skips these tests where there is none)


def bound(name: str, *, folder: str = "", deleted: bool = False, mount: int = -1, uid: int = 0) -> Any:
    entry = fdinfo_pb2.file_entry(type=fdinfo_pb2.UNIXSK, id=1)
    said = entry.usk
    for field in ("id", "ino", "type", "state", "flags", "uflags", "backlog", "peer"):
        setattr(said, field, 1)
    for field in ("uid", "euid", "signum", "pid_type", "pid"):
        setattr(said.fown, field, 0)
    options = said.opts
    for field in ("so_sndbuf", "so_rcvbuf", "so_snd_tmo_sec", "so_snd_tmo_usec", "so_rcv_tmo_sec", "so_rcv_tmo_usec"):
        setattr(options, field, 0)
    said.name = name.encode() + b"\0"
    said.file_perms.mode, said.file_perms.uid, said.file_perms.gid = 0o755, uid, uid
    said.mnt_id, said.deleted = mount, deleted
    if folder:
        said.name_dir = folder
    return entry


@pytest.fixture
def image(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    folder = tmp_path / "image"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor, folder / "files.img"
    os.close(descriptor)


def test_those_that_are_missing_are_made_and_go_again(tmp_path: Path, image: tuple[int, Path]) -> None:
    directory, file = image
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    user = 1234 if os.geteuid() == 0 else os.geteuid()
    entries = [
        bound(f"{there}/a.sock"),
        bound(f"{tmp_path}/pymp-x/listener-1", uid=user),
        bound("s", folder=f"{tmp_path}/deep/er", uid=user),
        bound("\0abstract"),
        bound(""),
        bound("relative"),
        bound(f"{tmp_path}/deleted/s", deleted=True),
        bound(f"{tmp_path}/elsewhere/s", mount=7),
        fdinfo_pb2.file_entry(type=fdinfo_pb2.EVENTFD, id=2),
    ]
    write_image(file, "FILES", entries)
    assert set(socket_folders(directory)) == {str(there), f"{tmp_path}/pymp-x", f"{tmp_path}/deep/er"}
    folders = SocketFolders(directory, os.getpid())
    made = [tmp_path / "pymp-x", tmp_path / "deep", tmp_path / "deep" / "er"]
    assert {(path.stat().st_mode & 0o777, path.stat().st_uid) for path in made} == {(0o700, user)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "image", "pymp-x", "there"]
    (made[0] / "file").touch()
    with socket.socket(socket.AF_UNIX) as bound_by_criu:
        bound_by_criu.bind(str(made[2] / "s"))
    folders.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "pymp-x", "there"]
    SocketFolders(directory, os.getpid()).discard()
    assert made[0].exists()  # it was there
    SocketFolders(directory, os.getpid()).keep()
    assert all(path.exists() for path in made)


def test_an_image_s_files_may_be_links(tmp_path: Path, image: tuple[int, Path]) -> None:
    """As with `cp -rs`, or where what files have in common is kept once; CRIU follows them."""
    directory, file = image
    write_image(tmp_path / "elsewhere", "FILES", [bound(f"{tmp_path}/x/s")])
    file.symlink_to(tmp_path / "elsewhere")
    assert set(socket_folders(directory)) == {f"{tmp_path}/x"}
    file.unlink()
    file.symlink_to("/dev/null")
    with pytest.raises(OSError, match="it is no regular file"):
        socket_folders(directory)


def test_a_name_may_be_any_bytes(tmp_path: Path, image: tuple[int, Path]) -> None:
    directory, file = image
    relative = with_bytes(bound("s", folder=f"{tmp_path}/ab"), "/ab", b"/\xff\xfe")
    absolute = with_bytes(bound(f"{tmp_path}/cd/s"), "/cd", b"/\xfe\xff")
    write_image(file, "FILES", [relative, absolute])
    folders = SocketFolders(directory, os.getpid())
    assert sorted(os.listdir(os.fsencode(tmp_path))) == [b"image", b"\xfe\xff", b"\xff\xfe"]
    folders.discard()


def test_one_that_cannot_be_made_is_named_and_none_is_left(tmp_path: Path, image: tuple[int, Path]) -> None:
    directory, file = image
    (tmp_path / "file").touch()
    write_image(file, "FILES", [bound(f"{tmp_path}/new/s"), bound(f"{tmp_path}/file/below/s")])
    with pytest.raises(RestoreFailed, match=r"file/below, in which a process has a socket, .* cannot be made"):
        SocketFolders(directory, os.getpid())
    assert not (tmp_path / "new").exists()
