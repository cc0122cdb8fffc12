"""phosd writes images with its own rights: only where the caller may write too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phos.gpu_engine.daemon.permissions import may_write, refuse_unwritable
from phos.gpu_engine.errors import NotPermitted


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "allowed"),
    [
        (0o755, 0, 0, True),
        (0o755, 4242, 4242, False),
        (0o777, 4242, 4242, True),
        (0o1777, 4242, 4242, True),
        (0o770, 4242, os.getegid(), True),
        (0o750, 4242, os.getegid(), False),
        (0o700, os.geteuid(), os.getegid(), True),
    ],
)
def test_who_may_write(tmp_path: Path, mode: int, uid: int, gid: int, allowed: bool) -> None:
    folder = tmp_path / "image"
    folder.mkdir()
    folder.chmod(mode)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        assert may_write(descriptor, uid, gid) is allowed
    finally:
        os.close(descriptor)


def test_a_phosd_that_may_not_write_itself_says_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own, in a checkpoint that root makes; into a directory that is root's."""
    tmp_path.chmod(0o700)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        refuse_unwritable(descriptor, 0, 0)
        with pytest.raises(NotPermitted, match="User 4242 may not write to"):
            refuse_unwritable(descriptor, 4242, 4242)
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        monkeypatch.setattr(os, "getegid", lambda: 4242)
        with pytest.raises(NotPermitted, match=f"This phosd runs as user 4242, who may not write to {tmp_path}"):
            refuse_unwritable(descriptor, 0, 0)
    finally:
        os.close(descriptor)
