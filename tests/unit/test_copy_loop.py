"""The native copy loop (gpu_engine/copy_loop.c) under the copier: what it copies, says and leaves behind.

Each test is a round of copy_rounds.py in a process of its own, on the software GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from phos.gpu_engine import copy_loop
from phos.gpu_engine.copy_work import SLOTS, HashRoom
from phos.gpu_engine.errors import DriverError
from phos.images.append import StripeState
from tests.unit.image_sets import skip
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


@needs_softgpu
def test_with_permits_few_pieces_are_under_way(tmp_path: Path) -> None:
    play(tmp_path, "save_permitted", SOFTGPU_COPY_BANDWIDTH="400000000")


@needs_softgpu
def test_copies_that_take_turns_are_complete(tmp_path: Path) -> None:
    play(tmp_path, "save_in_turns", [False], [True])


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
        self._kept = [by_name.get(name, nothing) for name, _ in copy_loop._CALLS]
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
def test_in_turns_one_small_part_is_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    engine = Engine()
    monkeypatch.setattr(copy_loop, "_driver_table", lambda: engine.table)
    monkeypatch.setattr(copy_loop.driver, "fail", refuse)
    turns = copy_loop.Turns()
    turns.begin(2 << 20)
    workers, pieces, size = 5, 4, (5 << 20) + 4096
    stream = SimpleNamespace(handle=0)
    content = random.Random(1).randbytes(size)
    source = ctypes.create_string_buffer(content, size)
    targets = [[ctypes.create_string_buffer(size) for _ in range(pieces)] for _ in range(workers)]
    wrong = [DriverError] if fails else []
    raised: list[type[BaseException]] = []
    right: list[bool] = []
    if fails:
        engine.refused = 4096

    def work(number: int) -> None:
        lane = copy_loop.CopyLane(stream, [2 * number + 1, 2 * number + 2], [0, 0])  # type: ignore[arg-type]
        state = StripeState(descriptor=-1, chunk=4 << 20)
        job = copy_loop.SaveJob(ctypes.pointer(state), turns=turns.address)
        for piece, target in enumerate(targets[number]):
            device = engine.refused if fails and (number, piece) == (2, 1) else ctypes.addressof(source)
            place = ctypes.addressof(target)
            save = copy_loop.packed_save(
                device, size, place=place, hashes=0, places=0, zero_tail=0, known=False, chunk=0
            )
            try:
                lane.save(job, [save])
            except DriverError as error:
                raised.append(type(error))
            else:
                right.append(target.raw == content)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert raised == wrong
    assert right == [True] * (workers * pieces - len(wrong))
    assert engine.most == 1
    assert sorted(set(engine.parts)) == [(1 << 20) + 4096, 2 << 20]
    assert len(engine.parts) == 3 * (workers * pieces - len(wrong))


@needs_softgpu
def test_small_pieces_are_saved_together_with_one_permit(tmp_path: Path) -> None:
    play(tmp_path, "save_small_with_one_permit")


@needs_softgpu
def test_memory_that_changed_too_early_is_found(tmp_path: Path) -> None:
    play(tmp_path, "save_changed", [0, False], [3, False], [1, True])


@needs_softgpu
def test_nothing_is_compared_without_need(tmp_path: Path) -> None:
    play(
        tmp_path,
        "save_not_compared",
        *([why, placed] for why in ("flag", "no word", "unknown", "zeros") for placed in (False, True)),
    )


@needs_softgpu
def test_a_file_that_takes_nothing_ends_its_writer_alone(tmp_path: Path) -> None:
    play(tmp_path, "save_failing", [None])


@needs_softgpu
def test_a_full_disk_ends_its_writer_alone(tmp_path: Path, small_disk: Path) -> None:
    play(tmp_path, "save_failing", [str(small_disk)])


@needs_softgpu
def test_what_has_a_place_is_not_appended(tmp_path: Path) -> None:
    play(tmp_path, "save_placed", [False, False], [False, True], [True, False], [True, True])


@needs_softgpu
def test_pieces_that_fit_nowhere_are_refused(tmp_path: Path) -> None:
    play(tmp_path, "save_too_large")


# ------------------------------------------------------------------------------------------------------------- loading


@needs_softgpu
def test_loads_arrive_once_and_in_order(tmp_path: Path) -> None:
    play(tmp_path, "load_all", ["mixed", True, 1], ["mixed", True, 3])


@needs_softgpu
def test_loads_that_nobody_checks_arrive_once_and_in_order(tmp_path: Path) -> None:
    play(tmp_path, "load_all", ["mixed", False, 2], ["host", False, 1])


@needs_softgpu
def test_blocks_are_filled(tmp_path: Path) -> None:
    play(tmp_path, "load_blocks")


@needs_softgpu
def test_what_arrived_wrong_does_not_count(tmp_path: Path) -> None:
    play(tmp_path, "load_wrong", ["file"], ["host"], ["read"])


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
def test_what_cannot_be_read_counts_for_nobody_later(tmp_path: Path) -> None:
    play(tmp_path, "load_failing", ["short", 3], ["closed", 3], ["reader", 3], ["unchecked", 3], ["short", 0])


@needs_softgpu
def test_files_do_not_overwrite_what_was_read_into_a_slot(tmp_path: Path) -> None:
    play(tmp_path, "load_between_slots")


# ---------------------------------------------------------------------------------------------------------------- both


@needs_softgpu
def test_a_job_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    play(tmp_path, "cancelled")


@needs_softgpu
def test_one_saves_while_another_loads(tmp_path: Path) -> None:
    play(tmp_path, "both_ways")


@needs_softgpu
@pytest.mark.parametrize("attempt", range(3))
def test_all_workers_may_begin_at_once(tmp_path: Path, attempt: int) -> None:
    play(tmp_path, "first_use", [attempt == 0])


# ---------------------------------------------------------------------------------------------------------- structures

Layout = dict[str, dict[str, tuple[int, int]]]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Offset and size of each field in copy_loop.c by structure; "" is the whole. And what its constants are."""
    if shutil.which("gcc") is None:
        skip("no C compiler")
    source = (ROOT / "gpu_engine" / "copy_loop.c").read_text()
    lines: list[str] = []
    for name, body in re.findall(
        r"struct phos_(\w+) \{\n(.*?)\n\};", re.sub(r"/\*.*?\*/", "", source, flags=re.S), re.S
    ):
        c = f"struct phos_{name}"
        lines.append(f'printf("{name} . 0 %zu\\n", sizeof({c}));')
        for declared in body.split(";"):
            for field in re.findall(r"\(\*(\w+)\)", declared) or re.findall(
                r"(\w+)(?:\[\w+\])?(?=,|$)", declared.strip()
            ):
                size = f"sizeof((({c} *)0)->{field})"
                lines.append(f'printf("{name} {field} %zu %zu\\n", offsetof({c}, {field}), {size});')
    for constants in re.findall(r"enum \{ (.*?) \};", source):
        for constant in re.findall(r"[A-Z]\w+", constants):
            lines.append(f'printf("enum {constant} %d 0\\n", (int){constant});')
    lines.append('printf("enum SLOTS %d 0\\n", SLOTS);')
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.c").write_text(
        '#include "copy_loop.c"\n#include <stdio.h>\nint main(void)\n{\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    others = [ROOT / name for name in ("images/append.c", "images/chunk_hash.c", "gpu_engine/cow/chunk_table.c")]
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", f"-I{ROOT / 'gpu_engine'}"]
    subprocess.run(["gcc", *flags, "-o", folder / "layout", folder / "layout.c", *others], check=True)
    shown = subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout
    result: Layout = {}
    for structure, field, offset, size in map(str.split, shown.splitlines()):
        result.setdefault(structure, {})["" if field == "." else field] = int(offset), int(size)
    return result


@pytest.mark.parametrize(
    "name, structure",
    [("copy_lane", copy_loop._Lane), ("save_job", copy_loop.SaveJob), ("copy_failure", copy_loop._Failure)],
)
def test_structures_are_those_of_the_source(layout: Layout, name: str, structure: type[ctypes.Structure]) -> None:
    fields = {field[0]: getattr(structure, field[0]) for field in structure._fields_}
    found = {field: (each.offset, each.size) for field, each in fields.items()}
    assert {**found, "": (0, ctypes.sizeof(structure))} == layout[name]


def test_loads_are_packed_as_the_source_has_them(layout: Layout) -> None:
    room = HashRoom(kernel=5, grid=6, block=7, chunk_bytes=8, room=9, host=10)
    kinds = layout["enum"]
    cases = [
        (copy_loop.packed_load(1, 2, host=3, room=room), {"host": 3, "kind": kinds["HOST"][0]}),
        (
            copy_loop.packed_load(1, 2, file=(12, 13), room=room),
            {"descriptor": 12, "offset": 13, "kind": kinds["IN_FILE"][0]},
        ),
        (copy_loop.packed_load(1, 2), {"kind": kinds["ZEROS"][0]}),
    ]
    hashed = {"hash_kernel": 5, "hash_grid": 6, "hash_block": 7, "chunk_bytes": 8}
    hashed |= {"room": 9, "hashes": 10}
    for number, (packed, special) in enumerate(cases):
        found = unpacked(packed, layout["load"])
        expected = {**dict.fromkeys(found, 0), "device": 1, "size": 2, **special, **(hashed if number < 2 else {})}
        if "descriptor" not in special:
            expected["descriptor"] = 2**32 - 1
        assert found == expected


def test_saves_are_packed_as_the_source_has_them(layout: Layout) -> None:
    packed = copy_loop.packed_save(1, 2, place=3, hashes=4, places=5, zero_tail=6, known=True, chunk=8)
    expected = {"device": 1, "size": 2, "place": 3, "hashes": 4, "places": 5, "zero_tail": 6, "known": 1, "chunk": 8}
    assert unpacked(packed, layout["save"]) == expected


def unpacked(packed: bytes, fields: dict[str, tuple[int, int]]) -> dict[str, int]:
    """The fields' values, unsigned."""
    assert len(packed) == fields[""][1]
    forms = {4: "<I", 8: "<Q"}
    return {name: struct.unpack_from(forms[size], packed, offset)[0] for name, (offset, size) in fields.items() if name}


def test_calls_are_numbered_as_in_the_source(layout: Layout) -> None:
    names = {
        "memcpy_to_device": "cuMemcpyHtoDAsync",
        "memcpy_to_host": "cuMemcpyDtoHAsync",
        "memset_8": "cuMemsetD8Async",
        "launch": "cuLaunchKernel",
        "record": "cuEventRecord",
        "wait": "cuEventSynchronize",
        "synchronise": "cuStreamSynchronize",
        "query": "cuEventQuery",
    }
    calls = [name for name, _ in copy_loop._CALLS]
    members = sorted((offset, name) for name, (offset, _) in layout["copy_driver"].items() if name)
    assert [names[name] for _, name in members] == calls
    constants = {name: value for name, (value, _) in layout["enum"].items()}
    assert constants["SLOTS"] == SLOTS
    failing = {name.split("_8")[0].upper(): copy_loop.CHANGED + 1 + calls.index(call) for name, call in names.items()}
    failing |= {"READING": copy_loop.READING, "APPENDING": copy_loop.APPENDING, "CHANGED": copy_loop.CHANGED}
    assert {name: constants[name] for name in failing} == failing
