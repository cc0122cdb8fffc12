"""Memory that is mapped while the first of it is copied: in which order, and what is given back when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.errors import DriverError
from phos.gpu_engine.restore.reserved import ReservedMemory

SIZE = 2 << 20
PATIENCE = 30.0


@dataclass(frozen=True)
class Mapped:
    """What a GPU's context gives."""

    gpu: Gpu
    address: int

    def unmap(self) -> None:
        self.gpu.mapped.remove(self.address)


class Gpu:
    """A context whose mappings take as long as the test wants."""

    def __init__(self) -> None:
        self.reserved: set[int] = set()
        self.mapped: list[int] = []
        self.order: list[int] = []
        self.may_map = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.refused: set[int] = set()
        self.next = 1 << 40

    def wait_mapped(self, count: int) -> None:
        end = time.monotonic() + PATIENCE
        while len(self.order) < count and time.monotonic() < end:
            time.sleep(0.001)

    def reserve(self, size: int) -> int:
        self.next += size
        self.reserved.add(self.next)
        return self.next

    def free_reserved(self, address: int, _: int) -> None:
        self.reserved.remove(address)

    def map_block(self, descriptor: int, _: int, address: int) -> Mapped:
        self.begun.release()
        assert self.may_map.acquire(timeout=PATIENCE)
        self.reserved.remove(address)
        if descriptor in self.refused:
            raise DriverError("cuMemMap", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        self.order.append(descriptor)
        self.mapped.append(address)
        return Mapped(self, address)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The only GPU; everything has been given back to it in the end."""
    made = Gpu()
    monkeypatch.setattr(driver, "context", lambda _: made)
    yield made
    assert (made.reserved, made.mapped) == (set(), [])


def blocks_of(count: int) -> list[Block]:
    """Blocks whose descriptors are their numbers."""
    return [Block((b"s" * 16, number), SIZE, 0, number, True) for number in range(count)]


def started(action: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread, and what it fails with."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures


def test_blocks_are_mapped_in_their_order_beside_the_caller(gpu: Gpu) -> None:
    memory, blocks = ReservedMemory(), blocks_of(3)
    addresses = [memory.reserve(block) for block in blocks]
    assert len(set(addresses)) == 3
    memory.map(reversed(blocks))
    assert gpu.order == []
    gpu.may_map.release(3)
    gpu.wait_mapped(3)
    assert gpu.order == [2, 1, 0]
    for block in blocks:
        memory.wait(block.key)
    assert sorted(gpu.mapped) == sorted(addresses)
    memory.free()
    memory.free()


def test_who_waits_for_a_block_has_it_mapped_next(gpu: Gpu) -> None:
    memory, blocks = ReservedMemory(), blocks_of(6)
    for block in blocks:
        memory.reserve(block)
    memory.map(blocks)
    assert gpu.begun.acquire(timeout=PATIENCE)  # the first is being mapped
    waiting, failures = started(lambda: memory.wait(blocks[4].key))
    waiting.join(0.2)
    assert waiting.is_alive()
    gpu.may_map.release(2)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert not failures
    assert gpu.order == [0, 4]
    gpu.may_map.release(4)
    gpu.wait_mapped(6)
    assert gpu.order == [0, 4, 1, 2, 3, 5]
    memory.free()


def test_who_waits_is_told_that_mapping_failed(gpu: Gpu) -> None:
    memory, blocks = ReservedMemory(), blocks_of(5)
    for block in blocks:
        memory.reserve(block)
    gpu.refused = {2}
    memory.map(blocks)
    waiting = [started(lambda key=block.key: memory.wait(key)) for block in blocks[3:]]
    assert gpu.begun.acquire(timeout=PATIENCE)
    time.sleep(0.1)
    gpu.may_map.release(5)
    told = []
    for thread, failures in waiting:
        thread.join(PATIENCE)
        assert not thread.is_alive()
        told += failures
    assert all(isinstance(error, DriverError) for error in told)
    with pytest.raises(DriverError):
        memory.wait(blocks[2].key)
    memory.wait(blocks[0].key)
    memory.free()


def test_what_was_never_mapped_is_given_back(gpu: Gpu) -> None:
    memory, blocks = ReservedMemory(), blocks_of(5)
    for block in blocks:
        memory.reserve(block)
    memory.free()
    assert not gpu.reserved
    for block in blocks:
        memory.reserve(block)
    memory.map(blocks)
    assert gpu.begun.acquire(timeout=PATIENCE)
    freeing, failures = started(memory.free)
    freeing.join(0.1)
    assert freeing.is_alive(), "one is being mapped"
    gpu.may_map.release(1)
    freeing.join(PATIENCE)
    assert not freeing.is_alive()
    assert not failures
    assert gpu.order == [0], "no further one is mapped"
