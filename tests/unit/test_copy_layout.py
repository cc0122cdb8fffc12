"""Structures and constants of the native copies: of copy_lane.h, copy_loop.c, and what fills and saves by plan."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from phos.gpu_engine import copy_lane, copy_loop, fill_plan, save_places, save_plan
from phos.gpu_engine.content_hash import SPAN_BYTES, THREADS
from phos.gpu_engine.copy_work import SLOTS
from phos.gpu_engine.fill_plan import FillPlan
from phos.images.formats import HASH_SIZE
from tests.unit.fill_places import FillPlace, packed
from tests.unit.image_sets import skip

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "gpu_engine"

Layout = dict[str, dict[str, tuple[int, int]]]

MACROS = ["SLOTS", "NOT_READY"]
FILL_MACROS = [*MACROS, "PHOS_FILL_IN_MEMORY", "PHOS_FILL_ZEROS", "PHOS_FILL_ELSEWHERE", "PHOS_HASH_BYTES"]


def layout_of(
    folder: Path, source: str, headers: Sequence[str], others: Sequence[str], macros: Sequence[str]
) -> Layout:
    """Offset and size of each field by structure, "" is the whole; and what the constants are, in "enum"."""
    if shutil.which("gcc") is None:
        skip("no C compiler")
    text = "\n".join((ENGINE / name).read_text() for name in (*headers, source))
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lines: list[str] = []
    for name, body in re.findall(r"struct phos_(\w+) \{\n(.*?)\n\};", text, re.DOTALL):
        c = f"struct phos_{name}"
        lines.append(f'printf("{name} . 0 %zu\\n", sizeof({c}));')
        for declared in body.split(";"):
            for field in re.findall(r"\(\*(\w+)\)", declared) or re.findall(
                r"(\w+)(?:\[\w+\])?(?=,|$)", declared.strip()
            ):
                size = f"sizeof((({c} *)0)->{field})"
                lines.append(f'printf("{name} {field} %zu %zu\\n", offsetof({c}, {field}), {size});')
    constants = [name for body in re.findall(r"enum \{ (.*?) \};", text) for name in re.findall(r"[A-Z]\w+", body)]
    lines += [f'printf("enum {name} %d 0\\n", (int){name});' for name in [*constants, *macros]]
    program = folder / f"{source.removesuffix('.c')}_layout"
    program.with_suffix(".c").write_text(
        f'#include "{source}"\n#include <stdio.h>\nint main(void)\n{{\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", f"-I{ENGINE}"]
    sources = [program.with_suffix(".c"), *(ROOT / name for name in others)]
    subprocess.run(["gcc", *flags, "-o", program, *sources], check=True)
    shown = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    result: Layout = {}
    for structure, field, offset, size in map(str.split, shown.splitlines()):
        result.setdefault(structure, {})["" if field == "." else field] = int(offset), int(size)
    return result


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """What is in copy_lane.h and copy_loop.c."""
    others = ("images/append.c", "images/chunk_hash.c", "gpu_engine/cow/chunk_table.c")
    return layout_of(tmp_path_factory.mktemp("layout"), "copy_loop.c", ["copy_lane.h"], others, MACROS)


@pytest.fixture(scope="module")
def fill_layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """What is in copy_lane.h, fill_plan.h and fill_loop.c."""
    others = ("gpu_engine/fill_plan.c", "gpu_engine/cow/chunk_table.c")
    headers = ["copy_lane.h", "fill_plan.h"]
    return layout_of(tmp_path_factory.mktemp("layout"), "fill_loop.c", headers, others, FILL_MACROS)


@pytest.fixture(scope="module")
def save_layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """What is in copy_lane.h, save_plan.h and save_loop.c."""
    others = ("gpu_engine/save_plan.c", "gpu_engine/cow/chunk_table.c")
    headers = ["copy_lane.h", "save_plan.h"]
    macros = [
        *MACROS,
        "PHOS_SAVE_IN_PLACE",
        "PHOS_SAVE_TAKEN",
        "PHOS_SAVE_NOTHING_YET",
        "PHOS_SAVE_NOTHING_LEFT",
        "MOST",
    ]
    return layout_of(tmp_path_factory.mktemp("layout"), "save_loop.c", headers, others, macros)


def as_python(structure: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """The same of a structure of ours."""
    fields = {field[0]: getattr(structure, field[0]) for field in structure._fields_}
    return {"": (0, ctypes.sizeof(structure)), **{name: (each.offset, each.size) for name, each in fields.items()}}


def unpacked(packed: bytes, fields: dict[str, tuple[int, int]]) -> dict[str, int]:
    """The fields' values, unsigned; bytes that are longer than a word are left out."""
    assert len(packed) == fields[""][1]
    forms = {4: "<I", 8: "<Q"}
    return {
        name: struct.unpack_from(forms[size], packed, offset)[0]
        for name, (offset, size) in fields.items()
        if name and size in forms
    }


@pytest.mark.parametrize(
    "name, structure",
    [("copy_lane", copy_lane.LaneRecord), ("copy_failure", copy_lane.Failure), ("save_job", copy_loop.SaveJob)],
)
def test_structures_that_save_are_those_of_the_source(
    layout: Layout, name: str, structure: type[ctypes.Structure]
) -> None:
    assert as_python(structure) == layout[name]


@pytest.mark.parametrize(
    "name, structure",
    [
        ("copy_lane", copy_lane.LaneRecord),
        ("copy_failure", copy_lane.Failure),
        ("fill_queue", fill_plan._Queue),
        ("fill_window", fill_plan._Window),
        ("fill_load", fill_plan._Load),
        ("fill_step", fill_plan._Step),
        ("fill_worker", fill_plan._Worker),
    ],
)
def test_structures_that_fill_are_those_of_the_source(
    fill_layout: Layout, name: str, structure: type[ctypes.Structure]
) -> None:
    assert as_python(structure) == fill_layout[name]


def test_a_plan_is_that_of_the_source_up_to_its_lock(fill_layout: Layout) -> None:
    expected = dict(fill_layout["fill_plan"])
    whole, (lock, lock_size) = expected.pop("")[1], expected.pop("lock")
    found = as_python(fill_plan._Plan)
    assert found.pop("") == (0, lock)
    assert found == expected
    assert lock + lock_size <= whole == fill_plan._library().phos_fill_plan_size()


@pytest.mark.parametrize(
    "name, structure",
    [
        ("save_place", save_places.Place),
        ("save_made", save_plan._Made),
        ("save_window", save_plan._Window),
        ("save_pool", save_plan._Pool),
        ("save_piece", save_plan._Piece),
        ("save_record", save_plan._Record),
        ("save_pump", save_plan._Pump),
    ],
)
def test_structures_that_save_into_memory_are_those_of_the_source(
    save_layout: Layout, name: str, structure: type[ctypes.Structure]
) -> None:
    assert as_python(structure) == save_layout[name]


def test_a_queue_that_saves_is_that_of_the_source(save_layout: Layout) -> None:
    expected, found = save_layout["save_queue"], as_python(save_plan._Queue)
    at, size = found.pop("rings")
    rings = ["asked_head", "asked_tail", "made_head", "made_tail"]
    assert [expected[name] for name in rings] == [(at + size // 4 * i, size // 4) for i in range(4)]
    assert found == {name: each for name, each in expected.items() if name not in rings}


def test_a_plan_that_saves_is_that_of_the_source_up_to_its_lock(save_layout: Layout) -> None:
    expected = dict(save_layout["save_plan"])
    whole, (lock, lock_size) = expected.pop("")[1], expected.pop("lock")
    found = as_python(save_plan._Plan)
    assert found.pop("") == (0, lock)
    assert found == expected
    assert lock + lock_size <= whole == save_plan._library().phos_save_plan_size()


def test_constants_that_save_are_those_of_the_source(save_layout: Layout) -> None:
    constants = {name: value for name, (value, _) in save_layout["enum"].items()}
    assert constants["PHOS_SAVE_IN_PLACE"] & 0xFFFFFFFF == save_plan.IN_PLACE
    assert constants["MOST"] == save_plan.events_of_a_pump()
    assert constants["PHOS_SAVE_TAKEN"] == save_plan.TAKEN
    assert constants["PHOS_SAVE_NOTHING_YET"] == save_plan.NOTHING_YET
    assert constants["PHOS_SAVE_NOTHING_LEFT"] == save_plan.NOTHING_LEFT
    assert constants["DONE"] == save_plan.DONE


def test_a_worker_has_its_size(fill_layout: Layout) -> None:
    library = fill_plan._library()
    library.phos_fill_worker_size.restype = ctypes.c_uint64
    assert library.phos_fill_worker_size() == ctypes.sizeof(fill_plan._Worker) == fill_layout["fill_worker"][""][1]


def test_places_are_packed_as_the_source_has_them(fill_layout: Layout) -> None:
    fields = fill_layout["fill_place"]
    hash_ = bytes(range(1, HASH_SIZE + 1))
    first = FillPlace((b"s" * 16, 1), 2, 3, 0, 5, 6, 7, hash_, None)
    second = FillPlace((b"s" * 16, 2), 12, (1 << 63) + 13, 4, 15, -3, (1 << 63) + 17, bytes(HASH_SIZE), None)
    plan: FillPlan[None] = FillPlan(packed([first, second]), [1, 0], 100)
    size = fields[""][1]
    found = [bytes(plan._packed)[at : at + size] for at in (0, size)]
    assert len(plan._packed) == 2 * size
    expected = {
        "address": 3,
        "source": 7,
        "size": 2,
        "chunk_bytes": 5,
        "descriptor": 6,
        "block": 0,
        "queue": 0,
        "zero": 0,
    }
    assert unpacked(found[0], fields) == expected
    expected = {"address": (1 << 63) + 13, "source": (1 << 63) + 17, "size": 12, "chunk_bytes": 15}
    expected |= {"descriptor": 2**32 - 3, "block": 1, "queue": 1, "zero": 0}
    assert unpacked(found[1], fields) == expected
    at, length = fields["hash"]
    assert (found[0][at : at + length], found[1][at : at + length]) == (hash_, bytes(HASH_SIZE))
    plan.places.get_all()  # changes what lies in files, and nothing else
    expected = {**unpacked(found[0], fields), "descriptor": 2**32 - 3}
    assert unpacked(bytes(plan._packed)[:size], fields) == expected
    assert bytes(plan._packed)[size:] == found[1]


def test_saves_are_packed_as_the_source_has_them(layout: Layout) -> None:
    packed = copy_loop.packed_save(1, 2, hashes=4, places=5, zero_tail=6, known=True, chunk=8)
    expected = {"device": 1, "size": 2, "hashes": 4, "places": 5, "zero_tail": 6, "known": 1, "chunk": 8}
    assert unpacked(packed, layout["save"]) == expected


def test_calls_are_numbered_as_in_the_source(layout: Layout) -> None:
    names = {
        "memcpy_to_device": "cuMemcpyHtoDAsync",
        "memcpy_to_host": "cuMemcpyDtoHAsync",
        "memset_8": "cuMemsetD8Async",
        "launch": "cuLaunchKernel",
        "record": "cuEventRecord",
        "wait": "cuEventSynchronize",
        "query": "cuEventQuery",
        "stream_wait": "cuStreamWaitEvent",
    }
    calls = [name for name, _ in copy_lane.CALLS]
    members = sorted((offset, name) for name, (offset, _) in layout["copy_driver"].items() if name)
    assert [names[name] for _, name in members] == calls
    assert all(symbol.removesuffix("_v2") == name for name, symbol in copy_lane.CALLS)
    constants = {name: value for name, (value, _) in layout["enum"].items()}
    assert constants["SLOTS"] == SLOTS
    failing = {name.split("_8")[0].upper(): copy_lane.CHANGED + 1 + calls.index(call) for name, call in names.items()}
    failing |= {"READING": copy_lane.READING, "APPENDING": copy_lane.APPENDING, "CHANGED": copy_lane.CHANGED}
    assert {name: constants[name] for name in failing} == failing
    assert set(constants) == {*failing, *MACROS}


def test_constants_are_those_of_the_source(fill_layout: Layout) -> None:
    constants = {name: value for name, (value, _) in fill_layout["enum"].items()}
    expected = {
        "PHOS_FILL_IN_MEMORY": fill_plan.IN_MEMORY,
        "PHOS_FILL_ZEROS": fill_plan.ALL_ZEROS,
        "PHOS_FILL_ELSEWHERE": fill_plan.ELSEWHERE,
        "PHOS_HASH_BYTES": HASH_SIZE,
        "SLOTS": SLOTS,
        "OUT_OF_TIME": fill_plan.OUT_OF_TIME,
        "NOTHING_YET": fill_plan.NOTHING_YET,
        "NOTHING_LEFT": fill_plan.NOTHING_LEFT,
        "ELSEWHERE": fill_plan.GET,
        "BROKEN": fill_plan.BROKEN,
    }
    assert {name: constants[name] for name in expected} == expected


def test_kernels_are_launched_with_the_numbers_of_their_source() -> None:
    source = (ENGINE / "content_hash.cu").read_text()
    for name, value in (("SPAN", SPAN_BYTES), ("THREADS", THREADS)):
        found = re.search(rf"(?:#define|\b\w+ )\s*{name}\b\s*=?\s*(\d+)", source)
        assert found is not None
        assert int(found[1]) == value
