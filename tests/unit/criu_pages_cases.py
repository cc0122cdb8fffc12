"""Made-up images for the tests of images/criu_pages.py: a task's memory, who dumped which page, what was copied."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from phos.images.criu_pages import PE_LAZY, PE_PRESENT, Run
from tests.unit.criu_pages_files import COPIED, PAGE, TASK, Pages, write_memory, write_pair

BASE = 0x7F0000000000
NUMBER = 3
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


SIMPLE = Case(vmas=[(0, 8, LAZY)], own={0: BOTH, 3: BOTH}, wanted=[(1, 3), (4, 6)], copied=[(1, 2, 1), (4, 2, 4)])
"""In place: C w w C w w"""


def moved() -> Case:
    """As SIMPLE, but not where it has to be."""
    return Case(vmas=SIMPLE.vmas, own=SIMPLE.own, wanted=SIMPLE.wanted, copied=[(1, 2, 0), (4, 2, 2)])
