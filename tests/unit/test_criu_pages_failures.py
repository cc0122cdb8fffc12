"""What cannot be put together is refused by name (images/criu_pages.py); CRIU's files stay as they were."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from phos.images.criu_pages import PE_PARENT, Run
from phos.images.errors import ImageError
from tests.unit import criu_pages_files as files
from tests.unit.criu_pages_cases import NUMBER, SIMPLE, Case, at, moved, write_case
from tests.unit.criu_pages_files import COPIED, PAGE, TASK, bodies_of, call, content, entry_of, write_image

pytest_generate_tests, form = files.in_each_form, files.form


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
