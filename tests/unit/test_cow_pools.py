"""How GPU memory is shared out among shadow pools, and whose a slot is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.gpu_engine import driver
from phos.gpu_engine.cow.chunk_table import NO_SLOT, POOL_FLAGS
from phos.gpu_engine.cow.settings import CowSettings
from phos.gpu_engine.cow.shadow_pool import LEAST_BYTES, MARGIN_BYTES, LentPools, slots_for
from phos.gpu_engine.cow.window import Windows
from phos.gpu_engine.ring import CHUNK_BYTES


class FakeContext:
    """A GPU with so much free memory."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_memory(self) -> int:
        return self.free


@given(st.integers(0, 96 << 30), st.integers(0, 8 << 30), st.integers(1, 16))
def test_pools_fit(free: int, wanted: int, processes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phos.gpu_engine.driver.context", lambda device: FakeContext(free))
        slots = slots_for(0, wanted, processes)
    if slots is None:
        assert processes * POOL_FLAGS + LEAST_BYTES > free
        return
    taken = processes * (POOL_FLAGS + slots * CHUNK_BYTES)
    assert slots >= 0
    assert slots * CHUNK_BYTES * processes <= wanted
    assert taken + (MARGIN_BYTES if slots else LEAST_BYTES) <= free
    if free >= MARGIN_BYTES + wanted + processes * POOL_FLAGS:
        assert (slots + 1) * CHUNK_BYTES * processes > wanted


class FakePool:
    """Only its slots count."""

    def __init__(self, slots: int) -> None:
        self.slots = slots


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(-3, 30))
def test_slots_are_found_in_their_pools(sizes: list[int], slot: int) -> None:
    pools = [FakePool(size) for size in sizes]
    everywhere = [(number, index) for number, pool in enumerate(pools) for index in range(pool.slots)]
    expected = everywhere[slot] if 0 <= slot < len(everywhere) else None
    found: object = LentPools(pools).find(slot)  # type: ignore[arg-type]
    assert found == expected


def test_a_process_has_no_more_slots_than_a_chunks_state_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend refuses a table with more, and its process would stand still until all is saved."""
    monkeypatch.setattr("phos.gpu_engine.driver.context", lambda device: FakeContext(200 << 30))
    monkeypatch.setattr("phos.gpu_engine.cow.window.ShadowPool", lambda device, slots, lane: FakePool(slots))
    gpus = range(3)
    process = SimpleNamespace(
        session=bytes(16),
        own_blocks=lambda: [SimpleNamespace(device=device) for device in gpus],
        ordinals=lambda: {device: device for device in gpus},
    )
    windows = Windows(CowSettings(pool_bytes=150 << 30), lambda device: driver.Lane.__new__(driver.Lane))
    windows.lend_pools([process])  # type: ignore[list-item]
    assert windows.pool_bytes == NO_SLOT * CHUNK_BYTES
