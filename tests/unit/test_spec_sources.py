"""Holding the files of modules, and keeping modules that are in no file."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from phos.gpu_engine.spec import sources
from phos.gpu_engine.spec.module_store import ModuleStore
from phos.gpu_engine.spec.sources import FileSource, hold, identity_of


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def read(source: FileSource) -> bytes:
    data = Path(source.path).read_bytes()[source.offset :]
    return data[: source.size] if source.size else data


def test_a_file_is_held_once_and_let_go_with_its_last_user(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(b"module")
    (tmp_path / "link").symlink_to(path)
    gc.collect()  # of other tests, failed ones for example
    before = descriptors()
    first, second = FileSource.of(str(path)), FileSource.of(str(tmp_path / "link"), 2)
    assert descriptors() == before + 1
    path.unlink()
    assert (read(first), read(second)) == (b"module", b"dule")
    del first
    gc.collect()
    assert read(second) == b"dule"
    del second
    gc.collect()
    assert descriptors() == before


def test_a_file_in_the_place_of_another_is_another(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(b"module")
    first, again = FileSource.of(str(path)), FileSource.of(str(path))
    path.unlink()
    path.write_bytes(b"other!")
    second = FileSource.of(str(path))
    assert identity_of(first) == identity_of(again) != identity_of(second)
    assert (read(first), read(second)) == (b"module", b"other!")


def test_nothing_but_files_is_held(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = descriptors()
    assert [hold(str(path)) for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/null"))] == [
        None
    ] * 4
    assert FileSource.of(str(tmp_path / "none"), 7).path == str(tmp_path / "none")
    assert descriptors() == before


def test_so_many_files_are_held_and_no_more(tmp_path: Path) -> None:
    gc.collect()
    allowed, sources.FILES_HELD = sources.FILES_HELD, len(sources._held) + 2
    try:
        kept = []
        for number in range(4):
            (tmp_path / str(number)).write_bytes(b"module")
            kept.append(FileSource.of(str(tmp_path / str(number))))
        assert [source.held is not None for source in kept] == [True, True, False, False]
        assert [read(source) for source in kept] == [b"module"] * 4
    finally:
        sources.FILES_HELD = allowed


def test_a_module_is_found_by_what_its_frontend_says_of_it(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path / "modules")
    kept = store.keep(1000, 0xFEED, b"module")
    assert kept is not None
    assert read(kept) == b"module"
    found = ModuleStore(tmp_path / "modules").find(1000, 0xFEED, 6)
    assert found is not None
    assert read(found) == b"module"
    assert identity_of(found) == identity_of(kept)
    assert [store.find(*other) for other in ((1001, 0xFEED, 6), (1000, 0xFEEE, 6), (1000, 0xFEED, 7))] == [None] * 3
    assert store.keep(1000, 0, b"module") is None
    assert (tmp_path / "modules").stat().st_mode & 0o077 == 0


def test_a_module_that_a_crash_of_the_machine_has_left_torn_is_written_anew(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path)
    assert store.keep(1000, 0xFEED, b"module") is not None
    (path,) = tmp_path.iterdir()
    path.write_bytes(bytes(6))  # it had its size by then, and its data had not come to the disk
    kept = store.keep(1000, 0xFEED, b"module")
    assert kept is not None
    assert read(kept) == b"module"
    assert path.read_bytes() == b"module"


def test_the_store_is_bounded(tmp_path: Path) -> None:
    store = ModuleStore(tmp_path, max_bytes=4096)
    assert store.keep(0, 1, bytes(2000)) is None  # it would push all others out
    kept = []
    for number in range(1, 9):
        kept.append(store.keep(0, number, bytes([number]) * 1000))
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=lambda path: -path.stat().st_mtime_ns)):
            os.utime(path, ns=(10**18 - age * 10**9,) * 2)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4096
    assert [store.find(0, number, 1000) is not None for number in range(1, 9)] == [False] * 4 + [True] * 4
    assert all(source is not None and len(read(source)) == 1000 for source in kept)  # those in use stay readable


def test_the_store_deletes_nothing_but_modules(tmp_path: Path) -> None:
    (tmp_path / "kernel.module").write_bytes(bytes(9000))
    os.utime(tmp_path / "kernel.module", (1, 1))
    store = ModuleStore(tmp_path, max_bytes=4096)
    assert store.keep(0, 1, bytes(1000)) is not None
    assert store.find(0, 1, 1000) is not None
    assert (tmp_path / "kernel.module").exists()


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = ModuleStore(tmp_path / "file" / "modules")
    assert store.keep(0, 1, b"module") is None
    assert store.keep(0, 2, b"module") is None
    assert len([record for record in caplog.records if "in memory only" in record.message]) == 1
