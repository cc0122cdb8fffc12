"""Images that phosd holds pinned: restored from its memory, whatever becomes of their data files."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.dumped import LAYERS, LAYERS_SUM, Dumped
from tests.integration.site import Site, wait_until

MODES = ["eager", "lazy"]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in memory. Asked for before the site, it is there until that site's phosd has ended."""
    folder = Path(tempfile.mkdtemp(prefix="phos-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def pinned(site: Site) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = site.status()["pinned"]
    return found


def pin(site: Site, image: Path, *options: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(site.run("phos-gpu", "image", "pin", "--json", *options, str(image)).stdout)
    return said


def damage_first(dumped: Dumped) -> None:
    """Change a bit of its first data file."""
    with open(dumped.data()[0], "r+b") as data:
        byte = data.read(1)
        data.seek(0)
        data.write(bytes([byte[0] ^ 1]))


def refused(site: Site, *words: str) -> str:
    done = site.run("phos-gpu", "image", *words, check=False)
    assert done.returncode != 0
    return done.stderr


def test_an_image_on_a_disk_is_copied_and_restored_without_its_data_files(site: Site) -> None:
    dumped = Dumped(site, site.folder)
    said = pin(site, dumped.image, "--copy", "--name", "layers")
    assert said["copied"] == said["bytes"] >= LAYERS * (4 << 20)
    assert [(p["name"], p["state"], p["checked"] > 0) for p in pinned(site)] == [("layers", "pinned", True)]
    for file in dumped.data():
        file.unlink()
    for mode in MODES:
        assert dumped.restore(mode) == LAYERS_SUM
    site.run("phos-gpu", "image", "unpin", "layers")
    assert pinned(site) == []
    assert "is missing" in dumped.restore(check=False)


def test_what_lies_in_memory_is_pinned_where_it_is(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    said = pin(site, dumped.image)
    assert said["copied"] == 0
    assert said["bytes"] >= LAYERS * (4 << 20)
    maps = Path(f"/proc/{site.daemon_pid()}/maps").read_text()
    assert all(str(file) in maps for file in dumped.data())
    for mode in MODES:
        assert dumped.restore(mode) == LAYERS_SUM
    for file in dumped.data():  # the memory lives on
        file.unlink()
    for mode in MODES:
        assert dumped.restore(mode) == LAYERS_SUM
    site.run("phos-gpu", "image", "unpin", str(dumped.image))
    assert "phos-data-" not in Path(f"/proc/{site.daemon_pid()}/maps").read_text()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
def test_a_pinned_image_is_neither_read_nor_hashed(shared: Path, site: Site, mode: str, copy: bool) -> None:
    """What is pinned is altered in a way that nothing but reading it could notice."""
    dumped = Dumped(site, shared)
    pin(site, dumped.image, *(["--copy"] if copy else []))
    if not copy:
        assert dumped.restore(mode) == LAYERS_SUM
        return
    for file in dumped.data():
        size = file.stat().st_size
        file.write_bytes(b"\xff" * size)
    assert dumped.restore(mode) == LAYERS_SUM


@pytest.mark.parametrize("damage", ["altered", "cut off"])
@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_changes_where_it_is_pinned_is_noticed(shared: Path, site: Site, mode: str, damage: str) -> None:
    dumped = Dumped(site, shared)
    kept = {file: file.read_bytes() for file in dumped.data()}
    pin(site, dumped.image)
    for file in kept:
        with open(file, "r+b") as data:
            if damage == "altered":
                data.write(b"\xff" * 4096)
            else:
                data.truncate(4096)
    assert {p["state"] for p in pinned(site)} == {"changed"}
    errors = dumped.restore(mode, check=False)
    assert "is damaged" in errors or "is cut off" in errors
    for file, content in kept.items():
        file.write_bytes(content)
    # As it was, but not known to be: read and hashed.
    assert dumped.restore(mode) == LAYERS_SUM
    site.run("phos-gpu", "image", "unpin", str(dumped.image))
    pin(site, dumped.image)
    assert {p["state"] for p in pinned(site)} == {"pinned"}
    assert dumped.restore(mode) == LAYERS_SUM


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_stores_through_a_mapping_are_noticed_by_a_restore(shared: Path, site: Site, mode: str) -> None:
    """No time of modification tells of them."""
    dumped = Dumped(site, shared)
    assert pin(site, dumped.image)["copied"] == 0
    with open(dumped.data()[0], "r+b") as data, mmap.mmap(data.fileno(), 4096) as mapped:
        mapped[0] ^= 1
        assert {p["state"] for p in pinned(site)} == {"pinned"}
        errors = dumped.restore(mode, check=False)
        mapped[0] ^= 1
        assert "arrived on GPU 0 other than they are in" in errors
    assert {p["state"] for p in pinned(site)} == {"changed"}  # now that it is closed
    assert dumped.restore("lazy") == LAYERS_SUM


def test_what_somebody_may_write_to_is_copied(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    with open(dumped.data()[0], "r+b") as data, mmap.mmap(data.fileno(), 4096) as mapped:
        assert pin(site, dumped.image)["copied"] > 0
        mapped[0] ^= 1
        for mode in MODES:
            assert dumped.restore(mode) == LAYERS_SUM


def test_a_damaged_image_is_not_pinned(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    damage_first(dumped)
    for options in ([], ["--copy"]):
        assert "is damaged" in refused(site, "pin", *options, str(dumped.image))
        assert pinned(site) == []
    assert "phos-data-" not in Path(f"/proc/{site.daemon_pid()}/maps").read_text()
    (dumped.image / "phos-commit.img").unlink()
    assert "is incomplete" in refused(site, "pin", str(dumped.image))


def test_refusals_are_sentences(shared: Path, site: Site) -> None:
    site.environment["PHOS_PIN_LIMIT"] = "60M"
    dumped = Dumped(site, shared)
    other = shared / "other"
    shutil.copytree(dumped.image, other)
    pin(site, dumped.image, "--name", "first")
    assert "is pinned already, as first" in refused(site, "pin", str(other))
    assert "is no name for an image" in refused(site, "pin", "--name", "a/b", str(other))
    assert "There is no image directory" in refused(site, "pin", str(shared / "none"))
    assert "No image nothing is pinned" in refused(site, "unpin", "nothing")
    site.run("phos-gpu", "image", "unpin", "first")
    # The same under another path is the same image: it is used for both.
    pin(site, other)
    assert dumped.restore() == LAYERS_SUM
    shutil.rmtree(other)
    site.run("phos-gpu", "image", "unpin", str(other))
    assert pinned(site) == []
    site.stop_phosd()
    site.environment["PHOS_PIN_LIMIT"] = "1M"
    assert "phosd may pin 0.00 GB, of which 0.00 GB are in use" in refused(site, "pin", str(dumped.image))
    site.stop_phosd()
    site.environment["PHOS_PIN_LIMIT"] = "1G"
    site.environment["SOFTGPU_FAULTS"] = "register-fail-at:1"
    assert "The driver cannot pin the data of" in refused(site, "pin", str(dumped.image))
    assert pinned(site) == []
    pin(site, dumped.image)  # the fault strikes once


def test_a_limit_that_is_no_size_is_said(site: Site) -> None:
    done = site.run("phosd", "--ensure", check=False, PHOS_PIN_LIMIT="much")
    assert done.returncode != 0
    assert "PHOS_PIN_LIMIT=much is no size" in done.stderr


def test_phosd_lets_its_pinned_images_go_when_it_ends(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    pin(site, dumped.image)
    pid = site.daemon_pid()
    site.stop_phosd()
    site.freed(pid)
    assert dumped.restore() == LAYERS_SUM  # from its files, by a new one
    assert pinned(site) == []


def test_an_image_that_is_unpinned_during_its_restore_stays_until_it_is_done(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    dumped.go.unlink()
    site.stop_phosd()
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(6 << 20)
    pin(site, dumped.image, "--copy", "--name", "layers")
    for file in dumped.data():
        file.unlink()
    dumped.program.output.write_bytes(dumped.output)
    words = ["criu", "restore", "--lib", "phos", "-d", "-D", str(dumped.image), "-o", "restore.log", "-v4"]
    criu = site.background(*words, PHOS_RESTORE="lazy")
    wait_until(lambda: bool(pinned(site)[0]["users"]), "the restore to begin")
    site.run("phos-gpu", "image", "unpin", "layers")
    assert pinned(site) == []
    dumped.go.touch()
    assert criu.wait() == 0
    assert dumped.program.wait_result() == LAYERS_SUM


def test_a_pool_takes_its_memory_from_what_is_pinned(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    pin(site, dumped.image, "--name", "layers")
    site.run("phos-gpu", "pool", "create", str(dumped.image), "--size", "1")
    for file in dumped.data():
        file.unlink()
    wait_until(lambda: pinned(site)[0]["users"] >= 1, "the pool to use it")
    dumped.program.output.write_bytes(dumped.output)
    site.run("phos-gpu", "pool", "take", "image")
    wait_until(lambda: dumped.program.result() is not None, "a result")
    assert dumped.program.result() == LAYERS_SUM


def test_a_pool_has_its_image_pinned_where_it_lies_in_memory(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    words = ("phos-gpu", "pool", "create", str(dumped.image), "--size", "1", "--name")
    site.run(*words, "first")
    (shown,) = pinned(site)
    assert (shown["state"], shown["copied"], shown["pools"]) == ("pinned", 0, ["first"])
    assert shown["bytes"] >= LAYERS * (4 << 20)
    assert shown["users"] == 1
    assert "pool first" in site.run("phos-gpu", "image", "list").stdout
    dumped.program.output.write_bytes(dumped.output)
    site.run("phos-gpu", "pool", "take", "first")
    wait_until(lambda: dumped.program.result() is not None, "a result")
    assert dumped.program.result() == LAYERS_SUM
    site.run(*words, "second")
    site.run("phos-gpu", "pool", "drop", "first")
    assert [one["pools"] for one in pinned(site)] == [["second"]]
    site.stop_phosd()  # the next has it anew, with the pool
    site.run("phosd", "--ensure")
    wait_until(lambda: [one["pools"] for one in pinned(site) if one["state"] == "pinned"] == [["second"]], "the pool")
    site.run("phos-gpu", "pool", "drop", "second")
    assert pinned(site) == []
    assert "phos-data-" not in Path(f"/proc/{site.daemon_pid()}/maps").read_text()


def test_a_pool_of_a_damaged_image_in_memory_is_refused(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    damage_first(dumped)
    done = site.run("phos-gpu", "pool", "create", str(dumped.image), "--size", "1", check=False)
    assert done.returncode == 7
    assert "there is no pool" in done.stderr
    assert "is damaged" in done.stderr
    assert (site.status()["pools"], pinned(site)) == ([], [])


def test_what_has_changed_since_a_pool_had_it_pinned_is_not_taken(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    site.run("phos-gpu", "pool", "create", str(dumped.image), "--size", "1")
    damage_first(dumped)
    done = site.run("phos-gpu", "pool", "take", "image", check=False)
    assert done.returncode == 7
    assert "was changed while phosd had it pinned" in done.stderr
    (pool,) = site.status()["pools"]
    assert (pool["state"], pool["parked"]) == ("failed", [])
    assert pinned(site) == []


def test_what_is_shown(shared: Path, site: Site) -> None:
    dumped = Dumped(site, shared)
    assert "No image is pinned" in site.run("phos-gpu", "image", "list").stdout
    assert "is pinned" not in site.run("phos-gpu", "status").stdout
    pin(site, dumped.image, "--name", "layers")
    for words in (["image", "list"], ["status"]):
        shown = site.run("phos-gpu", *words, COLUMNS="200").stdout
        assert "layers" in shown
        assert str(dumped.image) in shown
        assert "nobody" in shown
    listed = json.loads(site.run("phos-gpu", "image", "list", "--json").stdout)
    assert listed["limit"] > 0
    assert listed["pinned"][0]["image"] == os.path.realpath(dumped.image)
