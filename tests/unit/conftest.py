"""What several files of tests share: phosd's place, played by the test; full disks; writes that fail; hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phos.gpu_engine.cow import shadows
from tests.unit import append_replaced
from tests.unit.cow_scene import Clock, Scene
from tests.unit.frontend_fake import FakePhosd
from tests.unit.image_sets import skip, write_small
from tests.unit.remote_peers import KEY, Host


@pytest.fixture
def phosd() -> Iterator[FakePhosd]:
    with FakePhosd() as daemon:
        yield daemon


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        skip("mounting needs root")
    place = tmp_path / "mounted"
    place.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)]
    else:
        mkfs = shutil.which("mkfs.ext4", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
        if mkfs is None:
            skip("no mkfs.ext4")
        file = tmp_path / "disk"
        file.write_bytes(bytes(2 << 20))
        subprocess.run([mkfs, "-q", "-m", "0", "-O", "^has_journal", str(file)], check=True, capture_output=True)
        mount = ["mount", "-o", "loop", str(file), str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        skip(f"cannot mount a {request.param}: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="session")
def append_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return append_replaced.build(tmp_path_factory.mktemp("append"))


@pytest.fixture
def replace_pwritev(append_library: Path) -> Iterator[Callable[[append_replaced.Write | None], None]]:
    """Says what is called where GPU data is written to an image, instead of pwritev()."""
    with append_replaced.replaceable(append_library) as replace:
        yield replace


@pytest.fixture
def closed_scenes() -> Iterator[None]:
    """Keep no descriptors of tables."""
    yield
    while Scene.made:
        Scene.made.pop().close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The shadows' time."""
    made = Clock()
    monkeypatch.setattr(shadows, "time", made)
    return made


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with an image, for other hosts."""
    folder = tmp_path / "shared"
    (folder / "image").mkdir(parents=True)
    write_small(folder / "image")
    return folder


@pytest.fixture
def host(shared: Path) -> Iterator[Host]:
    """Who shares it."""
    made = Host(shared)
    yield made
    made.server.stop()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The secret that such a host asks for."""
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    return file
