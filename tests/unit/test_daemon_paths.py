"""Where phosd is sought, and where it is not."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gpu_engine.daemon import paths
from phos.gpu_engine.errors import NotPermitted, UsageError
from tests.unit.as_user import NOBODY, as_user, needs_root


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user without any setting, where everybody can make one."""
    user = 4242 if os.geteuid() == 0 else os.geteuid()
    for name in ("PHOS_SOCKET", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paths, "SYSTEM_SOCKET", tmp_path / "none")
    monkeypatch.setattr(paths, "TEMPORARY", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    return tmp_path / f"phos-{user}"


def make(place: Path, mode: int, owner: int) -> None:
    place.mkdir()
    place.chmod(mode)
    if place.stat().st_uid != owner:
        os.chown(place, owner, owner)


@needs_root
def test_a_users_own_folder_is_where_phosd_is(place: Path) -> None:
    assert paths.socket_path() == place / "phos" / "phosd.sock"
    make(place, 0o755, 4242)
    assert paths.socket_path() == place / "phos" / "phosd.sock"


@needs_root
@pytest.mark.parametrize(("mode", "owner"), [(0o755, NOBODY), (0o777, 4242), (0o770, 4242)])
def test_nobody_can_pose_as_a_users_phosd(place: Path, mode: int, owner: int) -> None:
    make(place, mode, owner)
    with pytest.raises(NotPermitted, match="phosd is not sought there"):
        paths.socket_path()


def test_a_link_is_no_folder(place: Path) -> None:
    place.symlink_to("/")
    with pytest.raises(NotPermitted, match="phosd is not sought there"):
        paths.socket_path()


@pytest.fixture
def closed_umask() -> Iterator[None]:
    """As root has it on machines that are kept closed."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_everybody_finds_the_folder_whatever_the_umask_is(tmp_path: Path, closed_umask: None) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(0o700)
    paths.make_folder(kept / "run" / "phos" / "phosd.sock")
    paths.make_folder(kept / "run" / "phos" / "phosd.sock")
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (kept / "run" / "phos", kept / "run", kept)] == [
        0o755,
        0o755,
        0o700,
    ]


@needs_root
def test_a_users_own_folder_is_not_one_that_the_group_may_write_to(place: Path) -> None:
    before = os.umask(0o002)
    try:
        paths.make_folder(paths.socket_path())
    finally:
        os.umask(before)
    os.chown(place, 4242, 4242)
    assert paths.socket_path() == place / "phos" / "phosd.sock"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for folder in ("file", "file/below", "link"):
        with pytest.raises(UsageError, match="cannot be made"):
            paths.make_folder(tmp_path / folder / "phosd.sock")


@needs_root
def test_a_folder_that_one_may_not_enter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.delenv("PHOS_SOCKET", raising=False)
        monkeypatch.setattr(paths, "SYSTEM_SOCKET", Path(name, "phosd.sock"))

        def look() -> None:
            for find in (paths.socket_path, lambda: paths.refuse_unfit(paths.SYSTEM_SOCKET)):
                with pytest.raises(NotPermitted, match=rf"may not enter the folder {name} of phosd's socket"):
                    find()

        assert as_user(Path("/"), look) == ""
