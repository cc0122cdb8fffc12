"""The native copy loops (gpu_engine/copy_loop.c, fill_loop.c) under the copier: what they copy, say and leave behind.

Each test is a round of copy_rounds.py in a process of its own, on the software GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from phos.gpu_engine import copy_lane, save_places, save_plan
from phos.gpu_engine.errors import DriverError
from phos.images.stripe import Room
from tests.unit.softgpu_host import needs_softgpu

ROOT = Path(__file__).resolve().parents[2]


def play(folder: Path, name: str, *cases: Sequence[object], **settings: str) -> None:
    """A round of copy_rounds.py, on two GPUs, with the arguments of each case in turn."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "1",
        "SOFTGPU_MACHINE": folder.name,
        "SOFTGPU_DEVICES": "2",
        # What has been compared is memory for the next: else half of the time goes to the clearing of pages.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": "1000000000",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # and in huge pages, where there are any: they come for less
        **settings,
    }
    command = [sys.executable, "-m", "tests.unit.copy_rounds", name, str(folder), *map(json.dumps, cases or [[]])]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "RIGHT\n"), done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------------------- saving


@needs_softgpu
def test_files_hold_what_memory_held(tmp_path: Path) -> None:
    play(tmp_path, "save_blocks", [2, 1, "none", False], [2, 3, "none", True], [3, 1, "gpu", True])


@needs_softgpu
def test_what_has_come_is_marked_as_saved(tmp_path: Path) -> None:
    play(tmp_path, "save_given")


@needs_softgpu
def test_what_somebody_waits_for_is_saved_alone_and_first(tmp_path: Path) -> None:
    play(tmp_path, "save_urgent")


class Engine:
    """A driver of which only copies to the host work, which says how much of them was under way at once."""

    def __init__(self) -> None:
        self.under_way = self.most = self.refused = 0
        self.parts: list[int] = []
        self.asked: dict[int, int] = {}
        self._lock = threading.Lock()
        integer, address = ctypes.c_int, ctypes.c_uint64
        copy = ctypes.CFUNCTYPE(integer, address, address, ctypes.c_size_t, address)(self._copy)
        query = ctypes.CFUNCTYPE(integer, address)(self._query)
        nothing = ctypes.CFUNCTYPE(integer, address, address)(lambda *_: 0)
        by_name = {"cuMemcpyDtoHAsync": copy, "cuEventQuery": query}
        self._kept = [by_name.get(name, nothing) for name, _ in copy_lane.CALLS]
        self.table = (ctypes.c_uint64 * len(self._kept))(*(ctypes.cast(f, ctypes.c_void_p).value for f in self._kept))

    def _copy(self, host: int, device: int, size: int, _: int) -> int:
        if device == self.refused:
            return 1
        ctypes.memmove(host, device, size)
        with self._lock:
            self.parts.append(size)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        return 0

    def _query(self, event: int) -> int:
        with self._lock:
            self.asked[event] = self.asked.get(event, 0) + 1
            if self.asked[event] % 3:
                return 600  # CUDA_ERROR_NOT_READY
            self.under_way -= 1
            return 0


def refuse(call: str, code: int) -> None:
    """What driver.fail() does where there is a driver."""
    raise DriverError(call, code, "refused")


@pytest.mark.parametrize("fails", [False, True])
def test_in_parts_one_small_part_is_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    engine = Engine()
    monkeypatch.setattr(save_plan, "driver_table", lambda: engine.table)
    monkeypatch.setattr(copy_lane.driver, "fail", refuse)
    pieces, size = 8, (5 << 20) + 4096
    content = random.Random(1).randbytes(size)
    source, room = ctypes.create_string_buffer(content, size), ctypes.create_string_buffer(pieces * (6 << 20))
    if fails:
        engine.refused = 4096
    places = [
        save_places.SavePlace((bytes(16), i), 0, size, 4096 if fails and i == 5 else ctypes.addressof(source), 0)
        for i in range(pieces)
    ]
    plan = save_plan.SavePlan(places, range(pieces), None, join_bytes=size)
    plan.give_room(Room(ctypes.addressof(room), len(room), 1 << 40, 0))
    plan.in_parts(2 << 20)
    pump = save_plan.Pump(plan, 0, 0, range(1, save_plan.events_of_a_pump() + 1))
    if fails:
        with pytest.raises(DriverError):
            pump.run()
    else:
        pump.run()
    done = 5 if fails else pieces
    assert plan.in_turns == done
    saved = [pump.next_record() for _ in range(done)]
    assert pump.next_record() is None
    assert all(one is not None and ctypes.string_at(one.to, size) == content for one in saved)
    assert engine.most == 1
    assert sorted(set(engine.parts)) == [(1 << 20) + 4096, 2 << 20]
    assert len(engine.parts) == 3 * done


# ------------------------------------------------------------------------------------- into memory of an image's own


@needs_softgpu
def test_an_images_memory_holds_what_memory_held(tmp_path: Path) -> None:
    play(tmp_path, "placed_blocks", [True], [False])


@needs_softgpu
def test_what_has_come_there_is_marked_as_saved(tmp_path: Path) -> None:
    play(tmp_path, "placed_table")


@needs_softgpu
def test_what_a_process_waits_for_comes_behind_what_is_under_way(tmp_path: Path) -> None:
    play(tmp_path, "placed_wanted", SOFTGPU_COPY_BANDWIDTH="400000000")


@needs_softgpu
def test_copies_by_parts_are_complete(tmp_path: Path) -> None:
    play(tmp_path, "placed_in_parts")


@needs_softgpu
def test_memory_that_changed_too_early_is_found_there(tmp_path: Path) -> None:
    play(tmp_path, "placed_changed", [0, True], [5, True], [3, False])


@needs_softgpu
def test_nothing_is_compared_there_without_need(tmp_path: Path) -> None:
    play(tmp_path, "placed_not_compared", ["unknown"], ["zeros"], ["nobody"])


@needs_softgpu
def test_copies_there_that_fail_end_their_job_alone(tmp_path: Path) -> None:
    play(tmp_path, "placed_failing", ["driver"], ["room"])


@needs_softgpu
def test_a_save_there_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    play(tmp_path, "placed_cancelled", SOFTGPU_COPY_BANDWIDTH="400000000")


@needs_softgpu
def test_a_job_whose_workers_are_wanted_elsewhere_is_settled_to_its_end(tmp_path: Path) -> None:
    play(tmp_path, "placed_settled_beside_others")


@needs_softgpu
def test_workers_that_rest_while_a_job_is_settled(tmp_path: Path) -> None:
    play(tmp_path, "placed_resting", [False], [True])


@needs_softgpu
def test_the_first_failure_is_what_is_said(tmp_path: Path) -> None:
    play(tmp_path, "placed_failing_for_good")


# ------------------------------------------------------------------------------------------------------ into its files


@needs_softgpu
def test_memory_that_changed_too_early_is_found(tmp_path: Path) -> None:
    play(tmp_path, "save_changed", [0], [3])


@needs_softgpu
def test_nothing_is_compared_without_need(tmp_path: Path) -> None:
    play(tmp_path, "save_not_compared", ["flag"], ["no word"], ["unknown"], ["zeros"])


@needs_softgpu
def test_a_file_that_takes_nothing_ends_its_writer_alone(tmp_path: Path) -> None:
    play(tmp_path, "save_failing", [None])


@needs_softgpu
def test_a_full_disk_ends_its_writer_alone(tmp_path: Path, small_disk: Path) -> None:
    play(tmp_path, "save_failing", [str(small_disk)])


@needs_softgpu
def test_pieces_that_fit_nowhere_are_refused(tmp_path: Path) -> None:
    play(tmp_path, "save_too_large")


# ------------------------------------------------------------------------------------------------------------- loading


@needs_softgpu
def test_what_is_loaded_counts_once_and_when_it_is_there(tmp_path: Path) -> None:
    play(tmp_path, "load_all", ["mixed", True, 1], ["mixed", True, 3])


@needs_softgpu
def test_what_nobody_checks_counts_once_and_when_it_is_there(tmp_path: Path) -> None:
    play(tmp_path, "load_all", ["mixed", False, 2], ["host", False, 1])


@needs_softgpu
def test_nothing_to_load_is_loaded_at_once(tmp_path: Path) -> None:
    play(tmp_path, "load_nothing")


@needs_softgpu
def test_blocks_are_filled(tmp_path: Path) -> None:
    play(tmp_path, "load_blocks")


@needs_softgpu
def test_blocks_that_are_mapped_late_are_waited_for(tmp_path: Path) -> None:
    play(tmp_path, "load_mapped_late", [1], [3])


@needs_softgpu
def test_what_arrived_wrong_does_not_count(tmp_path: Path) -> None:
    play(tmp_path, "load_wrong", *([kind, which] for kind in ("file", "host", "read") for which in range(3)))


@needs_softgpu
def test_the_gpu_where_it_arrived_wrong_is_blamed(tmp_path: Path) -> None:
    play(tmp_path, "load_wrong_on_another_gpu")


@needs_softgpu
def test_what_somebody_waits_for_is_loaded_first(tmp_path: Path) -> None:
    play(tmp_path, "load_urgent")


@needs_softgpu
def test_nothing_arrives_sooner_than_it_can(tmp_path: Path) -> None:
    play(tmp_path, "load_slowly", [False], [True], SOFTGPU_COPY_BANDWIDTH="400000000")


@needs_softgpu
def test_nothing_arrives_before_its_copy_ends(tmp_path: Path) -> None:
    play(tmp_path, "load_held", [False], [True], SOFTGPU_COPY_HOLD=str(tmp_path / "held"))


@needs_softgpu
def test_room_for_hashes_is_got_once(tmp_path: Path) -> None:
    play(tmp_path, "keep_rooms")


@needs_softgpu
def test_what_cannot_be_read_counts_for_nobody_later(tmp_path: Path) -> None:
    play(tmp_path, "load_failing", ["short", 3], ["closed", 3], ["reader", 3], ["unchecked", 3], ["short", 0])


@needs_softgpu
@pytest.mark.parametrize("which", range(4))
def test_who_owns_a_file_says_what_is_wrong_with_any_chunk_of_a_piece(tmp_path: Path, which: int) -> None:
    play(tmp_path, "load_failing_joined", [which])


@needs_softgpu
def test_files_do_not_overwrite_what_was_read_into_a_slot(tmp_path: Path) -> None:
    play(tmp_path, "load_between_slots", SOFTGPU_COPY_BANDWIDTH="1000000000")


@needs_softgpu
def test_one_worker_fills_two_gpus(tmp_path: Path) -> None:
    play(tmp_path, "load_with_few_workers")


@needs_softgpu
def test_a_load_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    play(tmp_path, "load_given_up")


# ---------------------------------------------------------------------------------------------------------------- both


@needs_softgpu
def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    play(tmp_path, "cancelled")


@needs_softgpu
def test_one_saves_while_another_loads(tmp_path: Path) -> None:
    play(tmp_path, "both_ways")


@needs_softgpu
@pytest.mark.parametrize("attempt", range(3))
def test_all_workers_may_begin_at_once(tmp_path: Path, attempt: int) -> None:
    play(tmp_path, "first_use", [attempt == 0])
