"""Copied pages in made-up images of CRIU's (images/criu_pages.py): against a model, and case by case."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from phos.images import criu_pages
from phos.images.criu_pages import PE_LAZY, PE_PRESENT, Run
from tests.unit import criu_pages_files as files
from tests.unit.criu_pages_cases import BASE, BOTH, LAZY, NUMBER, SIMPLE, Case, at, cases, moved, write_case
from tests.unit.criu_pages_files import (
    COPIED,
    PAGE,
    TASK,
    WIDER,
    bodies_of,
    call,
    content,
    entries_for,
    entries_of,
    entry_of,
    joined,
    pages_of,
    use_form,
    write_image,
    write_memory,
    write_pair,
)

pytest_generate_tests, form = files.in_each_form, files.form


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


@settings(max_examples=400)
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


@pytest.mark.parametrize("own", [True, False], ids=["with entries of its own", "without"])
def test_the_image_of_an_older_criu_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """CRIU 4.2's package reads it, and CRIU 4.1 has to read what is made of it."""
    expected, runs, wanted = write_case(tmp_path, SIMPLE)
    pagemap = tmp_path / f"pagemap-{TASK}.img"
    if not own:  # all of them were copied
        runs, wanted = [Run(at(0), 6 * PAGE, 0)], [(at(0), at(6))]
    entries = [entry_of(at(page) // PAGE, 1, flags=BOTH) for page in (0, 3) if own]
    use_form(monkeypatch, WIDER)
    narrow = [WIDER(vaddr=entry.vaddr, compat_nr_pages=entry.nr_pages, flags=BOTH) for entry in entries]
    write_image(pagemap, "PAGEMAP", [bodies_of(pagemap)[0], *narrow])
    assert call(tmp_path, runs, wanted) is True
    found = [WIDER.FromString(body) for body in bodies_of(pagemap)[1:]]
    assert found
    assert not any(entry.HasField("nr_pages") for entry in found)
    assert joined((e.vaddr // PAGE, e.compat_nr_pages, e.flags) for e in found) == entries_for(expected)


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
