"""Memory with a name in /dev/shm, saved of processes that stand still: gpu_engine/named_memory.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import procfs
from phos.gpu_engine.errors import CheckpointFailed
from phos.gpu_engine.named_memory import DumpedNamedMemory
from phos.gpu_engine.shared_memory import SHARED_MEMORY
from phos.images.errors import ImageError
from phos.images.writer import ImageWriter
from tests.unit.criu_pages_files import write_image
from tests.unit.test_criu_remaps import names_of, regular, remap

HOLDER = r"""
import mmap, os, sys
how, path = sys.argv[1:]
flags = os.O_RDWR if how == "writes" else os.O_RDONLY
file = os.open(path, flags)
kind = mmap.MAP_PRIVATE if how == "private" else mmap.MAP_SHARED
memory = mmap.mmap(file, 0, kind, mmap.PROT_READ if how == "reads" else mmap.PROT_READ | mmap.PROT_WRITE)
os.close(file)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    path = SHARED_MEMORY / f"phos-test-{uuid.uuid4().hex}"
    yield path
    for left in SHARED_MEMORY.glob(f"{path.name}*"):
        left.unlink()


@pytest.fixture
def hold() -> Iterator[Callable[[str, Path], int]]:
    """A process that has a file mapped."""
    processes = []

    def hold(how: str, path: Path) -> int:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, how, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        processes.append(holder)
        assert holder.stdout
        assert holder.stdout.readline() == b"ready\n"
        return holder.pid

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


@dataclass
class Files:
    """What a writer is given, and an image gives back."""

    path: Path = Path("/an/image")
    inventory: pb.Inventory = field(default_factory=pb.Inventory)
    content: dict[str, bytes] = field(default_factory=dict)
    failure: Exception | None = None
    ours: bool = True

    def add_file(self, name: str, source: int, size: int) -> list[bytes]:
        if self.failure:
            raise self.failure
        self.content[name] = os.pread(source, size, 0)
        return []

    def dump(self, folder: Path, *pids: int) -> DumpedNamedMemory:
        """As of tasks that CRIU, which is this process, has frozen."""
        dumped = DumpedNamedMemory(cast(ImageWriter, self), ours=self.ours)
        for pid in pids:
            dumped.look(pid, os.getpid())
        dumped.wait()
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            dumped.describe(self.inventory, directory, {})
        finally:
            os.close(directory)
        return dumped


def test_what_is_shared_for_writing_is_saved_once(path: Path, hold: Callable[[str, Path], int], tmp_path: Path) -> None:
    path.write_bytes(b"\1" * 10000)
    os.link(path, f"{path}-too")
    path.chmod(0o640)
    files = Files()
    files.dump(tmp_path, hold("writes", path), hold("writes", Path(f"{path}-too")))
    assert files.content == {"phos-shared-0.raw": b"\1" * 10000}
    (saved,) = files.inventory.named_memory
    assert (saved.device, saved.inode, saved.shared) == (path.stat().st_dev, path.stat().st_ino, False)
    assert (saved.file, sorted(saved.names)) == ("phos-shared-0.raw", [path.name, f"{path.name}-too"])
    assert (saved.size, saved.mode, saved.uid, saved.inode) == (10000, 0o640, os.geteuid(), path.stat().st_ino)


@pytest.mark.parametrize("how", ["reads", "private"])
def test_what_nobody_writes_to_is_a_file_like_any_other(
    path: Path, hold: Callable[[str, Path], int], tmp_path: Path, how: str
) -> None:
    """Nor is what lies in a folder there, or has no name left, which CRIU sees to."""
    path.write_bytes(b"\1" * 4096)
    files = Files()
    folder = path.with_name(f"{path.name}-folder")
    folder.mkdir()
    below, gone = folder / "file", path.with_name(f"{path.name}-gone")
    try:
        below.write_bytes(b"\1" * 4096)
        gone.write_bytes(b"\1" * 4096)
        pids = [hold(how, path), hold("writes", below), hold("writes", gone)]
        gone.unlink()
        files.dump(tmp_path, *pids)
    finally:
        below.unlink()
        folder.rmdir()
    assert not files.content
    assert not files.inventory.named_memory


def test_a_name_that_is_gone_is_not_the_only_one(path: Path, hold: Callable[[str, Path], int], tmp_path: Path) -> None:
    """As sem_open(3) makes a semaphore; however it is mapped."""
    files = Files()
    for number, how in enumerate(("writes", "reads")):
        first, name = Path(f"{path}-{number}-first"), f"{path.name}-{number}"
        first.write_bytes(bytes([number]) * 32)
        pid = hold(how, first)
        os.link(first, SHARED_MEMORY / name)
        first.unlink()
        os.link(SHARED_MEMORY / name, SHARED_MEMORY / f"link_remap.{os.getpid()}")  # as CRIU might have
        try:
            files.dump(tmp_path, pid)
        finally:
            (SHARED_MEMORY / f"link_remap.{os.getpid()}").unlink()
        assert [list(memory.names) for memory in files.inventory.named_memory][number:] == [[name]]


def test_of_a_tree_with_another_dev_shm_all_is_criu_s(
    path: Path, hold: Callable[[str, Path], int], tmp_path: Path
) -> None:
    path.write_bytes(b"\1" * 4096)
    files = Files(ours=False)
    files.dump(tmp_path, hold("writes", path))
    assert not files.content


@pytest.mark.parametrize("name", [True, False])
def test_a_link_of_criu_s_goes_if_it_is_not_needed(
    path: Path, hold: Callable[[str, Path], int], tmp_path: Path, name: bool
) -> None:
    """It is where the file has no other name: the image could not be restored without."""
    link, kept = SHARED_MEMORY / f"link_remap.{os.getpid()}", f"{path}-kept"
    path.write_bytes(b"\1" * 32)
    task = hold("writes", path)
    os.link(path, link)
    if name:
        os.link(path, kept)
    path.unlink()
    write_image(tmp_path / "files.img", "FILES", [regular(1, str(path)), regular(2, str(link))])
    write_image(tmp_path / "remap-fpath.img", "REMAP_FPATH", [remap(1, 2)])
    try:
        dumped = Files().dump(tmp_path, task)
        dumped.remove_links()
        assert names_of(tmp_path) == ({1: kept} if name else {1: str(path), 2: str(link)})
        assert link.exists() is not name
    finally:
        link.unlink(missing_ok=True)


def test_whoever_outside_of_the_tree_has_it_shares_it(
    path: Path, hold: Callable[[str, Path], int], tmp_path: Path
) -> None:
    path.write_bytes(b"\1" * 4096)
    files = Files()
    task, _ = hold("writes", path), hold("reads", path)
    files.dump(tmp_path, task)
    assert [memory.shared for memory in files.inventory.named_memory] == [True]


def test_holes_are_not_read(path: Path, hold: Callable[[str, Path], int], tmp_path: Path) -> None:
    """A terabyte with a word at its end."""
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - 8)
        file.write(b"the end.")
    image = tmp_path / "image"
    image.mkdir()
    directory = os.open(image, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with ImageWriter(directory, stripes=1) as writer:
            dumped = DumpedNamedMemory(writer, ours=True)
            dumped.look(hold("writes", path), os.getpid())
            dumped.wait()
            saved = image / "phos-shared-0.raw"
            assert saved.stat().st_size == 1 << 40
            assert saved.stat().st_blocks <= 4096
            with saved.open("rb") as file:
                file.seek(-8, os.SEEK_END)
                assert file.read() == b"the end."
    finally:
        os.close(directory)


def test_a_tensor_on_the_way_is_saved(path: Path, hold: Callable[[str, Path], int], tmp_path: Path) -> None:
    """PyTorch calls it after the process that has made it; nobody has it mapped."""
    path.write_bytes(b"\1" * 4096)
    task, other = hold("reads", path), hold("reads", path)
    names = [f"torch_{task}_12345_0", f"torch_{other}_12345_0", f"torch_{task}0_12345_0"]
    try:
        for name in names:
            (SHARED_MEMORY / name).write_bytes(name.encode())
        files = Files()
        files.dump(tmp_path, task)
        assert files.content == {"phos-shared-0.raw": names[0].encode()}
    finally:
        for name in names:
            (SHARED_MEMORY / name).unlink()


def test_one_that_is_opened_meanwhile_by_a_process_outside_fails_nothing(
    path: Path, hold: Callable[[str, Path], int], tmp_path: Path
) -> None:
    """Who is handed a tensor removes its name; in a container beside, a process may even have the same number."""
    path.write_bytes(b"\1" * 4096)
    task = hold("writes", path)
    over = threading.Event()

    def come_and_go() -> None:
        names = [SHARED_MEMORY / f"torch_{task}_{number}_0" for number in range(20)]
        while not over.is_set():
            for name in names:
                name.touch()
            for name in names:
                name.unlink()

    others = threading.Thread(target=come_and_go)
    others.start()
    try:
        for _ in range(30):
            files = Files()
            files.dump(tmp_path, task)
            assert b"\1" * 4096 in files.content.values()
    finally:
        over.set()
        others.join()


def test_a_process_that_has_ended_has_nothing(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    files = Files()
    files.dump(tmp_path, ended.pid)
    assert not files.inventory.named_memory


def test_what_cannot_be_saved_fails_the_checkpoint(
    path: Path, hold: Callable[[str, Path], int], tmp_path: Path
) -> None:
    path.write_bytes(b"\1" * 4096)
    files = Files(failure=ImageError("the disk is full"))
    with pytest.raises(CheckpointFailed, match="share in /dev/shm failed: the disk is full"):
        files.dump(tmp_path, hold("writes", path))


def users(path: Path, *, writes: bool = False) -> int:
    status = path.stat()
    file = status.st_dev, status.st_ino
    found = procfs.users_of({file, (1, 1)}, writes=writes)
    assert found.keys() <= {file}
    assert procfs.users_of({file}, but={found.get(file, 0)}, writes=writes) == {}
    return found.get(file, 0)


@pytest.mark.parametrize(("how", "writes"), [("<", False), (">>", True), ("<>", True)])
def test_whoever_has_a_file_open_uses_it(path: Path, how: str, writes: bool) -> None:
    path.touch()
    words = ["sh", "-c", f"exec 7{how}{path}; echo ready; exec sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        assert users(path) == process.pid
        assert users(path, writes=True) == (process.pid if writes else 0)
        process.kill()
    assert users(path) == 0


@pytest.mark.parametrize(("how", "writes"), [("reads", False), ("private", False), ("writes", True)])
def test_whoever_has_mapped_it_uses_it(path: Path, hold: Callable[[str, Path], int], how: str, writes: bool) -> None:
    path.write_bytes(b"1")
    pid = hold(how, path)
    assert users(path) == pid
    assert users(path, writes=True) == (pid if writes else 0)
