"""What the analysis process keeps on disk, and for whom."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from as_user import needs_root
from spec_build import SCALE, ZSTD

from phos.gpu_engine.spec import worker
from phos.gpu_engine.spec.cache import Cache

ALICE, BOB = 1001, 1002


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_NVDISASM", "")


def analysed(cache: Cache, user: int, module: bytes | Path, **more: object) -> int:
    """A user's process has loaded a module; how many files the cache has then."""
    header = {"kernels": [SCALE], "capability": 90, "seconds": 20.0, "user": user, **more}
    if isinstance(module, Path):
        header.update(path=str(module), offset=0, size=0)
    with worker._image(header, module if isinstance(module, bytes) else b"") as (image, whose):
        found, _ = worker._analyse(image, header, cache, lambda partly: None, whose)
    assert set(found) == {SCALE}
    assert cache.folder is not None
    return len(list(cache.folder.iterdir()))


def test_nobody_gets_what_was_found_in_a_module_of_another_user(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    assert [analysed(cache, user, ZSTD) for user in (ALICE, ALICE, BOB, 0)] == [1, 1, 2, 3]


@needs_root
def test_what_is_found_in_a_file_of_roots_is_for_all(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.write_bytes(ZSTD)
    cache = Cache(tmp_path / "cache")
    assert [analysed(cache, user, library) for user in (ALICE, BOB, 0)] == [1, 1, 1]
    # A file that others can write may have been another when its hash was taken.
    library.chmod(0o664)
    assert [analysed(cache, user, library) for user in (ALICE, BOB)] == [2, 3]
    library.chmod(0o644)
    os.chown(library, ALICE, ALICE)
    assert [analysed(cache, user, library) for user in (ALICE, BOB, 0)] == [3, 3, 4]
    # A copy of what a user's process had in memory is root's file, and that user's module.
    os.chown(library, 0, 0)
    assert [analysed(cache, user, library, kept=True) for user in (ALICE, 1003)] == [4, 5]
