"""Memory with a name in /dev/shm, saved of a process that stands still and made again: gpu_engine/named_memory.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import named_memory, procfs
from phos.gpu_engine.errors import CheckpointFailed, RestoreFailed
from phos.gpu_engine.named_memory import SHARED_MEMORY, DumpedNamedMemory, RestoredNamedMemory
from phos.images.errors import ImageError
from phos.images.source import ImageSource
from phos.images.writer import ImageWriter

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

    def copy_file(self, name: str, target: int) -> None:
        if self.failure:
            raise self.failure
        os.pwrite(target, self.content[name], 0)

    def dump(self, folder: Path, *pids: int) -> None:
        """As of tasks that CRIU has frozen."""
        dumped = DumpedNamedMemory(cast(ImageWriter, self), ours=self.ours)
        for pid in pids:
            dumped.look(pid)
        dumped.wait()
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            dumped.describe(self.inventory, directory)
        finally:
            os.close(directory)

    def restore(self) -> RestoredNamedMemory:
        return RestoredNamedMemory(cast(ImageSource, self))


def test_what_is_shared_for_writing_is_saved_once(path: Path, hold: Callable[[str, Path], int], tmp_path: Path) -> None:
    path.write_bytes(b"\1" * 10000)
    os.link(path, f"{path}-too")
    path.chmod(0o640)
    files = Files()
    files.dump(tmp_path, hold("writes", path), hold("writes", Path(f"{path}-too")))
    assert files.content == {"phos-shared-0.raw": b"\1" * 10000}
    (saved,) = files.inventory.named_memory
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


def dumped(path: Path, hold: Callable[[str, Path], int], folder: Path) -> tuple[Files, int]:
    """Of one process that has a file by two names."""
    path.write_bytes(b"\1" * 5000)
    os.link(path, f"{path}-too")
    files = Files()
    holder = hold("writes", path)
    files.dump(folder, holder)
    files.inventory.host.boot_id = named_memory.BOOT_ID.read_text().strip()
    return files, holder


def test_it_is_there_again_under_all_names(path: Path, hold: Callable[[str, Path], int], tmp_path: Path) -> None:
    files, _ = dumped(path, hold, tmp_path)
    inode = path.stat().st_ino
    (saved,) = files.inventory.named_memory
    saved.mode = 0o604
    if os.geteuid() == 0:
        saved.uid, saved.gid = 1234, 4321
    files.inventory.host.boot_id = "another"  # so that its user does not count
    path.write_bytes(b"changed")
    restored = files.restore()
    other = Path(f"{path}-too")
    for name in (path, other):
        assert name.read_bytes() == b"\1" * 5000
        assert name.stat().st_ino == other.stat().st_ino != inode
        assert (name.stat().st_mode & 0o7777, name.stat().st_nlink) == (0o604, 2)
        assert (name.stat().st_uid, name.stat().st_gid) == (saved.uid, saved.gid)
    path.unlink()
    path.write_bytes(b"another's by now")
    restored.discard()
    assert path.read_bytes() == b"another's by now"
    assert not other.exists()


def test_who_still_uses_the_very_file_keeps_it(
    path: Path, hold: Callable[[str, Path], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, holder = dumped(path, hold, tmp_path)
    inode = path.stat().st_ino
    files.restore().discard()
    assert path.stat().st_ino == inode
    assert f"{path} is still used by process {holder} (" in caplog.text
    os.kill(holder, signal.SIGKILL)
    while not procfs.is_remains(holder):
        pass
    files.restore()
    assert path.stat().st_ino != inode


@pytest.mark.parametrize(("how", "writes"), [("<", False), (">>", True), ("<>", True)])
def test_whoever_has_a_file_open_uses_it(path: Path, how: str, writes: bool) -> None:
    path.touch()
    words = ["sh", "-c", f"exec 7{how}{path}; echo ready; exec sleep 60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        assert procfs.user_of(path.stat()) == process.pid
        assert procfs.user_of(path.stat(), writes=True) == (process.pid if writes else 0)
        process.kill()
    assert procfs.user_of(path.stat()) == 0


@pytest.mark.parametrize(("how", "writes"), [("reads", False), ("private", False), ("writes", True)])
def test_whoever_has_mapped_it_uses_it(path: Path, hold: Callable[[str, Path], int], how: str, writes: bool) -> None:
    path.write_bytes(b"1")
    pid = hold(how, path)
    assert procfs.user_of(path.stat()) == pid
    assert procfs.user_of(path.stat(), writes=True) == (pid if writes else 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../passwd", "/dev/shm/x"])
def test_an_image_may_not_name_just_any_file(name: str) -> None:
    files = Files(content={"phos-shared-0.raw": b""})
    files.inventory.named_memory.add(file="phos-shared-0.raw", names=[name], mode=0o600)
    with pytest.raises(RestoreFailed, match="PhOS puts none there"):
        files.restore()


@pytest.mark.parametrize(("names", "mode"), [([], 0o600), (["x"], 0o4755), (["x"], 0o100600)])
def test_an_image_may_not_make_just_any_file(names: list[str], mode: int) -> None:
    files = Files(content={"phos-shared-0.raw": b""})
    files.inventory.named_memory.add(file="phos-shared-0.raw", names=names, mode=mode)
    with pytest.raises(RestoreFailed, match="PhOS makes no such file"):
        files.restore()


@pytest.mark.parametrize("failure", [ImageError("it is damaged"), OSError(28, "No space left on device")])
def test_a_restore_that_fails_leaves_nothing(path: Path, failure: Exception) -> None:
    files = Files(content={"phos-shared-0.raw": b"\1" * 64})
    for number in range(2):
        files.inventory.named_memory.add(
            file=f"phos-shared-{number}.raw", names=[f"{path.name}-{number}"], mode=0o600, size=64, uid=os.geteuid()
        )
    copy = files.copy_file

    def fails(name: str, target: int) -> None:
        if name == "phos-shared-1.raw":
            raise failure
        copy(name, target)

    files.copy_file = fails  # type: ignore[method-assign]
    with pytest.raises((ImageError, RestoreFailed), match=r"damaged|cannot be made: No space left"):
        files.restore()
    assert not list(SHARED_MEMORY.glob(f"{path.name}*"))
