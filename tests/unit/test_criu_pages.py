"""Copied pages in CRIU's images (images/criu_pages.py): against a model, and against what CRIU itself dumps."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from phos.images import criu_pages
from phos.images.criu_pages import PE_LAZY, PE_PARENT, PE_PRESENT, Run, merge
from phos.images.errors import ImageError
from phos.images.formats import IMG_COMMON
from phos.images.native import launcher
from tests.unit.image_sets import forbids_skips, skip

if not forbids_skips():
    pytest.importorskip("pycriu", reason="no pycriu here")
from pycriu.images import mm_pb2, pagemap_pb2
from pycriu.images.magic import by_name

PAGE = mmap.PAGESIZE
BASE = 0x7F0000000000
TASK = 77
NUMBER = 3
COPIED = "copied.raw"
BOTH = PE_PRESENT | PE_LAZY

LAZY = (0x22, 1)  # MAP_PRIVATE | MAP_ANONYMOUS; VMA_AREA_REGULAR
KINDS = {
    LAZY: BOTH,
    (0x22 | 0x100, 1 | 1 << 5): BOTH,  # MAP_GROWSDOWN; the heap
    (0x02, 1 | 1 << 6): PE_PRESENT,  # a private mapping of a file
    (0x21, 1 | 1 << 8): PE_PRESENT,  # shared
    (0x22 | 0x2000, 1): PE_PRESENT,  # MAP_LOCKED
    (0x22 | 0x40000, 1): PE_PRESENT,  # MAP_HUGETLB
    (0x22, 1 | 1 << 2): PE_PRESENT,  # vsyscall
    (0x22, 1 | 1 << 3): PE_PRESENT,  # vdso
    (0x22, 1 | 1 << 12): PE_PRESENT,  # vvar
}
"""Flags and status of a VMA, and the flags of its pages."""


def wider_entries() -> type[Any]:
    """The message of an entry as CRIU 4.2 has it, and its pycriu (images/pagemap.proto there)."""
    file = descriptor_pb2.FileDescriptorProto(name="pagemap-4.2.proto")
    message = file.message_type.add(name="pagemap_entry")
    field = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind, label) in enumerate(
        [
            ("vaddr", field.TYPE_UINT64, field.LABEL_REQUIRED),
            ("compat_nr_pages", field.TYPE_UINT32, field.LABEL_REQUIRED),
            ("in_parent", field.TYPE_BOOL, field.LABEL_OPTIONAL),
            ("flags", field.TYPE_UINT32, field.LABEL_OPTIONAL),
            ("nr_pages", field.TYPE_UINT64, field.LABEL_OPTIONAL),
        ],
        start=1,
    ):
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: type[Any] = message_factory.GetMessageClass(pool.FindMessageTypeByName("pagemap_entry"))
    return made


INSTALLED = pagemap_pb2.pagemap_entry
WIDER = INSTALLED if "compat_nr_pages" in INSTALLED.DESCRIPTOR.fields_by_name else wider_entries()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With entries as the CRIU that is installed has them; where it need not read them, also with those of CRIU 4.2."""
    forms = [INSTALLED] if "dumped" in metafunc.fixturenames or WIDER is INSTALLED else [INSTALLED, WIDER]
    metafunc.parametrize("form", forms, indirect=True, ids=["installed", "4.2"][: len(forms)])


@pytest.fixture(autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagemap_pb2, "pagemap_entry", request.param)


def entry_of(page: int, count: int, **more: Any) -> Any:
    """An entry of so many pages, the first by its number."""
    entry = pagemap_pb2.pagemap_entry(vaddr=page * PAGE, nr_pages=count, **more)
    if "compat_nr_pages" in entry.DESCRIPTOR.fields_by_name:
        entry.compat_nr_pages = 0
    return entry


# ------------------------------------------------------------------------------------------------- images and a model

Pages = dict[int, tuple[bytes, int]]
"""Page number of the address: its content and flags. The content is empty if it is not in the pages file."""


def write_image(path: Path, kind: str, messages: Iterable[Any]) -> None:
    bodies = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
    frames = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    path.write_bytes(struct.pack("<II", IMG_COMMON, by_name[kind]) + frames)


def bodies_of(path: Path) -> list[bytes]:
    raw, at, bodies = path.read_bytes(), 8, []
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        bodies.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return bodies


def entries_of(path: Path) -> list[tuple[int, int, int]]:
    """(page number, pages, flags) of each entry of a pagemap."""
    entries = [pagemap_pb2.pagemap_entry.FromString(body) for body in bodies_of(path)[1:]]
    assert all(entry.vaddr % PAGE == 0 for entry in entries)
    return [
        (entry.vaddr // PAGE, entry.nr_pages or getattr(entry, "compat_nr_pages", 0), entry.flags) for entry in entries
    ]


def joined(entries: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours with equal flags are one entry."""
    out: list[tuple[int, int, int]] = []
    for first, count, flags in entries:
        if out and out[-1][0] + out[-1][1] == first and out[-1][2] == flags:
            out[-1] = (out[-1][0], out[-1][1] + count, flags)
        else:
            out.append((first, count, flags))
    return out


def entries_for(pages: Mapping[int, tuple[bytes, int]]) -> list[tuple[int, int, int]]:
    return joined((number, 1, pages[number][1]) for number in sorted(pages))


def pages_of(folder: Path, task: int) -> Pages:
    """What an image says of a task's memory; it holds nothing else."""
    pagemap = folder / f"pagemap-{task}.img"
    head = pagemap_pb2.pagemap_head.FromString(bodies_of(pagemap)[0])
    raw, at, pages = (folder / f"pages-{head.pages_id}.img").read_bytes(), 0, Pages()
    for first, count, flags in entries_of(pagemap):
        for number in range(first, first + count):
            assert number not in pages
            pages[number] = (raw[at : at + PAGE] if flags & PE_PRESENT else b"", flags)
            at += PAGE if flags & PE_PRESENT else 0
    assert at == len(raw)
    return pages


def write_pair(folder: Path, task: int, number: int, pages: Mapping[int, tuple[bytes, int]]) -> None:
    """A pagemap and its pages."""
    entries = [entry_of(first, count, flags=flags) for first, count, flags in entries_for(pages)]
    write_image(folder / f"pagemap-{task}.img", "PAGEMAP", [pagemap_pb2.pagemap_head(pages_id=number), *entries])
    (folder / f"pages-{number}.img").write_bytes(b"".join(pages[number][0] for number in sorted(pages)))


def write_memory(folder: Path, vmas: Sequence[tuple[int, int, tuple[int, int]]]) -> None:
    """The image that says what memory there is: (first page number, pages, kind)."""
    names = [field.name for field in mm_pb2.mm_entry.DESCRIPTOR.fields if field.name.startswith("mm_")]
    addresses = dict.fromkeys(set(names) - {"mm_saved_auxv"}, 0)
    mm = mm_pb2.mm_entry(exe_file_id=1, **addresses)
    for first, count, (flags, status) in vmas:
        start, end = first * PAGE, (first + count) * PAGE
        mm.vmas.add(start=start, end=end, pgoff=0, shmid=0, prot=3, flags=flags, status=status, fd=-1)
    write_image(folder / f"mm-{TASK}.img", "MM", [mm])


def call(folder: Path, copied: Sequence[Run], wanted: Iterable[tuple[int, int]], task: int = TASK) -> bool:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    file = os.open(folder / COPIED, os.O_RDWR)
    try:
        return merge(directory, task, COPIED, file, copied, wanted)
    finally:
        os.close(file)
        os.close(directory)


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Page numbers as (first, count) of neighbours."""
    return [(first, count) for first, count, _ in joined((number, 1, 0) for number in sorted(numbers))]


def split(folder: Path, pages: Pages, chosen: Iterable[int], shift: int = 0) -> list[Run]:
    """Write a file of chosen pages: each run where it will be in the pages file, or so many pages further on."""
    chosen = set(chosen)
    places, at = {}, shift * PAGE
    for number in sorted(pages):
        places[number] = at
        at += PAGE if pages[number][1] & PE_PRESENT else 0
    runs = []
    with (folder / COPIED).open("wb") as file:
        file.truncate(at + 5 * PAGE)  # room that was preallocated
        for first, count in runs_of(chosen):
            for begin, length in _contiguous(first, count, places):
                runs.append(Run(begin * PAGE, length * PAGE, places[begin]))
                file.seek(places[begin])
                file.write(b"".join(pages[number][0] for number in range(begin, begin + length)))
    return runs


def _contiguous(first: int, count: int, places: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    begin = first
    for number in range(first + 1, first + count + 1):
        if number == first + count or places[number] != places[number - 1] + PAGE:
            yield begin, number - begin
            begin = number


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ----------------------------------------------------------------------------------------------------- made-up images


@dataclass
class Case:
    """A task's memory, who dumped which page, and where the copied ones lie. In pages from BASE."""

    vmas: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    own: dict[int, int] = field(default_factory=dict)  # flags by page
    wanted: list[tuple[int, int]] = field(default_factory=list)
    copied: list[tuple[int, int, int]] = field(default_factory=list)  # first page, pages, offset in pages
    length: int = 0  # of the file, at least


def kind_at(case: Case, page: int) -> tuple[int, int]:
    return next(kind for first, count, kind in case.vmas if first <= page < first + count)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case, at = Case(), 0
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 2))
        count = draw(st.integers(1, 6))
        case.vmas.append((at, count, draw(st.sampled_from([LAZY, LAZY, *KINDS]))))
        at += count
    everywhere = [page for first, count, _ in case.vmas for page in range(first, first + count)]
    who = {page: draw(st.sampled_from(["nobody", "own", "own", "wanted", "wanted", "wanted"])) for page in everywhere}
    for page in everywhere:
        if who[page] == "own":
            usual = KINDS[kind_at(case, page)]
            case.own[page] = draw(st.sampled_from([usual, usual, usual, PE_LAZY, PE_PRESENT]))
    wanted = [page for page in everywhere if who[page] == "wanted"]
    # Ranges: neighbours at times apart, at times overlapping, some said twice, some empty.
    for page in wanted:
        joins = draw(st.booleans())
        if case.wanted and case.wanted[-1][1] == page and joins:
            case.wanted[-1] = (case.wanted[-1][0], page + 1)
        else:
            case.wanted.append((page - 1 if who.get(page - 1) == "wanted" and draw(st.booleans()) else page, page + 1))
    more = draw(st.booleans())
    if case.wanted and more:
        case.wanted += [draw(st.sampled_from(case.wanted)), (draw(st.sampled_from(everywhere)),) * 2]
    case.wanted = list(draw(st.permutations(case.wanted)))
    # Runs: in their final places or anywhere; some of what nobody wants, also of what CRIU dumped itself.
    extra = [page for page in range(-1, at + 2) if page not in wanted and draw(st.integers(0, 5)) == 0]
    in_place = draw(st.booleans())
    final, end = {}, 0
    for page in sorted({*wanted, *case.own}):
        final[page] = end
        end += 1 if case.own.get(page, PE_PRESENT) & PE_PRESENT else 0
    free = end + 3
    runs: list[tuple[int, int, int]] = []
    for page in sorted([*wanted, *extra]):
        if in_place and page in wanted:
            place = final[page]
        else:
            free += draw(st.integers(0, 1))
            place, free = free, free + 1
        last_run = runs[-1] if runs else (0, 0, 0)
        follows = runs and last_run[0] + last_run[1] == page and last_run[2] + last_run[1] == place
        if follows and draw(st.booleans()):
            runs[-1] = (last_run[0], last_run[1] + 1, last_run[2])
        else:
            runs.append((page, 1, place))
    case.copied = list(draw(st.permutations(runs)))
    case.length = draw(st.sampled_from([0, end, free + 2]))
    return case


def at(page: int) -> int:
    return BASE + page * PAGE


def data(page: int, who: str) -> bytes:
    return random.Random(f"{page} {who}").randbytes(PAGE)


def write_case(folder: Path, case: Case) -> tuple[Pages, list[Run], list[tuple[int, int]]]:
    """Its files; what must become of them, and what to call merge() with."""
    first = BASE // PAGE
    write_memory(folder, [(first + start, count, kind) for start, count, kind in case.vmas])
    own = {first + page: (data(page, "own") if flags & PE_PRESENT else b"", flags) for page, flags in case.own.items()}
    write_pair(folder, TASK, NUMBER, own)
    length = max([case.length, *(offset + count for _, count, offset in case.copied)])
    raw = bytearray(random.Random("junk").randbytes(length * PAGE))
    for start, count, offset in case.copied:
        raw[offset * PAGE : (offset + count) * PAGE] = b"".join(data(start + n, "ours") for n in range(count))
    (folder / COPIED).write_bytes(raw)
    expected = dict(own)
    for start, end in case.wanted:
        for page in range(start, end):
            expected[first + page] = (data(page, "ours"), KINDS[kind_at(case, page)])
    runs = [Run(at(start), count * PAGE, offset * PAGE) for start, count, offset in case.copied]
    return expected, runs, [(at(start), at(end)) for start, end in case.wanted]


def lies_right(case: Case) -> bool:
    """Every wanted page has its final place already."""
    places = {start + n: offset + n for start, count, offset in case.copied for n in range(count)}
    wanted = {page for start, end in case.wanted for page in range(start, end)}
    end = 0
    for page in sorted({*wanted, *case.own}):
        if page in wanted and places[page] != end:
            return False
        end += 1 if case.own.get(page, PE_PRESENT) & PE_PRESENT else 0
    return True


@settings(max_examples=400, deadline=None)
@given(cases())
def test_the_result_is_what_the_model_says(case: Case) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected, runs, wanted = write_case(folder, case)
        before = content(folder)
        in_place = call(folder, runs, wanted)
        after = content(folder)
        assert set(after) == set(before) - {COPIED}
        changed = {file for file in after if after[file] != before[file]}
        if not any(start < end for start, end in wanted):
            assert not in_place
            assert not changed
            return
        assert changed == {f"pagemap-{TASK}.img", f"pages-{NUMBER}.img"}
        assert in_place == lies_right(case)
        assert pages_of(folder, TASK) == expected
        assert entries_of(folder / f"pagemap-{TASK}.img") == entries_for(expected)


SIMPLE = Case(vmas=[(0, 8, LAZY)], own={0: BOTH, 3: BOTH}, wanted=[(1, 3), (4, 6)], copied=[(1, 2, 1), (4, 2, 4)])
"""In place: C w w C w w"""


def moved() -> Case:
    """As SIMPLE, but not where it has to be."""
    return Case(vmas=SIMPLE.vmas, own=SIMPLE.own, wanted=SIMPLE.wanted, copied=[(1, 2, 0), (4, 2, 2)])


def test_the_file_becomes_the_pages_file(tmp_path: Path) -> None:
    expected, runs, wanted = write_case(tmp_path, SIMPLE)
    copied, pages = tmp_path / COPIED, tmp_path / f"pages-{NUMBER}.img"
    pages.chmod(0o640)
    inode = copied.stat().st_ino
    assert call(tmp_path, runs, wanted) is True
    assert pages.stat().st_ino == inode
    assert [path.stat().st_mode & 0o777 for path in (pages, tmp_path / f"pagemap-{TASK}.img")] == [0o640, 0o640]
    assert pages_of(tmp_path, TASK) == expected


def test_pages_elsewhere_are_put_together_in_a_new_file(tmp_path: Path) -> None:
    expected, runs, wanted = write_case(tmp_path, moved())
    assert call(tmp_path, runs, wanted) is False
    assert pages_of(tmp_path, TASK) == expected
    assert not (tmp_path / COPIED).exists()


def test_without_anything_wanted_no_file_of_criu_is_even_read(tmp_path: Path) -> None:
    (tmp_path / COPIED).write_bytes(b"anything")
    assert call(tmp_path, [Run(at(0), PAGE, 0)], [(at(1), at(1))]) is False
    assert list(tmp_path.iterdir()) == []


def test_an_entry_holds_no_more_pages_than_criu_can_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu_pages, "_ENTRY_LIMIT", 3)
    case = Case(vmas=[(0, 9, LAZY)], own={0: BOTH}, wanted=[(1, 9)], copied=[(1, 8, 1)])
    expected, runs, wanted = write_case(tmp_path, case)
    call(tmp_path, runs, wanted)
    entries = entries_of(tmp_path / f"pagemap-{TASK}.img")
    assert max(count for _, count, _ in entries) == 3
    assert joined(entries) == entries_for(expected)
    assert pages_of(tmp_path, TASK) == expected


def test_gigabytes_in_one_piece_are_entries_that_criu_lazy_pages_can_count(tmp_path: Path) -> None:
    """It keeps the length of the longest in an int, as bytes."""
    count = (5 << 30) // PAGE
    write_pair(tmp_path, TASK, NUMBER, {})
    write_memory(tmp_path, [(1000, count, LAZY)])
    with (tmp_path / COPIED).open("wb") as file:
        file.truncate(count * PAGE)
    run = Run(1000 * PAGE, count * PAGE, 0)
    assert call(tmp_path, [run], [(run.address, run.address + run.size)]) is True
    entries = entries_of(tmp_path / f"pagemap-{TASK}.img")
    assert joined(entries) == [(1000, count, PE_PRESENT | PE_LAZY)]
    assert max(length for _, length, _ in entries) * PAGE < 1 << 31
    assert (tmp_path / f"pages-{NUMBER}.img").stat().st_size == count * PAGE


def test_what_a_newer_criu_says_is_kept(tmp_path: Path) -> None:
    """Fields that we do not know, in the head and in an entry: then that entry is not put together with others."""
    expected, runs, wanted = write_case(tmp_path, SIMPLE)
    pagemap = tmp_path / f"pagemap-{TASK}.img"
    head, first, second = bodies_of(pagemap)
    unknown = b"\x98\x06\x07"  # field 99: 7
    write_image(pagemap, "PAGEMAP", [head + unknown, first, second + unknown])
    call(tmp_path, runs, wanted)
    bodies = bodies_of(pagemap)
    assert bodies[0] == head + unknown
    assert bodies[2] == second + unknown
    first_page = BASE // PAGE
    assert entries_of(pagemap) == [(first_page, 3, BOTH), (first_page + 3, 1, BOTH), (first_page + 4, 2, BOTH)]
    assert pages_of(tmp_path, TASK) == expected


def test_an_entry_without_flags_has_its_pages(tmp_path: Path) -> None:
    """So an old CRIU wrote it."""
    expected, runs, wanted = write_case(tmp_path, SIMPLE)
    pagemap = tmp_path / f"pagemap-{TASK}.img"
    entries = [entry_of(at(page) // PAGE, 1) for page in (0, 3)]
    write_image(pagemap, "PAGEMAP", [bodies_of(pagemap)[0], *entries])
    assert call(tmp_path, runs, wanted) is True
    assert bodies_of(pagemap)[1] == entries[0].SerializeToString()
    raw = b"".join(expected[number][0] for number in sorted(expected))
    assert (tmp_path / f"pages-{NUMBER}.img").read_bytes() == raw


# ------------------------------------------------------------------------------------------------------------- copying


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, 0])
@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize("case", [SIMPLE, moved()], ids=["in place", "moved"])
def test_what_the_kernel_does_not_copy_is_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, done: int, code: int
) -> None:
    """At once, or after a part of it was copied; said with an error, or by copying nothing."""
    real, calls = os.copy_file_range, []

    def refuse(source: int, target: int, count: int, offset: int, place: int) -> int:
        calls.append(count)
        if done and len(calls) % 2:
            return real(source, target, count // 2, offset, place)
        if code:
            raise OSError(code, os.strerror(code))
        return 0

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(criu_pages, "_BUFFER_SIZE", PAGE + 512)
    expected, runs, wanted = write_case(tmp_path, case)
    call(tmp_path, runs, wanted)
    assert calls
    assert pages_of(tmp_path, TASK) == expected


@pytest.mark.parametrize("case", [SIMPLE, moved()], ids=["in place", "moved"])
@pytest.mark.parametrize("function", ["copy_file_range", "pwrite", "preadv", "write", "ftruncate", "fchmod"])
def test_an_error_of_the_system_names_the_file_and_leaves_criu_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, case: Case
) -> None:
    _, runs, wanted = write_case(tmp_path, case)

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if function.startswith("p"):
        monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    monkeypatch.setattr(os, function, fail)
    with untouched(tmp_path), pytest.raises(OSError, match=r"No space left .*(\.img|\.new|\.raw)'") as caught:
        call(tmp_path, runs, wanted)
    assert caught.value.errno == errno.ENOSPC


def test_after_the_first_rename_nothing_temporary_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs, wanted = write_case(tmp_path, moved())
    before, real = content(tmp_path), os.rename

    def rename(source: str, target: str, **where: int) -> None:
        if target.startswith("pages"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), source, None, target)
        real(source, target, **where)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="pages-"):
        call(tmp_path, runs, wanted)
    after = content(tmp_path)
    assert set(after) == set(before)
    assert {name for name in after if after[name] != before[name]} == {name for name in after if "pagemap" in name}


# -------------------------------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """All files but the copied one, whatever becomes of that, are afterwards as they were."""
    before = content(folder)
    yield
    after = content(folder)
    assert set(after) == set(before)
    del before[COPIED], after[COPIED]
    assert after == before


def refused(folder: Path, runs: Sequence[Run], wanted: Sequence[tuple[int, int]], message: str) -> None:
    with untouched(folder), pytest.raises(ImageError, match=message):
        call(folder, runs, wanted)


def simple(folder: Path) -> tuple[list[Run], list[tuple[int, int]]]:
    _, runs, wanted = write_case(folder, SIMPLE)
    return runs, wanted


def test_memory_that_no_vma_covers_is_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    refused(tmp_path, [*runs, Run(at(8), PAGE, 0)], [*wanted, (at(7), at(9))], rf"^{COPIED} does not hold .*{at(7):x}")
    runs.append(Run(at(7), 2 * PAGE, 0))
    refused(tmp_path, runs, [*wanted, (at(7), at(9))], rf"^mm-{TASK}.img has no memory at {at(8):#x}")


def test_a_page_that_was_not_copied_is_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    refused(tmp_path, runs[:1], wanted, f"^{COPIED} does not hold the page {at(4):#x}")
    refused(tmp_path, [], wanted, f"^{COPIED} does not hold the page {at(1):#x}")


def test_a_page_that_criu_dumped_as_well_is_refused(tmp_path: Path) -> None:
    _, wanted = simple(tmp_path)
    runs = [Run(at(0), 6 * PAGE, 0)]
    message = f"^pagemap-{TASK}.img holds pages that CRIU was kept from dumping, at"
    for both in ((0, 1), (2, 4), (3, 4)):
        refused(tmp_path, runs, [*wanted, (at(both[0]), at(both[1]))], message)


def test_a_parent_image_is_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    pagemap = tmp_path / f"pagemap-{TASK}.img"
    head, *_ = bodies_of(pagemap)
    for says in ({"flags": PE_PARENT}, {"in_parent": True}):
        entry = entry_of(at(0) // PAGE, 1, **says)
        write_image(pagemap, "PAGEMAP", [head, entry])
        refused(tmp_path, runs, wanted, f"^pagemap-{TASK}.img: the pages at {at(0):#x} are in a parent image")


@pytest.mark.parametrize("own", [True, False], ids=["with entries of its own", "without"])
def test_the_image_of_an_older_criu_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """CRIU 4.2's package reads it, and CRIU 4.1 has to read what is made of it."""
    expected, runs, wanted = write_case(tmp_path, SIMPLE)
    pagemap = tmp_path / f"pagemap-{TASK}.img"
    if not own:  # all of them were copied
        runs, wanted = [Run(at(0), 6 * PAGE, 0)], [(at(0), at(6))]
    entries = [entry_of(at(page) // PAGE, 1, flags=BOTH) for page in (0, 3) if own]
    monkeypatch.setattr(pagemap_pb2, "pagemap_entry", WIDER)
    narrow = [WIDER(vaddr=entry.vaddr, compat_nr_pages=entry.nr_pages, flags=BOTH) for entry in entries]
    write_image(pagemap, "PAGEMAP", [bodies_of(pagemap)[0], *narrow])
    assert call(tmp_path, runs, wanted) is True
    found = [WIDER.FromString(body) for body in bodies_of(pagemap)[1:]]
    assert found
    assert not any(entry.HasField("nr_pages") for entry in found)
    assert joined((e.vaddr // PAGE, e.compat_nr_pages, e.flags) for e in found) == entries_for(expected)


def test_an_entry_that_a_newer_criu_counted_is_refused(tmp_path: Path) -> None:
    """By CRIU 4.1's package, which sees no pages in it."""
    runs, wanted = simple(tmp_path)
    pagemap = tmp_path / f"pagemap-{TASK}.img"
    head, *_ = bodies_of(pagemap)
    write_image(pagemap, "PAGEMAP", [head, entry_of(at(0) // PAGE, 0)])
    refused(tmp_path, runs, wanted, f"^pagemap-{TASK}.img has no pages at {at(0):#x}. Is CRIU newer")


def test_a_pages_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    pages = tmp_path / f"pages-{NUMBER}.img"
    os.truncate(pages, 2 * PAGE - 1)
    refused(tmp_path, runs, wanted, f"^{pages.name} is cut off: it has {2 * PAGE - 1} bytes, and its pages take")


def test_a_copied_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    os.truncate(tmp_path / COPIED, 6 * PAGE - 1)
    refused(tmp_path, runs, wanted, f"^{COPIED} is cut off")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs, wanted = write_case(tmp_path, moved())
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    refused(tmp_path, runs, wanted, f"^pages-{NUMBER}.img ends at byte 0")


def test_entries_and_runs_that_hold_a_page_twice_are_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    refused(tmp_path, [*runs, Run(at(5), PAGE, 0)], wanted, f"^{COPIED} holds the page {at(5):#x} twice")
    pagemap = tmp_path / f"pagemap-{TASK}.img"
    head, first, _ = bodies_of(pagemap)
    write_image(pagemap, "PAGEMAP", [head, first, first])
    refused(tmp_path, runs, wanted, f"^pagemap-{TASK}.img holds pages twice, at {at(0):#x}")


def test_what_is_no_whole_page_is_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    refused(tmp_path, runs, [*wanted, (at(1), at(2) - 1)], "whole pages")
    for run in (Run(at(7) + 1, PAGE, 0), Run(at(7), PAGE + 512, 0), Run(at(7), PAGE, 512)):
        refused(tmp_path, [*runs, run], wanted, f"^{COPIED}: the run at .* whole pages")


def test_damaged_images_are_refused(tmp_path: Path) -> None:
    runs, wanted = simple(tmp_path)
    for name in (f"pagemap-{TASK}.img", f"mm-{TASK}.img"):
        path = tmp_path / name
        raw = path.read_bytes()
        for damaged in (b"", raw[:6], b"x" + raw[1:], raw[:4] + b"xxxx" + raw[8:], raw[:-1], raw[:8]):
            path.write_bytes(damaged)
            refused(tmp_path, runs, wanted, f"^{name} ")
        bodies = bodies_of(path)
        for wrong in ([b"\xff\xff", *bodies[1:]], [b"", *bodies[1:]]):
            path.write_bytes(raw[:8] + b"".join(struct.pack("<I", len(body)) + body for body in wrong))
            refused(tmp_path, runs, wanted, f"^{name} is damaged")
        path.write_bytes(raw)
    assert call(tmp_path, runs, wanted)


@pytest.mark.parametrize("name", [f"pagemap-{TASK}.img", f"pages-{NUMBER}.img", f"mm-{TASK}.img"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    runs, wanted = simple(tmp_path)
    (tmp_path / name).unlink()
    with untouched(tmp_path), pytest.raises(FileNotFoundError, match=name):
        call(tmp_path, runs, wanted)


@pytest.mark.parametrize("name", [f"pagemap-{TASK}.img.new", f"pages-{NUMBER}.img.new"])
def test_a_file_of_our_temporary_name_is_left_alone(tmp_path: Path, name: str) -> None:
    _, runs, wanted = write_case(tmp_path, moved())
    (tmp_path / name).write_bytes(b"someone's")
    with untouched(tmp_path), pytest.raises(FileExistsError, match=name):
        call(tmp_path, runs, wanted)


# ------------------------------------------------------------------------------------------------------------ real CRIU

PROGRAM = """
import ctypes, mmap, os, sys, threading, time, zlib
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
def fill(memory, pages):
    for i in pages:
        memory[i * page : (i + 1) * page] = os.urandom(page)
def address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
dense = mmap.mmap(-1, 1200 * page, flags=private)
fill(dense, range(1200))
holes = mmap.mmap(-1, 400 * page, flags=private)
fill(holes, [i for i in range(400) if i % 7 in (1, 2, 5)])
locked = mmap.mmap(-1, 40 * page, flags=private)
fill(locked, range(40))
assert libc.mlock(ctypes.c_void_p(address(locked) + 8 * page), 16 * page) == 0
with open("file", "wb+") as file:
    file.write(os.urandom(64 * page))
    file.flush()
    written = mmap.mmap(file.fileno(), 64 * page, flags=mmap.MAP_PRIVATE)
fill(written, range(3, 64, 5))
wait = threading.Event()
for _ in range(3):
    threading.Thread(target=wait.wait, daemon=True).start()
out = os.open("sums", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
number = 0
while True:
    total = 0
    for memory in (dense, holes, locked, written):
        total = zlib.crc32(memory, total)
    os.write(out, f"{number} {total}\\n".encode())
    number += 1
    time.sleep(0.05)
"""


def criu(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [launcher("criu"), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def needs_criu() -> None:
    if os.geteuid() != 0:
        skip("CRIU needs root")
    version = criu("--version")
    if version.returncode:
        skip(f"no CRIU here: {version.stderr.strip()}")


def sums(folder: Path) -> list[tuple[int, str]]:
    path = folder / "sums"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), total) for number, total in (line.split() for line in lines)]


def wait_for_sums(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(sums(folder)) < count:
        assert time.monotonic() < deadline, f"only {len(sums(folder))} of {count} checksums"
        time.sleep(0.02)


@dataclass(frozen=True)
class Dumped:
    """A dump by CRIU alone, of a process that has ended since."""

    images: Path
    task: int
    work: Path


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    needs_criu()
    for _ in range(5):
        made = dump(tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("images"))
        if any(flags & PE_LAZY for _, _, flags in entries_of(made.images / f"pagemap-{made.task}.img")):
            return made
        # A stack pointer that is a multiple of the page size, one of 256 is: see the module's description.
    raise AssertionError("CRIU lets no page be restored lazily")


def dump(work: Path, images: Path) -> Dumped:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PROGRAM], cwd=work, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for_sums(work, 3)
        done = criu("dump", "-t", process.pid, "-D", images, "--leave-running", "-o", "dump.log")
        if done.returncode:
            log = images / "dump.log"
            skip(f"CRIU cannot dump here: {done.stderr}{log.read_text()[-500:] if log.exists() else ''}")
    finally:
        process.kill()
        process.wait()
    return Dumped(images, process.pid, work)


def split_dump(dumped: Dumped, folder: Path, seed: int, shift: int) -> tuple[Pages, list[Run], list[tuple[int, int]]]:
    """The dump in another folder, as if a random part of its pages had been copied beside CRIU."""
    shutil.copytree(dumped.images, folder, dirs_exist_ok=True)
    pages = pages_of(folder, dumped.task)
    chance = random.Random(seed)
    chosen: set[int] = set()
    for first, count in runs_of(pages):  # runs of all lengths, some to the end of their memory and the next one's start
        start = first
        while start < first + count:
            length = chance.choice([1, 1, 2, 5, 60, 2000])
            if chance.random() < 0.6:
                chosen.update(range(start, min(start + length, first + count)))
            start += length
    number = pagemap_pb2.pagemap_head.FromString(bodies_of(folder / f"pagemap-{dumped.task}.img")[0]).pages_id
    runs = split(folder, pages, chosen, shift)
    write_pair(folder, dumped.task, number, {n: page for n, page in pages.items() if n not in chosen})
    return pages, runs, [(first * PAGE, (first + count) * PAGE) for first, count in runs_of(chosen)]


@pytest.mark.root
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_real_dump_is_put_together_again(dumped: Dumped, tmp_path: Path, seed: int, shift: int) -> None:
    original = entries_of(dumped.images / f"pagemap-{dumped.task}.img")
    flags = {flags for _, _, flags in original}
    assert flags == {PE_PRESENT, BOTH}  # else it would prove little
    pages, runs, wanted = split_dump(dumped, tmp_path, seed, shift)
    assert len(runs) > 20
    assert call(tmp_path, runs, wanted, dumped.task) == (shift == 0)
    assert pages_of(tmp_path, dumped.task) == pages
    assert joined(entries_of(tmp_path / f"pagemap-{dumped.task}.img")) == joined(original)
    before = content(dumped.images)
    after = content(tmp_path)
    assert {name for name in after if after[name] != before[name]} <= {f"pagemap-{dumped.task}.img"}
    assert set(after) == set(before)


@pytest.mark.root
def test_a_real_dump_of_which_everything_was_copied_is_put_together_again(dumped: Dumped, tmp_path: Path) -> None:
    """All flags are ours then."""
    shutil.copytree(dumped.images, tmp_path, dirs_exist_ok=True)
    pages = pages_of(tmp_path, dumped.task)
    runs = split(tmp_path, pages, pages)
    head = bodies_of(tmp_path / f"pagemap-{dumped.task}.img")[0]
    write_image(tmp_path / f"pagemap-{dumped.task}.img", "PAGEMAP", [head])
    (tmp_path / f"pages-{pagemap_pb2.pagemap_head.FromString(head).pages_id}.img").write_bytes(b"")
    wanted = [(first * PAGE, (first + count) * PAGE) for first, count in runs_of(pages)]
    assert call(tmp_path, runs, wanted, dumped.task) is True
    assert pages_of(tmp_path, dumped.task) == pages
    original = entries_of(dumped.images / f"pagemap-{dumped.task}.img")
    assert entries_of(tmp_path / f"pagemap-{dumped.task}.img") == joined(original)


@pytest.mark.root
def test_a_process_goes_on_from_what_was_put_together(dumped: Dumped, tmp_path: Path) -> None:
    _, runs, wanted = split_dump(dumped, tmp_path, 99, 0)
    assert call(tmp_path, runs, wanted, dumped.task) is True
    before = sums(dumped.work)
    done = criu("restore", "-D", tmp_path, "-d", "-o", "restore.log")
    assert done.returncode == 0, (tmp_path / "restore.log").read_text()[-2000:]
    try:
        wait_for_sums(dumped.work, len(before) + 3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(dumped.task, signal.SIGKILL)
    after = sums(dumped.work)
    assert {total for _, total in after} == {before[0][1]}
    # It had gone on for a moment after the dump, so it says some numbers again.
    numbers = [number for number, _ in after[len(before) :]]
    assert 3 <= numbers[0] <= len(before)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
