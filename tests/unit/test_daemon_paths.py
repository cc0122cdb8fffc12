"""Where phosd is sought, and where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phos.gpu_engine.daemon import paths
from phos.gpu_engine.errors import NotPermitted
from tests.unit.as_user import NOBODY, needs_root


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
