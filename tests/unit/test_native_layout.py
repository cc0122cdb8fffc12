"""Structures and constants that Python shares with libphos_chunks.so are those of its source."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from phos.gpu_engine import copy_lane, copy_loop, fill_plan
from phos.gpu_engine.copy_work import SLOTS
from phos.images.formats import HASH_SIZE
from tests.unit.image_sets import skip

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("copy_lane.h", "copy_loop.c", "fill_plan.h", "fill_loop.c")

Layout = dict[str, dict[str, tuple[int, int]]]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Offset and size of each field in the sources by structure; "" is the whole. And what their constants are."""
    if shutil.which("gcc") is None:
        skip("no C compiler")
    source = "".join((ROOT / "gpu_engine" / name).read_text() for name in SOURCES)
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
    constants = [c for each in re.findall(r"enum (?:\w+ )?\{ (.*?) \};", source) for c in re.findall(r"[A-Z]\w+", each)]
    for constant in [*constants, *re.findall(r"#define (PHOS_FILL_\w+|PHOS_HASH_BYTES|SLOTS) ", source)]:
        lines.append(f'printf("enum {constant} %d 0\\n", (int){constant});')
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.c").write_text(
        '#include "copy_loop.c"\n#include "fill_loop.c"\n#include <stdio.h>\nint main(void)\n{\n'
        + "\n".join(lines)
        + "\nreturn 0;\n}\n"
    )
    names = ("images/append.c", "images/chunk_hash.c", "gpu_engine/cow/chunk_table.c", "gpu_engine/fill_plan.c")
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", f"-I{ROOT / 'gpu_engine'}", "-pthread"]
    others = [ROOT / name for name in names]
    subprocess.run(["gcc", *flags, "-o", folder / "layout", folder / "layout.c", *others], check=True)
    shown = subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout
    result: Layout = {}
    for structure, field, offset, size in map(str.split, shown.splitlines()):
        result.setdefault(structure, {})["" if field == "." else field] = int(offset), int(size)
    return result


@pytest.mark.parametrize(
    "name, structure",
    [
        ("copy_lane", copy_lane.LaneRecord),
        ("copy_failure", copy_lane.Failure),
        ("save_job", copy_loop.SaveJob),
        ("fill_queue", fill_plan._Queue),
        ("fill_window", fill_plan._Window),
        ("fill_load", fill_plan._Load),
        ("fill_step", fill_plan._Step),
        ("fill_worker", fill_plan._Worker),
    ],
)
def test_structures_are_those_of_the_source(layout: Layout, name: str, structure: type[ctypes.Structure]) -> None:
    fields = {field[0]: getattr(structure, field[0]) for field in structure._fields_}
    found = {field: (each.offset, each.size) for field, each in fields.items()}
    assert {**found, "": (0, ctypes.sizeof(structure))} == layout[name]


def test_a_plan_is_that_of_the_source_but_for_its_lock(layout: Layout) -> None:
    wanted = dict(layout["fill_plan"])
    whole, lock = wanted.pop(""), wanted.pop("lock")
    fields = {field[0]: getattr(fill_plan._Plan, field[0]) for field in fill_plan._Plan._fields_}
    assert {field: (each.offset, each.size) for field, each in fields.items()} == wanted
    assert ctypes.sizeof(fill_plan._Plan) == lock[0]
    assert fill_plan._library().phos_fill_plan_size() == whole[1]


def test_places_are_packed_as_the_source_has_them(layout: Layout) -> None:
    places = fill_plan.Places(lambda _key, _number: b"")
    places.add((b"s" * 16, 1), 5, [(1, 2, 3, 4, -2, b"h" * 16), (6, 7, 8, 9, 10, b"i" * 16)])
    places.add((b"s" * 16, 2), 3, [(11, 12, 13, 14, -3, b"j" * 16)])
    size = layout["fill_place"][""][1]
    expected = [(1, 2, 3, 4, -2, 0, 0, b"h"), (6, 7, 8, 9, 10, 0, 0, b"i"), (11, 12, 13, 14, -3, 1, 1, b"j")]
    names = ("address", "source", "size", "chunk_bytes", "descriptor", "block", "queue")
    forms = {"address": "<Q", "source": "<Q", "descriptor": "<i"}
    assert len(places.packed) == size * len(expected)
    for number, values in enumerate(expected):
        raw = places.packed[number * size : (number + 1) * size]
        found = [struct.unpack_from(forms.get(name, "<I"), raw, layout["fill_place"][name][0])[0] for name in names]
        offset, length = layout["fill_place"]["hash"]
        assert (*found, raw[offset : offset + length]) == (*values[:-1], values[-1] * HASH_SIZE)
    assert [places.size(number) for number in range(3)] == [3, 8, 13]
    assert [places.descriptor(number) for number in range(3)] == [-2, 10, -3]
    assert [places.key(number) for number in range(3)] == [
        ((b"s" * 16, 1), 0),
        ((b"s" * 16, 1), 1),
        ((b"s" * 16, 2), 0),
    ]


def test_saves_are_packed_as_the_source_has_them(layout: Layout) -> None:
    packed = copy_loop.packed_save(1, 2, place=3, hashes=4, places=5, zero_tail=6, known=True, chunk=8)
    expected = {"device": 1, "size": 2, "place": 3, "hashes": 4, "places": 5, "zero_tail": 6, "known": 1, "chunk": 8}
    fields = layout["save"]
    assert len(packed) == fields[""][1]
    forms = {4: "<I", 8: "<Q"}
    found = {
        name: struct.unpack_from(forms[size], packed, offset)[0] for name, (offset, size) in fields.items() if name
    }
    assert found == expected


def test_constants_are_those_of_the_source(layout: Layout) -> None:
    constants = {name: value for name, (value, _) in layout["enum"].items()}
    assert constants["SLOTS"] == SLOTS
    assert constants["PHOS_HASH_BYTES"] == HASH_SIZE
    places = {"IN_MEMORY": fill_plan.IN_MEMORY, "ZEROS": fill_plan.ALL_ZEROS, "ELSEWHERE": fill_plan.ELSEWHERE}
    assert {name: constants[f"PHOS_FILL_{name}"] for name in places} == places
    ends = ("OUT_OF_TIME", "NOTHING_YET", "NOTHING_LEFT", "ELSEWHERE", "BROKEN")
    wanted = (
        fill_plan.OUT_OF_TIME,
        fill_plan.NOTHING_YET,
        fill_plan.NOTHING_LEFT,
        fill_plan.GET,
        fill_plan.BROKEN,
    )
    assert tuple(constants[name] for name in ends) == wanted


def test_calls_are_numbered_as_in_the_source(layout: Layout) -> None:
    names = {
        "memcpy_to_device": "cuMemcpyHtoDAsync",
        "memcpy_to_host": "cuMemcpyDtoHAsync",
        "memset_8": "cuMemsetD8Async",
        "launch": "cuLaunchKernel",
        "record": "cuEventRecord",
        "wait": "cuEventSynchronize",
        "query": "cuEventQuery",
    }
    calls = [name for name, _ in copy_lane.CALLS]
    members = sorted((offset, name) for name, (offset, _) in layout["copy_driver"].items() if name)
    assert [names[name] for _, name in members] == calls
    constants = {name: value for name, (value, _) in layout["enum"].items()}
    failing = {name.split("_8")[0].upper(): copy_lane.CHANGED + 1 + calls.index(call) for name, call in names.items()}
    failing |= {"READING": copy_lane.READING, "APPENDING": copy_lane.APPENDING, "CHANGED": copy_lane.CHANGED}
    assert {name: constants[name] for name in failing} == failing
