"""Residue files: made, locked, swept, saved into an image and put back."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from phos.gen import phos_image_pb2 as pb
from phos.gpu_engine import residue, shared_memory
from phos.gpu_engine.errors import Mispredicted, PhosError, RestoreFailed
from phos.gpu_engine.residue import DumpedResidues, ResidueFile, RestoredResidues
from phos.images import formats
from phos.images.errors import ImageError
from phos.images.mapping import HUGE_PAGE, can_collapse, map_memory, unmap_memory, view_of
from phos.images.reader import Image
from phos.images.writer import ImageWriter
from tests.unit.as_user import NOBODY, as_user, needs_root
from tests.unit.image_sets import SESSION
from tests.unit.smaps import mapped_huge

MiB = 1 << 20
SIZE = 70 * MiB  # more than one segment of the hashes


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shared memory of the test's own."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", path)
    return path


class Process:
    """A process under the frontend, as far as residue.py asks it for anything."""

    session = SESSION
    executable = "program"
    pid = os.getpid()
    takes_residue = True

    def __init__(self, needed: int | None = None, refuse: str = "") -> None:
        self.residue_bytes = needed
        self.refuse = refuse
        self.mapped: Path | None = None
        self.dropped = 0

    def prepare_residue(self, path: str, size: int, device: int, inode: int) -> None:
        status = os.stat(path)
        assert (status.st_size, status.st_dev, status.st_ino) == (size, device, inode)
        assert status.st_mode & 0o777 == 0o600
        if self.refuse:
            raise PhosError(self.refuse)
        self.mapped = Path(path)

    def drop_residue(self) -> None:
        self.dropped += 1


def prepared(process: Process, estimate: int = SIZE) -> DumpedResidues:
    files = DumpedResidues()
    files.prepare([process], estimate, os.getpid())  # type: ignore[list-item]
    return files


def left(memory: Path) -> list[str]:
    return sorted(str(path.relative_to(memory)) for path in memory.rglob("*.residue"))


def image(folder: Path, files: DumpedResidues, before_saving: Callable[[], None] = lambda: None) -> Path:
    """An image with nothing but residues; hashed first, as a concurrent checkpoint does."""
    folder.mkdir()
    directory = os.open(folder, os.O_RDONLY)
    try:
        with ImageWriter(directory, stripes=1) as writer:
            files.start_hashing()
            files.wait()
            before_saving()
            inventory = pb.Inventory(protocol="cow")
            inventory.processes.add(pid=7, session=SESSION, under_frontend=True)
            files.describe(inventory, writer)
            writer.commit(inventory)
    finally:
        os.close(directory)
    return folder


def test_size_has_room_for_the_page_that_stays_unused_and_an_eighth_more() -> None:
    for needed in (1, 8 * MiB, 389 * MiB):
        size = residue.file_bytes(needed)
        assert size % residue.GRAIN == 0
        assert needed + needed // 8 + residue.GRAIN <= size < needed + needed // 8 + 3 * residue.GRAIN


def test_a_file_is_made_locked_and_let_go(memory: Path) -> None:
    process = Process()
    files = prepared(process)
    assert process.mapped is not None
    assert process.mapped.parent == shared_memory.folder()
    assert process.mapped.parent.stat().st_mode & 0o777 == 0o711
    assert process.mapped.stat().st_blocks * 512 >= process.mapped.stat().st_size  # allocated
    shared_memory.sweep()
    assert left(memory), "a file that is in use was swept away"
    files.discard()
    assert not left(memory)


def test_the_folder_is_claimed_before_anybody_else_makes_it(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared_memory.claim()
    assert stat.S_IMODE(shared_memory.folder().stat().st_mode) == 0o711
    shared_memory.folder().chmod(0o777)
    shared_memory.claim()
    assert stat.S_IMODE(shared_memory.folder().stat().st_mode) == 0o711
    assert not caplog.records


@needs_root
def test_a_folder_that_somebody_else_has_made_is_refused_with_a_sentence(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared_memory.folder().mkdir()
    os.chown(shared_memory.folder(), NOBODY, NOBODY)
    shared_memory.claim()
    assert f"{shared_memory.folder()} belongs to user {NOBODY}" in caplog.text
    message = pb.Residue(path=str(shared_memory.folder() / f"{'0' * 32}-{'a' * 8}.residue"), size=SIZE, mode=0o600)
    with pytest.raises(RestoreFailed, match=r"belongs to user 65534.*remove it as root"):
        residue._make_again(message)


@needs_root
def test_a_user_does_not_make_roots_folder(memory: Path) -> None:
    memory.chmod(0o1777)
    assert as_user(memory, lambda: shared_memory.enter(Path("phos"), 0)) == "ENOENT"
    assert as_user(memory, lambda: shared_memory.enter(Path(f"phos-{NOBODY}"), NOBODY)) == ""
    assert [path.name for path in memory.iterdir()] == [f"phos-{NOBODY}"]


@pytest.mark.skipif(not can_collapse(), reason="the kernel makes no huge pages on request")
def test_who_maps_a_file_anew_finds_huge_pages() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path = Path(name) / "phos" / f"{'0' * 32}-{'a' * 8}.residue"
        file = ResidueFile.make(path, SIZE, os.geteuid(), os.getegid())
        file.find_pages()
        assert os.stat(path).st_size == SIZE
        address = map_memory(SIZE, file.descriptor)
        try:
            assert bytes(view_of(address, SIZE)[::HUGE_PAGE]) == bytes(SIZE // HUGE_PAGE)
            assert mapped_huge(address) == SIZE
        finally:
            unmap_memory(address, SIZE)
            file.discard()


@pytest.mark.parametrize("size", [5, MiB + 5, residue.GRAIN + 1])
def test_finding_pages_makes_no_file_longer(memory: Path, size: int) -> None:
    file = ResidueFile.make(shared_memory.folder() / f"{'0' * 32}-{'a' * 8}.residue", size, os.geteuid(), os.getegid())
    file.find_pages()
    status = os.stat(file.path)
    assert status.st_size == size <= status.st_blocks * 512
    file.discard()


def test_what_the_last_checkpoint_needed_decides_the_size() -> None:
    process = Process(needed=20 * MiB)
    files = prepared(process)
    assert process.mapped is not None
    assert process.mapped.stat().st_size == residue.file_bytes(20 * MiB)
    files.discard()
    for nothing in (Process(needed=0), Process()):
        nothing.takes_residue = nothing.residue_bytes is not None
        assert not prepared(nothing)._files
        assert nothing.mapped is None


@pytest.mark.parametrize("obstacle", ["refused", "mounts", "room", "folder"])
def test_without_a_file_the_checkpoint_goes_on(memory: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str) -> None:
    process = Process(refuse="it is another file here" if obstacle == "refused" else "")
    if obstacle == "mounts":
        monkeypatch.setattr(shared_memory, "is_ours", lambda pid, criu: False)
    if obstacle == "room":
        monkeypatch.setattr(residue, "_room_for", lambda size: False)
    if obstacle == "folder":
        shared_memory.folder().symlink_to("/tmp")
    files = prepared(process)
    assert process.mapped is None
    assert not left(memory)
    inventory = pb.Inventory()
    files.start_hashing()
    files.describe(inventory, None)  # type: ignore[arg-type]  # nothing is written
    files.discard()


def test_room_is_asked_of_the_file_system() -> None:
    assert residue._room_for(1)
    assert not residue._room_for(1 << 50)


def test_files_of_a_killed_phosd_are_swept_and_others_are_not(memory: Path) -> None:
    folder = shared_memory.folder()
    folder.mkdir()
    stale = folder / f"{'0' * 32}-{'a' * 8}.residue"
    held = folder / f"{'1' * 32}-{'b' * 8}.residue"
    other = folder / "notes.residue"
    for path in (stale, held, other):
        path.touch()
    with open(held) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        shared_memory.sweep()
        assert left(memory) == sorted([f"{folder.name}/{held.name}", f"{folder.name}/{other.name}"])
    shared_memory.sweep()
    assert left(memory) == [f"{folder.name}/{other.name}"]


def test_a_dropped_file_is_let_go_by_the_process() -> None:
    process, stranger = Process(), Process()
    stranger.session = bytes(16)
    files = prepared(process)
    files.drop([process, stranger])  # type: ignore[list-item]
    assert (process.dropped, stranger.dropped) == (1, 0)
    files.discard()


def test_content_comes_back_from_the_image(tmp_path: Path, memory: Path) -> None:
    process = Process()
    files = prepared(process)
    assert process.mapped is not None
    content = bytearray(process.mapped.stat().st_size)
    content[5 * MiB : 6 * MiB + 3] = os.urandom(MiB + 3)
    content[-5:] = b"the e"
    process.mapped.write_bytes(content)
    path, mode = process.mapped, process.mapped.stat().st_mode
    folder = image(tmp_path / "image", files)
    files.discard()
    assert not left(memory)
    stored = folder / "phos-residue-0.raw"
    assert stored.stat().st_size == len(content)
    assert stored.stat().st_blocks * 512 < 8 * MiB, "zeros take no space"
    with Image.open(folder) as opened:
        assert opened.verify() == []
        [described] = opened.inventory.processes[0].residues
        assert (described.file, described.path, described.size) == (stored.name, str(path), len(content))
        again = RestoredResidues(opened)
        assert path.stat().st_size == len(content), "CRIU wants to see it before the content is there"
        assert path.stat().st_mode == mode
        again.fill()
        again.wait()
        assert again.error == ""
        assert path.read_bytes() == content
        with pytest.raises(RestoreFailed, match="is in use"):
            RestoredResidues(opened)
        assert path.exists()
        again.discard()
        assert not left(memory)


def test_a_file_that_is_in_use_is_waited_for_if_one_can(tmp_path: Path, memory: Path) -> None:
    """A pool of the same image is filled: that lasts a second for each of its processes."""
    files = prepared(Process())
    folder = image(tmp_path / "image", files)
    files.discard()
    with Image.open(folder) as opened:
        parked = RestoredResidues(opened)
        with pytest.raises(RestoreFailed, match=r"is in use: .* for a pool"):
            RestoredResidues(opened)
        later = threading.Timer(0.1, parked.discard)
        later.start()
        RestoredResidues(opened, 60).discard()
        later.join()
    assert not left(memory)


def test_a_file_is_not_let_go_while_it_is_filled(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor would be another file's, and that would be written to: a pool is dropped while it is filled."""
    process = Process()
    files = prepared(process)
    folder = image(tmp_path / "image", files)
    files.discard()
    begun, go_on, found = threading.Event(), threading.Event(), []

    def copy(_: Image, name: str, target: int) -> None:
        before = os.fstat(target).st_ino
        begun.set()
        go_on.wait(10)
        found.append(os.fstat(target).st_ino == before)

    monkeypatch.setattr(Image, "copy_file", copy)
    with Image.open(folder) as opened:
        again = RestoredResidues(opened)
        filling = threading.Thread(target=again.fill)
        filling.start()
        assert begun.wait(10)
        letting_go = threading.Thread(target=again.discard)
        letting_go.start()
        letting_go.join(0.1)
        go_on.set()
        filling.join()
        letting_go.join()
        again.fill()  # too late
    assert found == [True]
    assert again.error == ""
    assert not left(memory)


def test_damage_is_found_by_verify_and_at_restore(tmp_path: Path, memory: Path) -> None:
    process = Process()
    files = prepared(process)
    folder = image(tmp_path / "image", files)
    files.discard()
    with open(folder / "phos-residue-0.raw", "r+b") as file:
        file.seek(formats.SEGMENT_SIZE + 5)
        file.write(b"x")
    with Image.open(folder) as opened:
        [problem] = opened.verify()
        assert "phos-residue-0.raw is damaged" in problem
        again = RestoredResidues(opened)
        again.fill()
        assert "phos-residue-0.raw is damaged" in again.error
        again.discard()
    os.truncate(folder / "phos-residue-0.raw", MiB)
    with pytest.raises(ImageError, match=r"phos-residue-0.raw is cut off"):
        Image.open(folder)
    (folder / "phos-residue-0.raw").unlink()
    with pytest.raises(ImageError, match=r"phos-residue-0.raw is missing"):
        Image.open(folder)
    assert not left(memory)


def test_a_driver_that_writes_to_what_it_reads_is_noticed(tmp_path: Path) -> None:
    process = Process()
    files = prepared(process)

    def write() -> None:
        assert process.mapped is not None
        with open(process.mapped, "r+b") as file:
            file.seek(SIZE - 9)
            file.write(b"x")

    with pytest.raises(Mispredicted, match="changed what it had saved"):
        image(tmp_path / "image", files, write)
    assert files.changed
    assert not list((tmp_path / "image").iterdir()), "the writer leaves nothing behind"
    files.discard()


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/etc/passwd", 0o600),
        ("{shm}/phos/../../etc/x.residue", 0o600),
        ("{shm}/other/00112233445566778899aabbccddeeff-00112233.residue", 0o600),
        ("{shm}/phos/00112233445566778899aabbccddeeff-00112233.residue/x", 0o600),
        ("{shm}/phos/name.residue", 0o600),
        ("{shm}/phos/00112233445566778899aabbccddeeff-00112233.residue", 0o4600),
        ("{shm}/phos/00112233445566778899aabbccddeeff-00112233.residue", 0o666),
    ],
)
def test_an_image_cannot_name_any_other_file(memory: Path, path: str, mode: int) -> None:
    wanted = pb.Residue(file="phos-residue-0.raw", path=path.format(shm=memory), size=4096, mode=mode)
    with pytest.raises(RestoreFailed):
        residue._make_again(wanted)
    assert not list(memory.rglob("*.residue"))


def test_a_stale_file_in_the_way_of_a_restore_is_replaced(memory: Path) -> None:
    path = shared_memory.folder() / f"{'0' * 32}-{'a' * 8}.residue"
    path.parent.mkdir()
    path.write_bytes(b"old")
    made = ResidueFile.make(path, 4096, os.getuid(), os.getgid())
    assert path.read_bytes() == bytes(4096)
    path.unlink()
    path.write_bytes(b"somebody else's")
    made.discard()
    assert path.read_bytes() == b"somebody else's"
