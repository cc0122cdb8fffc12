"""What is preloaded into ``criu lazy-pages``, where a process lets go of memory, moves it, unmaps it, or forks."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import time
from pathlib import Path

import pytest

from phos.images.mapping import map_memory, unmap_memory
from tests.unit import userfault
from tests.unit.lazy_fill_server import (
    ALL,
    FAILED,
    LIBC,
    PAGE,
    PAGEFAULT,
    REMAP,
    UNMAP,
    Make,
    Memory,
    Serve,
    asked,
    called,
    content,
    copy,
    size_of,
)


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
