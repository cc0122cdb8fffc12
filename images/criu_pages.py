"""Pages of a task that were copied beside CRIU, put into CRIU's images of its memory.

CRIU was made not to see those pages, so it dumped only the others. What is made of both is what `criu dump` alone would
have written:

    pagemap-<PID>.img     the number N of the pages file, then entries of address, number of pages and flags, by address
    pages-<N>.img         the pages of the entries that have PE_PRESENT, one behind the other, in the entries' order

and likewise, with pagemap-shmem-<INODE>.img, of memory that tasks share without a name.

Facts are those of CRIU 4.1.1: images/pagemap.proto and criu/include/pagemap.h say what an entry is; criu/include/vma.h,
criu/include/image.h and generate_iovs() in criu/mem.c say which pages may be restored lazily. CRIU itself begins a new
entry wherever one of its pipes was full; here neighbours with equal flags are one entry.

CRIU also means to keep the page that a thread's stack pointer is in from being restored lazily, but is_stack() in
criu/mem.c compares the offsets in the page instead of the pages. So it finds no page at all, or, if one thread's stack
pointer is a multiple of the page size, every page of the task. That is not imitated: in the second case our pages
may be restored lazily although CRIU's own may not. No harm comes of it, as in the first case stacks may be too.

Addresses, sizes and offsets are bytes. Every step goes through lists that are sorted by address, never page by page.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from phos.images import criu_files
from phos.images.errors import ImageError

PE_PARENT, PE_LAZY, PE_PRESENT = 1, 2, 4
"""An entry's flags: its pages are in another image; they can be restored lazily; they are in the pages file."""

_PAGE = mmap.PAGESIZE
# Pages of one entry. collect_iovs() of criu/uffd.c counts the bytes of an entry in an int, and `criu lazy-pages` fails
# when those of the longest are 2 GiB; it also sets so much address space aside.
_ENTRY_LIMIT = (64 << 20) // _PAGE

# What the memory of a VMA is that may be restored lazily. mmap(2), the same values on x86-64 and AArch64.
_MAP_LOCKED, _MAP_HUGETLB = 0x2000, 0x40000
_LAZY = mmap.MAP_ANONYMOUS | mmap.MAP_PRIVATE
_LAZY_MASK = _LAZY | _MAP_LOCKED | _MAP_HUGETLB
_SPECIAL = 1 << 2 | 1 << 3 | 1 << 12  # VMA_AREA_VSYSCALL, VMA_AREA_VDSO, VMA_AREA_VVAR

_MEMFDS = "memfd.img"  # which CRIU lists memory without a name in

# Where copy_file_range(2) cannot be had: between these two file systems, for these files, in this kernel.
_REFUSALS = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_BUFFER_SIZE = 1 << 20

_COMPAT = "compat_nr_pages"
"""Where CRIU before 4.2 counts the pages of an entry. Later ones have a wider nr_pages, and 0 here."""

_Range = tuple[int, int, int]
"""First address, address behind the last, and what its list says of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Pages that follow one another in a task's memory, and in a file. Bytes, all multiples of the page size."""

    address: int
    size: int
    offset: int


class _Part(NamedTuple):
    """Neighbouring pages of the result that come from one place: of CRIU's own an entry of it."""

    address: int
    end: int
    flags: int
    offset: int
    own: bool  # the offset is in CRIU's pages file
    kept: bytes | None = None  # an own entry as CRIU wrote it, if that says more than address, pages and flags


class _Move(NamedTuple):
    """Bytes of the result and where they are now."""

    own: bool
    offset: int
    target: int
    size: int


def prepare() -> None:
    """Import what :func:`merge` needs of CRIU's Python package, which takes longer than a merge."""
    from pycriu.images import magic, memfd_pb2, mm_pb2, pagemap_pb2  # noqa: F401


def merge(
    directory: int, task: int, name: str, file: int, copied: Sequence[Run], wanted: Iterable[tuple[int, int]]
) -> bool:
    """Put the wanted pages of the file `name` into CRIU's images of a task's memory, and remove that file.

    ``directory``: an open descriptor of the image directory. ``task``: the PID in CRIU's file names. ``file``: an open
    descriptor of `name`, which stays the caller's: whoever owns the directory may have put another file there, or a
    link to one, and that is not written to. ``copied``: what
    the file holds, in any order; it may have gaps and be longer. ``wanted``: address ranges [start, end) that CRIU was
    kept from dumping, in any order, also overlapping. What was copied and is not wanted does not get into the images.
    With nothing wanted, CRIU's files stay as they are.

    CRIU must have finished with the task: pagemap-, pages- and mm-<PID>.img are read.

    Returns True if every wanted page already lay in the file where it has to be in the pages file. Then the file itself
    has become the pages file, and only CRIU's own pages were copied; otherwise everything was, into a new file.

    The pagemap is renamed first, the pages file last. A crash between the two leaves a pagemap that asks for more pages
    than there are, which a restore refuses; the other way round it would take wrong ones. Nothing is synced here: that
    is the caller's, as is calling the image whole.

    Raises:
        ImageError: a wanted page was not copied, lies in no VMA of the task, or is in CRIU's image as well; an entry of
            CRIU's refers to a parent image; a file is damaged or shorter than it has to be; two runs hold one page, or
            something is not a multiple of the page size.
        OSError: a file cannot be read or written; it names the file.

    Whatever is raised before the renames, CRIU's two files are untouched; `name` is still there, perhaps with CRIU's
    pages in its gaps; and nothing else is left.
    """
    ranges = _union(wanted)
    if not ranges:
        os.unlink(name, dir_fd=directory)
        return False

    return _merge(directory, f"pagemap-{task}.img", name, file, _ours(directory, task, name, copied, ranges))


def shared_sizes(directory: int) -> dict[int, int]:
    """Of memory that tasks share without a name, by its inode, as CRIU restores it; bytes, whole pages.

    Raises:
        ImageError, OSError: CRIU's list of it cannot be read.
    """
    from pycriu.images.memfd_pb2 import memfd_inode_entry

    entries = (
        criu_files.parse(memfd_inode_entry, body, _MEMFDS)
        for body in criu_files.messages(directory, _MEMFDS, "MEMFD_INODE")
    )
    return {entry.shmid: -(-entry.size // _PAGE) * _PAGE for entry in entries}


def merge_shared(
    directory: int, inode: int, name: str, file: int, copied: Sequence[Run], sizes: Mapping[int, int]
) -> bool:
    """Put the pages of the file `name` into CRIU's images of memory that tasks share without a name (criu/shmem.c).

    CRIU calls it by the ``inode`` of the file that it is; an address is an offset in it. ``sizes``: as of
    :func:`shared_sizes`. What lies behind that end was not there when CRIU looked, and is left out: a restore would
    take an entry that reaches over it for the end of all, and say nothing. The rest, and what is raised, is as with
    :func:`merge`; and ImageError, if CRIU has no such memory.
    """
    end = sizes.get(inode)
    if end is None:
        raise ImageError(f"{_MEMFDS} does not know shared memory {inode}, which CRIU was kept from dumping")
    ours = [
        _Part(run.address, min(run.address + run.size, end), PE_PRESENT, run.offset, False)
        for run in copied
        if run.address < end
    ]
    return _merge(directory, f"pagemap-shmem-{inode}.img", name, file, ours)


def _merge(directory: int, pagemap: str, name: str, file: int, added: Sequence[_Part]) -> bool:
    head, number, own, wide = _own(directory, pagemap)
    pages = f"pages-{number}.img"
    parts = sorted([*own, *added], key=itemgetter(0))
    for part, following in pairwise(parts):
        if part.end > following.address:
            what = "twice" if part.own and following.own else "that CRIU was kept from dumping"
            raise ImageError(f"{pagemap} holds pages {what}, at {following.address:#x}")
    moves, size, in_place = _moves(parts)

    with ExitStack() as stack:
        theirs = stack.enter_context(criu_files.open_file(directory, pages, "r"))
        ours = stack.enter_context(io.FileIO(file, "r+", closefd=False))
        ours.name = name  # for errors
        _check_sizes(theirs, ours, parts)
        mode = stat.S_IMODE(os.fstat(theirs.fileno()).st_mode)
        if in_place:
            target, made = ours, name
            moves = [move for move in moves if move.own]
        else:
            made = f"{pages}.new"  # no name of an image's file, should it ever be left behind
            target = stack.enter_context(criu_files.new_file(directory, made, stack))
        for move in moves:
            _copy(theirs if move.own else ours, move.offset, target, move.target, move.size)
        with criu_files.naming(made):
            os.ftruncate(target.fileno(), size)
            os.fchmod(target.fileno(), mode)

        table = stack.enter_context(criu_files.new_file(directory, f"{pagemap}.new", stack))
        with criu_files.naming(f"{pagemap}.new"):
            criu_files.write(table, head + b"".join(_entries(parts, wide)))
            os.fchmod(table.fileno(), mode)
        os.rename(f"{pagemap}.new", pagemap, src_dir_fd=directory, dst_dir_fd=directory)
        os.rename(made, pages, src_dir_fd=directory, dst_dir_fd=directory)
    if not in_place:
        os.unlink(name, dir_fd=directory)
    return in_place


# -------------------------------------------------------------------------------------------------- CRIU's descriptions


def _encoder(wide: bool) -> Callable[[int, int, int], bytes]:
    """What makes an entry of an address, an end and flags. ``wide``: one that counts pages as CRIU 4.2 does."""
    from pycriu.images.pagemap_pb2 import pagemap_entry

    entry = pagemap_entry()  # one for all: making one takes as long as filling it in
    count = "nr_pages"
    if _knows_compat(pagemap_entry):
        entry.compat_nr_pages = 0
        count = "nr_pages" if wide else _COMPAT

    def encode(address: int, end: int, flags: int) -> bytes:
        entry.vaddr, entry.flags = address, flags
        setattr(entry, count, (end - address) // _PAGE)
        message: bytes = entry.SerializeToString()
        return message

    return encode


def _knows_compat(kind: Any) -> bool:
    """Whether the pycriu that is installed is CRIU 4.2's."""
    return _COMPAT in kind.DESCRIPTOR.fields_by_name


def _own(directory: int, name: str) -> tuple[bytes, int, list[_Part], bool]:
    """What CRIU's pagemap says: its bytes before the first entry, the pages file's number, the entries.

    And whether it counts pages as CRIU 4.2 does, which reads the other way as well; CRIU 4.1 reads no other.
    """
    from pycriu.images.pagemap_pb2 import pagemap_entry, pagemap_head

    bodies = criu_files.messages(directory, name, "PAGEMAP")
    if not bodies:
        raise ImageError(f"{name} does not say which its pages file is")
    head = criu_files.parse(pagemap_head, bodies[0], name)
    raw_head = criu_files.header("PAGEMAP") + criu_files.framed(bodies[0])
    entries = [criu_files.parse(pagemap_entry, body, name) for body in bodies[1:]]
    wide = _knows_compat(pagemap_entry) and any(entry.HasField("nr_pages") for entry in entries)
    parts, offset, encode = [], 0, _encoder(wide)
    for body, entry in zip(bodies[1:], entries, strict=True):
        # Images of older CRIUs count pages elsewhere, or have no flags; init_compat_pagemap_entry() of criu/pagemap.c.
        address, pages = entry.vaddr, entry.nr_pages or getattr(entry, _COMPAT, 0)
        if not pages:
            raise ImageError(
                f"{name} has no pages at {address:#x}. Is CRIU newer than the pycriu package that PhOS was installed "
                "with? With PHOS_CPU_PAGES=off in phosd's environment CRIU copies all pages itself."
            )
        flags = entry.flags if entry.HasField("flags") else PE_PRESENT
        if flags & PE_PARENT or entry.in_parent:
            raise ImageError(f"{name}: the pages at {address:#x} are in a parent image, which cannot be merged into")
        end = address + pages * _PAGE
        parts.append(_Part(address, end, flags, offset, True, None if body == encode(address, end, flags) else body))
        if flags & PE_PRESENT:
            offset += end - address
    return raw_head, head.pages_id, parts, wide


def _memory(directory: int, task: int) -> list[_Range]:
    """The task's memory by address, with the flags that CRIU gives a dumped page of it."""
    from pycriu.images.mm_pb2 import mm_entry

    areas: list[_Range] = []
    for vma in sorted(criu_files.only(directory, f"mm-{task}.img", "MM", mm_entry).vmas, key=lambda vma: vma.start):
        lazy = vma.flags & _LAZY_MASK == _LAZY and not vma.status & _SPECIAL
        start, end, flags = vma.start, vma.end, PE_PRESENT | PE_LAZY if lazy else PE_PRESENT
        if areas and areas[-1][1:] == (start, flags):
            start = areas.pop()[0]
        areas.append((start, end, flags))
    return areas


# ------------------------------------------------------------------------------------------------- what lies where


def _union(wanted: Iterable[tuple[int, int]]) -> list[_Range]:
    """The ranges sorted, without overlaps."""
    out: list[_Range] = []
    for start, end in sorted(wanted):
        if (start | end) % _PAGE:
            raise ImageError(f"the wanted range {start:#x}-{end:#x} is not made of whole pages")
        if start >= end:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]), 0)
        else:
            out.append((start, end, 0))
    return out


def _ours(directory: int, task: int, name: str, copied: Sequence[Run], ranges: Sequence[_Range]) -> list[_Part]:
    """The wanted pages: their flags, and where the file has them."""
    runs: list[_Range] = []
    for run in sorted(copied, key=lambda run: run.address):
        if (run.address | run.size | run.offset) % _PAGE:
            raise ImageError(f"{name}: the run at {run.address:#x} is not made of whole pages")
        if runs and run.address < runs[-1][1]:
            raise ImageError(f"{name} holds the page {run.address:#x} twice")
        if run.size:
            runs.append((run.address, run.address + run.size, run.offset - run.address))
    flagged = (
        (start, end, flags)
        for start, end, _, flags in _cut(ranges, _memory(directory, task), f"mm-{task}.img has no memory at")
    )
    return [
        _Part(start, end, flags, start + shift, False)
        for start, end, flags, shift in _cut(flagged, runs, f"{name} does not hold the page")
    ]


def _cut(ranges: Iterable[_Range], areas: Sequence[_Range], missing: str) -> Iterator[tuple[int, int, int, int]]:
    """The ranges in pieces, each within one area: start, end, what its range says, what its area says.

    Both are sorted and do not overlap. ImageError (``missing`` and an address) if an address of a range has no area.
    """
    at = 0
    for first, end, value in ranges:
        start = first
        while start < end:
            while at < len(areas) and areas[at][1] <= start:
                at += 1
            if at == len(areas) or areas[at][0] > start:
                raise ImageError(f"{missing} {start:#x}, which CRIU was kept from dumping")
            stop = min(end, areas[at][1])
            yield start, stop, value, areas[at][2]
            start = stop


def _moves(parts: Iterable[_Part]) -> tuple[list[_Move], int, bool]:
    """Where all data of the result comes from, its size, and whether all of ours is in its place already."""
    moves: list[_Move] = []
    size, in_place = 0, True
    for part in parts:
        if not part.flags & PE_PRESENT:
            continue
        length = part.end - part.address
        in_place = in_place and (part.own or part.offset == size)
        last = moves[-1] if moves else None
        if last and last.own == part.own and last.offset + last.size == part.offset:
            moves[-1] = _Move(last.own, last.offset, last.target, last.size + length)
        else:
            moves.append(_Move(part.own, part.offset, size, length))
        size += length
    return moves, size, in_place


def _check_sizes(theirs: io.FileIO, ours: io.FileIO, parts: Iterable[_Part]) -> None:
    """ImageError if one of the files ends before its pages do."""
    ends = {True: 0, False: 0}
    for part in parts:
        if part.flags & PE_PRESENT:
            ends[part.own] = max(ends[part.own], part.offset + part.end - part.address)
    for file, end in ((theirs, ends[True]), (ours, ends[False])):
        size = os.fstat(file.fileno()).st_size
        if size < end:
            raise ImageError(f"{file.name} is cut off: it has {size} bytes, and its pages take {end}")


def _entries(parts: Iterable[_Part], wide: bool) -> Iterator[bytes]:
    """The pagemap's entries as they are in the file."""
    address = end = flags = 0  # of the entry that is being put together; nothing as long as it ends where it begins
    limit, encode = _ENTRY_LIMIT * _PAGE, _encoder(wide)
    for part in parts:
        if part.address == end and part.flags == flags and part.kept is None and part.end - address <= limit:
            end = part.end
            continue
        if address < end:
            yield criu_files.framed(encode(address, end, flags))
        if part.kept is not None:
            yield criu_files.framed(part.kept)
            address = end = 0
            continue
        address, end, flags = part.address, part.end, part.flags
        while end - address > limit:
            yield criu_files.framed(encode(address, address + limit, flags))
            address += limit
    if address < end:
        yield criu_files.framed(encode(address, end, flags))


# ------------------------------------------------------------------------------------------------------------- files


def _copy(source: io.FileIO, offset: int, target: io.FileIO, at: int, size: int) -> None:
    """Copy bytes from one file to another. ImageError if the source ends before, OSError names the file, or both."""
    try:
        # 0: at the source's end, or where a file system does not do it but does not say so. Reading tells.
        while size and (n := os.copy_file_range(source.fileno(), target.fileno(), size, offset, at)):
            offset, at, size = offset + n, at + n, size - n
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise OSError(error.errno, error.strerror, source.name, None, target.name) from error
    view = memoryview(bytearray(min(size, _BUFFER_SIZE)))
    while size:
        with criu_files.naming(str(source.name)):
            n = os.preadv(source.fileno(), [view[: min(size, _BUFFER_SIZE)]], offset)
        if not n:
            raise ImageError(f"{source.name} ends at byte {offset}; it shrank while it was read")
        done = 0
        with criu_files.naming(str(target.name)):
            while done < n:
                done += os.pwrite(target.fileno(), view[done:n], at + done)
        offset, at, size = offset + n, at + n, size - n
