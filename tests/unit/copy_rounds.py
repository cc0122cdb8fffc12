"""Copies between files and the software GPU's memory: `copy_rounds NAME FOLDER CASE...`, with arguments in JSON.

The software GPU's memory is plain memory of the process, so what is there can be compared byte by byte. What is wrong
ends the process with a traceback. test_copy_loop.py runs the rounds.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from phos.gpu_engine import driver
from phos.gpu_engine.copy_work import Cancelled, Piece
from phos.gpu_engine.ring import CHUNK_BYTES as CHUNK
from tests.unit import copy_rounds_loading, copy_rounds_placed, copy_rounds_saving
from tests.unit.copy_filling import MIXED, Filling, Store, places_of, reading_of
from tests.unit.copy_machine import PATIENCE, Given, Machine, fails, started, writer_in


def cancelled(folder: Path) -> None:
    """A job that saves and is given up ends so; the next one is right."""
    machine = Machine(2)
    blocks = machine.blocks(["xx" * 8] * 2)
    event = threading.Event()

    class Stopping(Given):
        def landed(self, piece: Piece) -> None:
            super().landed(piece)
            event.set()

    pieces = [machine.piece(block, at * CHUNK) for block in blocks for at in range(8)]
    with writer_in(folder / "image", 2) as writer:
        source = Stopping(pieces)
        fails(Cancelled, lambda: machine.copier.drain(source, 0, writer, machine.progress(), event))
        assert 0 < len(source.saved) < len(pieces)
        fails(Cancelled, lambda: machine.copier.save(blocks, writer, machine.progress(), event, machine.mapped))
    machine.saves_still(folder / "next")
    event.clear()
    waiting = Given([None] * 1_000_000)
    with writer_in(folder / "more", 2) as writer:
        thread, failures = started(lambda: machine.copier.drain(waiting, 0, writer, machine.progress(), event))
        time.sleep(0.05)
        assert thread.is_alive()
        event.set()
        thread.join(PATIENCE)
        assert [type(failure) for failure in failures] == [Cancelled]
    machine.saves_still(folder / "last")


def both_ways(folder: Path) -> None:
    """One saves while the other loads, with the same workers."""
    machine = Machine(3)
    store = Store(folder, 16 * CHUNK)
    blocks = machine.blocks(["xx" * 5, "xx00xxx", "x"] * 2)
    reading = reading_of(machine, store, True)
    with writer_in(folder / "image") as writer:
        filling = Filling(machine, places_of(machine, store, MIXED))
        both = threading.Barrier(2)

        def save() -> None:
            both.wait(PATIENCE)
            machine.save(blocks, writer)

        def load() -> None:
            both.wait(PATIENCE)
            filling.run(reading)

        (saving, failures), (loading, more) = started(save), started(load)
        for thread in (saving, loading):
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert not failures + more, failures + more
        machine.compare(writer, blocks)
        filling.all_arrived()


def first_use(folder: Path, slow: bool) -> None:
    """All workers begin at once, in a process that has copied nothing yet."""
    workers = 6
    machine = Machine(workers)
    blocks = machine.blocks(["xx"] * workers * 2)
    if slow:  # so that every worker asks for the entry points before the first has them
        entry_points = driver.entry_points

        def slowly(symbols: Sequence[str]) -> list[int]:
            time.sleep(0.1)
            return entry_points(symbols)

        driver.entry_points = slowly
    together = threading.Barrier(workers)
    local = threading.local()

    class Together(Given):
        def take(self) -> Piece | None:
            if not hasattr(local, "met"):
                local.met = True
                together.wait(PATIENCE)
            return super().take()

    with writer_in(folder / "image", workers) as writer:
        machine.drain(Together([machine.piece(block, urgent=True) for block in blocks]), writer)
        machine.compare(writer, blocks)
        # Memory that was given back by mistake is used again.
        kept = [(ctypes.c_uint64 * size)(*[1] * size) for size in (6, 7, 8) for _ in range(1000)]
        again = machine.blocks(["xx"] * workers)
        machine.save(again, writer)
        machine.compare(writer, blocks + again)
        assert len(kept) == 3000


def main() -> None:
    name, folder, *cases = sys.argv[1:]
    rounds = {**vars(copy_rounds_saving), **vars(copy_rounds_placed), **vars(copy_rounds_loading), **globals()}
    play: Callable[..., None] = rounds[name]
    for number, case in enumerate(cases):
        place = Path(folder) / str(number)
        place.mkdir()
        try:
            play(place, *json.loads(case))
        except BaseException:
            print(f"{name}, {case}:", file=sys.stderr)
            raise
    print("RIGHT")


if __name__ == "__main__":
    main()
