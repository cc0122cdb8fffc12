"""The keeper, as a process of its own."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import keeper
from phos.gpu_engine.daemon.keeper_link import HeldBlock, KeeperLink
from phos.gpu_engine.daemon.memory import Broker
from phos.gpu_engine.errors import DaemonUnavailable
from tests.unit.waiting import eventually

SESSION, OTHER = bytes(16), bytes([7] * 16)


class Kept:
    """A keeper and a phosd's link to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keeper.sock"
        self.process = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__, str(folder)])
        eventually(self.path.exists, "the keeper")
        self.link = KeeperLink(self.path)

    def held(self) -> list[HeldBlock]:
        found = list(self.link.held())
        for block in found:
            os.close(block.descriptor)
        return found

    def descriptors(self) -> int:
        """Of memory."""
        return sum("memfd:kept" in name for name in self._names())

    def watched(self) -> int:
        """Processes whose end it will notice."""
        return sum("pidfd" in name for name in self._names())

    def _names(self) -> list[str]:
        names = []
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                names.append(os.readlink(entry))
        return names

    def another_phosd(self) -> None:
        self.link.close()
        self.link = KeeperLink(self.path)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    made.link.close()  # first: it would start another
    made.process.kill()
    made.process.wait()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("kept")
    yield descriptor
    os.close(descriptor)


def test_keeper_hands_over_to_the_next_phosd(kept: Kept, memory: int) -> None:
    for number in range(3):
        kept.link.add(SESSION, os.getpid(), number, 2 << 20, 0, memory)
    kept.link.remove(SESSION, 1)
    kept.another_phosd()
    assert [(b.session, b.pid, b.block) for b in kept.held()] == [(SESSION, os.getpid(), 0), (SESSION, os.getpid(), 2)]
    kept.link.remove(SESSION, None)
    assert kept.held() == []
    assert kept.descriptors() == 0


def test_keeper_names_the_process_a_session_was_restored_as(kept: Kept, memory: int) -> None:
    """Before the restore phosd stands in for the process; a later phosd must find the process, not the dead phosd."""
    stand_in = subprocess.Popen(["sleep", "60"])
    kept.link.add(SESSION, stand_in.pid, 1, 2 << 20, 0, memory)
    kept.link.moved(SESSION, os.getpid())
    stand_in.kill()
    stand_in.wait()
    kept.another_phosd()
    assert [b.pid for b in kept.held()] == [os.getpid()]


def test_keeper_drops_what_ends_while_no_phosd_is_there(kept: Kept, memory: int) -> None:
    living, ended = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])
    ended.wait()
    kept.link.add(SESSION, living.pid, 1, 2 << 20, 0, memory)
    kept.link.add(OTHER, ended.pid, 1, 2 << 20, 0, memory)  # it was gone before its block came
    assert len(kept.held()) == 2
    kept.link.close()
    eventually(lambda: kept.descriptors() == 1, "the block of the process that had ended")
    living.kill()
    living.wait()
    eventually(lambda: kept.descriptors() == 0, "the block of the process that was killed")
    kept.link = KeeperLink(kept.path)


@pytest.mark.parametrize(
    "packet",
    [
        b"{",
        b"[]",
        b"null",
        b'{"op": "add"}',
        b'{"op": "detached", "session": "00", "pid": []}',
        b'{"op": "remove", "session": []}',
        b'{"op": 3}',
        b"\xff\xfe",
    ],
)
def test_keeper_survives_a_confused_phosd(kept: Kept, memory: int, packet: bytes) -> None:
    kept.link.add(SESSION, os.getpid(), 1, 2 << 20, 0, memory)
    kept.link._socket.send(packet)
    assert [b.block for b in kept.held()] == [1]


def holders(folder: Path) -> list[psutil.Process]:
    """The keepers of a folder."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            found += [child] if str(folder) in child.cmdline() else []
    return found


def test_keeper_that_is_killed_is_replaced_and_given_everything_again(
    kept: Kept, memory: int, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(kept.link)
    for number in (1, 2, 3):
        broker.add(Block((SESSION, number), 2 << 20, 0, os.dup(memory)), 1)
    broker.moved(SESSION, os.getpid())
    for turn in range(2):
        broker.remove((SESSION, turn + 1))
        eventually(lambda: len(holders(kept.path.parent)) == 1, "one keeper, and none that is about to end")
        (running,) = holders(kept.path.parent)
        running.kill()
        broker.add(Block((OTHER, turn), 2 << 20, 0, os.dup(memory)), os.getpid())  # while there may be none
        broker.remove((OTHER, turn))
        running.wait(10)  # a dead one's socket may take a connection for a moment, and be lost a second time
        left = [(SESSION, os.getpid(), number) for number in range(turn + 2, 4)]
        eventually(lambda left=left: held_now(kept) == left, "the new keeper to hold everything")
    assert "is gone: phosd starts another" in caplog.text
    kept.another_phosd()
    adopted = Broker(kept.link)
    assert adopted.adopt_from_keeper() == {SESSION: os.getpid()}
    for holder in (broker, adopted):
        holder.drop_session(SESSION)
    kept.link.close()
    for process in holders(kept.path.parent):
        process.kill()
        process.wait()


def test_what_the_keeper_was_not_told_it_is_told_later(
    kept: Kept, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and a packet did not come through: from then on it has to know what is held, and what no longer."""
    broker = Broker(kept.link)
    for number in (1, 2):
        broker.add(Block((SESSION, number), 2 << 20, 0, os.dup(memory)), os.getpid())
    send_fds = socket.send_fds
    failed = threading.Event()

    def failing(*arguments: object) -> int:
        monkeypatch.setattr(socket, "send_fds", send_fds)
        failed.set()
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    monkeypatch.setattr(socket, "send_fds", failing)
    broker.remove((SESSION, 1))
    broker.add(Block((SESSION, 3), 2 << 20, 0, os.dup(memory)), os.getpid())
    assert failed.is_set()
    eventually(lambda: held_now(kept) == [(SESSION, os.getpid(), number) for number in (2, 3)], "all to be told")
    assert kept.process.poll() is None
    broker.drop_session(SESSION)


def test_what_a_session_was_lent_is_known_to_the_next_phosd_and_to_another_keeper(kept: Kept, memory: int) -> None:
    broker = Broker(kept.link)
    for number in (1, 2):
        broker.add(Block((OTHER, number), 2 << 20, 0, os.dup(memory)), 1)
    broker.lend(SESSION, os.getpid(), {4: (OTHER, 1), 5: (OTHER, 2)}, 10)
    broker.take_back(SESSION, 5)
    broker.drop_session(OTHER)
    lent = [(SESSION, os.getpid(), 4, (OTHER, 1))]
    assert [(held.session, held.pid, held.block, held.owner) for held in kept.held()] == lent
    for keeper_ in holders(kept.path.parent):
        keeper_.kill()
        keeper_.wait(10)
    eventually(lambda: held_now(kept) == [held[:3] for held in lent], "the new keeper to hold it")
    kept.another_phosd()
    adopted = Broker(kept.link)
    assert adopted.adopt_from_keeper() == {SESSION: os.getpid()}
    assert adopted.lent(SESSION) == {4: (OTHER, 1)}
    assert [block.key for block in adopted.left_behind()] == [(OTHER, 1)]
    adopted.take_back(SESSION)
    assert kept.held() == []
    broker.drop_session(SESSION)
    kept.link.close()
    for keeper_ in holders(kept.path.parent):
        keeper_.kill()
        keeper_.wait(10)


def detached(kept: Kept) -> dict[bytes, int] | None:
    found: dict[bytes, int] = {}
    try:
        assert [*kept.link.held(found)] == []
    except (DaemonUnavailable, OSError):
        return None
    return found


def test_a_detached_session_without_memory_is_known_to_the_next_phosd_and_to_another_keeper(kept: Kept) -> None:
    broker = Broker(kept.link)
    broker.detaches(SESSION, os.getpid())
    broker.detaches(OTHER, os.getpid())
    broker.attached(OTHER)
    for keeper_ in holders(kept.path.parent):
        keeper_.kill()
        keeper_.wait(10)
    eventually(lambda: detached(kept) == {SESSION: os.getpid()}, "the new keeper to know of it")
    kept.another_phosd()
    adopted = Broker(kept.link)
    assert adopted.adopt_from_keeper() == {SESSION: os.getpid()}
    adopted.attached(SESSION)
    assert detached(kept) == {}
    kept.link.close()
    for keeper_ in holders(kept.path.parent):
        keeper_.kill()
        keeper_.wait(10)


def test_a_session_whose_last_block_goes_is_forgotten_unless_it_is_detached(kept: Kept, memory: int) -> None:
    kept.link.add(SESSION, os.getpid(), 1, 2 << 20, 0, memory)
    kept.link.detached(SESSION, os.getpid())
    kept.link.remove(SESSION, 1)
    assert detached(kept) == {SESSION: os.getpid()}
    assert kept.descriptors() == 0
    kept.link.moved(SESSION, 1)
    assert detached(kept) == {SESSION: 1}
    kept.link.add(SESSION, 1, 2, 2 << 20, 0, memory)
    kept.link.attached(SESSION)
    assert [block.block for block in kept.held()] == [2]
    kept.link.detached(SESSION, 1)
    kept.link.remove(SESSION, None)
    assert detached(kept) == {}


def test_a_detached_session_is_forgotten_with_its_process(kept: Kept) -> None:
    living, ended = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["true"])
    ended.wait()
    kept.link.detached(SESSION, living.pid)
    kept.link.detached(OTHER, ended.pid)
    assert detached(kept) == {SESSION: living.pid, OTHER: ended.pid}, "phosd says what is to be forgotten"
    assert kept.watched() == 1
    kept.link.close()
    living.kill()
    living.wait()
    eventually(lambda: kept.watched() == 0, "the keeper to notice the end")
    kept.link = KeeperLink(kept.path)
    assert detached(kept) == {}


def test_a_phosd_without_descriptors_left_understands_the_keeper_later(kept: Kept, memory: int) -> None:
    broker = Broker(kept.link)
    for number in range(3):
        broker.add(Block((SESSION, number), 2 << 20, 0, os.dup(memory)), os.getpid())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(memory))
        with pytest.raises(OSError, match="Too many open files"):
            list(kept.link.held())
        broker.settle()  # for which it need not have them
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    broker.remove((SESSION, 1))
    assert [block.block for block in kept.held()] == [0, 2]
    broker.drop_session(SESSION)


def held_now(kept: Kept) -> list[tuple[bytes, int, int]] | None:
    try:
        return [(block.session, block.pid, block.block) for block in kept.held()]
    except (DaemonUnavailable, OSError):
        return None
