"""What a process maps of others is phosd's to keep from its detach until it maps it again."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phos.gen import wire_pb2
from phos.gpu_engine import sealed
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.daemon import limits, wire
from phos.gpu_engine.daemon.states import SessionState
from phos.gpu_engine.errors import CheckpointFailed, NotPermitted, PhosError
from tests.unit.session_fake import NUMBER, OTHER, Frontend, MiB, memory_map, open_descriptors

MAPPED = {4: (OTHER, 7), 5: (OTHER, 8)}
"""The process's numbers of another's blocks."""


class Guest(Frontend):
    """A process that maps two blocks of another, and how many descriptors there are then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.inodes = [self.export(7), self.export(8)]
        self.broker.belongs(OTHER, 1000)
        self.connect()
        self.tell_imports()
        self.quiesced()
        self.before = open_descriptors()

    def export(self, number: int) -> int:
        descriptor = sealed.make("block", 2 * MiB)
        self.broker.add(Block((OTHER, number), 2 * MiB, 0, descriptor), os.getpid())
        return os.fstat(descriptor).st_ino

    def tell_imports(self) -> None:
        for number, (owner, theirs) in MAPPED.items():
            added = wire_pb2.BlockAdded(block=number, size=2 * MiB, owner_session=owner, owner_block=theirs)
            self.send(block_added=added)
        self.settle()

    def quiesced(self) -> None:
        thread = self.in_background("quiesce", quiesce_done=wire_pb2.QuiesceDone())
        self.session.quiesce(1.0, 1.0)
        thread.join()

    def detach(self, error: str = "", *, owner_ends: bool = False) -> None:
        blocks = [
            wire_pb2.MemoryMap.Block(block=number, size=2 * MiB, owner_session=owner, owner_block=theirs)
            for number, (owner, theirs) in MAPPED.items()
        ]
        map_ = memory_map(blocks=blocks)

        def answer() -> None:
            assert self.end
            packet = wire.receive(self.end)
            assert packet is not None
            assert packet[0].WhichOneof("body") == "detach"
            if owner_ends:
                self.broker.drop_session(OTHER)
            self.send(() if error else (map_,), packet[0].id, detach_done=wire_pb2.DetachDone(error=error))
            if not error:
                self.end.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            self.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
        finally:
            thread.join()
            os.close(map_)
        self.close()

    def attach(self) -> list[tuple[int, int]]:
        """Attach it; returns the numbers and inodes that it got."""
        self.connect(wire_pb2.DETACHED)
        self.session.machine.adopt(SessionState.ATTACHING)
        got: list[tuple[int, int]] = []

        def take() -> None:
            assert self.end
            while (packet := wire.receive(self.end)) is not None:
                kind = packet[0].WhichOneof("body")
                if kind == "attach_blocks":
                    inodes = [os.fstat(descriptor).st_ino for descriptor in packet[1]]
                    got.extend(zip(packet[0].attach_blocks.block, inodes, strict=True))
                    wire.close_all(packet[1])
                elif kind == "attach":
                    self.send((), packet[0].id, attach_done=wire_pb2.AttachDone())
                else:
                    self.send((), packet[0].id, done=wire_pb2.Done())
                    return

        thread = threading.Thread(target=take)
        thread.start()
        self.session.attach()
        thread.join()
        return got


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    made = Guest(tmp_path)
    yield made
    made.close()
    made.broker.drop_session(NUMBER)
    made.broker.drop_session(OTHER)


def test_it_outlives_its_owner_until_it_is_mapped_again(guest: Guest) -> None:
    guest.detach()
    assert guest.broker.left_behind() == []
    assert guest.broker.drop_session(OTHER) == 0, "somebody still has it"
    assert sorted(block.key for block in guest.broker.left_behind()) == sorted(MAPPED.values())
    assert guest.session.block_keys() == MAPPED
    assert guest.attach() == list(zip(MAPPED, guest.inodes, strict=True))
    assert guest.broker.left_behind() == []
    assert open_descriptors() == guest.before - len(MAPPED)


def test_the_owner_may_end_while_the_other_unmaps_it(guest: Guest) -> None:
    """Whose user the owner was is not known any more when the memory map is read."""
    guest.detach(owner_ends=True)
    assert guest.attach() == list(zip(MAPPED, guest.inodes, strict=True))


def test_it_is_what_was_mapped_whatever_has_its_name_by_then(guest: Guest) -> None:
    guest.detach()
    guest.broker.drop_session(OTHER)
    for number in (7, 8):
        guest.export(number)
    assert guest.attach() == list(zip(MAPPED, guest.inodes, strict=True))


def test_it_goes_with_the_process_that_maps_it(guest: Guest) -> None:
    guest.detach()
    guest.broker.drop_session(OTHER)
    guest.session.end()
    assert guest.broker.drop_session(NUMBER) == 4 * MiB
    assert open_descriptors() == guest.before - len(MAPPED) - 2, "the connection has ended as well"
    with pytest.raises(CheckpointFailed, match="ended while"):
        guest.session._blocks.secure()
    assert guest.broker.left_behind() == []


def test_a_detach_that_is_refused_gives_it_back(guest: Guest) -> None:
    with pytest.raises(CheckpointFailed, match="it cannot be"):
        guest.detach("it cannot be")
    assert not guest.broker.lent(NUMBER)
    assert open_descriptors() == guest.before


def test_it_is_there_for_a_process_that_detaches_after_all(guest: Guest) -> None:
    """It hung up before it answered, and nobody can know whether it has unmapped anything."""

    def hang_up() -> None:
        guest.answer("detach")
        assert guest.end
        guest.end.close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    with pytest.raises(PhosError, match="ended, or closed its connection"):
        guest.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
    thread.join()
    guest.close()
    guest.broker.drop_session(OTHER)
    assert guest.attach() == list(zip(MAPPED, guest.inodes, strict=True))
    assert not guest.broker.lent(NUMBER)


def test_a_process_that_maps_it_still_gives_it_back_when_it_connects(guest: Guest) -> None:
    guest.session._blocks.secure()
    guest.close()
    assert guest.broker.lent(NUMBER) == MAPPED
    guest.connect()
    assert not guest.broker.lent(NUMBER)


def test_what_is_unmapped_meanwhile_is_given_back(guest: Guest) -> None:
    """What was closed while a stream was captured goes when the process is about to detach."""
    guest.session._blocks.secure()
    guest.send(block_removed=wire_pb2.BlockRemoved(block=4))
    guest.settle()
    assert guest.broker.lent(NUMBER) == {5: (OTHER, 8)}


def test_a_process_whose_memory_has_lost_its_owner_is_not_detached(guest: Guest) -> None:
    guest.broker.remove((OTHER, 8))
    with pytest.raises(CheckpointFailed, match="of another process that has ended, or has freed it"):
        guest.session.detach(reduce_stack=False, huge_pages=False, copy_threads=False)
    assert not guest.broker.lent(NUMBER)
    assert not list(guest.session._holds._folder.iterdir())


def test_the_keeper_knows_who_is_detached(guest: Guest) -> None:
    """Also of one that has no memory when it is: what it maps may have been unmapped at the last moment."""
    told = guest.broker._keeper.told  # type: ignore[attr-defined]
    guest.detach()
    detached, attached = ("detached", NUMBER, os.getpid()), ("attached", NUMBER)
    assert detached in told
    assert attached not in told
    guest.attach()
    assert told[-1] == attached


def test_the_keeper_is_not_told_of_what_is_only_about_to_be_restored(guest: Guest) -> None:
    """The next phosd cannot bring it back: its restore fails with this one."""
    guest.session.keep_imports(os.getpid())
    assert guest.broker.lent(NUMBER) == MAPPED
    assert not any(what[0] == "detached" for what in guest.broker._keeper.told)  # type: ignore[attr-defined]


def test_a_user_may_not_have_others_memory_without_end(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps a descriptor open, of the same block for each process that maps it."""
    monkeypatch.setattr(limits, "blocks", lambda: 3)
    guest.broker.belongs(NUMBER, 1000)
    with pytest.raises(NotPermitted, match="maps 2 GPU memory blocks of others"):
        guest.session._blocks.secure()
    monkeypatch.setattr(limits, "blocks", lambda: 4)
    for _ in range(2):  # in place of the former
        guest.session._blocks.secure()
    assert not guest.broker.may_hold((OTHER, 9), 4)
    guest.broker.belongs(NUMBER, 0)
    guest.broker.belongs(OTHER, 0)
    assert guest.broker.may_hold((OTHER, 9), 4)
