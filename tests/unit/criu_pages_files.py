"""A task's pages in CRIU's images, as the tests of images/criu_pages.py write and read them: in the forms there are."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from phos.images.criu_pages import PE_PRESENT, Run, merge
from phos.images.formats import IMG_COMMON
from tests.unit.image_sets import forbids_skips

if not forbids_skips():
    pytest.importorskip("pycriu", reason="no pycriu here")
from pycriu.images import mm_pb2, pagemap_pb2
from pycriu.images.magic import by_name

PAGE = mmap.PAGESIZE
TASK = 77
COPIED = "copied.raw"


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


def in_each_form(metafunc: pytest.Metafunc) -> None:
    """With entries as the CRIU that is installed has them; where it need not read them, also with those of CRIU 4.2.

    A module of tests has this as its ``pytest_generate_tests``, and the fixture ``form`` beside it.
    """
    forms = [INSTALLED] if "dumped" in metafunc.fixturenames or WIDER is INSTALLED else [INSTALLED, WIDER]
    metafunc.parametrize("form", forms, indirect=True, ids=["installed", "4.2"][: len(forms)])


@pytest.fixture(autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_form(monkeypatch, request.param)


def use_form(monkeypatch: pytest.MonkeyPatch, entry: type[Any]) -> None:
    """From here on, pycriu and so criu_pages.py have entries of this type."""
    monkeypatch.setattr(pagemap_pb2, "pagemap_entry", entry)


def entry_of(page: int, count: int, **more: Any) -> Any:
    """An entry of so many pages, the first by its number."""
    entry = pagemap_pb2.pagemap_entry(vaddr=page * PAGE, nr_pages=count, **more)
    if "compat_nr_pages" in entry.DESCRIPTOR.fields_by_name:
        entry.compat_nr_pages = 0
    return entry


Pages = dict[int, tuple[bytes, int]]
"""Page number of the address: its content and flags. The content is empty if it is not in the pages file."""


def with_bytes(message: Any, text: str, raw: bytes) -> Any:
    """The message with these bytes in place of a text of as many: CRIU writes the names of files as they are."""
    return type(message).FromString(message.SerializeToString().replace(text.encode(), raw))


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


def pages_number(folder: Path, task: int) -> int:
    """The number of a task's pages file; its pagemap says it."""
    number: int = pagemap_pb2.pagemap_head.FromString(bodies_of(folder / f"pagemap-{task}.img")[0]).pages_id
    return number


def pages_of(folder: Path, task: int) -> Pages:
    """What an image says of a task's memory; it holds nothing else."""
    pagemap = folder / f"pagemap-{task}.img"
    raw, at, pages = (folder / f"pages-{pages_number(folder, task)}.img").read_bytes(), 0, Pages()
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
