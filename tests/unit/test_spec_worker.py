"""What the analysis process keeps on disk, and for whom."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from as_user import needs_root
from spec_build import SCALE, THROUGH, ZSTD, image

from phos.gpu_engine.spec import analysis, disassembler, worker
from phos.gpu_engine.spec.cache import Cache
from phos.gpu_engine.spec.fatbin import Kind

ALICE, BOB = 1001, 1002


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_NVDISASM", "")


def analysed(cache: Cache, user: int, module: bytes | Path, **more: object) -> int:
    """A user's process has loaded a module; how many files the cache has then."""
    header = {"kernels": [SCALE], "capability": 90, "seconds": 20.0, "user": user, **more}
    if isinstance(module, Path):
        header.update(path=str(module), offset=0, size=0)
    with worker._image(header, module if isinstance(module, bytes) else b"") as (opened, whose):
        found, _ = worker._analyse(opened, header, cache, lambda partly: None, whose)
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


def test_what_a_disassembler_fails_at_once_is_asked_of_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fail for want of memory or of room for its files; what was known without it was kept for ever."""
    runs = tmp_path / "runs"
    tool = tmp_path / "nvdisasm"
    tool.write_text(f"#!/bin/sh\necho run >> {runs}\necho no space left on device >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PHOS_NVDISASM", str(tool))
    cache = Cache(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    cubin = image(Kind.ELF, 90)
    for count in (1, 2):
        assert analysed(cache, ALICE, cubin) == 0
        assert runs.read_text().count("run") == count
    tool.write_text("#!/bin/sh\nexit 0\n")  # it works, and says nothing of the kernel
    assert analysed(cache, ALICE, cubin) == 1


def test_the_next_process_does_not_read_ptx_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "PTX_SECONDS", -1.0)
    analysis._texts.clear()
    cache = Cache(tmp_path / "cache")
    key = cache.key(ZSTD, 90, disassembler.identity(), user=ALICE)
    assert analysed(cache, ALICE, ZSTD) == 1
    assert cache.load(key).hard == {0}
    monkeypatch.setattr(analysis, "_read", None)
    header = {"kernels": [SCALE, THROUGH], "capability": 90, "seconds": 20.0}
    assert set(worker._analyse(ZSTD, header, cache, lambda partly: None, ALICE)[0]) == {SCALE, THROUGH}
    assert set(cache.load(key).kernels) == {SCALE, THROUGH}
    assert cache.load(key).hard == {0}
