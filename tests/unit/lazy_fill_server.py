"""``criu lazy-pages`` as what is preloaded into it sees it (criu_plugin/lazy_fill/), and memory that is missing."""

from __future__ import annotations

import array
import ctypes
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pycriu.images import pagemap_pb2

from phos.gpu_engine.installation import frontend_library
from phos.images.mapping import map_memory, unmap_memory
from tests.unit import userfault
from tests.unit.image_sets import skip
from tests.unit.userfault import CopyRequest

PAGE = 4096
LAZY, PRESENT = 2, 4
MAGIC = struct.pack("=II", 0x54564319, 0x56084025)

ALL = LAZY | PRESENT
PAGEFAULT, REMAP, UNMAP = 0x12, 0x14, 0x16  # UFFD_EVENT_...

Entry = tuple[int, int, int]
"""Number of the first page, how many, flags."""


CRIU = """
#include <sys/types.h>
#include <unistd.h>
int folder = -1;
volatile int held;
int criu_get_image_dir(void) { while (held) usleep(1000); return folder; }
int fork_and_exit(void) { pid_t child = fork(); if (!child) _exit(0); return child; }
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


def message(entry: Any) -> bytes:
    content: bytes = entry.SerializeToString()
    return struct.pack("=I", len(content)) + content


def pagemap(entries: Sequence[Entry], pages_id: int = 1) -> bytes:
    messages = [pagemap_pb2.pagemap_head(pages_id=pages_id)]
    messages += [pagemap_pb2.pagemap_entry(vaddr=first * PAGE, nr_pages=n, flags=flags) for first, n, flags in entries]
    return MAGIC + b"".join(map(message, messages))


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


def called(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """A thread of the process changes its memory; it waits until CRIU has heard of that."""
    call = threading.Thread(target=function, args=arguments)
    call.start()
    return call


def size_of(pages: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(pages * PAGE)


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
def shm_folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


Serve = Callable[..., Server]


@pytest.fixture
def serve(
    library: ctypes.CDLL, criu: ctypes.CDLL, shm_folder: Path, monkeypatch: pytest.MonkeyPatch, memory: Make
) -> Iterator[Serve]:
    assert memory, "it goes later: who unmaps its memory waits until that is heard of"
    made: list[Server] = []
    monkeypatch.setenv("PHOS_FILL_THREADS", "3")
    number = ctypes.c_int.in_dll(criu, "folder")
    number.value = os.open(shm_folder, os.O_RDONLY | os.O_DIRECTORY)

    def make(memory: Memory, entries: Sequence[Entry]) -> Server:
        made.append(Server(library, shm_folder, memory, entries))
        return made[-1]

    yield make
    for each in made:
        each.close()
    os.close(number.value)
