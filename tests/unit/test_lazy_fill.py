"""What is preloaded into ``criu lazy-pages`` (criu_plugin/lazy_fill/): reading pagemaps, filling memory from them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycriu.images import pagemap_pb2

from tests.unit import userfault
from tests.unit.image_sets import skip
from tests.unit.lazy_fill_server import (
    ALL,
    LAZY,
    LIBC,
    MAGIC,
    PAGE,
    PRESENT,
    Entry,
    Make,
    Memory,
    Serve,
    called,
    content,
    copy,
    message,
    pagemap,
    size_of,
)
from tests.unit.userfault import CopyRequest


class Run(ctypes.Structure):
    """struct phos_lazy_run."""

    _fields_ = (("address", ctypes.c_uint64), ("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class Pages(ctypes.Structure):
    """struct phos_lazy_pages."""

    _fields_ = (("pages_id", ctypes.c_uint32), ("count", ctypes.c_size_t), ("runs", ctypes.POINTER(Run)))


def decode(library: ctypes.CDLL, image: bytes) -> tuple[int, list[tuple[int, int, int]]] | None:
    pages = Pages()
    if library.phos_lazy_decode(image, ctypes.c_size_t(len(image)), ctypes.byref(pages)):
        assert not pages.runs
        return None
    runs = [(run.address, run.offset, run.size) for run in pages.runs[: pages.count]]
    LIBC.free(pages.runs)
    return pages.pages_id, runs


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


def test_all_come_without_threads_whose_pids_the_image_needs(serve: Serve, memory: Make, shm_folder: Path) -> None:
    last = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
    for pid in range(last + 1, last + 500):
        (shm_folder / f"core-{pid}.img").touch()
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
    shm_folder: Path,
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
        shutil.copytree(shm_folder, tmp_path / "image")
        other = os.open(tmp_path / "image", os.O_RDONLY | os.O_DIRECTORY)
        os.dup2(other, ctypes.c_int.in_dll(criu, "folder").value)
        os.close(other)
    if reason == "cut off":
        os.truncate(shm_folder / "pages-3.img", PAGE)
    if reason == "no pagemap":
        (shm_folder / "pagemap-4711.img").unlink()
    if reason == "a pagemap of nothing":
        (shm_folder / "pagemap-4711.img").write_bytes(b"")
    for number in range(10):
        data = content(1, 100 + number)
        assert server.ask(number, data) == (0, PAGE)
        assert ten.page(number) == data, "somebody else had brought it"


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
