"""phosd writes images with its own rights: only where the caller may write too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phos.gpu_engine.daemon.permissions import may_write


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
