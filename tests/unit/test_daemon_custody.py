"""While root writes into a user's directory it is root's, and nothing leads elsewhere."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine.daemon import custody as custody_module
from phos.gpu_engine.daemon import requests
from phos.gpu_engine.daemon.custody import _served_by, _settle, custody, give_back_left
from phos.gpu_engine.daemon.jobs import JobTable
from phos.gpu_engine.daemon.requests import Requests
from phos.gpu_engine.errors import CheckpointFailed, NotPermitted, PhosError
from tests.unit.as_user import NOBODY, as_user, needs_root
from tests.unit.waiting import eventually

pytestmark = needs_root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user may be."""
    tmp_path.chmod(0o711)
    image = tmp_path / "image"
    image.mkdir(mode=0o700)
    image.chmod(0o2755)
    os.chown(image, NOBODY, NOBODY)
    return tmp_path


@pytest.fixture
def image(folder: Path) -> Iterator[int]:
    """The user's own directory, as a program of the user sends it."""
    descriptor = os.open(folder / "image", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def records(folder: Path) -> Path:
    """Where it is noted what is not the user's at present."""
    (folder / "run").mkdir(mode=0o755)
    return folder / "run" / "custody"


def owner(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_uid, stat.S_IMODE(status.st_mode)


def test_its_owner_can_do_nothing_in_it_meanwhile(folder: Path, image: int, records: Path) -> None:
    with custody(image, NOBODY, records) as taken:
        assert owner(folder / "image") == (0, 0o700)
        assert as_user(folder, lambda: os.symlink("/etc/passwd", "image/pages-1.img")) == "EACCES"
        assert as_user(folder, lambda: os.symlink("/etc/passwd", "pages-1.img", dir_fd=image)) == "EACCES"
        assert as_user(folder, lambda: os.chmod("image", 0o777)) == "EPERM"
        os.close(os.open("pages-1.img", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=taken))
    assert owner(folder / "image") == (NOBODY, 0o2755)
    assert os.listdir(image) == ["pages-1.img"]
    assert os.listxattr(image) == []
    assert os.listdir(records) == []


def test_it_is_given_back_after_a_failure(folder: Path, image: int, records: Path) -> None:
    with pytest.raises(ZeroDivisionError), custody(image, NOBODY, records):
        raise ZeroDivisionError
    assert owner(folder / "image") == (NOBODY, 0o2755)


def test_what_was_put_there_before_is_no_target(folder: Path, image: int, records: Path) -> None:
    assert as_user(folder, lambda: os.symlink("/etc/passwd", "image/pages-1.img")) == ""
    with pytest.raises(CheckpointFailed, match="is not empty"), custody(image, NOBODY, records):
        pytest.fail("not to be written to")
    assert owner(folder / "image") == (NOBODY, 0o2755)


def test_what_is_not_the_users_own_is_refused(folder: Path, image: int, records: Path) -> None:
    os.fchown(image, 0, 0)
    os.fchmod(image, 0o777)
    with pytest.raises(NotPermitted, match="belongs to user 0"), custody(image, NOBODY, records):
        pytest.fail("not to be written to")
    assert owner(folder / "image") == (0, 0o777)
    file = os.open(folder / "file", os.O_CREAT | os.O_RDONLY)
    with pytest.raises(NotPermitted, match="is no directory"), custody(file, NOBODY, records):
        pytest.fail("not to be written to")
    os.close(file)


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
90 22 0:50 / /home/me/remote rw,nosuid,nodev shared:2 - fuse.sshfs me@host: rw,user_id=4242,group_id=4242,allow_other
91 22 0:51 / /data rw shared:3 - fuse.gateway gateway rw,user_id=0,group_id=0,allow_other
"""


@pytest.mark.parametrize(("mount", "user"), [("22", 0), ("90", 4242), ("91", 0), ("9", 0), ("", 0)])
def test_who_serves_a_file_system(mount: str, user: int) -> None:
    assert _served_by(mount, MOUNTS) == user


def test_a_file_system_that_a_user_serves_is_refused(
    image: int, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says of owners and modes."""
    monkeypatch.setattr(
        custody_module, "_served_by", lambda mount, mounts: 4242 if f"\n{mount} " in "\n" + mounts else 0
    )
    with pytest.raises(NotPermitted, match="that user 4242 provides"), custody(image, NOBODY, records):
        pytest.fail("not to be written to")


def test_one_at_a_time(image: int, records: Path) -> None:
    with custody(image, NOBODY, records), pytest.raises(PhosError, match="in use"), custody(image, NOBODY, records):
        pytest.fail("it would be given back to the user while the first writes")


def test_root_keeps_its_own(folder: Path, image: int, records: Path) -> None:
    with custody(image, 0, records):
        assert owner(folder / "image") == (NOBODY, 0o2755)


def killed_over_it(image: int, records: Path) -> None:
    """As a phosd that is killed while it writes there."""
    child = os.fork()
    if child == 0:
        with custody(image, NOBODY, records):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_the_next_phosd_gives_it_back(folder: Path, image: int, records: Path) -> None:
    killed_over_it(image, records)
    assert owner(folder / "image") == (0, 0o700)
    give_back_left(records)
    eventually(lambda: not os.listdir(records))
    assert owner(folder / "image") == (NOBODY, 0o2755)
    assert os.listxattr(image) == []
    with custody(image, NOBODY, records):
        assert owner(folder / "image") == (0, 0o700)


def test_it_is_not_given_back_before_all_of_roots_have_left_it(folder: Path, image: int, records: Path) -> None:
    """A CRIU that the killed phosd had started may write there for some time yet."""
    killed_over_it(image, records)
    (record,) = records.iterdir()
    with subprocess.Popen(["sleep", "600"], cwd=folder / "image") as inside:
        assert not _settle(record)
        assert owner(folder / "image") == (0, 0o700)
        inside.kill()
    with subprocess.Popen(["sleep", "600"], pass_fds=[image]) as writing:
        assert not _settle(record)
        writing.kill()
    assert _settle(record)
    assert owner(folder / "image") == (NOBODY, 0o2755)


def test_nothing_else_is_given_to_the_user(folder: Path, image: int, records: Path) -> None:
    """Whoever owns the folder above can let the noted path lead to any directory of root's."""
    killed_over_it(image, records)
    (folder / "image").rename(folder / "moved")
    (folder / "image").mkdir(mode=0o700)
    (record,) = records.iterdir()
    assert _settle(record)
    assert owner(folder / "image") == (0, 0o700)
    assert os.listdir(records) == []


@pytest.mark.parametrize("status", [0, 1])
def test_a_checkpoint_that_a_user_asks_for_goes_nowhere_else(
    folder: Path, image: int, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The user has the path lead elsewhere while phosd's command runs."""
    (folder / "victim").mkdir()
    command = folder / "phos-gpu"
    command.write_text(
        f"""#!/bin/sh
for last; do :; done
mv {folder}/image {folder}/moved && ln -s {folder}/victim {folder}/image
cd /
echo written >"$last/dump.log"
echo '{{"seconds": 1.5}}'
echo "see $last/dump.log" >&2
exit {status}
"""
    )
    command.chmod(0o755)
    monkeypatch.setattr(requests, "launcher", lambda _name: command)
    session, said = asked(folder, image)
    assert os.listdir(folder / "victim") == []
    assert (folder / "moved" / "dump.log").read_text() == "written\n"
    assert owner(folder / "moved") == (NOBODY, 0o2755)
    assert said.error == ("" if status == 0 else f"see {folder}/moved/dump.log")
    assert session.told == [said]


class _Session:
    """The session of a process that asks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.told: list[wire_pb2.CheckpointResult] = []

    def tell(self, *, checkpoint_result: wire_pb2.CheckpointResult) -> None:
        self.told.append(checkpoint_result)


def asked(folder: Path, directory: int) -> tuple[_Session, wire_pb2.CheckpointResult]:
    """A process of the user's asks for a checkpoint in that directory."""
    ready, let_ready = os.pipe()
    wait, let_go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_go)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        os.write(let_ready, b"1")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    registry = SimpleNamespace(
        claims=SimpleNamespace(has=lambda _pids: False), jobs=JobTable(), path=folder / "phosd.sock"
    )
    session = _Session(child)
    peer = SimpleNamespace(pid=child, uid=NOBODY, gid=NOBODY)
    try:
        serving = Requests(registry)  # type: ignore[arg-type]
        serving._serve(session, peer, wire_pb2.CheckpointRequest(number=1), os.dup(directory))  # type: ignore[arg-type]
    finally:
        for descriptor in (let_go, ready, let_ready, wait):
            os.close(descriptor)
        os.waitpid(child, 0)
    return session, session.told[0]
