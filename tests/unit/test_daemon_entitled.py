"""Whoever says that it maps another's memory is served, and is handed it only if it is its user's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine import sealed
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import limits, wire
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import CheckpointFailed, MemoryLost
from tests.unit.session_fake import NUMBER, OTHER, Frontend, MiB

KEY = (OTHER, 7)
MINE, ANOTHERS = 1000, 1001


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Frontend]:
    """A process of user MINE."""
    made = Frontend(tmp_path, uid=MINE)
    made.broker.belongs(NUMBER, MINE)
    made.connect()
    yield made
    made.close()
    made.broker.drop_session(NUMBER)
    made.broker.drop_session(OTHER)


def name(frontend: Frontend, owner: bytes = OTHER) -> None:
    """It says that it maps block 7 of that session as its own number 4."""
    frontend.send(
        block_added=wire_pb2.BlockAdded(block=4, size=2 * MiB, owner_session=owner, owner_block=KEY[1]),
    )


def comes(frontend: Frontend, uid: int) -> None:
    """The owner of KEY, and its block."""
    frontend.broker.belongs(OTHER, uid)
    frontend.broker.add(Block(KEY, 2 * MiB, 0, sealed.make("block", 2 * MiB)), os.getpid())


def resolved(frontend: Frontend) -> str:
    """What is said to a wish for KEY; without a descriptor."""
    assert frontend.end
    frontend.send((), 1, token_resolve=wire_pb2.TokenResolve(session=OTHER, block=KEY[1]))
    packet = wire.receive(frontend.end)
    assert packet is not None
    assert packet[1] == []
    return packet[0].token_resolved.error


def test_memory_of_an_unknown_owner_is_noted(frontend: Frontend) -> None:
    name(frontend)
    frontend.settle()  # it is still connected
    assert frontend.session.block_keys() == {4: KEY}
    assert "knows no such exported memory" in resolved(frontend)
    assert frontend.session.blocks_of_others() == set()
    with pytest.raises(CheckpointFailed, match="of another process that has ended, or has freed it"):
        frontend.session._blocks.secure()
    frontend.send(block_removed=wire_pb2.BlockRemoved(block=4))
    frontend.settle()
    frontend.session._blocks.secure()


def test_it_is_handed_nothing_when_the_owner_turns_out_to_be_another_users(frontend: Frontend) -> None:
    """It named the session before phosd knew it, and that must not be worth more than naming it afterwards."""
    name(frontend)
    frontend.settle()
    comes(frontend, ANOTHERS)
    assert "knows no such exported memory" in resolved(frontend)
    assert frontend.session.blocks_of_others() == set(), "in nobody's way"
    with pytest.raises(KeyError):
        frontend.session.borrow([KEY])
    with pytest.raises(CheckpointFailed, match="of another process that has ended"):
        frontend.session._blocks.secure()
    assert not frontend.broker.lent(NUMBER)
    # It claims to be detached, and would have what it said mapped again.
    frontend.close()
    frontend.connect(wire_pb2.DETACHED)
    frontend.session.machine.adopt(SessionState.ATTACHING)
    with pytest.raises(MemoryLost):
        frontend.session.attach()
    assert frontend.end
    frontend.end.setblocking(False)
    with pytest.raises(BlockingIOError):
        frontend.end.recv(1)


def test_it_is_as_ever_when_the_owner_turns_out_to_be_the_same_users(frontend: Frontend) -> None:
    """The importer may be the first to find a phosd that has just begun."""
    name(frontend)
    frontend.settle()
    comes(frontend, MINE)
    assert frontend.session.blocks_of_others() == {KEY}
    wire.close_all(block.descriptor for block in frontend.session.borrow([KEY]))
    frontend.session._blocks.secure()
    assert frontend.broker.lent(NUMBER) == {4: KEY}


def test_a_wish_that_is_not_fulfilled_is_in_nobodys_way(frontend: Frontend) -> None:
    """Nor is it kept: a process may have any number of them."""
    frontend.broker.needed = lambda *_: True
    frontend.broker.belongs(OTHER, MINE)
    assert "knows no such exported memory" in resolved(frontend)
    comes(frontend, MINE)
    assert "which process" in resolved(frontend), "it sees no GPU"
    assert frontend.session.blocks_of_others() == set()


def test_a_wish_is_answered_when_phosd_has_no_descriptors_left(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process waits for the answer, and as many others may wait at once as before."""
    comes(frontend, MINE)

    def borrow(*_: object) -> list[Block]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(frontend.broker, "borrow", borrow)
    for _ in range(limits.RESOLVES + 1):
        assert "phosd cannot hand it over: [Errno 24] Too many open files" in resolved(frontend)


@pytest.mark.parametrize("owner", [OTHER, OTHER[:15], OTHER * 64], ids=["another user's", "short", "long"])
def test_who_names_what_cannot_be_its_own_is_not_served(frontend: Frontend, owner: bytes) -> None:
    comes(frontend, ANOTHERS)
    name(frontend, owner)
    assert frontend.thread
    frontend.thread.join(5)
    assert not frontend.thread.is_alive()
    assert frontend.session.block_keys() == {}


def test_root_may_have_everybodys(tmp_path: Path) -> None:
    root = Frontend(tmp_path, uid=0)
    root.connect()
    comes(root, ANOTHERS)
    name(root)
    root.settle()
    wire.close_all(block.descriptor for block in root.session.borrow([KEY]))
    assert root.session.blocks_of_others() == {KEY}
    root.close()
    root.broker.drop_session(OTHER)
