"""Memory that processes share by a name, and semaphores, go with the image: gpu_engine/named_memory.py."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from phos.gpu_engine import procfs
from tests.integration.pool_commands import create, full, results, take
from tests.integration.site import Program, Site, wait_until

SHARED_MEMORY = Path("/dev/shm")
PROGRAMS = Path(__file__).parent / "programs"
WORKERS = PROGRAMS / "spawned_workers.py"
OPTIONS = ("--iterations", "300", "--iteration-seconds", "0.03", "--until")
AREA = 1 << 20


class Shared:
    """What a program's tree has in /dev/shm, by its image."""

    def __init__(self, site: Site, image: Path) -> None:
        inspected = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
        self.files = [memory["file"] for memory in inspected["saved_by"]["named_memory"]]
        self.paths = [SHARED_MEMORY / name for m in inspected["saved_by"]["named_memory"] for name in m["names"]]
        (self.memory,) = (path for path in self.paths if path.name.startswith("psm_"))
        assert len([path for path in self.paths if path.name.startswith("sem.")]) == 8

    def there(self) -> list[Path]:
        return [path for path in self.paths if path.exists()]

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)


@pytest.fixture
def shared(site: Site) -> Iterator[Callable[[Path], Shared]]:
    """Who is killed leaves his memory behind, which goes with the test."""
    known: list[Shared] = []

    def shared_of(image: Path) -> Shared:
        known.append(Shared(site, image))
        return known[-1]

    yield shared_of
    for each in known:
        each.remove()


@pytest.fixture
def expected(site: Site) -> str:
    return site.reference_of(sys.executable, str(WORKERS), *OPTIONS[:2], "--until")


def working(site: Site, *, under: bool = True) -> Program:
    program = site.until_awaited(sys.executable, str(WORKERS), *OPTIONS, under=under)
    program.wait_iterations(5)
    return program


def kill(site: Site, program: Program, *, tracker: bool = True) -> None:
    """All of its tree. Without Python's ``tracker`` of names that one removes them when the others have ended."""
    tree = [*psutil.Process(program.pid).children(), psutil.Process(program.pid)]
    trackers = [process for process in tree if "resource_tracker" in " ".join(process.cmdline())]
    assert len(trackers) == 1
    for process in (*trackers, *tree) if tracker else [process for process in tree if process not in trackers]:
        process.kill()
    site.gone(program)
    for process in tree:
        site.freed(process.pid)


@pytest.mark.parametrize("under", [True, False], ids=["frontend", "driver-alone"])
@pytest.mark.parametrize("lazily", [False, True], ids=["eager", "lazy"])
def test_a_program_that_was_dumped_and_killed_goes_on(
    site: Site, expected: str, shared: Callable[[Path], Shared], under: bool, lazily: bool
) -> None:
    """Without an option. Twice; its names may have gone since, and what is in them may be another's."""
    program = working(site, under=under)
    image = site.image()
    site.dump(program, image)
    memory = shared(image)
    site.run("phos-gpu", "verify", str(image))
    assert all(path.stat().st_nlink == 1 for path in memory.paths)  # no link of CRIU's
    for time in range(2):
        site.restore(image, PHOS_RESTORE="lazy" if lazily else "eager")
        if not time:
            program.wait_progress()
            kill(site, program)
            memory.remove()
    assert program.wait_result() == expected
    wait_until(lambda: not program.alive(), "its end")
    wait_until(lambda: not memory.there(), "the end of its memory")


@pytest.mark.parametrize("tracker", [True, False], ids=["names-stay", "names-go"])
def test_a_program_that_ran_on_is_restored_as_it_was(
    site: Site, expected: str, shared: Callable[[Path], Shared], tracker: bool
) -> None:
    """What is in its memory has changed since."""
    program = working(site)
    image = site.image()
    site.dump(program, image, "--leave-running")
    memory = shared(image)
    program.wait_progress(5)
    kill(site, program, tracker=tracker)
    assert bool(memory.there()) == tracker
    site.restore(image)
    assert program.wait_result() == expected


@pytest.mark.parametrize("runs_on", [True, False])
def test_it_is_saved_while_everything_stands_still_or_not_at_all(site: Site, expected: str, runs_on: bool) -> None:
    """CRIU is killed meanwhile, and lets the tasks go with that: what they write then is not of that moment."""
    site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="criu killed in a dump")
    program = working(site)
    image = site.image()
    assert site.dump(program, image, *(["--leave-running"] if runs_on else []), check=False).returncode != 0
    (job,) = site.status()["jobs"]
    assert (job["state"], "CRIU ended too soon" in job["error"]) == ("failed", True), job["error"]
    assert not (image / "phos-commit.img").exists()
    assert program.wait_result() == expected


def test_what_was_restored_is_dumped_again(site: Site, expected: str, shared: Callable[[Path], Shared]) -> None:
    program = working(site)
    first, second = site.image("first"), site.image("second")
    site.dump(program, first)
    shared(first)
    site.restore(first)
    program.wait_progress()
    site.dump(program, second)
    assert shared(second).paths
    site.restore(second)
    assert program.wait_result() == expected


def test_whoever_shares_it_still_goes_on_sharing_it(
    site: Site, expected: str, shared: Callable[[Path], Shared]
) -> None:
    """A process outside of the tree has the very file, which is not taken from it."""
    program = working(site)
    (line,) = (line for line in program.lines() if ", memory psm_" in line)
    path = SHARED_MEMORY / line.split("memory ")[1].split(",")[0]
    image = site.image()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as ours:
        site.dump(program, image)
        assert shared(image).memory == path
        inode = os.fstat(file.fileno()).st_ino
        site.restore(image)
        assert path.stat().st_ino == inode
        assert f"{path} is used by process {os.getpid()}" in (image / "restore.log").read_text()
        counted = ours[AREA - 8 : AREA]
        program.wait_progress()
        assert ours[AREA - 8 : AREA] != counted
        assert program.wait_result() == expected


def test_another_file_of_that_name_is_replaced_and_its_user_keeps_it(
    site: Site, expected: str, shared: Callable[[Path], Shared]
) -> None:
    program = working(site)
    image = site.image()
    site.dump(program, image)
    path = shared(image).memory
    path.unlink()
    other = SharedMemory(path.name, create=True, size=2 * AREA)
    try:
        other.buf[:4] = b"mine"
        site.restore(image)
        assert program.wait_result() == expected
        assert bytes(other.buf[:4]) == b"mine"
    finally:
        other.close()


@pytest.mark.parametrize("there", [False, True])
def test_a_restore_that_fails_leaves_what_was_there(site: Site, shared: Callable[[Path], Shared], there: bool) -> None:
    program = working(site)
    image = site.image()
    site.dump(program, image)
    memory = shared(image)
    if not there:
        memory.remove()
    before = [(path, path.stat().st_ino, path.stat().st_nlink) for path in memory.there()]
    assert bool(before) is there

    def as_before() -> bool:
        return before == [(path, path.stat().st_ino, path.stat().st_nlink) for path in memory.there()]

    away = program.output.rename(program.output.with_suffix(".away"))  # CRIU fails for that
    assert site.restore(image, check=False).returncode != 0
    wait_until(as_before, "what was there before")
    away.rename(program.output)
    data = image / memory.files[0]
    data.write_bytes(b"\1" * data.stat().st_size)
    assert site.restore(image, check=False).returncode != 0
    assert f"{data} is damaged" in site.errors(image / "restore.log")
    wait_until(as_before, "what was there before")


def test_two_are_dumped_at_a_time(site: Site, expected: str, shared: Callable[[Path], Shared]) -> None:
    """Files of both are called alike by CRIU."""
    programs = [working(site) for _ in range(2)]
    images = [site.image(f"image-{i}") for i in range(2)]
    dumps = [site.begin_dump(program, image) for program, image in zip(programs, images, strict=True)]
    assert [dump.wait() for dump in dumps] == [0, 0]
    for program, image in zip(programs, images, strict=True):
        shared(image)
        site.gone(program)
        site.restore(image)
    assert [program.wait_result() for program in programs] == [expected, expected]


def mapped(pid: int, path: Path) -> int:
    """The inode of a file as a process has mapped it."""
    found = procfs.mappings(pid, str(path))
    (inode,) = {m.inode for m in found if m.name.removesuffix(" (deleted)") == str(path)}
    return inode


@pytest.mark.parametrize("original", ["killed", "runs on"])
def test_each_of_a_pool_has_its_own(site: Site, expected: str, shared: Callable[[Path], Shared], original: str) -> None:
    """And its names, from when it is taken until another is, but for moments in which one is parked."""
    program = working(site)
    image = site.image()
    site.dump(program, image, *(["--leave-running"] if original == "runs on" else []))
    memory = shared(image).memory
    before = memory.stat().st_ino
    create(site, image, 2, "--name", "p")
    inodes = {before}
    for number in range(2):
        if not number:
            assert memory.stat().st_ino == before
        pid = take(site, "p")["pids"][0]
        inode = mapped(pid, memory)
        assert inode not in inodes
        inodes.add(inode)
        full(site, 2)
        assert memory.stat().st_ino == inode
    if original == "runs on":
        assert mapped(program.pid, memory) == before
    program.let_end()
    copies = 3 if original == "runs on" else 2
    wait_until(lambda: len(results(program)) == copies, "all results")
    assert results(program) == [expected] * copies


def test_a_pool_is_filled_while_others_are_restored(
    site: Site, expected: str, shared: Callable[[Path], Shared]
) -> None:
    """Of the same image, which is the same names."""
    program = working(site)
    image = site.image()
    site.dump(program, image)
    memory = shared(image).memory
    for _ in range(3):
        pool = site.background("phos-gpu", "pool", "create", str(image), "--size", "2", "--name", "p")
        site.restore(image)
        wait_until(lambda: memory.stat().st_ino == mapped(program.pid, memory), "its name, while others are parked")
        made = pool.wait() == 0  # or the restore had what the driver saved at that moment
        if not made:  # phosd would go on trying, and each time take the names for a moment
            site.run("phos-gpu", "pool", "drop", "p", check=False)
        wait_until(lambda: memory.stat().st_ino == mapped(program.pid, memory), "its name, when all are parked")
        program.wait_progress()
        kill(site, program)
        if made:
            site.run("phos-gpu", "pool", "drop", "p")
    site.restore(image)
    assert program.wait_result() == expected


@pytest.mark.parametrize("there", [True, False])
def test_a_socket_gets_the_folder_that_it_needs(
    site: Site, expected: str, shared: Callable[[Path], Shared], there: bool
) -> None:
    """Python's forkserver listens in one of its own, which goes with the program, or before it."""
    words = (sys.executable, str(WORKERS), "--context", "forkserver", *OPTIONS)
    program = site.until_awaited(*words, TMPDIR=str(site.folder))
    program.wait_iterations(5)
    (folder,) = site.folder.glob("pymp-*")
    image = site.image()
    site.dump(program, image)
    shared(image)
    if not there:
        shutil.rmtree(folder)
    away = program.output.rename(program.output.with_suffix(".away"))
    assert site.restore(image, check=False).returncode != 0  # CRIU's for the output
    wait_until(lambda: folder.exists() is there, "the end of the folder")
    away.rename(program.output)
    site.restore(image)
    assert program.wait_result() == expected
    wait_until(lambda: not program.alive(), "its end")
    assert not folder.exists()


def test_files_that_have_lost_the_same_name_are_told_apart(site: Site) -> None:
    """Mapped by a name that each had for a moment, and one that is only open."""
    base = f"phos-test-{os.getpid()}"
    go = site.folder / "go"
    program = site.start(sys.executable, str(PROGRAMS / "renamed_memory.py"), base, str(go))
    try:
        wait_until(lambda: "READY" in program.lines(), "the program")
        image = site.image()
        site.dump(program, image)
        site.gone(program)
        site.restore(image)
        go.touch()
        assert program.wait_result() == "A,B,C"
    finally:
        for path in SHARED_MEMORY.glob(f"{base}*"):
            path.unlink()


def test_there_may_be_thousands(site: Site) -> None:
    """More than one packet from CRIU's plugin to phosd would hold."""
    count = 2200
    base = f"phos-test-{os.getpid()}"
    go = site.folder / "go"
    program = site.start(sys.executable, str(PROGRAMS / "many_names.py"), str(count), base, str(go))
    try:
        wait_until(lambda: "READY" in program.lines(), "the program")
        image = site.image()
        site.dump(program, image)
        site.gone(program)
        for path in SHARED_MEMORY.glob(f"{base}*"):
            path.unlink()
        site.restore(image)
        go.touch()
        assert program.wait_result() == f"{count},{count}"
    finally:
        for path in SHARED_MEMORY.glob(f"{base}*"):
            path.unlink()


@pytest.mark.parametrize("asked", [False, True])
def test_without_a_gpu_all_is_criu_s(site: Site, asked: bool) -> None:
    """A semaphore needs a link then, which nobody makes who was not asked to; it goes where the program runs on."""
    program = site.start(sys.executable, "-c", SEMAPHORE, under=False)
    wait_until(lambda: "READY" in program.lines(), "the program")
    image = site.image()
    dumped = site.dump(program, image, "-R", *(["--link-remap"] if asked else []), check=False)
    assert (dumped.returncode == 0) is asked
    if not asked:
        assert "CRIU needs --link-remap" in site.errors(image / "dump.log")
    assert program.alive()
    program.process.terminate()


SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print("READY", flush=True)
while True:
    time.sleep(1)
"""


def unnamed(site: Site, folder: Path, *name: str) -> tuple[Program, Path]:
    """A program and its child with memory of whose file the name is gone, and the file for which they wait."""
    go = site.folder / "go"
    words = [sys.executable, str(PROGRAMS / "unnamed_memory.py"), str(folder), str(go), str(8 << 20), *name]
    program = site.start(*words)
    wait_until(lambda: "READY" in program.lines(), "the program")
    return program, go


@pytest.mark.parametrize("runs_on", [True, False], ids=["runs-on", "killed"])
def test_a_file_on_a_disk_is_criu_s(site: Site, runs_on: bool) -> None:
    """It makes a link to it, if it is told to, which it removes again where the program runs on."""
    folder = site.folder / "disk"
    folder.mkdir()
    program, go = unnamed(site, folder, "named")
    image = site.image()
    refused = site.dump(program, image, "--leave-running", check=False)
    assert refused.returncode != 0
    assert "Use link-remap option" in site.errors(image / "dump.log")
    image = site.image("second")
    dumped = site.dump(program, image, "--link-remap", *(["--leave-running"] if runs_on else []), check=False)
    if runs_on:
        assert dumped.returncode != 0
        assert "has lost that name and has another one" in dumped.stdout + dumped.stderr
        assert not (image / "phos-commit.img").exists()
    else:
        assert dumped.returncode == 0
        site.gone(program)
        site.restore(image)
    go.touch()
    assert program.wait_result() == "counts,same"
    assert [path.name for path in folder.iterdir()] == ["named"]
