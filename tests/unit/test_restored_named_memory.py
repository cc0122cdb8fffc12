"""Memory with a name in /dev/shm, made again for a restore: gpu_engine/restore/named_memory.py."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import procfs, shared_memory
from phos.gpu_engine.errors import RestoreFailed
from phos.gpu_engine.restore import named_memory
from phos.gpu_engine.restore.named_memory import RestoredNamedMemory
from phos.gpu_engine.shared_memory import SHARED_MEMORY
from phos.images.errors import ImageError
from phos.images.source import ImageSource

CONTENT = b"\1" * (5000 + os.getpid())
"""Of another size in each process that runs tests: they share the folder."""


@pytest.fixture(autouse=True)
def nothing_hidden_stays() -> Iterator[None]:
    before = set(shared_memory.folder().glob("*.memory"))
    yield
    left = [path for path in set(shared_memory.folder().glob("*.memory")) - before if is_of_ours(path)]
    assert not left


def is_of_ours(path: Path) -> bool:
    try:
        return path.stat().st_size == len(CONTENT)
    except OSError:
        return False  # another test's


@pytest.fixture
def path() -> Iterator[Path]:
    path = SHARED_MEMORY / f"phos-test-{uuid.uuid4().hex}"
    yield path
    for left in SHARED_MEMORY.glob(f"{path.name}*"):
        left.unlink()


class Image:
    """An image with memory of two names."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = Path("/an/image")
        self.inventory = pb.Inventory()
        self.inventory.host.boot_id = named_memory.BOOT_ID.read_text().strip()
        self.failure: Exception | None = None
        self.names = [path, Path(f"{path}-too")]
        path.write_bytes(CONTENT)
        os.link(path, self.names[1])
        status = path.stat()
        self.inode = status.st_ino
        self.memory = self.inventory.named_memory.add(
            file="phos-shared-0.raw",
            names=[name.name for name in self.names],
            size=len(CONTENT),
            mode=0o640,
            uid=os.geteuid(),
            gid=os.getegid(),
            device=status.st_dev,
            inode=status.st_ino,
            shared=shared,
            allocated=512 * status.st_blocks,
        )

    def copy_file(self, name: str, target: int) -> None:
        assert name == "phos-shared-0.raw"
        if self.failure:
            raise self.failure
        os.pwrite(target, CONTENT, 0)

    def restore(self, patience: float = 0.0, *, pool: bool = False) -> RestoredNamedMemory:
        return RestoredNamedMemory(cast(ImageSource, self), patience, pool=pool)

    def gone(self) -> None:
        for name in self.names:
            name.unlink()

    def changed(self) -> None:
        self.names[0].write_bytes(b"changed")

    def now(self) -> list[int]:
        """The inodes that have its names."""
        return [name.stat().st_ino for name in self.names if name.exists()]


def test_it_is_there_again_under_all_names(path: Path) -> None:
    image = Image(path)
    image.gone()
    if os.geteuid() == 0:
        image.memory.uid, image.memory.gid = 1234, 4321
    restored = image.restore()
    inode, also = image.now()
    assert inode == also
    status = path.stat()
    assert (status.st_size, status.st_mode & 0o7777) == (len(CONTENT), 0o640)
    assert (status.st_uid, status.st_gid) == (image.memory.uid, image.memory.gid)
    restored.fill()
    restored.release()
    restored.wait()
    restored.keep()
    assert [name.read_bytes() for name in image.names] == [CONTENT, CONTENT]
    assert path.stat().st_nlink == 2


def test_files_are_not_all_open_at_once(path: Path) -> None:
    """There may be thousands; a descriptor stands for each name, until CRIU has opened all, and one for the restore."""
    image = Image(path)
    before = os.listdir("/proc/self/fd")
    restored = image.restore()
    assert len(os.listdir("/proc/self/fd")) == len(before) + len(image.names) + 1
    restored.fill()
    restored.release()
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    restored.keep()
    assert os.listdir("/proc/self/fd") == before
    assert path.read_bytes() == CONTENT


def test_what_lay_there_comes_back_if_the_restore_fails(path: Path) -> None:
    image = Image(path)
    image.changed()
    restored = image.restore()
    assert image.inode not in image.now()
    restored.fill()
    restored.discard()
    assert image.now() == [image.inode] * 2
    assert path.read_bytes() == b"changed"
    assert path.stat().st_nlink == 2


def test_what_lay_there_goes_if_it_does_not(path: Path) -> None:
    image = Image(path)
    image.changed()
    restored = image.restore()
    with path.open("rb") as new:
        restored.fill()
        restored.keep()
        restored.discard()  # of no effect any more
        assert image.now() == [os.fstat(new.fileno()).st_ino] * 2
        assert new.read() == CONTENT


def test_what_has_been_replaced_since_stays(path: Path) -> None:
    image = Image(path)
    image.gone()
    restored = image.restore()
    path.unlink()
    path.write_bytes(b"another's")
    restored.discard()
    assert path.read_bytes() == b"another's"
    assert not image.names[1].exists()


def test_two_restores_do_not_take_names_at_a_time(path: Path) -> None:
    first = second = Image(path)
    restored = first.restore()
    before = second.now()
    with pytest.raises(RestoreFailed, match="is just being made for another restore"):
        second.restore()
    assert second.now() == before
    Image(Path(f"{path}-2")).restore().discard()  # of others it does not matter
    waiting: list[RestoredNamedMemory] = []
    thread = threading.Thread(target=lambda: waiting.append(second.restore(30.0)))
    thread.start()
    restored.release()  # CRIU has opened it
    thread.join()
    waiting[0].discard()
    restored.discard()


def test_in_a_pool_names_come_with_who_is_taken(path: Path) -> None:
    """Who had them keeps them until then; and nobody shares with anybody."""
    image = Image(path, shared=True)
    with path.open("rb"):
        parked = [image.restore(pool=True) for _ in range(1)]
        for other in parked:
            assert image.inode not in image.now()
            other.fill()
            other.release()
            other.give_back()
        parked += [image.restore(pool=True)]
        parked[1].fill()
        parked[1].give_back()
        assert image.now() == [image.inode] * 2
        for member in parked:
            before = image.now()
            member.take_names(0.0)
            member.keep()
            assert len(set(image.now())) == 1
            assert set(image.now()) != set(before)
            assert path.read_bytes() == CONTENT


def used(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], stdin=path.open("rb"))


def test_whoever_outside_shared_the_very_file_still_does(path: Path) -> None:
    image = Image(path, shared=True)
    image.changed()
    with used(path) as user:
        restored = image.restore()
        (warning,) = restored.warnings
        assert warning.startswith(f"{path} is used by process {user.pid} (")
        restored.fill()
        restored.discard()
        assert image.now() == [image.inode] * 2
        assert path.read_bytes() == b"changed"
        user.kill()
    image.restore().discard()  # nobody does any more
    image.memory.shared = False
    with used(path) as user:
        restored = image.restore()
        assert not restored.warnings
        assert image.inode not in image.now()
        restored.discard()
        user.kill()


@pytest.mark.parametrize("change", ["boot", "inode", "device"])
def test_another_file_is_nobody_s_partner(path: Path, change: str) -> None:
    image = Image(path, shared=True)
    if change == "boot":
        image.inventory.host.boot_id = "another"
    else:
        setattr(image.memory, change, 1)
    with used(path) as user:
        restored = image.restore()
        assert not restored.warnings
        assert image.inode not in image.now()
        restored.discard()
        user.kill()


@pytest.mark.parametrize("again", [False, True])
def test_without_room_for_both_what_the_dead_left_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Whatever they were: the image's processes, or those of an earlier restore."""
    image = Image(path)
    if again:
        image.changed()
        first = image.restore()
        first.fill()
        first.keep()
    there = image.now()
    room = named_memory.SPARE_BYTES + image.memory.allocated - 1
    monkeypatch.setattr(shared_memory, "room", lambda: room)
    with used(path) as user:  # not dead
        restored = image.restore()
        restored.discard()
        assert image.now() == there
        user.kill()
    image.memory.allocated -= 4096
    image.restore().discard()
    assert image.now() == there
    image.memory.allocated += 4096
    restored = image.restore()
    assert there[0] not in image.now()
    restored.discard()
    assert not image.now()


@contextmanager
def dying_phosd(image: Image) -> Iterator[None]:
    """One that has begun a restore; at the end of the block it is killed. Until then nobody sweeps what it has made."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        image.restore()
        os.write(writing, b"1")
        signal.pause()
    try:
        assert os.read(reading, 1) == b"1"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def test_a_phosd_that_was_killed_is_put_right(path: Path) -> None:
    """The next one gives what was there before its name again, unless somebody has what replaced it."""
    image = Image(path)
    image.changed()
    with dying_phosd(image):
        shared_memory.sweep()
        assert image.inode not in image.now()
    shared_memory.sweep()
    assert image.now() == [image.inode] * 2
    assert path.read_bytes() == b"changed"
    assert path.stat().st_nlink == 2


def test_however_much_a_killed_phosd_has_noted_all_is_put_right(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody looks at all processes for each name."""
    shared_memory.claim()
    token = secrets.token_hex(16)
    looks = []
    users_of = procfs.users_of
    monkeypatch.setattr(procfs, "users_of", lambda files: looks.append(len(files)) or users_of(files))
    former, new = shared_memory.hidden(token), path
    former.write_bytes(b"former")
    new.write_bytes(CONTENT)
    line = f"{former.name} {new.stat().st_ino} {path.name}\n"
    gone = f"{former.name} 1 {'x' * 200}\n"
    shared_memory.stands_for(token).write_text(gone * ((1 << 20) // len(gone) + 1) + line)
    shared_memory.sweep()
    assert path.read_bytes() == b"former"
    assert looks == [2]
    assert not list(shared_memory.folder().glob(f"{token}-*"))


def test_what_a_killed_phosd_has_given_to_somebody_stays(path: Path) -> None:
    image = Image(path)
    with dying_phosd(image):
        now = image.now()
        user = used(path)
    with user:
        shared_memory.sweep()
        assert image.now() == now
        user.kill()
    assert path.stat().st_nlink == 2


def test_nothing_is_locked_that_programs_may_lock(path: Path) -> None:
    image = Image(path)
    with path.open("rb") as former:
        restored = image.restore()
        with path.open("rb") as new:
            for file in (former, new):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        restored.discard()


def test_it_is_not_let_go_while_it_is_filled(path: Path) -> None:
    image, begun, goes_on = Image(path), threading.Event(), threading.Event()
    restored = image.restore()
    copy = image.copy_file

    def slowly(name: str, target: int) -> None:
        begun.set()
        assert goes_on.wait(30)
        copy(name, target)  # fails if it was closed

    image.copy_file = slowly  # type: ignore[method-assign]
    filling = threading.Thread(target=restored.fill)
    filling.start()
    assert begun.wait(30)
    discarding = threading.Thread(target=restored.discard)
    discarding.start()
    discarding.join(0.05)
    assert discarding.is_alive()
    goes_on.set()
    filling.join()
    discarding.join()
    assert not restored.error


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../passwd", "/dev/shm/x", "a\nb"])
def test_an_image_may_not_name_just_any_file(path: Path, name: str) -> None:
    image = Image(path)
    image.memory.names[1] = name
    with pytest.raises(RestoreFailed, match="PhOS puts none there"):
        image.restore()
    assert image.now() == [image.inode] * 2


@pytest.mark.parametrize(("names", "mode"), [([], 0o600), (["x"], 0o4755), (["x"], 0o100600)])
def test_an_image_may_not_make_just_any_file(path: Path, names: list[str], mode: int) -> None:
    image = Image(path)
    del image.memory.names[:]
    image.memory.names.extend(names)
    image.memory.mode = mode
    with pytest.raises(RestoreFailed, match="PhOS makes no such file"):
        image.restore()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("other", [folder, link, lambda path: (path.unlink(), os.mkfifo(path))])
def test_what_is_no_file_is_not_replaced(path: Path, other: Callable[[Path], object]) -> None:
    image = Image(path)
    other(image.names[1])
    kind = image.names[1].lstat().st_mode
    with pytest.raises(RestoreFailed, match="cannot be made: it is there, and no file"):
        image.restore()
    assert image.names[1].lstat().st_mode == kind
    assert path.stat().st_ino == image.inode
    if image.names[1].is_dir():
        image.names[1].rmdir()


@pytest.mark.parametrize("failure", [ImageError("it is damaged"), OSError(28, "No space left"), KeyError("unforeseen")])
def test_who_waits_is_told_that_it_cannot_be_filled(path: Path, failure: Exception) -> None:
    image = Image(path)
    image.failure = failure
    restored = image.restore()
    restored.fill()
    with pytest.raises(RestoreFailed, match=r"cannot be put back: .*(damaged|No space left|unforeseen)"):
        restored.wait()
    restored.discard()
    assert image.now() == [image.inode] * 2


def test_an_image_without_any_waits_for_nobody(path: Path) -> None:
    image = Image(path)
    held = image.restore()
    del image.inventory.named_memory[:]
    restored = image.restore()
    restored.fill()
    restored.wait()
    restored.discard()
    held.discard()


def test_a_lock_is_one_s_at_a_time(path: Path) -> None:
    """Whoever has it has the file that is there: it goes with him, and may have been taken for one left behind."""
    name = shared_memory.hidden(secrets.token_hex(16))
    inside: list[int] = [0]
    turns: list[int] = []

    def hold() -> None:
        for _ in range(200):
            while (held := shared_memory.hold(name)) is None:
                pass
            inside[0] += 1
            turns.append(inside[0])
            inside[0] -= 1
            held.discard()

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert turns == [1] * 600
    assert not name.exists()
