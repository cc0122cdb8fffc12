"""What is laid out before processes stand still, and when it is of no use any more."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phos.gpu_engine import driver
from phos.gpu_engine.blocks import Block
from phos.gpu_engine.cow import window
from phos.gpu_engine.cow.layout import Layout, first_written_first
from phos.gpu_engine.cow.settings import CowSettings
from phos.gpu_engine.cow.window import ProcessWindow, Windows
from phos.gpu_engine.mapped_blocks import MappedBlocks
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from phos.gpu_engine.save_places import SavePlace, SavePlaces, places_of
from phos.gpu_engine.save_plan import PoolFlags, SavePlan
from phos.images.chunk_hash import zero_hash
from tests.unit.cow_scene import SESSION


class Mapped(MappedBlocks):
    """Blocks that are mapped nowhere, at addresses given."""

    def __init__(self, addresses: dict[Any, int]) -> None:
        self._addresses = addresses

    def __getitem__(self, key: Any) -> Any:
        return type("Mapping", (), {"address": self._addresses[key]})


def blocks_of(*sizes: int, device: int = 0) -> list[Block]:
    """Blocks of these sizes, numbered from 1."""
    return [Block((SESSION, number + 1), size, device, -1) for number, size in enumerate(sizes)]


def mapped(blocks: list[Block], base: int = 1 << 40) -> Mapped:
    """Each at its own address."""
    return Mapped({block.key: base + (number << 34) for number, block in enumerate(blocks)})


def test_every_chunk_has_its_number_place_and_size() -> None:
    blocks = blocks_of(2 * CHUNK + CHUNK // 2, CHUNK)
    layout = Layout(blocks, mapped(blocks), [], [])
    one, other = (block.key for block in blocks)
    assert layout.chunks == {one: range(3), other: range(3, 4)}
    base = 1 << 40
    assert layout.places == [
        SavePlace(one, 0, CHUNK, base, 0),
        SavePlace(one, CHUNK, CHUNK, base + CHUNK, 0),
        SavePlace(one, 2 * CHUNK, CHUNK // 2, base + 2 * CHUNK, 0),
        SavePlace(other, 0, CHUNK, base + (1 << 34), 0),
    ]


def test_first_written_first() -> None:
    one, other = (SESSION, 1), (SESSION, 2)
    chunks = {one: range(3), other: range(3, 5)}
    before = [(other, 1), ((SESSION, 9), 0), (one, 2), (one, 3), (other, 1), (one, 0)]
    assert first_written_first(chunks, before) == [4, 2, 0, 1, 3]
    assert first_written_first(chunks, []) == [0, 1, 2, 3, 4]


Change = Callable[[list[Block]], tuple[list[Block], Mapped, list[int]]]

CHANGES: dict[str, Change] = {
    "allocated": lambda blocks: ([*blocks, *blocks_of(CHUNK, CHUNK, CHUNK)[2:]], mapped(blocks_of(1, 1, 1)), [0]),
    "freed": lambda blocks: (blocks[:1], mapped(blocks), [0]),
    "freed and allocated": lambda blocks: (blocks_of(CHUNK, 3 * CHUNK), mapped(blocks), [0]),
    "mapped elsewhere": lambda blocks: (blocks, mapped(blocks, 1 << 41), [0]),
    "on another GPU": lambda blocks: (blocks_of(CHUNK, 2 * CHUNK, device=1), mapped(blocks), [0]),
    "shadows elsewhere": lambda blocks: (blocks, mapped(blocks), [0, 1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_does_not_fit_what_has_changed(change: str) -> None:
    blocks = blocks_of(CHUNK, 2 * CHUNK)
    layout = Layout(blocks, mapped(blocks), [0], [])
    assert layout.fits(list(blocks), mapped(blocks), [0])
    assert not layout.fits(*CHANGES[change](blocks))


@given(st.sets(st.integers(0, 5)), st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(0, 3))))
def test_zeros_come_first_then_what_was_written_first(zeros: set[int], written: list[tuple[int, int]]) -> None:
    blocks = blocks_of(3 * CHUNK, 3 * CHUNK)
    before = [((SESSION, block), chunk) for block, chunk in written]
    layout = Layout(blocks, mapped(blocks), [], before)
    order = layout.order(sorted(zeros))
    assert sorted(order) == list(range(6))
    assert set(order[: len(zeros)]) == zeros
    assert order[len(zeros) :] == [n for n in first_written_first(layout.chunks, before) if n not in zeros]
    assert layout.order([]) == first_written_first(layout.chunks, before), "it may be asked again"


@pytest.mark.parametrize("changed", [False, True])
def test_what_was_foreseen_is_taken_if_it_still_fits(monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    made: list[Layout] = []

    def layout(*arguments: Any) -> Layout:
        made.append(Layout(*arguments))
        return made[-1]

    monkeypatch.setattr(window, "Layout", layout)
    windows = Windows(CowSettings(), driver.Lane)
    blocks = blocks_of(2 * CHUNK, CHUNK)
    windows.foresee(blocks, mapped(blocks), [((SESSION, 2), 0)])
    if changed:
        blocks = blocks_of(2 * CHUNK, CHUNK, 3 * CHUNK)
    process = SimpleNamespace(session=SESSION, pid=1, ordinals=dict, alive=lambda: True)
    detached = SimpleNamespace(blocks=[SimpleNamespace(number=b.key[1], size=b.size, key=b.key) for b in blocks])
    sink = SimpleNamespace(placeable=0, place_limit=0)
    feed = windows.lay_out([process], {SESSION: detached}, blocks, mapped(blocks), None, sink)  # type: ignore[list-item,dict-item,arg-type]
    assert len(made) == 1 + changed
    assert feed.places is made[-1].places
    taken = [feed.take() for _ in feed.places]
    assert [piece.chunk for piece in taken if piece] == [2, 0, 1, *([3, 4, 5] if changed else [])]
    windows.close()


def test_a_checkpoint_may_be_given_up_while_its_windows_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, which ends what there is of them."""
    blocks = [Block((bytes([number]) * 16, 1), CHUNK, 0, -1) for number in (1, 2)]
    processes = [SimpleNamespace(session=b.key[0], pid=1, ordinals=dict, alive=lambda: True) for b in blocks]
    detached = {b.key[0]: SimpleNamespace(blocks=[SimpleNamespace(number=1, size=b.size, key=b.key)]) for b in blocks}
    sink = SimpleNamespace(placeable=0, place_limit=0)
    windows = Windows(CowSettings(), driver.Lane)
    windows.foresee(blocks, mapped(blocks), [])
    ending, laid_out, made = threading.Event(), threading.Event(), itertools.count()
    with ThreadPoolExecutor() as pool:
        given_up: list[Future[None]] = []

        class Slow(ProcessWindow):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                if next(made):  # the first of two is there, if any is to be seen yet
                    given_up.append(pool.submit(windows.over))
                    ending.wait(0.5)

            def end(self) -> None:
                ending.set()
                laid_out.wait(5)
                super().end()

        monkeypatch.setattr(window, "ProcessWindow", Slow)
        windows.lay_out(processes, detached, blocks, mapped(blocks), None, sink)  # type: ignore[arg-type]
        laid_out.set()
        given_up[0].result(10)
        windows.over()
        assert [windows.of(process).descriptors() for process in processes] == [[], []]  # type: ignore[arg-type]
    windows.close()


def test_zeros_are_known_by_the_hash_of_as_many() -> None:
    places = SavePlaces(places_of(blocks := blocks_of(CHUNK + CHUNK // 2), mapped(blocks)))
    whole, half = zero_hash(CHUNK), zero_hash(CHUNK // 2)
    assert places.zeros([whole, half]) == [0, 1]
    assert places.zeros([bytes(16), half]) == [1]
    packed = places.packed([1])
    assert [one.address for one in packed] == [1 << 40, 0]
    assert [one.address for one in places.packed([])] == [1 << 40, (1 << 40) + CHUNK], "the others are copies"


def test_a_plan_has_a_queue_for_gpus_that_only_shadows_are_on() -> None:
    places = SavePlaces(places_of(blocks := blocks_of(CHUNK, device=1), mapped(blocks)))
    assert SavePlan(places, [0], None, join_bytes=CHUNK).devices == [1]
    plan = SavePlan(places, [0], None, join_bytes=CHUNK, pools=[PoolFlags(0, 0, 0, 0, 0)])
    assert plan.devices == [0, 1]
    assert SavePlaces(places, [0]).packed([])[0].queue == 1
    ready = SavePlaces(places, [0])
    assert SavePlan(ready, [0], None, join_bytes=CHUNK, pools=[PoolFlags(0, 0, 0, 0, 0)]).places is ready
