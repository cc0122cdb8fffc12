"""What a process frees while a checkpoint has its memory: when that is let go of, and who waits for it."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

from phos.gpu_engine.blocks import BlockKey
from phos.gpu_engine.daemon.loans import Loans
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.stop.dump import StopDump

A, B = b"a" * 16, b"b" * 16


class Checkpoint:
    def __init__(self) -> None:
        self.returned = threading.Event()
        self.saves = False
        self.freed: list[BlockKey] = []

    @property
    def keeps_blocks(self) -> bool:
        return self.saves and not self.returned.is_set()

    def let_go(self, key: BlockKey) -> None:
        self.freed.append(key)


def waits(loans: Loans, session: bytes) -> threading.Thread:
    waiting = threading.Thread(target=loans.wait, args=(session,), daemon=True)
    waiting.start()
    waiting.join(0.1)
    return waiting


def test_who_has_been_saved_is_waited_for_by_nobody_else() -> None:
    loans, checkpoint = Loans(), Checkpoint()
    with loans.lent([A], checkpoint):
        loans.freed((A, 1))
        loans.freed((B, 2))
        assert checkpoint.freed == [(A, 1)]
        assert not loans.keeps(A), "it is only being prepared"
        assert not waits(loans, A).is_alive()
        checkpoint.saves = True
        assert loans.keeps(A)
        assert not loans.keeps(B)
        waiting = waits(loans, A)
        assert waiting.is_alive()
        assert not waits(loans, B).is_alive()
        checkpoint.returned.set()
        waiting.join(10)
        assert not waiting.is_alive()
        assert not loans.keeps(A)
    loans.freed((A, 3))
    assert checkpoint.freed == [(A, 1)]


def test_nobody_waits_for_a_checkpoint_that_is_over() -> None:
    loans, checkpoint = Loans(), Checkpoint()
    checkpoint.saves = True
    with loans.lent([A, B], checkpoint):
        waiting = waits(loans, B)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()
    assert not loans.keeps(A)


class Mapped:
    def __init__(self) -> None:
        self.removed: list[BlockKey] = []

    def remove(self, key: BlockKey) -> None:
        self.removed.append(key)
        if key[1] == 13:
            raise DriverError("cuMemUnmap", 1, "broken")

    def close(self) -> None:
        self.removed = []


def test_a_checkpoint_lets_go_of_what_it_does_not_need_yet() -> None:
    dump: Any = StopDump.__new__(StopDump)
    dump.path, dump._mapped, dump._mapping, dump.returned = "image", Mapped(), threading.Lock(), threading.Event()
    dump._borrowed, dump._keys = [], frozenset()
    dump.let_go((A, 1))
    dump.let_go((A, 13))  # the driver's failure is phosd's to note
    assert dump._mapped.removed == [(A, 1), (A, 13)]
    assert not dump.keeps_blocks
    dump._borrowed, dump._keys = [object()], frozenset([(A, 2)])
    dump.let_go((A, 2))
    assert dump._mapped.removed == [(A, 1), (A, 13)]
    assert dump.keeps_blocks
    dump._borrowed = []
    dump._return_blocks()
    assert not dump.keeps_blocks


def returned_while_freed(count: int) -> list[int]:
    """What is unmapped by a checkpoint that returns so many blocks while their owner frees them."""
    dump: Any = StopDump.__new__(StopDump)
    dump.path, dump._mapping, dump.returned = "image", threading.Lock(), threading.Event()
    dump._mapped, dump._borrowed = MappedBlocks(), []
    unmapped: list[int] = []
    for number in range(count):
        dump._mapped._mappings[A, number] = SimpleNamespace(unmap=partial(unmapped.append, number))
    dump._keys = frozenset(dump._mapped._mappings)
    freeing = threading.Thread(target=lambda: [dump.let_go((A, number)) for number in range(count)])
    freeing.start()
    dump._return_blocks()
    freeing.join()
    return unmapped


def test_what_is_freed_while_the_blocks_are_returned_spoils_nothing() -> None:
    """The frontend gives back what it has kept for the window when that ends, and the checkpoint all it has."""
    for _ in range(20):
        assert sorted(returned_while_freed(300)) == list(range(300))
