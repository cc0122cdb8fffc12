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
        self.refused: dict[int, BaseException] = {}
        self.next = 1 << 40

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
            raise self.refused[descriptor]
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


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def reserved(blocks: list[Block]) -> ReservedMemory:
    """Memory with addresses for some blocks."""
    memory = ReservedMemory()
    for block in blocks:
        memory.reserve(block)
    return memory


def test_blocks_are_mapped_in_their_order_beside_the_caller(gpu: Gpu) -> None:
    memory, blocks = ReservedMemory(), blocks_of(3)
    addresses = [memory.reserve(block) for block in blocks]
    assert len(set(addresses)) == 3
    memory.map(reversed(blocks))
    assert gpu.order == []
    gpu.may_map.release(3)
    until(lambda: len(gpu.order) == 3)
    until(lambda: all(memory.mapped(block.key) for block in blocks))
    assert gpu.order == [2, 1, 0]
    assert sorted(gpu.mapped) == sorted(addresses)
    memory.free()
    memory.free()


def test_what_is_asked_for_is_mapped_next(gpu: Gpu) -> None:
    blocks = blocks_of(6)
    memory = reserved(blocks)
    memory.map(blocks)
    assert gpu.begun.acquire(timeout=PATIENCE)  # the first is being mapped
    for number in (4, 0, 4, 5):
        assert not memory.mapped(blocks[number].key)
    gpu.may_map.release(2)
    until(lambda: memory.mapped(blocks[4].key))
    assert gpu.order == [0, 4]
    gpu.may_map.release(4)
    until(lambda: len(gpu.order) == 6)
    assert gpu.order == [0, 4, 5, 1, 2, 3]
    memory.free()


@pytest.mark.parametrize("failure", [DriverError("cuMemMap", 2, "CUDA_ERROR_OUT_OF_MEMORY"), MemoryError()])
def test_who_asks_is_told_that_mapping_failed(gpu: Gpu, failure: BaseException) -> None:
    blocks = blocks_of(5)
    memory = reserved(blocks)
    gpu.refused = {2: failure}
    memory.map(blocks)
    gpu.may_map.release(5)
    until(lambda: len(gpu.order) == 2 and memory._failure is not None)
    for number in (2, 3, 4):
        with pytest.raises(type(failure)):
            memory.mapped(blocks[number].key)
    assert memory.mapped(blocks[0].key), "what was mapped before is there"
    memory.free()


def test_what_was_never_mapped_is_given_back(gpu: Gpu) -> None:
    blocks = blocks_of(5)
    memory = reserved(blocks)
    memory.free()
    assert not gpu.reserved
    memory = reserved(blocks)
    memory.map(blocks)
    assert gpu.begun.acquire(timeout=PATIENCE)
    freeing = threading.Thread(target=memory.free, daemon=True)
    freeing.start()
    until(lambda: not memory._left)
    assert freeing.is_alive(), "one is being mapped"
    gpu.may_map.release(1)
    freeing.join(PATIENCE)
    assert not freeing.is_alive()
    assert gpu.order == [0], "no further one is mapped"


def test_without_a_thread_everything_is_given_back(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = reserved(blocks_of(2))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            memory.map(blocks_of(2))
    memory.free()
    assert not gpu.reserved
