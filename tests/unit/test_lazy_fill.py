"""What is preloaded into ``criu lazy-pages`` (criu_plugin/lazy_fill/): reading pagemaps, filling memory from them."""

from __future__ import annotations

import array
import ctypes
import errno
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycriu.images import pagemap_pb2

from phos.gpu_engine.installation import frontend_library
from phos.images.mapping import map_memory, unmap_memory
from tests.unit import userfault
from tests.unit.image_sets import skip
from tests.unit.userfault import CopyRequest

PAGE = 4096
LAZY, PRESENT = 2, 4
MAGIC = struct.pack("=II", 0x54564319, 0x56084025)

Entry = tuple[int, int, int]
"""Number of the first page, how many, flags."""


class Run(ctypes.Structure):
    """struct phos_lazy_run."""

    _fields_ = (("address", ctypes.c_uint64), ("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class Pages(ctypes.Structure):
    """struct phos_lazy_pages."""

    _fields_ = (("pages_id", ctypes.c_uint32), ("count", ctypes.c_size_t), ("runs", ctypes.POINTER(Run)))


CRIU = """
#define _GNU_SOURCE
#include <sys/types.h>
#include <unistd.h>
int folder = -1;
volatile int held;
int criu_get_image_dir(void) { while (held) usleep(1000); return folder; }
/* fork() holds malloc()'s locks while it waits for who reads of it here, who may want to allocate. */
int fork_and_exit(void) { pid_t child = _Fork(); if (!child) _exit(0); return child; }
"""


@pytest.fixture(scope="module")
def criu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """What CRIU exports, for what is preloaded into it."""
    if shutil.which("gcc") is None:
        skip("no C compiler")
    built = tmp_path_factory.mktemp("criu") / "libcriu.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", built], input=CRIU.encode(), check=True)
    return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


@pytest.fixture(scope="module")
def library(criu: ctypes.CDLL) -> ctypes.CDLL:
    return ctypes.CDLL(str(frontend_library().with_name("phos_lazy_fill.so")), use_errno=True)


LIBC = ctypes.CDLL(None)
LIBC.mremap.restype = ctypes.c_void_p
FAILED = 2**64 - 1


def decode(library: ctypes.CDLL, image: bytes) -> tuple[int, list[tuple[int, int, int]]] | None:
    pages = Pages()
    if library.phos_lazy_decode(image, ctypes.c_size_t(len(image)), ctypes.byref(pages)):
        assert not pages.runs
        return None
    runs = [(run.address, run.offset, run.size) for run in pages.runs[: pages.count]]
    LIBC.free(pages.runs)
    return pages.pages_id, runs


def message(entry: Any) -> bytes:
    content: bytes = entry.SerializeToString()
    return struct.pack("=I", len(content)) + content


def pagemap(entries: Sequence[Entry], pages_id: int = 1) -> bytes:
    messages = [pagemap_pb2.pagemap_head(pages_id=pages_id)]
    messages += [pagemap_pb2.pagemap_entry(vaddr=first * PAGE, nr_pages=n, flags=flags) for first, n, flags in entries]
    return MAGIC + b"".join(map(message, messages))


def runs_of(entries: Sequence[Entry]) -> list[tuple[int, int, int]]:
    """As a page for each entry, put together where they follow each other."""
    runs: list[list[int]] = []
    offset = 0
    for first, count, flags in entries:
        if flags & PRESENT:
            address, size = first * PAGE, count * PAGE
            if flags & LAZY and size:
                if runs and runs[-1][0] + runs[-1][2] == address and runs[-1][1] + runs[-1][2] == offset:
                    runs[-1][2] += size
                else:
                    runs.append([address, offset, size])
            offset += size
    return [(address, at, size) for address, at, size in runs]


ENTRIES = st.lists(
    st.tuples(st.integers(0, 1 << 34), st.integers(0, 1 << 20), st.sampled_from([LAZY, PRESENT, LAZY | PRESENT, 1])),
    max_size=40,
)


@given(entries=ENTRIES, pages_id=st.integers(0, 2**32 - 1))
def test_a_pagemap_is_read_as_criu_writes_it(library: ctypes.CDLL, entries: list[Entry], pages_id: int) -> None:
    assert decode(library, pagemap(entries, pages_id)) == (pages_id, runs_of(entries))


@given(entries=ENTRIES, data=st.data())
def test_what_is_no_pagemap_is_refused_or_understood(library: ctypes.CDLL, entries: list[Entry], data: Any) -> None:
    image = bytearray(pagemap(entries))
    for _ in range(data.draw(st.integers(1, 4))):
        image[data.draw(st.integers(0, len(image) - 1))] = data.draw(st.integers(0, 255))
    image = image[: data.draw(st.integers(0, len(image)))]
    found = decode(library, bytes(image))
    if found is not None:
        assert all(size and not (address | offset | size) % PAGE for address, offset, size in found[1])


@given(image=st.binary(max_size=200))
def test_garbage_is_refused(library: ctypes.CDLL, image: bytes) -> None:
    assert decode(library, image) is None
    found = decode(library, MAGIC + image)
    assert found is None or len(found[1]) <= len(image)


@pytest.mark.parametrize(
    "entry", [(1 << 52, 1, 6), (1, 1, 0)], ids=["behind the end of all memory", "flags of before CRIU 3"]
)
def test_what_it_does_not_understand_it_leaves_to_criu(library: ctypes.CDLL, entry: Entry) -> None:
    image = pagemap([(1, 1, 6)])
    assert decode(library, image) is not None
    first, count, flags = entry
    wrong = pagemap_pb2.pagemap_entry(vaddr=first * PAGE if first < 1 << 51 else 2**64 - PAGE, nr_pages=count * 2)
    if flags:
        wrong.flags = flags
    assert decode(library, image + message(wrong)) is None


def test_a_count_of_64_bits_is_that_of_criu_4_2(library: ctypes.CDLL) -> None:
    entry = pagemap_pb2.pagemap_entry(vaddr=PAGE, nr_pages=0, flags=6).SerializeToString() + b"\x28\x03"  # field 5
    image = pagemap([]) + struct.pack("=I", len(entry)) + entry
    assert decode(library, image) == (1, [(PAGE, 0, 3 * PAGE)])


# With memory.


class Memory:
    """Pages of this process that are missing, and a descriptor for them."""

    def __init__(self, pages: int, features: int = 0) -> None:
        try:
            self.uffd = userfault.open_uffd(features)
        except OSError as error:
            skip(f"userfaultfd(2) is refused: {error.strerror}")
        self.pages = pages
        self.address = map_memory(pages * PAGE, -1)
        userfault.register(self.uffd, self.address, pages * PAGE)

    def renew(self) -> None:
        """Other memory, all of it missing, at the same place."""
        os.close(self.uffd)
        fixed, size = 0x32, ctypes.c_size_t(self.pages * PAGE)  # private, of nobody
        LIBC.mmap(ctypes.c_void_p(self.address), size, 3, fixed, -1, ctypes.c_long(0))
        self.uffd = userfault.open_uffd()
        userfault.register(self.uffd, self.address, self.pages * PAGE)

    def page(self, number: int) -> bytes:
        return ctypes.string_at(self.address + number * PAGE, PAGE)

    def close(self) -> None:
        os.close(self.uffd)  # who waits for a page gets zeros
        unmap_memory(self.address, self.pages * PAGE)


Make = Callable[..., Memory]


@pytest.fixture
def memory() -> Iterator[Make]:
    made: list[Memory] = []

    def make(pages: int, features: int = 0) -> Memory:
        made.append(Memory(pages, features))
        return made[-1]

    yield make
    for each in made:
        each.close()


def content(pages: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(pages * PAGE)


def copy(library: ctypes.CDLL, uffd: int, to: int, source: bytes) -> tuple[int, int]:
    """What CRIU asks for: the call's result, and what it says was copied."""
    buffer = ctypes.create_string_buffer(source, len(source))
    request = CopyRequest(to, ctypes.addressof(buffer), len(source), 0, 0)
    result = library.ioctl(uffd, ctypes.c_ulong(userfault.COPY), ctypes.byref(request))
    return result, request.copied


@given(there=st.lists(st.booleans(), min_size=1, max_size=24))
def test_pages_that_are_there_stay_and_the_others_come(library: ctypes.CDLL, there: list[bool]) -> None:
    memory = Memory(len(there))
    try:
        old, new = content(len(there), 2), content(len(there))
        for number in (n for n, is_there in enumerate(there) if is_there):
            at = number * PAGE
            assert copy(library, memory.uffd, memory.address + at, old[at : at + PAGE]) == (0, PAGE)
        assert copy(library, memory.uffd, memory.address, new) == (0, len(new))
        for number, is_there in enumerate(there):
            at = number * PAGE
            assert memory.page(number) == (old if is_there else new)[at : at + PAGE]
    finally:
        memory.close()


def test_what_cannot_be_brought_is_said(library: ctypes.CDLL, memory: Make) -> None:
    four = memory(4)
    new = content(6)
    assert copy(library, four.uffd, four.address - PAGE, new[:PAGE]) == (-1, -errno.ENOENT)
    assert ctypes.get_errno() == errno.ENOENT
    assert copy(library, four.uffd, four.address, b"x" * 100) == (-1, -errno.EINVAL)


def asked(uffd: int) -> bool:
    """Whether there is something to be heard, or comes soon."""
    os.set_blocking(uffd, False)  # only such can be waited for
    return bool(select.select([uffd], [], [], 60)[0])


class Server:
    """``criu lazy-pages`` as the library sees it: told of a process, with its files open, asked for a page."""

    def __init__(self, library: ctypes.CDLL, folder: Path, memory: Memory, entries: Sequence[Entry]) -> None:
        self.library, self.memory = library, memory
        base = memory.address // PAGE
        absolute = [(base + first, count, flags) for first, count, flags in entries]
        stored = sum(count for _, count, flags in entries if flags & PRESENT)
        self.data = content(stored)
        (folder / "pagemap-4711.img").write_bytes(pagemap(absolute, 3))
        (folder / "pages-3.img").write_bytes(self.data)
        self._told(4711, memory.uffd)

    def _told(self, pid: int, uffd: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(struct.pack("=i", pid))
            number = ctypes.c_int()
            assert self.library.recv(ours.fileno(), ctypes.byref(number), ctypes.c_size_t(4), 0) == 4
            assert number.value == pid
            theirs.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [uffd]))])
            self.uffd = self._received(ours)

    def _received(self, ours: socket.socket) -> int:
        data, control = ctypes.create_string_buffer(1), ctypes.create_string_buffer(64)
        vector = struct.pack("=QQ", ctypes.addressof(data), 1)
        vectors = ctypes.create_string_buffer(vector, 16)
        header = struct.pack("@PIxxxxPQPQixxxx", 0, 0, ctypes.addressof(vectors), 1, ctypes.addressof(control), 64, 0)
        message = ctypes.create_string_buffer(header, len(header))
        assert self.library.recvmsg(ours.fileno(), message, 0) == 1
        return int(struct.unpack_from("=i", control.raw, 16)[0])

    def ask(self, page: int, data: bytes) -> tuple[int, int]:
        """CRIU brings a page."""
        return copy(self.library, self.uffd, self.memory.address + page * PAGE, data)

    def zero(self, page: int) -> int:
        """CRIU has nothing to bring there."""
        request = ctypes.create_string_buffer(struct.pack("=QQQq", self.memory.address + page * PAGE, PAGE, 0, 0), 32)
        return int(self.library.ioctl(self.uffd, ctypes.c_ulong(userfault.ZEROPAGE), request))

    def unregister(self, page: int, count: int) -> int:
        """CRIU has heard that the process has let go of them."""
        request = struct.pack("=QQ", self.memory.address + page * PAGE, count * PAGE)
        return int(self.library.ioctl(self.uffd, ctypes.c_ulong(userfault.UNREGISTER), request))

    def wait(self, milliseconds: int) -> int:
        """CRIU waits until there is something to be heard; whether there is."""
        with select.epoll() as waiting:
            waiting.register(self.uffd)
            found = ctypes.create_string_buffer(12)  # struct epoll_event
            return int(self.library.epoll_wait(waiting.fileno(), found, 1, milliseconds))

    def hear(self) -> int:
        """CRIU reads of an event; which."""
        return self.hear_all()[0]

    def hear_all(self) -> tuple[int, int, int]:
        """With its first two addresses."""
        assert asked(self.uffd), "nothing is said"
        buffer = ctypes.create_string_buffer(userfault.MESSAGE_BYTES)
        assert self.library.read(self.uffd, buffer, ctypes.c_size_t(len(buffer))) == len(buffer)
        first, second = struct.unpack_from("=QQ", buffer.raw, 8)
        return buffer.raw[0], first, second

    def close(self) -> None:
        if self.uffd >= 0:
            assert self.library.close(self.uffd) == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


Serve = Callable[..., Server]


@pytest.fixture
def serve(
    library: ctypes.CDLL, criu: ctypes.CDLL, folder: Path, monkeypatch: pytest.MonkeyPatch, memory: Make
) -> Iterator[Serve]:
    assert memory, "it goes later: who unmaps its memory waits until that is heard of"
    made: list[Server] = []
    monkeypatch.setenv("PHOS_FILL_THREADS", "3")
    number = ctypes.c_int.in_dll(criu, "folder")
    number.value = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def make(memory: Memory, entries: Sequence[Entry]) -> Server:
        made.append(Server(library, folder, memory, entries))
        return made[-1]

    yield make
    for each in made:
        each.close()
    os.close(number.value)


ALL = LAZY | PRESENT
PAGEFAULT, REMAP, UNMAP = 0x12, 0x14, 0x16  # UFFD_EVENT_...


def test_with_the_first_page_all_come(serve: Serve, memory: Make) -> None:
    big = memory(2000)
    server = serve(big, [(0, 700, ALL), (700, 10, PRESENT), (720, 1, ALL), (1000, 1000, ALL)])
    first = content(1, 9)
    assert server.ask(5, first) == (0, PAGE)
    assert big.page(5) == first, "what CRIU asked for went first"
    for number in (*range(700), 720, *range(1000, 2000)):
        at = number if number < 710 else number - 10 if number < 1000 else number - 289
        assert number == 5 or big.page(number) == server.data[at * PAGE :][:PAGE], number
    # The others are still CRIU's to bring.
    other = content(1, 8)
    assert server.ask(705, other) == (0, PAGE)
    assert big.page(705) == other


def test_all_come_without_threads_whose_pids_the_image_needs(serve: Serve, memory: Make, folder: Path) -> None:
    last = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
    for pid in range(last + 1, last + 500):
        (folder / f"core-{pid}.img").touch()
    big = memory(2000)
    server = serve(big, [(0, 2000, ALL)])
    assert server.ask(5, content(1, 9)) == (0, PAGE)
    assert all(big.page(number) == server.data[number * PAGE :][:PAGE] for number in range(2000) if number != 5)


def test_what_has_come_counts_as_brought_and_is_not_overwritten(serve: Serve, memory: Make) -> None:
    ten = memory(10)
    server = serve(ten, [(0, 10, ALL)])
    server.ask(0, server.data[:PAGE])
    wrong = content(9, 5)
    assert server.ask(1, wrong) == (0, len(wrong))
    assert b"".join(ten.page(number) for number in range(10)) == server.data


@pytest.mark.parametrize("reason", ["no threads", "on a disk", "cut off", "no pagemap", "a pagemap of nothing"])
def test_where_it_cannot_be_done_criu_goes_on_by_itself(
    serve: Serve,
    memory: Make,
    criu: ctypes.CDLL,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reason: str,
) -> None:
    ten = memory(10)
    if reason == "no threads":
        monkeypatch.setenv("PHOS_FILL_THREADS", "0")
    server = serve(ten, [(0, 10, ALL)])
    if reason == "on a disk":
        kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
        if kind.strip() == "tmpfs":
            skip("the folder for tests lies in memory")
        shutil.copytree(folder, tmp_path / "image")
        other = os.open(tmp_path / "image", os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(other, ctypes.c_int.in_dll(criu, "folder").value)
        os.close(other)
    if reason == "cut off":
        os.truncate(folder / "pages-3.img", PAGE)
    if reason == "no pagemap":
        (folder / "pagemap-4711.img").unlink()
    if reason == "a pagemap of nothing":
        (folder / "pagemap-4711.img").write_bytes(b"")
    for number in range(10):
        data = content(1, 100 + number)
        assert server.ask(number, data) == (0, PAGE)
        assert ten.page(number) == data, "somebody else had brought it"


def mapped(address: int) -> bool:
    there = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in there)


def advised(memory: Memory, page: int, count: int) -> threading.Thread:
    """A thread of the process lets go of pages."""
    return called(LIBC.madvise, ctypes.c_void_p(memory.address + page * PAGE), size_of(count), 4)  # MADV_DONTNEED


def test_what_the_process_has_let_go_of_is_not_taken_for_there(serve: Serve, memory: Make) -> None:
    six = memory(6, userfault.REMOVE)
    server = serve(six, [(0, 6, ALL)])
    server.ask(0, server.data[:PAGE])
    letting_go = advised(six, 2, 2)
    assert server.hear() == 0x15  # UFFD_EVENT_REMOVE
    letting_go.join()
    new = content(6, 7)
    assert server.ask(2, new[2 * PAGE : 4 * PAGE]) == (0, 2 * PAGE)
    assert (six.page(2), six.page(3)) == (new[2 * PAGE : 3 * PAGE], new[3 * PAGE : 4 * PAGE])
    assert six.page(1) == server.data[PAGE : 2 * PAGE]


def test_after_the_process_has_changed_anything_nothing_is_filled(serve: Serve, memory: Make) -> None:
    six = memory(6, userfault.REMOVE)
    server = serve(six, [(0, 6, ALL)])
    letting_go = advised(six, 2, 2)
    server.hear()
    letting_go.join()
    new = content(6, 7)
    for number in range(6):
        assert server.ask(number, new[number * PAGE :][:PAGE]) == (0, PAGE)
        assert six.page(number) == new[number * PAGE :][:PAGE]


def test_what_the_process_has_let_go_of_stays_one_mapping_with_the_rest(serve: Serve, memory: Make) -> None:
    six = memory(6, userfault.REMOVE)
    server = serve(six, [(0, 6, ALL)])
    found = ctypes.create_string_buffer(b"x" * PAGE, PAGE)
    reading = called(LIBC.memcpy, found, ctypes.c_void_p(six.address + 2 * PAGE), size_of(1))
    assert server.hear() == PAGEFAULT
    letting_go = advised(six, 2, 2)
    assert server.hear() == 0x15
    assert server.unregister(2, 2) == 0
    letting_go.join()
    assert asked(six.uffd), "who has waited asks again"
    assert server.hear() == PAGEFAULT
    assert server.zero(2) == 0
    reading.join()
    assert found.raw == bytes(PAGE)
    moved = LIBC.mremap(ctypes.c_void_p(six.address), size_of(6), size_of(7), 1)
    assert moved != FAILED
    six.address, six.pages = moved, 7


def test_what_the_process_has_let_go_of_may_be_unmapped_by_then(serve: Serve, memory: Make) -> None:
    six = memory(6, userfault.REMOVE)
    server = serve(six, [(0, 6, ALL)])
    letting_go = advised(six, 4, 2)
    assert server.hear() == 0x15
    letting_go.join()
    unmap_memory(six.address + 4 * PAGE, 2 * PAGE)
    six.pages = 4
    assert server.unregister(4, 2) == 0


def test_what_criu_cannot_forget_is_unregistered(serve: Serve, memory: Make) -> None:
    """It counts bytes in an int."""
    pages = (1 << 31) // PAGE
    large = memory(pages + 1, userfault.REMOVE)
    server = serve(large, [(0, 1, ALL)])
    letting_go = advised(large, 1, pages)
    assert server.hear() == 0x15
    assert server.unregister(1, pages) == 0
    letting_go.join()
    assert (server.zero(1), server.zero(0)) == (-1, 0)


@pytest.mark.parametrize("known", [True, False])
def test_who_asked_while_the_process_changed_its_memory_asks_again(serve: Serve, memory: Make, known: bool) -> None:
    eight = memory(8, userfault.REMOVE)
    server = serve(eight, [(0, 6, ALL)])
    data = content(1) if known else bytes(PAGE)

    def bring() -> int:
        return server.ask(6, data)[0] if known else server.zero(6)

    found = ctypes.create_string_buffer(b"x" * PAGE, PAGE)
    reading = called(LIBC.memcpy, found, ctypes.c_void_p(eight.address + 6 * PAGE), size_of(1))
    assert server.hear() == PAGEFAULT
    letting_go = advised(eight, 7, 1)
    assert asked(eight.uffd)
    assert (bring(), ctypes.get_errno()) == (-1, errno.EAGAIN)
    assert server.wait(-1) == 1
    assert server.hear() == 0x15, "as long as CRIU has not heard of the change nobody is woken"
    assert server.wait(-1) == 1, "it waits until the change is over as well"
    letting_go.join()
    assert server.hear() == PAGEFAULT
    assert bring() == 0
    reading.join()
    assert found.raw == data
    assert server.wait(0) == 0


def called(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """A thread of the process changes its memory; it waits until CRIU has heard of that."""
    call = threading.Thread(target=function, args=arguments)
    call.start()
    return call


def size_of(pages: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(pages * PAGE)


def test_what_has_been_moved_there_is_not_taken_for_there(serve: Serve, memory: Make) -> None:
    """Pages that were filled go elsewhere, and others, that CRIU has yet to bring, come to their place."""
    eight, elsewhere = memory(8, userfault.REMAP), map_memory(4 * PAGE, -1)
    server = serve(eight, [(0, 4, ALL)])
    server.ask(0, server.data[:PAGE])
    first, second = ctypes.c_void_p(eight.address), ctypes.c_void_p(eight.address + 4 * PAGE)
    away = called(LIBC.mremap, first, size_of(4), size_of(4), 3, ctypes.c_void_p(elsewhere))
    assert server.hear() == 0x14  # UFFD_EVENT_REMAP
    away.join()
    coming = called(LIBC.mremap, second, size_of(4), size_of(4), 3, first)
    assert server.hear() == 0x14
    coming.join()
    new = content(4, 7)
    assert server.ask(0, new) == (0, len(new))
    assert b"".join(eight.page(number) for number in range(4)) == new
    assert ctypes.string_at(elsewhere, 4 * PAGE) == server.data
    unmap_memory(elsewhere, 4 * PAGE)


def moved(old: int, new: int, pages: int, kept: int = 0) -> threading.Thread:
    """A thread of the process moves pages."""
    return called(LIBC.mremap, ctypes.c_void_p(old), size_of(pages), size_of(pages), 3 | kept, ctypes.c_void_p(new))


def test_what_comes_to_where_other_memory_went_from_is_not_forgotten(serve: Serve, memory: Make) -> None:
    """The kernel says only when CRIU has heard of the move that the old place was unmapped."""
    eight, elsewhere = memory(8, userfault.REMAP | userfault.UNMAP), map_memory(4 * PAGE, -1)
    server = serve(eight, [(0, 4, ALL)])
    away = moved(eight.address, elsewhere, 4)
    assert asked(eight.uffd)
    coming = moved(eight.address + 4 * PAGE, eight.address, 4)
    while mapped(eight.address + 4 * PAGE):
        time.sleep(0.001)
    assert server.hear_all() == (REMAP, eight.address, elsewhere)
    assert server.hear_all() == (REMAP, eight.address + 4 * PAGE, eight.address)
    for _ in range(2):
        event, first, behind = server.hear_all()
        assert (event, behind - first) == (UNMAP, 0)
    away.join()
    coming.join()
    eight.pages = 4
    eight.pages = 0
    for address in (eight.address, elsewhere):
        going = called(LIBC.munmap, ctypes.c_void_p(address), size_of(4))
        assert server.hear_all() == (UNMAP, address, address + 4 * PAGE)
        going.join()


def test_what_was_moved_and_stays_mapped_may_be_unmapped_later(serve: Serve, memory: Make) -> None:
    four, elsewhere = memory(4, userfault.REMAP | userfault.UNMAP), map_memory(4 * PAGE, -1)
    server = serve(four, [(0, 4, ALL)])
    away = moved(four.address, elsewhere, 4, kept=4)  # MREMAP_DONTUNMAP
    assert server.hear() == REMAP
    away.join()
    assert server.wait(0) == 0
    four.pages = 0
    for address in (four.address, elsewhere):
        going = called(LIBC.munmap, ctypes.c_void_p(address), size_of(4))
        assert server.hear_all() == (UNMAP, address, address + 4 * PAGE)
        going.join()


def test_what_has_been_unmapped_is_not_taken_for_there(serve: Serve, memory: Make) -> None:
    six = memory(6, userfault.UNMAP)
    server = serve(six, [(0, 6, ALL)])
    server.ask(0, server.data[:PAGE])
    place = ctypes.c_void_p(six.address + 2 * PAGE)
    going = called(LIBC.munmap, place, size_of(2))
    assert server.hear() == 0x16  # UFFD_EVENT_UNMAP
    going.join()
    LIBC.mmap(place, size_of(2), 3, 0x32, -1, ctypes.c_long(0))
    userfault.register(six.uffd, six.address + 2 * PAGE, 2 * PAGE)
    new = content(2, 7)
    assert server.ask(2, new) == (0, len(new))
    assert six.page(2) + six.page(3) == new


def test_while_a_change_is_not_heard_of_nothing_is_brought(serve: Serve, memory: Make) -> None:
    six = memory(6, userfault.REMOVE)
    server = serve(six, [(0, 6, ALL)])
    letting_go = advised(six, 2, 2)
    assert asked(six.uffd), "it lets go of them, and waits until that is heard of"
    assert server.ask(0, server.data[:PAGE]) == (-1, -errno.EAGAIN)
    server.hear()
    letting_go.join()
    new = content(6, 7)
    for number in range(2, 6):
        server.ask(number, new[number * PAGE :][:PAGE])
        assert six.page(number) in (new[number * PAGE :][:PAGE], server.data[number * PAGE :][:PAGE])
    assert six.page(2) == new[2 * PAGE : 3 * PAGE]


@pytest.mark.parametrize("closed_by_criu", [True, False])
def test_a_child_of_nobody_who_is_filled_is_not_another(
    criu: ctypes.CDLL, library: ctypes.CDLL, serve: Serve, memory: Make, closed_by_criu: bool
) -> None:
    """Its descriptor has the number of one that was."""
    six, other = memory(6), memory(6, userfault.FORK)
    server = serve(six, [(0, 6, ALL)])
    server.ask(0, server.data[:PAGE])
    number = server.uffd
    if closed_by_criu:
        library.close(number)
    else:
        os.close(number)
    server.uffd = -1
    lower = []
    while (found := os.open("/dev/null", os.O_RDONLY)) != number:
        lower.append(found)
    os.close(number)
    forking = called(criu.fork_and_exit)
    buffer = ctypes.create_string_buffer(userfault.MESSAGE_BYTES)
    assert library.read(other.uffd, buffer, ctypes.c_size_t(len(buffer))) == len(buffer)
    assert (buffer.raw[0], struct.unpack_from("=I", buffer.raw, 8)[0]) == (0x13, number)  # UFFD_EVENT_FORK
    forking.join()
    os.waitpid(-1, 0)
    assert copy(library, number, six.address, server.data[:PAGE]) == (-1, -errno.ESRCH), "the child has ended"
    for descriptor in (number, *lower):
        os.close(descriptor)


def test_part_of_a_run_that_cannot_be_brought_holds_nothing_else_up(serve: Serve, memory: Make) -> None:
    """It is another mapping, which CRIU has not registered."""
    twenty = memory(20)
    place = ctypes.c_void_p(twenty.address + 7 * PAGE)
    LIBC.mmap(place, size_of(3), 3, 0x32, -1, ctypes.c_long(0))
    server = serve(twenty, [(0, 20, ALL)])
    server.ask(0, server.data[:PAGE])
    wrong = content(1, 5)
    for number in (*range(7), *range(10, 20)):
        assert server.ask(number, wrong) == (0, PAGE)
        assert twenty.page(number) == server.data[number * PAGE :][:PAGE]
    assert twenty.page(8) == bytes(PAGE)


def test_who_waits_for_a_page_that_is_there_is_woken(library: ctypes.CDLL, memory: Make) -> None:
    two = memory(2)
    found = ctypes.create_string_buffer(PAGE)
    reading = called(LIBC.memcpy, found, ctypes.c_void_p(two.address + PAGE), size_of(1))
    buffer = ctypes.create_string_buffer(userfault.MESSAGE_BYTES)
    assert library.read(two.uffd, buffer, ctypes.c_size_t(len(buffer))) == len(buffer)
    data = content(1)
    source = ctypes.create_string_buffer(data, PAGE)
    quietly = CopyRequest(two.address + PAGE, ctypes.addressof(source), PAGE, 1, 0)  # UFFDIO_COPY_MODE_DONTWAKE
    assert library.ioctl(two.uffd, ctypes.c_ulong(userfault.COPY), ctypes.byref(quietly)) == 0
    assert copy(library, two.uffd, two.address, content(2, 3)) == (0, 2 * PAGE)
    reading.join(10)
    assert found.raw == data


def test_whoever_restores_can_wait_for_the_end(criu: ctypes.CDLL, serve: Serve, memory: Make) -> None:
    held = ctypes.c_int.in_dll(criu, "held")
    six = memory(6)
    server = serve(six, [(0, 6, ALL)])
    name = f"\0phos-lazy-fill-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as early, pytest.raises(ConnectionRefusedError):
        early.connect(name)
    held.value = 1
    filling = called(server.ask, 0, server.data[:PAGE])
    try:
        with socket.socket(socket.AF_UNIX) as waiting:
            while waiting.connect_ex(name):
                pass
            waiting.settimeout(0.1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
            held.value = 0
            waiting.settimeout(10)
            with pytest.raises(ConnectionResetError):
                waiting.recv(1)
    finally:
        held.value = 0
        filling.join()


def test_a_descriptor_that_is_another_processs_later_is_not_the_first_ones(serve: Serve, memory: Make) -> None:
    six = memory(6)
    server = serve(six, [(0, 6, ALL)])
    server.ask(0, server.data[:PAGE])
    number = server.uffd
    os.close(number)
    six.renew()
    server._told(4712, six.uffd)
    assert server.uffd == number
    new = content(6, 7)
    for page in range(6):
        assert server.ask(page, new[page * PAGE :][:PAGE]) == (0, PAGE)
        assert six.page(page) == new[page * PAGE :][:PAGE], "it was taken for one that has been brought"
