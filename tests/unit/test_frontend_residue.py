"""The frontend's part of residue files: mapped before the quiesce, served to the driver alone, let go afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gen import wire_pb2 as wire
from tests.unit.frontend_fake import SOFTGPU, FakePhosd, Program, Session, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]

MiB = 1 << 20
RESIDUE = 12 * MiB  # what the software GPU saves of a context (SOFTGPU_RESIDUE)

BODY = """
import mmap
start()
here = ok(cu.cuMemAlloc(5 << 20))
fill(here, 5 << 20, 7)
say("ready")
while (word := heard()):
    if word == "check":
        assert read(here, 5 << 20) == b"\\7" * (5 << 20)
        say("right")
    if word == "large":   # as the driver asks for it, but not by the driver
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        large = mmap.mmap(-1, 9 << 20, flags=private)
        large[:5] = b"mine!"
        say("mapped")
    if word == "fork":
        child = os.fork()
        if not child:
            text = open("/proc/self/maps").read()
            os._exit(".residue" in text)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A file in memory; the frontend takes any that phosd names."""
    path = Path(f"/dev/shm/phos-test-{os.getpid()}.residue")
    path.write_bytes(b"")
    os.truncate(path, 32 * MiB)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def prepare(session: Session, path: Path | str, size: int = 32 * MiB, *, inode: int | None = None) -> str:
    """Ask for it; answers the error."""
    status = os.stat(path) if path else os.stat("/")
    request = wire.PrepareResidue(
        path=str(path), bytes=size, device=status.st_dev, inode=inode if inode is not None else status.st_ino
    )
    assert session.connection is not None
    return session.connection.ask(prepare_residue=request)[0].done.error


def places(app: Program, path: Path) -> list[tuple[int, int]]:
    """Where the program has the file mapped, slice by slice: the driver's lies between what nobody was given."""
    found = []
    for line in Path(f"/proc/{app.process.pid}/maps").read_text().splitlines():
        if path.name in line:
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
            found.append((begin, end))
    return found


def mapped(app: Program, path: Path) -> int:
    """How many bytes of the file the program has mapped."""
    return sum(end - begin for begin, end in places(app, path))


def memory(app: Program, address: int) -> bytes:
    """What the driver has saved, as it lies in the program's memory."""
    with open(f"/proc/{app.process.pid}/mem", "rb", buffering=0) as file:
        file.seek(address)
        return file.read(RESIDUE)


def driver(app: Program, action: str) -> None:
    """The driver's checkpoint or restore of the program, by another process, as phosd does it."""
    calls = {"checkpoint": "cuCheckpointProcessLock cuCheckpointProcessCheckpoint"}
    calls["restore"] = "cuCheckpointProcessRestore cuCheckpointProcessUnlock"
    code = (
        "import ctypes, sys\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "assert cuda.cuInit(0) == 0\n"
        "for name in sys.argv[2:]:\n"
        "    assert getattr(cuda, name)(int(sys.argv[1]), ctypes.create_string_buffer(128)) == 0, name\n"
    )
    command = [sys.executable, "-c", code, str(app.process.pid), *calls[action].split()]
    subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": str(SOFTGPU)}, check=True)


def detach(phosd: FakePhosd, session: Session) -> None:
    assert phosd.quiesce(session).error == ""
    assert phosd.detach(session).error == ""


def attach(phosd: FakePhosd, session: Session) -> wire.AttachDone:
    done = phosd.attach(session)
    assert done.error == ""
    assert phosd.open(session).error == ""
    return done


def check(app: Program) -> None:
    app.tell("check")
    assert app.line() == "right"


def test_the_driver_saves_to_the_file_and_restores_from_it(phosd: FakePhosd, file: Path) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        for _ in range(3):
            os.truncate(file, 0)
            os.truncate(file, 32 * MiB)  # zeros again, as a new file has them
            assert prepare(session, file) == ""
            assert mapped(app, file) == 32 * MiB
            detach(phosd, session)
            driver(app, "checkpoint")
            saved = file.read_bytes()
            assert not any(saved[: 2 * MiB]), "the first megabytes stay unused"
            assert len(saved.strip(b"\0")) > RESIDUE - MiB
            driver(app, "restore")
            done = attach(phosd, session)
            assert (done.residue_bytes, done.residue_served) == (RESIDUE, RESIDUE)
            check(app)
            eventually(lambda: mapped(app, file) == 0)
        app.finish()


def test_what_is_in_the_file_is_what_the_driver_restores(phosd: FakePhosd, file: Path) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        assert prepare(session, file) == ""
        detach(phosd, session)
        driver(app, "checkpoint")
        with open(file, "r+b") as changed:
            changed.seek(2 * MiB + RESIDUE - 8)
            changed.write(b"????")
        with pytest.raises(subprocess.CalledProcessError):
            driver(app, "restore")


def test_a_file_that_is_too_small_is_no_harm(phosd: FakePhosd, file: Path) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        assert prepare(session, file, 8 * MiB) == ""
        detach(phosd, session)
        driver(app, "checkpoint")
        driver(app, "restore")
        done = attach(phosd, session)
        assert (done.residue_bytes, done.residue_served) == (RESIDUE, 0)
        check(app)
        eventually(lambda: mapped(app, file) == 0)
        app.finish()


def test_only_the_driver_is_served(phosd: FakePhosd, file: Path) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        assert prepare(session, file) == ""
        detach(phosd, session)
        app.tell("large")
        assert app.line() == "mapped"
        assert b"mine!" not in file.read_bytes()
        done = attach(phosd, session)
        assert (done.residue_bytes, done.residue_served) == (0, 0)
        check(app)
        app.finish()


def test_files_that_cannot_be_used_are_refused(phosd: FakePhosd, file: Path, tmp_path: Path) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        assert "is another file here" in prepare(session, file, inode=1)
        assert "is another file here" in prepare(session, file, 64 * MiB)
        assert "of no use" in prepare(session, file, MiB)
        link = tmp_path / "link"
        link.symlink_to(file)
        assert "cannot be opened" in prepare(session, link)
        assert mapped(app, file) == 0
        app.finish()


def test_let_go_when_asked_when_replaced_and_when_phosd_goes(phosd: FakePhosd, file: Path) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        assert prepare(session, file) == ""
        assert prepare(session, "") == ""
        assert mapped(app, file) == 0
        assert prepare(session, file) == ""
        assert prepare(session, file, 16 * MiB) == ""
        assert mapped(app, file) == 16 * MiB
        assert phosd.quiesce(session).error == ""
        assert phosd.open(session).error == ""
        assert mapped(app, file) == 16 * MiB, "a quiesce may be tried again"
        assert session.connection is not None
        session.connection.close()
        eventually(lambda: mapped(app, file) == 0)
        check(app)
        app.finish()


def test_children_do_not_inherit_it(phosd: FakePhosd, file: Path) -> None:
    with program(phosd, BODY) as (app, session):
        assert app.line() == "ready"
        assert prepare(session, file) == ""
        app.tell("fork")
        assert app.line() == "0"
        app.finish()


def test_what_the_driver_keeps_becomes_ordinary_memory(phosd: FakePhosd, file: Path) -> None:
    with program(phosd, BODY, SOFTGPU_FAULTS="residue-keep:1") as (app, session):
        assert app.line() == "ready"
        assert prepare(session, file) == ""
        detach(phosd, session)
        driver(app, "checkpoint")
        at = places(app, file)[0][0] + 2 * MiB
        driver(app, "restore")
        before = memory(app, at)
        assert before in file.read_bytes()
        assert attach(phosd, session).residue_served == RESIDUE
        eventually(lambda: mapped(app, file) == 0)
        file.write_bytes(b"")
        assert memory(app, at) == before
        check(app)
        app.finish()
