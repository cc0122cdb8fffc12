"""What PyTorch's allocator has handed out of its segments: only that is copied aside, or waited for."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from phos.gen import wire_pb2 as wire
from phos.gpu_engine.cow.chunk_table import POOL_FLAGS, SHADOWED, ChunkTable, PoolShape, WindowTable
from tests.unit.frontend_fake import CUDA_INCLUDE, ROOT, FakePhosd, Program, built, program

BUILD = Path(os.environ.get("PHOS_HOME", ROOT / "build"))
REPORT = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
CUDA, CPU = 1, 0
UNKNOWN, HELD, FREE = range(3)
CHUNK = 4 << 20
MIB = 1 << 20

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]


class Part(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64))


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int8), ("index", ctypes.c_int8))


class Parts:
    """parts.c and part_reports.c by themselves."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._report = library[REPORT]
        self._report.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t, Device]
        library.phos_parts_find.argtypes = [ctypes.c_uint64, ctypes.POINTER(Part)]
        library.phos_parts_gone.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        library.phos_parts_gone.restype = None
        library.phos_parts_any.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        library.phos_parts_any.restype = ctypes.c_bool

    def report(self, address: int, size: int, device: int = CUDA) -> None:
        self._report(address, size, 0, 0, Device(device, 0))

    def any(self, begin: int, end: int) -> bool:
        return bool(self.library.phos_parts_any(begin, end))

    def find(self, address: int) -> tuple[int, int, int]:
        part = Part()
        kind = self.library.phos_parts_find(address, ctypes.byref(part))
        return (kind, part.begin, part.end) if kind != UNKNOWN else (kind, 0, 0)


@pytest.fixture
def parts_library(tmp_path: Path) -> Path:
    made, kick = tmp_path / "parts.so", tmp_path / "kick.c"
    kick.write_text("void phos_control_kick(void); void phos_control_kick(void) { }")
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    include = [f"-I{BUILD / 'gen'}", "-isystem", str(CUDA_INCLUDE)]
    sources = [ROOT / "frontend" / name for name in ("parts.c", "part_reports.c")]
    subprocess.run(["gcc", *flags, *include, "-o", made, kick, *sources], check=True)
    return made


@pytest.fixture
def parts(parts_library: Path) -> Parts:
    return Parts(ctypes.CDLL(str(parts_library)))


def test_what_is_handed_out_is_found_by_any_address_in_it(parts: Parts) -> None:
    assert parts.find(0x1000) == (UNKNOWN, 0, 0)
    parts.report(0x10000, 0x200)
    parts.report(0x10400, 0x400)
    parts.report(0x10200, 0x200, CPU)
    assert parts.find(0x10000) == parts.find(0x101FF) == (HELD, 0x10000, 0x10200)
    assert parts.find(0x10201) == parts.find(0x103FF) == (FREE, 0x10200, 0x10400)
    assert parts.find(0x107FF) == (HELD, 0x10400, 0x10800)
    assert parts.find(0x9000) == (FREE, 0, 0x10000)
    assert parts.find(0x10801) == (FREE, 0x10800, (1 << 64) - 1)
    parts.report(0x10400, -0x400)
    assert parts.find(0x107FF) == (FREE, 0x10200, (1 << 64) - 1)
    parts.report(0x10000, -0x200)
    assert parts.find(0x10000) == (UNKNOWN, 0, 0)


def test_the_end_of_what_is_handed_out_is_of_it_where_no_other_begins(parts: Parts) -> None:
    """Some kernels are given the end of what they write to."""
    parts.report(0x10000, 0x200)
    parts.report(0x10400, 0x400)
    parts.report(0x10800, 0x200)
    assert parts.find(0x10200) == (HELD, 0x10000, 0x10400)
    assert parts.find(0x10800) == (HELD, 0x10800, 0x10A00)
    assert parts.find(0x10A00) == (HELD, 0x10800, (1 << 64) - 1)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_came_back_without_a_report_does_not_hide_what_was_handed_out_since(parts: Parts, ordered: bool) -> None:
    """Beginning before it, within it, and around it."""
    parts.report(0x10000, 0x1000)
    parts.report(0x20000, 0x1000)
    parts.report(0x30000, 0x1000)
    if ordered:
        parts.find(0)
    parts.report(0x10800, 0x1000)
    parts.report(0x1F800, 0x1000)
    parts.report(0x2F000, 0x4000)
    assert parts.find(0x10900) == (HELD, 0x10800, 0x11800)
    assert parts.find(0x1FFFF) == parts.find(0x20010) == (HELD, 0x1F800, 0x20800)
    assert parts.find(0x30010) == (HELD, 0x2F000, 0x33000)
    assert parts.find(0x10010)[0] == parts.find(0x20900)[0] == FREE


def test_random_parts_are_those_of_a_list(parts: Parts) -> None:
    chance = random.Random(5)
    live: dict[int, int] = {}
    for step in range(20000):
        address = 0x7F0000000000 + chance.randrange(4000) * 0x200
        if chance.random() < 0.5:
            held = [b for b, size in live.items() if b < address + 0x200 and address < b + size]
            size = 0x200
            while not held and chance.random() < 0.7 and not any(b == address + size for b in live):
                size += 0x200
            if not held:
                live[address] = size
                parts.report(address, size)
        elif live and chance.random() < 0.8:
            gone = chance.choice(list(live))
            parts.report(gone, -live.pop(gone))
        if step % 7000 == 6999:
            begin, size = 0x7F0000000000 + chance.randrange(2) * MIB, 2 * MIB
            parts.library.phos_parts_gone(begin, size)
            live = {b: s for b, s in live.items() if not begin <= b < begin + size}
        if step % 5000 == 0:
            parts.library.phos_parts_rest()
        if step < 10000 and step % 50:
            continue
        asked = address + chance.randrange(0x400)
        wanted = next(((HELD, b, b + s) for b, s in live.items() if b <= asked < b + s), None)
        if wanted is None and live:
            wanted = (
                FREE,
                max((b + s for b, s in live.items() if b + s <= asked), default=0),
                min((b for b in live if b > asked), default=(1 << 64) - 1),
            )
            if wanted[1] == asked:
                wanted = (HELD, next(b for b, s in live.items() if b + s == asked), wanted[2])
        assert parts.find(asked) == (wanted or (UNKNOWN, 0, 0))
        end = asked + chance.choice((1, 0x400, 0x4000))
        assert parts.any(asked, end) == any(b < end and asked < b + s for b, s in live.items())


def test_more_reports_than_are_written_down_at_once_by_several_threads(parts: Parts) -> None:
    """Each of them hands out, takes back, and has some left; nobody asks, and nobody settles, meanwhile."""

    def works(thread: int) -> None:
        base = 0x7F0000000000 + (thread << 32)
        for number in range(9000):
            parts.report(base + number * 0x1000, 0x800)
            if number >= 100:
                parts.report(base + (number - 100) * 0x1000, -0x800)

    threads = [threading.Thread(target=works, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in range(3):
        base = 0x7F0000000000 + (thread << 32)
        held = [number for number in range(9000) if parts.find(base + number * 0x1000 + 0x7FF)[0] == HELD]
        assert held == list(range(8900, 9000))


REALTIME = """
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
struct device { int8_t type, index; };
void report(void *address, int64_t size, size_t allocated, size_t reserved, struct device device) __asm__("%s");
static atomic_bool done;

static void hand_out_and_take_back(uintptr_t address)
{
    report((void *)address, 512, 0, 0, (struct device){1, 0});
    report((void *)address, -512, 0, 0, (struct device){1, 0});
}

static void *ordinary(void *unused)
{
    while (!done)
        hand_out_and_take_back(4096);
    return unused;
}

int main(void)
{
    cpu_set_t first;
    CPU_ZERO(&first);
    sched_getaffinity(0, sizeof first, &first);
    int one = 0;
    while (!CPU_ISSET(one, &first))
        one++;
    CPU_ZERO(&first);
    CPU_SET(one, &first);
    pthread_t other;
    if (sched_setaffinity(0, sizeof first, &first) || pthread_create(&other, NULL, ordinary, NULL))
        return 1;
    if (pthread_setschedparam(pthread_self(), SCHED_FIFO, &(struct sched_param){.sched_priority = 1}))
        return 77;
    for (int i = 0; i < 3000; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        hand_out_and_take_back(8192);
    }
    done = 1;
    return pthread_join(other, NULL);
}
"""


def test_a_thread_with_a_real_time_priority_lets_whoever_is_writing_end(parts_library: Path, tmp_path: Path) -> None:
    """Both on one processor: it may have come in the middle of what the other one writes down."""
    code, made = tmp_path / "realtime.c", tmp_path / "realtime"
    code.write_text(REALTIME % REPORT)
    subprocess.run(["gcc", "-std=gnu11", "-O1", "-pthread", "-o", made, code, parts_library], check=True)
    ran = subprocess.run([made], timeout=30, check=False)
    if ran.returncode == 77:
        pytest.skip("no permission for real-time priorities")
    assert ran.returncode == 0


def test_memory_that_was_handed_out_in_a_capture_is_remembered_until_it_goes(parts: Parts) -> None:
    """Not that which came back in one, nor what is handed out after it."""
    base = 0x7F0000000000
    captured = parts.library.phos_parts_captured
    captured.argtypes, captured.restype = [ctypes.c_uint64, ctypes.c_uint64], ctypes.c_bool
    parts.report(base, 0x200)
    for depth in (1, 1, -1):
        parts.library.phos_parts_capture(depth)
    parts.report(base, -0x200)
    for segment in (40, 20, 60, 20):
        parts.report(base + segment * MIB + 0x400, 0x200)
        parts.report(base + segment * MIB + 0x400, -0x200)
    parts.library.phos_parts_capture(-1)
    parts.report(base + 80 * MIB, 0x200)
    assert [at for at in range(0, 100, 2) if captured(base + at * MIB, base + (at + 2) * MIB)] == [20, 40, 60]
    assert captured(base + 21 * MIB, base + 40 * MIB + 1)
    assert not captured(base + 22 * MIB, base + 40 * MIB)
    assert not captured(base + 62 * MIB, base + 400 * MIB)
    parts.library.phos_parts_gone(base + 30 * MIB, 20 * MIB)
    parts.library.phos_parts_gone(base + 61 * MIB, 20 * MIB)
    assert [at for at in range(0, 100, 2) if captured(base + at * MIB, base + (at + 2) * MIB)] == [20, 60]


def test_in_a_forked_child_nothing_is_known(parts: Parts) -> None:
    """Where another thread may have been in the middle of a change."""
    parts.report(0x10000, 0x200)
    parts.library.phos_parts_forked()
    for number in range(20000):
        parts.report(0x20000 + number * 0x200, 0x200)
    assert parts.find(0x20000) == (UNKNOWN, 0, 0)


# ---- in windows


C10 = """
#include <stddef.h>
#include <stdint.h>
struct device { int8_t type, index; };
int reported;
void report(void *address, int64_t size, size_t a, size_t b, struct device device) __asm__("%s");
void report(void *address, int64_t size, size_t a, size_t b, struct device device)
{
    (void)address, (void)a, (void)b;
    reported += size == 77 * 512 && device.type == 1;
}
"""
ALLOCATOR = """
#include <stddef.h>
#include <stdint.h>
struct device { int8_t type, index; };
void report(void *address, int64_t size, size_t a, size_t b, struct device device) __asm__("%s");
void hand_out(void *address, int64_t size)
{
    report(address, size, 1, 2, (struct device){1, 0});
}
"""

POOL, P, Q = 130 << 20, 40 << 20, 36 << 20

BODY = """
context = start()
libraries = {libraries!r}
c10 = ctypes.CDLL(libraries + "/libc10.so")
torch = ctypes.CDLL(libraries + "/libc10_cuda.so")
torch.hand_out.argtypes = [ctypes.c_void_p, ctypes.c_int64]
ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry one(.param .u64 to) {{ ret; }}\\0"
kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), b"one"))
stream = ok(cu.cuStreamCreate(1))
MIB = 1 << 20
def launch(to):
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, ((to,), (ctypes.c_uint64,)), 0))
pool, p, q = [int(ok(cu.cuMemAlloc(size))) for size in ({pool}, {p}, {q})]
"""


def build_libraries(folder: Path, c10: str = "libc10.so") -> None:
    """Libraries that are like PyTorch's in what matters here."""
    for name, source, more in ((c10, C10, []), ("libc10_cuda.so", ALLOCATOR, ["-L.", f"-l:{c10}"])):
        code = folder / f"{name}.c"
        code.write_text(source % REPORT)
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, code.name, *more]
        subprocess.run([*command, "-Wl,-rpath,$ORIGIN"], cwd=folder, check=True)


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    build_libraries(tmp_path)
    return tmp_path


FORWARDED = """
import ctypes, sys
folder, c10 = sys.argv[1:]
torch = ctypes.CDLL(folder + "/libc10_cuda.so")
torch.hand_out.argtypes = [ctypes.c_void_p, ctypes.c_int64]
torch.hand_out(4096, 77 * 512)
assert ctypes.CDLL("", ctypes.RTLD_GLOBAL).phos_parts_any(ctypes.c_uint64(4096), ctypes.c_uint64(8192))
print(ctypes.c_int.in_dll(ctypes.CDLL(folder + "/" + c10), "reported").value)
"""


@pytest.mark.parametrize("c10", ["libc10.so", "libc10-1f2e3d4c.so"])
def test_pytorchs_own_function_is_called_too_whatever_its_library_is_called(
    parts_library: Path, tmp_path: Path, c10: str
) -> None:
    """Packagers rename it."""
    build_libraries(tmp_path, c10)
    ran = subprocess.run(
        [sys.executable, "-c", FORWARDED, str(tmp_path), c10],
        env={**os.environ, "LD_PRELOAD": str(parts_library)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert ran.stdout == "1\n", ran.stderr


@contextmanager
def opened(phosd: FakePhosd, libraries: Path, body: str, **environment: str) -> Iterator[tuple[Program, set[int]]]:
    """A window in which the program goes on; gives the chunks of P's, or of the reserved, that it copies aside."""
    whole = BODY.format(libraries=str(libraries), pool=POOL, p=P, q=Q) + body
    with program(phosd, whole, **environment) as (app, session):
        of = int(app.line()) << 20
        assert not phosd.quiesce(session).error
        (lent,) = (number for number, block in session.blocks.items() if block.size == POOL)
        records, places, count = [], range(0), 0
        for number, block in session.blocks.items():
            if number != lent:
                records.append((number, block.size, count))
                if block.size == of:
                    places = range(places.start if places else count, count + -(-block.size // CHUNK))
                count += -(-block.size // CHUNK)
        shape = PoolShape(0, (POOL - POOL_FLAGS) // CHUNK, POOL)
        connection = session.connection
        assert connection is not None
        with (
            closing(ChunkTable(CHUNK, count)) as chunks,
            closing(WindowTable(0, records, [shape], 4 * count, prioritise=False, order=2 * count)) as table,
        ):
            shared = [chunks.descriptor, table.descriptor, session.blocks[lent].descriptor]
            assert not connection.ask(descriptors=shared, window_begin=wire.WindowBegin())[0].done.error
            assert not phosd.open(session).error
            app.tell()
            assert app.line() == "launched"
            yield app, {number for number, chunk in enumerate(places) if chunks.state(chunk) >= SHADOWED}
            chunks.close_window()
            assert not connection.ask(window_end=wire.WindowEnd())[0].done.error
        app.finish()


LAUNCHED = 'say("{of}"); heard(); {launch}; say("launched")'
HANDED_OUT = """
torch.hand_out(p + 9 * MIB, 10 * MIB)
torch.hand_out(p + 30 * MIB, 77 * 512)
torch.hand_out(p + 20 * MIB, 2 * MIB)
torch.hand_out(p + 20 * MIB, -2 * MIB)
assert ctypes.c_int.in_dll(c10, "reported").value == 1
"""


@built
@pytest.mark.parametrize(
    ("launch", "chunks"),
    [
        ("launch(p + 12 * MIB)", {2, 3, 4}),  # 9 to 19 MiB
        ("launch(p + 30 * MIB)", {7}),
        ("launch(p + 20 * MIB)", {4, 5, 6, 7}),  # nobody's, from 19 to 30
        ("launch(p + 19 * MIB)", {2, 3, 4, 5, 6, 7}),  # and what ends there
        ("launch(q)", set()),
    ],
)
def test_what_was_handed_out_is_copied_aside(phosd: FakePhosd, libraries: Path, launch: str, chunks: set[int]) -> None:
    body = HANDED_OUT + LAUNCHED.format(of=40, launch=launch)
    with opened(phosd, libraries, body) as (_, seen):
        assert seen == chunks


@built
def test_what_is_handed_out_in_the_window_is_known(phosd: FakePhosd, libraries: Path) -> None:
    late = "torch.hand_out(p + 9 * MIB, -10 * MIB); torch.hand_out(p + 9 * MIB, MIB); launch(p + 9 * MIB)"
    with opened(phosd, libraries, HANDED_OUT + LAUNCHED.format(of=40, launch=late)) as (_, seen):
        assert seen == {2}


@built
@pytest.mark.parametrize(
    ("before", "launch", "environment"),
    [
        pytest.param("", "launch(p + 12 * MIB)", {"PHOS_PYTORCH": "off"}, id="switched off"),
        pytest.param(
            "p = int(ok((cu.cuMemFree(p), cu.cuMemAlloc(40 * MIB))[1]))", "launch(p + 12 * MIB)", {}, id="freed"
        ),
        pytest.param(
            """
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
launch(p + 12 * MIB)
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
""",
            "ok(cu.cuGraphLaunch(graph, stream))",
            {},
            id="graph",
        ),
    ],
)
def test_where_nothing_can_be_known_it_is_the_whole_allocation(
    phosd: FakePhosd, libraries: Path, before: str, launch: str, environment: dict[str, str]
) -> None:
    """A graph's arguments were noted when something else may have been handed out; what was freed is another's."""
    body = HANDED_OUT + before + "\n" + LAUNCHED.format(of=40, launch=launch)
    with opened(phosd, libraries, body, **environment) as (_, seen):
        assert seen == set(range(10))


EXPANDABLE = """
prop = cu.CUmemAllocationProp()
prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
access = cu.CUmemAccessDesc()
access.location = prop.location
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
segment = int(ok(cu.cuMemAddressReserve(60 * MIB, 0, 0, 0)))
for i in range(3):
    ok(cu.cuMemMap(segment + i * 20 * MIB, 20 * MIB, 0, ok(cu.cuMemCreate(20 * MIB, prop, 0)), 0))
ok(cu.cuMemSetAccess(segment, 60 * MIB, [access], 1))
torch.hand_out(segment + 16 * MIB, 26 * MIB)
torch.hand_out(segment + 50 * MIB, MIB)
"""


@built
@pytest.mark.parametrize(
    ("launch", "chunks"),
    [
        ("launch(segment + 30 * MIB)", set(range(4, 11))),  # 16 to 42 MiB, from the middle
        ("launch(segment + 50 * MIB)", {12}),
        ("launch(segment + 45 * MIB)", {11, 12}),  # nobody's: from there to 50 MiB
        ("launch(segment + 42 * MIB)", set(range(4, 13))),  # and what ends there
    ],
)
def test_in_an_expandable_segment_as_well(phosd: FakePhosd, libraries: Path, launch: str, chunks: set[int]) -> None:
    """Of which the driver does not know where a tensor ends."""
    with opened(phosd, libraries, EXPANDABLE + LAUNCHED.format(of=20, launch=launch)) as (_, seen):
        assert seen == chunks


CAPTURED = """
def captured(at):
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    torch.hand_out(at, 12 * MIB)
    ok(cu.cuStreamEndCapture(stream))
    torch.hand_out(at, -12 * MIB)
    torch.hand_out(at, MIB)
"""
AFRESH = "p = int(ok((cu.cuMemFree(p), cu.cuMemAlloc(40 * MIB))[1])); torch.hand_out(p + 9 * MIB, MIB)"


@built
@pytest.mark.parametrize(
    ("before", "launch", "chunks"),
    [
        pytest.param("captured(p + 9 * MIB)", "launch(p + 9 * MIB)", set(range(10)), id="before"),
        pytest.param("", "captured(p + 9 * MIB); launch(p + 9 * MIB)", set(range(10)), id="in the window"),
        pytest.param("captured(q); torch.hand_out(p + 9 * MIB, MIB)", "launch(p + 9 * MIB)", {2}, id="in another one"),
        pytest.param("captured(p + 9 * MIB);" + AFRESH, "launch(p + 9 * MIB)", {2}, id="freed since"),
    ],
)
def test_of_a_segment_in_which_parts_were_handed_out_in_a_capture_it_is_the_whole(
    phosd: FakePhosd, libraries: Path, before: str, launch: str, chunks: set[int]
) -> None:
    """PyTorch makes the tensors of a graph again when it launches that, and reports none of them."""
    body = CAPTURED + before + "\n" + LAUNCHED.format(of=40, launch=launch)
    with opened(phosd, libraries, body) as (_, seen):
        assert seen == chunks


@built
def test_nor_is_anything_known_of_an_expandable_one(phosd: FakePhosd, libraries: Path) -> None:
    """All of which is one segment, wherever in it that was."""
    body = EXPANDABLE + CAPTURED + "captured(segment + 44 * MIB)\n"
    with opened(phosd, libraries, body + LAUNCHED.format(of=20, launch="launch(segment + 17 * MIB)")) as (_, seen):
        assert seen == set(range(4, 15))
