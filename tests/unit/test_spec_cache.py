"""The cache on disk: several writers, damaged and foreign files, a bounded size."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import xxhash

from phos.gpu_engine.spec import cache
from phos.gpu_engine.spec.cache import Cache
from phos.gpu_engine.spec.descriptor import AccessDescriptor, Parameter, from_layout
from phos.gpu_engine.spec.module_store import ModuleStore


def some(name: str, count: int = 2) -> AccessDescriptor:
    return from_layout(name, tuple(Parameter(8 * i, 8) for i in range(count)))


def test_what_is_stored_is_found_again(tmp_path: Path) -> None:
    kept = Cache(tmp_path / "made" / "by it")
    key = kept.key(b"module", 90)
    assert kept.load(key).kernels == {}
    kept.store(key, [some("a"), some("b", 0)], {3, 1, "a"})
    assert Cache(tmp_path / "made" / "by it").load(key).kernels == {"a": some("a"), "b": some("b", 0)}
    assert kept.load(key).hard == {1, 3, "a"}
    assert kept.folder is not None
    assert kept.folder.stat().st_mode & 0o777 == 0o700


def test_keys_tell_apart_what_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Cache(tmp_path)
    keys = {kept.key(b"module", 90), kept.key(b"module", 100), kept.key(b"modulf", 90), kept.key(b"module", 90, "tool")}
    keys |= {kept.key(b"module", 90, user=0), kept.key(b"module", 90, user=1000)}
    monkeypatch.setattr(cache, "analyser_version", lambda: b"another")
    keys.add(kept.key(b"module", 90))
    assert len(keys) == 7


def test_no_module_can_be_made_to_pass_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of xxh3 a second text with the same hash is made in milliseconds."""
    for fast in ("xxh3_128", "xxh3_128_digest"):
        monkeypatch.setattr(f"xxhash.{fast}", None)
    cache.analyser_version.cache_clear()
    assert len(Cache(tmp_path).key(b"module", 90)) == 40


def file_of(kept: Cache, key: str) -> Path:
    return kept.folder / f"phos-{key}.json"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "not json", "another form", "deep", "huge numbers"])
def test_damaged_files_are_ignored_and_rewritten(tmp_path: Path, damage: str) -> None:
    kept = Cache(tmp_path)
    key = kept.key(b"module", 90)
    kept.store(key, [some("a")])
    path = file_of(kept, key)
    good = path.read_bytes()
    bodies = {
        "not json": b"][",
        "another form": json.dumps({"a": 1}).encode(),
        "deep": b"[" * 100000,
        "huge numbers": b'[["k",[[0,1e400]],[],0,0]]',
    }
    if damage in bodies:
        path.write_bytes(xxhash.xxh3_128_digest(bodies[damage]) + bodies[damage])
    else:
        path.write_bytes({"cut": good[:-3], "flipped": good[:-3] + b"]]]", "empty": b""}[damage])
    assert kept.load(key).kernels == {}
    kept.store(key, [some("a")])
    assert kept.load(key).kernels == {"a": some("a")}


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    key, other = kept.key(b"module", 90), kept.key(b"other", 90)
    kept.store(other, [some("a")])
    file_of(kept, key).symlink_to(file_of(kept, other))
    assert kept.load(key).kernels == {}
    file_of(kept, key).unlink()
    os.mkfifo(file_of(kept, key))
    assert kept.load(key).kernels == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file of another user")
def test_files_of_other_users_are_not_trusted(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    key = kept.key(b"module", 90)
    kept.store(key, [some("a")])
    os.chown(file_of(kept, key), 12345, 12345)
    assert kept.load(key).kernels == {}


def test_a_folder_that_cannot_be_made_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    kept = Cache(tmp_path / "file" / "below")
    for _ in range(2):
        kept.store("key", [some("a")])
    assert kept.load("key").kernels == {}
    assert caplog.text.count("not cached") == 1


def test_its_size_is_bounded_and_the_longest_unused_go_first(tmp_path: Path) -> None:
    kept = Cache(tmp_path, max_bytes=5000)
    for number in range(30):
        kept.store(f"{number:040x}", [some(f"kernel{number}", 20)])
        os.utime(file_of(kept, f"{number:040x}"), ns=(number * 10**9, number * 10**9))
        kept.load(f"{0:040x}")  # in use all the time
    left = list(tmp_path.iterdir())
    assert sum(path.stat().st_size for path in left) <= 5000
    assert kept.load(f"{0:040x}").kernels
    assert kept.load(f"{29:040x}").kernels
    assert not kept.load(f"{1:040x}").kernels


def test_what_is_not_ours_stays_in_a_folder_that_is_given_to_us(tmp_path: Path) -> None:
    names = ["annotations.json", "film.mkv.part", f"{0:040x}.json", ".tmpabcdefgh.part", "phos-notes.json"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(9000))
        os.utime(tmp_path / name, (1, 1))
    left_by_a_killed_writer = tmp_path / ".phos-abc_1234.part"
    left_by_a_killed_writer.write_bytes(bytes(9000))
    os.utime(left_by_a_killed_writer, (1, 1))
    kept = Cache(tmp_path, max_bytes=5000)
    kept.store("a" * 40, [some("a")])
    assert kept.load("a" * 40), "it counts what is not ours"
    assert {path.name for path in tmp_path.iterdir()} == {*names, f"phos-{'a' * 40}.json"}


def test_writers_at_once_leave_whole_files(tmp_path: Path) -> None:
    key = "0" * 40
    wrong: list[str] = []

    def write(name: str) -> None:
        kept = Cache(tmp_path)
        for count in range(60):
            kept.store(key, [some(name, count)])
            found = kept.load(key).kernels
            if len(found) != 1:
                wrong.append(name)

    threads = [threading.Thread(target=write, args=(f"writer{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [path.name for path in tmp_path.iterdir()] == [f"phos-{key}.json"]


def test_a_killed_writer_leaves_what_was_there(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    kept.store("b" * 40, [some("a")])
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from phos.gpu_engine.spec.cache import Cache\n"
        "from phos.gpu_engine.spec.descriptor import from_layout\n"
        "os.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "Cache(Path(sys.argv[1])).store('b' * 40, [from_layout('b', ())])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=False)
    assert done.returncode == -9
    assert kept.load("b" * 40).kernels == {"a": some("a")}


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOS_CACHE", "/somewhere")
    assert cache.default_folder() == Path("/somewhere")
    monkeypatch.delenv("PHOS_CACHE")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cache.default_folder() == Path("/var/cache/phos")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    assert cache.default_folder() == Path("/home/me/cache/phos")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.default_folder() == Path("/home/me/.cache/phos")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry in the password file, as in a container that is run with any user id."""

    def nobody(_user: int) -> None:
        raise KeyError

    for name in ("PHOS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.mark.usefixtures("homeless")
def test_who_has_no_home_keeps_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert cache.default_folder() is None
    kept = Cache()
    for _ in range(2):
        kept.store(kept.key(b"module", 90), [some("a")])
    assert kept.load(kept.key(b"module", 90)).kernels == {}
    assert caplog.text.count("not cached") == 1
    store = ModuleStore()
    assert [store.keep(54321, 1, b"module") for _ in range(2)] == [None, None]
    assert store.find(54321, 1, 6) is None
    assert caplog.text.count("in memory only") == 1
