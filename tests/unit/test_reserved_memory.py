"""Memory that is mapped while the first of it is copied: in which order, and what is given back when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block, BlockKey
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


class Plan:
    """Who waits for blocks."""

    def __init__(self) -> None:
        self.needed: list[BlockKey] = []
        self.mapped: list[BlockKey] = []
        self.errors: list[BaseException] = []

    def due(self) -> BlockKey | None:
        return next((key for key in self.needed if key not in self.mapped), None)

    def map(self, key: BlockKey) -> None:
        self.mapped.append(key)

    def break_(self, error: BaseException) -> None:
        self.errors.append(error)


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
    memory, blocks, plan = ReservedMemory(), blocks_of(3), Plan()
    addresses = [memory.reserve(block) for block in blocks]
    assert len(set(addresses)) == 3
    memory.map(reversed(blocks), plan)
    assert gpu.order == []
    gpu.may_map.release(1)
    until(lambda: plan.mapped == [blocks[2].key])
    gpu.may_map.release(2)
    until(lambda: len(plan.mapped) == 3)
    assert gpu.order == [2, 1, 0]
    assert gpu.mapped == list(reversed(addresses))
    assert plan.mapped == [block.key for block in reversed(blocks)]
    memory.free()
    memory.free()
    assert plan.errors == []


def test_what_is_due_is_mapped_next(gpu: Gpu) -> None:
    blocks, plan = blocks_of(6), Plan()
    memory = reserved(blocks)
    memory.map(blocks, plan)
    assert gpu.begun.acquire(timeout=PATIENCE)  # the first is being mapped
    plan.needed = [blocks[number].key for number in (4, 0, 5)]
    gpu.may_map.release(2)
    until(lambda: len(plan.mapped) == 2)
    assert gpu.order == [0, 4]
    gpu.may_map.release(4)
    until(lambda: len(plan.mapped) == 6)
    assert gpu.order == [0, 4, 5, 1, 2, 3]
    memory.free()


def test_what_is_due_and_was_never_to_be_mapped_holds_nothing_up(gpu: Gpu) -> None:
    blocks, plan = blocks_of(3), Plan()
    plan.needed = [(b"x" * 16, 1)]
    memory = reserved(blocks)
    memory.map(blocks[1:], plan)
    gpu.may_map.release(2)
    until(lambda: len(plan.mapped) == 2)
    assert gpu.order == [1, 2]
    memory.free()


@pytest.mark.parametrize("failure", [DriverError("cuMemMap", 2, "CUDA_ERROR_OUT_OF_MEMORY"), MemoryError()])
def test_a_plan_is_told_that_mapping_failed(gpu: Gpu, failure: BaseException) -> None:
    blocks, plan = blocks_of(5), Plan()
    memory = reserved(blocks)
    gpu.refused = {2: failure}
    memory.map(blocks, plan)
    gpu.may_map.release(5)
    until(lambda: bool(plan.errors))
    memory.free()
    assert plan.errors == [failure]
    assert gpu.order == [0, 1], "none is mapped after it"
    assert plan.mapped == [blocks[0].key, blocks[1].key], "what was mapped before is there"


def test_what_was_never_mapped_is_given_back(gpu: Gpu) -> None:
    blocks, plan = blocks_of(5), Plan()
    memory = reserved(blocks)
    memory.free()
    assert not gpu.reserved
    memory = reserved(blocks)
    memory.map(blocks, plan)
    assert gpu.begun.acquire(timeout=PATIENCE)
    freeing = threading.Thread(target=memory.free, daemon=True)
    freeing.start()
    until(lambda: not memory._left)
    assert freeing.is_alive(), "one is being mapped"
    gpu.may_map.release(1)
    freeing.join(PATIENCE)
    assert not freeing.is_alive()
    assert gpu.order == [0], "no further one is mapped"
    assert plan.errors == []


def test_without_a_thread_everything_is_given_back(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = reserved(blocks_of(2))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            memory.map(blocks_of(2), Plan())
    memory.free()
    assert not gpu.reserved
