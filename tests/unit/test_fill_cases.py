"""Whatever is filled from wherever, wanted by whomever and mapped whenever: each place comes once, and counts once."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from phos.gpu_engine.cow.chunk_table import UNSAVED
from phos.gpu_engine.fill_plan import ALL_ZEROS, BROKEN, GET, NOTHING_LEFT, NOTHING_YET, OUT_OF_TIME
from tests.unit.fill_scene import SIZE, FillScene

ZEROS_AT_ONCE = 64
NONSENSE = [0xFFFFFFFF, 1 << 31, 1000]


@dataclass
class Case:
    """Blocks, and what happens."""

    blocks: list[str]
    devices: list[int]
    order: list[int]
    join: int
    mapped: bool
    moments: list[tuple[str, int, list[int]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def letters(shape: str) -> st.SearchStrategy[str]:
        return st.text(shape, min_size=1, max_size=6)

    block = st.one_of(letters("aA"), letters("m0"), letters("aabmM0e"), st.just("0" * (ZEROS_AT_ONCE + 2)))
    blocks = draw(st.lists(block, min_size=1, max_size=6))
    blocks = [text + "." * draw(st.booleans()) for text in blocks]
    count = sum(len(text.rstrip(".")) for text in blocks)
    order = list(range(count))
    if draw(st.booleans()):
        order = list(draw(st.permutations(order)))
    asked = st.lists(st.one_of(st.integers(0, count - 1), st.sampled_from([count, *NONSENSE])), max_size=4)
    what = st.sampled_from(["step", "step", "step", "step", "ask", "ask", "want", "map", "ready", "late"])
    moments = draw(st.lists(st.tuples(what, st.integers(0, 5), asked), max_size=60))
    devices = draw(st.lists(st.integers(0, 1), min_size=len(blocks), max_size=len(blocks)))
    return Case(blocks, devices, order, draw(st.integers(1, 5)), draw(st.booleans()), moments)


class Model:
    """What must be true of a scene whenever something is asked of its driver, and after each step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.scene = FillScene(
            case.blocks, case.order, join=case.join, processes=2, devices=case.devices, mapped=case.mapped
        )
        self.scene.engine.when = self.look
        self.block_of = {number: block for block, each in enumerate(self.scene.of_block) for number in each}
        self.mapped = set(range(len(case.blocks))) if case.mapped else set()
        self.asked: set[int] = set()
        self.heard = 0
        """How many have been asked for by processes, before anybody had them."""
        self.sent = [0, 0]

    def moved(self) -> list[int]:
        return [number for piece in self.scene.pieces() for number in piece]

    def look(self) -> None:
        """Nothing counts whose copy has not been reached."""
        reached = [move for move in self.scene.engine.moves if move.reached]
        there = {number for move in reached for number in self.scene.numbers(move)}
        assert set(self.scene.saved()) <= there

    def had(self, number: int) -> bool:
        return self.scene.table.state(number) != UNSAVED

    def on(self, queue: int) -> list[int]:
        """The places of a GPU, in the order."""
        device = self.scene.plan.devices[queue]
        return [number for number in self.case.order if self.scene.places[number].device == device]

    def available(self, number: int) -> bool:
        return not self.had(number) and self.block_of[number] in self.mapped

    def step(self, queue: int) -> int:
        """Take a piece, which must be the right one."""
        scene = self.scene
        left = [number for number in self.on(queue) if not self.had(number)]
        urgent = {number for number in self.asked if number in left and self.available(number)}
        before = len(scene.engine.moves)
        status = scene.step(queue)
        self.look()
        assert scene.arrived == sum(scene.places[number].size for number in scene.saved())
        new = scene.pieces()[before:]
        if status in (NOTHING_LEFT, NOTHING_YET):
            assert (status == NOTHING_LEFT) == (not left)
            assert not new
            assert not urgent
            assert not left or not self.available(left[0])
            assert all(scene.table.state(n) == 2 for n in self.on(queue) if self.had(n)), "what was taken has landed"
            return status
        assert status in (OUT_OF_TIME, GET)
        assert len(new) == 1
        piece = new[0]
        if urgent:
            assert len(piece) == 1
            assert piece[0] in urgent
        else:
            assert piece == self.following(left)
        assert all(self.block_of[number] in self.mapped for number in piece)
        assert (scene.places[piece[0]].content is not None and self.letter(piece[0]) == "e") == (status == GET)
        return status

    def letter(self, number: int) -> str:
        block = self.block_of[number]
        return self.case.blocks[block][number - self.scene.of_block[block][0]]

    def following(self, left: list[int]) -> list[int]:
        """The first of the order, and as many of its neighbours as may come with it."""
        places, piece = self.scene.places, [left[0]]
        order = self.on(self.scene.plan.devices.index(places[left[0]].device))
        at = order.index(left[0])
        for number in order[at + 1 :]:
            a, b = places[piece[-1]], places[number]
            size = sum(places[each].size for each in piece)
            if number != piece[-1] + 1 or number not in left or a.key != b.key or a.descriptor != b.descriptor:
                break
            if b.descriptor == ALL_ZEROS:
                if len(piece) == ZEROS_AT_ONCE:
                    break
            elif self.letter(number) == "e" or b.source != a.source + a.size or size + b.size > self.case.join * SIZE:
                break
            piece.append(number)
        return piece

    def happen(self, what: str, which: int, numbers: list[int]) -> None:
        """A moment of the case."""
        scene = self.scene
        if what == "step":
            self.step(which % len(scene.plan.devices))
        elif what == "ask":
            process = which % 2
            room = 64 - self.sent[process]  # of its queue
            scene.processes[process].want(*numbers[:room])
            self.sent[process] += len(numbers[:room])
            new = [number for number in numbers[:room] if number < scene.count and not self.had(number)]
            self.heard += len(set(new) - self.asked)
            self.asked |= set(new)
        elif what == "want":
            block = which % len(self.case.blocks)
            there = all(scene.table.state(number) == 2 for number in scene.of_block[block])
            assert scene.plan.want(scene.keys[block]) == there
            self.asked |= {number for number in scene.of_block[block] if not self.had(number)}
        elif what == "map":
            due = scene.plan.due()
            assert due is None or scene.keys.index(due) not in self.mapped
            block = which % len(self.case.blocks) if due is None else scene.keys.index(due)
            scene.plan.map(scene.keys[block])
            self.mapped.add(block)
        else:
            scene.engine.ready = what == "ready"

    def finish(self) -> None:
        """All becomes mapped when it is due, and comes."""
        queues = range(len(self.scene.plan.devices))
        over: set[int] = set()
        while len(over) < len(queues):
            for queue in queues:
                for _ in range(self.scene.count + 1):
                    if (status := self.step(queue)) in (NOTHING_YET, NOTHING_LEFT):
                        break
                assert status != BROKEN
                if status == NOTHING_LEFT:
                    over.add(queue)
                else:
                    due = self.scene.plan.due()
                    assert due is not None, "who waits has said what for"
                    self.happen("map", 0, [])
        assert sorted(self.moved()) == list(range(self.scene.count))
        assert self.scene.saved() == list(range(self.scene.count))
        assert self.scene.arrived == sum(place.size for place in self.scene.places)
        count, size = self.scene.plan.on_demand()
        assert self.heard <= count <= sum(self.sent)
        assert size <= count * SIZE


@settings(max_examples=80)
@given(cases())
def test_each_place_comes_once_and_counts_once(case: Case) -> None:
    model = Model(case)
    try:
        for what, which, numbers in case.moments:
            model.happen(what, which, numbers)
        model.finish()
    finally:
        FillScene.made.pop().close()
