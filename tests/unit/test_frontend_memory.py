"""The allocator: against a model, and against what the driver itself answers."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.frontend_fake import (
    LIBPHOS,
    PRELUDE,
    SOFTGPU,
    FakePhosd,
    Program,
    Session,
    environment_for,
    eventually,
    program,
)

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not (LIBPHOS.exists() and (SOFTGPU / "libcuda.so.1").exists()), reason="not built"),
]


@pytest.fixture
def phosd() -> Iterator[FakePhosd]:
    with FakePhosd() as daemon:
        yield daemon


# A program that does what it is told, one JSON list a line, and answers with one.
SERVER = """
context = start()
live = {}

def check(pointer, size, value):
    data = read(pointer, size)
    return data == bytes([value]) * size

while True:
    line = heard()
    if not line:
        break
    what, *rest = __import__("json").loads(line)
    if what == "alloc":
        size, value = rest
        code, pointer = cu.cuMemAlloc(size)
        if not int(code):
            fill(pointer, size, value)
            live[int(pointer)] = (size, value)
        answer = [int(code), int(pointer) if not int(code) else 0]
    elif what == "alloc_async":
        size, value = rest
        code, pointer = cu.cuMemAllocAsync(size, 0)
        if not int(code):
            ok(cu.cuMemsetD8Async(pointer, value, size, 0))
            live[int(pointer)] = (size, value)
        answer = [int(code), int(pointer) if not int(code) else 0]
    elif what in ("free", "free_async"):
        pointer = rest[0]
        size, value = live.pop(pointer)
        good = check(pointer, size, value)
        code = cu.cuMemFree(pointer) if what == "free" else cu.cuMemFreeAsync(pointer, 0)
        answer = [int(code[0]), good]
    elif what == "range":
        code, base, size = cu.cuMemGetAddressRange(rest[0])
        answer = [int(code), int(base) if not int(code) else 0, size]
    elif what == "check":
        answer = [all(check(p, s, v) for p, (s, v) in live.items())]
    elif what == "info":
        answer = [int(x) for x in ok(cu.cuMemGetInfo())]
    say(__import__("json").dumps(answer))
"""

UNIT = 2 << 20
SLAB = 16 * UNIT
SIZES = st.one_of(
    st.integers(1, 5000),
    st.integers(1, 3 << 20),
    st.sampled_from([512, 513, 4096, 4097, 1 << 20, (1 << 20) + 1, 2 << 20, (2 << 20) + 1, 9 << 20]),
    st.integers((1 << 20) + 1, 16 << 20),
    st.sampled_from([16 << 20, (16 << 20) + 1, 20 << 20, 32 << 20]),
)


def is_medium(size: int) -> bool:
    return 1 << 20 < size <= 16 << 20


class AllocatorMachine(RuleBasedStateMachine):
    """Allocations never overlap, are aligned, keep their content over toggles, and are found from inside."""

    phosd: FakePhosd
    app: Program

    @initialize()
    def begin(self) -> None:
        self.phosd = FakePhosd()
        self.app = Program(self.phosd, SERVER, PHOS_CACHE_BYTES="32M")
        self.session = self.phosd.arrival()
        self.live: dict[int, int] = {}
        self.value = 0

    def tell(self, *what: object) -> list:
        self.app.tell(json.dumps(what))
        return json.loads(self.app.line())

    @rule(size=SIZES, ordered=st.booleans())
    def allocate(self, size: int, ordered: bool) -> None:
        self.value = self.value % 250 + 1
        code, address = self.tell("alloc_async" if ordered else "alloc", size, self.value)
        assert code == 0
        assert address % 512 == 0
        for other, length in self.live.items():
            assert address + size <= other or other + length <= address, "allocations overlap"
        self.live[address] = size

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ordered=st.booleans())
    def free(self, data: st.DataObject, ordered: bool) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        code, good = self.tell("free_async" if ordered else "free", address)
        assert good, "content changed"
        assert code == 0
        del self.live[address]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ask_range(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        inside = address + data.draw(st.integers(0, self.live[address] - 1))
        assert self.tell("range", inside) == [0, address, self.live[address]]

    @rule()
    def toggle(self) -> None:
        self.phosd.toggle(self.session)
        assert self.session.memory_map is not None
        kept = {a.address: a.size for a in self.session.memory_map.allocations}
        assert kept == self.live
        blocks = {b.block: b.size for b in self.session.memory_map.blocks}
        for a in self.session.memory_map.allocations:
            assert a.offset + a.size <= blocks[a.block]
            if is_medium(a.size):
                assert blocks[a.block] == SLAB
                assert a.offset % UNIT == 0
        # Nothing is kept for what was freed: every block holds something.
        assert {a.block for a in self.session.memory_map.allocations} == set(blocks)
        mapped = {a.address - a.offset: blocks[a.block] for a in self.session.memory_map.allocations}
        ends = 0
        for base, size in sorted(mapped.items()):
            assert base >= ends, "blocks overlap"
            ends = base + size

    @rule()
    def contents(self) -> None:
        assert self.tell("check") == [True]

    @invariant()
    def told(self) -> None:
        if not hasattr(self, "session"):
            return
        free, total = self.tell("info")
        assert 0 < free <= total
        # What lives is not free. (What was freed is only when phosd has let go of it.)
        assert sum(-(-size // UNIT) * UNIT for size in self.live.values() if size > 1 << 20) <= total - free

    def teardown(self) -> None:
        if hasattr(self, "app"):
            self.app.kill()
            self.phosd.stop()


def test_allocator_against_a_model() -> None:
    run_state_machine_as_test(
        AllocatorMachine, settings=settings(max_examples=12, stateful_step_count=40, deadline=None)
    )


COMPARED = """
context = start()
import json
out = []

def note(name, result):
    out.append([name, int(result[0])])

note("zero", cu.cuMemAlloc(0))
note("huge", cu.cuMemAlloc(1 << 60))
note("more than there is", cu.cuMemAlloc(1 << 33))
note("pitch zero", cu.cuMemAllocPitch(0, 10, 4))
note("pitch element", cu.cuMemAllocPitch(100, 10, 5))
note("free nothing", cu.cuMemFree(0))
note("free wild", cu.cuMemFree(0x1234000))
p = ok(cu.cuMemAlloc(10000))
note("free inside", cu.cuMemFree(int(p) + 512))
note("range inside", cu.cuMemGetAddressRange(int(p) + 9999))
A = cu.CUpointer_attribute
for name in ("CU_POINTER_ATTRIBUTE_MEMORY_TYPE", "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
             "CU_POINTER_ATTRIBUTE_RANGE_SIZE", "CU_POINTER_ATTRIBUTE_IS_MANAGED", "CU_POINTER_ATTRIBUTE_MAPPED",
             "CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES"):
    code, value = cu.cuPointerGetAttribute(getattr(A, name), int(p) + 100)
    out.append([name, int(code), int(value) if not int(code) else None])
code, value = cu.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_CONTEXT, p)
out.append(["context", int(code), int(value) == int(context)])
code, value = cu.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, int(p) + 100)
out.append(["start", int(code), int(value) == int(p)])
ok(cu.cuMemFree(p))
note("free twice", cu.cuMemFree(p))
note("range of freed", cu.cuMemGetAddressRange(int(p)))
q, pitch = ok(cu.cuMemAllocPitch(1000, 10, 4))
out.append(["pitch", pitch % 512, pitch >= 1000])
ok(cu.cuMemFree(q))
note("retain", cu.cuMemRetainAllocationHandle(int(ok(cu.cuMemAlloc(100)))))
note("host zero", cu.cuMemHostAlloc(0, 0))
note("host free wild", cu.cuMemFreeHost(0x1234000))
note("async zero", cu.cuMemAllocAsync(0, 0))
ok(cu.cuCtxSetCurrent(None))
note("no context", cu.cuMemAlloc(100))
note("no context async", cu.cuMemAllocAsync(100, 0))
say(json.dumps(out))
"""


def test_answers_equal_the_drivers(tmp_path: Path) -> None:
    answers = []
    for preload in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(COMPARED)],
            env=environment_for(tmp_path / "nobody.sock", preload=preload),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[1] == answers[0]


def test_freed_memory_is_reported_free_and_given_back_when_needed(phosd: FakePhosd) -> None:
    body = """
    start()
    free, total = ok(cu.cuMemGetInfo())
    for _ in range(3):
        p = ok(cu.cuMemAlloc(100 << 20))
        ok(cu.cuMemFree(p))
    q = [ok(cu.cuMemAlloc(n << 20)) for n in (3, 5, 7)]
    for p in q:
        ok(cu.cuMemFree(p))
    assert ok(cu.cuMemGetInfo())[0] == free, (ok(cu.cuMemGetInfo()), free)
    everything = ok(cu.cuMemAlloc(free - (2 << 20)))  # only if the cache is flushed
    assert int(cu.cuMemAlloc(8 << 20)[0]) == 2
    ok(cu.cuMemFree(everything))
    say("done")
    """
    with program(phosd, body, SOFTGPU_MEMORY="512M", PHOS_CACHE_BYTES="256M") as (app, session):
        assert app.line() == "done"
        app.finish()
        eventually(lambda: session.connection is not None and session.connection.ended.is_set())


def test_blocks_are_registered_and_removed(phosd: FakePhosd) -> None:
    body = """
    start()
    p = [ok(cu.cuMemAlloc(3 << 20)) for _ in range(40)] + [ok(cu.cuMemAlloc(17 << 20)) for _ in range(7)]
    say("ready")
    heard()
    for q in p:
        ok(cu.cuMemFree(q))
    say("freed")
    heard()
    """
    with program(phosd, body, PHOS_CACHE_BYTES="0") as (app, session):
        app.line()
        eventually(lambda: len(session.blocks) == 5 + 7)  # eight of 4 MiB a slab
        assert all(b.descriptor >= 0 and not b.lost for b in session.blocks.values())
        assert sorted(b.size for b in session.blocks.values()) == [18 << 20] * 7 + [SLAB] * 5
        app.tell()
        app.line()
        eventually(lambda: not session.blocks)
        app.tell()
        app.finish()


def test_medium_sizes_share_slabs_and_grow_together_again(phosd: FakePhosd) -> None:
    body = """
    start()
    unit = 2 << 20
    free, total = ok(cu.cuMemGetInfo())
    a = [int(ok(cu.cuMemAlloc(2 * unit))) for _ in range(8)]
    assert ok(cu.cuMemGetInfo())[0] == free - 16 * unit
    base = min(a)
    assert sorted(a) == [base + 2 * n * unit for n in range(8)]
    # Best fit: the hole of two is taken before that of four.
    for n in (1, 4, 5):
        ok(cu.cuMemFree(base + 2 * n * unit))
    assert ok(cu.cuMemGetInfo())[0] == free - 10 * unit
    assert int(ok(cu.cuMemAlloc(2 * unit - 5))) == base + 2 * unit
    assert int(ok(cu.cuMemAlloc(4 * unit))) == base + 8 * unit
    # Neighbours freed in any order are one piece again.
    for n in (3, 1, 2):
        ok(cu.cuMemFree(base + 2 * n * unit))
    big = int(ok(cu.cuMemAlloc(6 * unit)))
    assert big == base + 2 * unit
    fill(big, 6 * unit, 5)
    assert int(ok(cu.cuMemGetAddressRange(big + 6 * unit - 1))[0]) == big
    ok(cu.cuMemFree(big))
    assert int(cu.cuMemGetAddressRange(big)[0]) != 0
    assert int(cu.cuMemFree(big)[0]) != 0
    assert int(cu.cuMemFree(base + unit)[0]) == 1  # inside the first
    say(base)
    heard()
    for address in (base, base + 8 * unit, base + 12 * unit, base + 14 * unit):
        ok(cu.cuMemFree(address))
    assert ok(cu.cuMemGetInfo())[0] == free
    say("done")
    """
    with program(phosd, body) as (app, session):
        base = int(app.line())
        phosd.toggle(session)
        assert session.memory_map is not None
        assert {(a.address - base) // UNIT: a.offset // UNIT for a in session.memory_map.allocations} == {
            0: 0, 8: 8, 12: 12, 14: 14,
        }  # fmt: skip
        assert len(session.memory_map.blocks) == 1
        app.tell()
        assert app.line() == "done"
        app.finish()


def test_no_more_slabs_once_much_is_free_in_those_there_are(phosd: FakePhosd) -> None:
    body = """
    start()
    total = ok(cu.cuMemGetInfo())[1]
    pieces = [int(ok(cu.cuMemAlloc(4 << 20))) for _ in range(8 * 20)]
    for n, p in enumerate(pieces):
        if n % 8:
            ok(cu.cuMemFree(p))  # one is left in each of twenty slabs
    kept = pieces[::8]
    larger = [int(ok(cu.cuMemAlloc(16 << 20))) for _ in range(25)]  # twenty fit into those
    ok(cu.cuMemFree(int(ok(cu.cuMemAlloc(100)))))
    for p in larger:
        ok(cu.cuMemFree(p))
    # 560 of 600 MiB are free in slabs: what does not fit there gets a block of its own.
    more = [int(ok(cu.cuMemAlloc(16 << 20))) for _ in range(20)]
    alone = [int(ok(cu.cuMemAlloc(14 << 20))) for _ in range(3)]
    say("ready")
    """
    with program(phosd, body, SOFTGPU_MEMORY="2G", PHOS_CACHE_BYTES="0") as (app, session):
        app.line()
        phosd.toggle(session)
        assert session.memory_map is not None
        sizes = sorted(b.size for b in session.memory_map.blocks)
        assert sizes == [14 << 20] * 3 + [SLAB] * 20
        app.finish()


def test_all_of_the_memory_can_be_had_in_medium_pieces(phosd: FakePhosd) -> None:
    """Where no whole slab fits any more, blocks of the exact size still do; and free slabs go when memory is short."""
    body = """
    start()
    free, total = ok(cu.cuMemGetInfo())
    small = ok(cu.cuMemAlloc(100))
    had = []
    while True:
        code, p = cu.cuMemAlloc(6 << 20)
        if int(code):
            assert int(code) == 2
            break
        had.append(p)
    left, _ = ok(cu.cuMemGetInfo())
    assert len(had) == (free - (2 << 20) - left) // (6 << 20)
    scattered = (len(had) // 5) * (2 << 20)  # five in each slab leave a unit
    assert left - scattered < 6 << 20, (left, scattered)
    for p in had:
        ok(cu.cuMemFree(p))
    for _ in range(2):
        everything = ok(cu.cuMemAlloc(free - (2 << 20)))
        assert int(cu.cuMemAlloc(2 << 20)[0]) == 2
        ok(cu.cuMemFree(everything))
    say("done")
    """
    with program(phosd, body, SOFTGPU_MEMORY="300M", PHOS_CACHE_BYTES="100M") as (app, _):
        assert app.line() == "done"
        app.finish()


SHORT_OF_MEMORY = """
context = start()
free, total = ok(cu.cuMemGetInfo())
heard()
pieces = [ok(cu.cuMemAlloc(20 << 20)) for _ in range(6)]
begun = time.monotonic()
assert int(cu.cuMemAlloc(free)[0]) == 2
say(time.monotonic() - begun)  # what running out takes here and now, with nothing to wait for
heard()
for p in pieces:
    ok(cu.cuMemFree(p))
begun = time.monotonic()
code, everything = cu.cuMemAlloc(free)
say(int(code), time.monotonic() - begun)
"""


def run_short(phosd: FakePhosd, app: Program, session: Session, reluctance: float) -> tuple[int, float]:
    """The answer to asking for all memory just after much was freed, and how many seconds were spent waiting."""
    app.tell()
    usual = float(app.line())
    eventually(lambda: len(session.blocks) == 6)
    phosd.reluctance = reluctance
    app.tell()
    code, seconds = app.line().split()
    return int(code), float(seconds) - usual


SHORT = {"SOFTGPU_MEMORY": "200M", "PHOS_CACHE_BYTES": "0"}


def test_freed_memory_is_waited_for_until_phosd_lets_go(phosd: FakePhosd) -> None:
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        code, seconds = run_short(phosd, app, session, 0.05)
        assert code == 0
        assert 0.2 < seconds < 0.9  # six times 0.05 s, and no more
        assert session.settled == 1
        app.finish()


def test_a_phosd_that_does_not_answer_costs_a_second(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        code, seconds = run_short(phosd, app, session, 0.3)
        assert code == 2
        assert 0.8 < seconds < 3
        app.finish()


def test_nobody_waits_for_a_phosd_that_has_gone(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        threading.Thread(target=lambda: (eventually(lambda: session.settled > 0), phosd.stop())).start()
        _, seconds = run_short(phosd, app, session, 0.02)
        assert seconds < 0.9
        app.finish()


def test_who_waits_for_memory_does_not_hold_up_a_quiesce(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        app.tell()
        app.line()
        eventually(lambda: len(session.blocks) == 6)
        app.tell()
        eventually(lambda: session.settled > 0)
        # The waiting thread is inside: it leaves when its second is over.
        assert not phosd.quiesce(session).error
        assert not phosd.open(session).error
        assert app.line().startswith("0 ")  # the descriptors were closed, only the answer was missing
        phosd.settles = True
        app.finish()


def test_nothing_freed_is_nothing_to_wait_for(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        app.tell()
        app.line()
        assert session.settled == 0
        app.kill()


def test_medium_memory_of_another_process(phosd: FakePhosd) -> None:
    """A handle names a place in a slab; the other pieces of the slab stay what they are."""
    exporter = """
    start()
    pieces = [ok(cu.cuMemAlloc(5 << 20)) for _ in range(3)]
    for n, p in enumerate(pieces):
        fill(p, 5 << 20, n + 1)
    ok(cu.cuCtxSynchronize())
    say(*(bytes(ok(cu.cuIpcGetMemHandle(p)).reserved).hex() for p in pieces[1:]))
    heard()
    assert [read(p, 5 << 20) for p in pieces] == [bytes([v]) * (5 << 20) for v in (1, 9, 3)]
    say("same")
    """
    importer = """
    start()
    opened = []
    for text in heard().split():
        h = cu.CUipcMemHandle()
        h.reserved = bytes.fromhex(text)
        opened.append(int(ok(cu.cuIpcOpenMemHandle(h, 1))))
    assert [read(p, 5 << 20)[0] for p in opened] == [2, 3]
    say("opened")
    heard()
    assert [read(p, 5 << 20)[-1] for p in opened] == [2, 3]
    fill(opened[0], 5 << 20, 9)
    ok(cu.cuCtxSynchronize())
    for p in opened:
        ok(cu.cuIpcCloseMemHandle(p))
    say("closed")
    """
    with program(phosd, exporter) as (one, first), program(phosd, importer) as (two, second):
        two.tell(one.line())
        assert two.line() == "opened"
        phosd.toggle(first)
        assert not phosd.quiesce(second).error
        assert not phosd.detach(second).error
        given = {n: first.blocks[b.owner_block].descriptor for n, b in second.blocks.items()}
        assert len(given) == 1
        assert not phosd.attach(second, given).error
        assert not phosd.open(second).error
        two.tell()
        assert two.line() == "closed"
        one.tell()
        assert one.line() == "same"
        two.finish()
        one.finish()


def test_everything_is_told_before_a_process_is_quiesced(phosd: FakePhosd) -> None:
    """Telling waits while the application allocates; a quiesce does not."""
    body = """
    context = start()
    stop = threading.Event()
    kept = []

    def work():
        ok(cu.cuCtxSetCurrent(context))
        while not stop.is_set() and len(kept) < 2000:
            kept.append(ok(cu.cuMemAlloc(17 << 20)))
            ok(cu.cuMemFree(ok(cu.cuMemAlloc(33 << 20))))
            time.sleep(0.0002)

    t = threading.Thread(target=work)
    t.start()
    say("ready")
    heard()
    stop.set()
    t.join()
    say(len(kept))
    """
    with program(phosd, body, SOFTGPU_MEMORY="64G", PHOS_CACHE_BYTES="0") as (app, session):
        app.line()
        for _ in range(12):
            assert not phosd.quiesce(session).error
            told = dict(session.blocks)
            assert not phosd.detach(session).error
            assert session.memory_map is not None
            assert {b.block for b in session.memory_map.blocks} == set(told)
            assert not phosd.attach(session).error
            assert not phosd.open(session).error
        app.tell()
        assert int(app.line()) > 0
        app.finish()


def test_stream_ordered_reuse_waits_for_the_freeing_stream(phosd: FakePhosd) -> None:
    body = """
    start()
    a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
    size = 8 << 20
    flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
    ctypes.memset(flag, 0, 4096)
    p = ok(cu.cuMemAllocAsync(size, a))
    ok(cu.cuStreamWaitValue32(a, flag, 1, 0))
    ok(cu.cuMemFreeAsync(p, a))
    other = ok(cu.cuMemAllocAsync(size, b))
    same = ok(cu.cuMemAllocAsync(size, a))
    assert int(other) != int(p), "another stream got memory that is still in use"
    assert int(same) == int(p), "the stream that freed it did not get it again"
    ctypes.memset(flag, 1, 1)
    ok(cu.cuMemFreeAsync(other, b)); ok(cu.cuMemFreeAsync(same, a))
    ok(cu.cuCtxSynchronize())
    again = ok(cu.cuMemAllocAsync(size, b))
    assert int(again) in (int(p), int(other))
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    attribute = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    assert int(ok(cu.cuMemPoolGetAttribute(pool, attribute))) == size
    ok(cu.cuMemFree(again))
    assert int(ok(cu.cuMemPoolGetAttribute(pool, attribute))) == 0
    say("done")
    """
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_own_pool(phosd: FakePhosd) -> None:
    body = """
    start()
    props = cu.CUmemPoolProps()
    props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = 0
    pool = ok(cu.cuMemPoolCreate(props))
    p = ok(cu.cuMemAllocFromPoolAsync(1 << 20, pool, 0))
    fill(p, 1 << 20, 6)
    assert int(ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, p))) == int(pool)
    say("ready")
    heard()
    ok(cu.cuMemPoolDestroy(pool))
    assert read(p, 1 << 20) == bytes([6]) * (1 << 20)
    ok(cu.cuMemFreeAsync(p, 0))
    ok(cu.cuCtxSynchronize())
    say("done")
    """
    with program(phosd, body) as (app, session):
        app.line()
        phosd.toggle(session)
        assert session.memory_map is not None
        assert [a.entry_point for a in session.memory_map.allocations] == ["cuMemAllocFromPoolAsync"]
        app.tell()
        assert app.line() == "done"
        app.finish()


def test_a_capture_survives_allocation_and_free(phosd: FakePhosd) -> None:
    body = """
    start()
    old = ok(cu.cuMemAlloc(5 << 20))
    keep = ok(cu.cuMemAlloc(1 << 20))
    s = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    p = ok(cu.cuMemAlloc(3 << 20))
    q = ok(cu.cuMemAlloc(300))
    ok(cu.cuMemsetD8Async(keep, 7, 1 << 20, s))
    ok(cu.cuMemFree(old))
    graph = ok(cu.cuStreamEndCapture(s))
    run = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphLaunch(run, s))
    ok(cu.cuStreamSynchronize(s))
    assert read(keep, 1 << 20) == bytes([7]) * (1 << 20)
    ok(cu.cuMemFree(p)); ok(cu.cuMemFree(q)); ok(cu.cuMemFree(keep))
    say("done")
    """
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_a_quiesce_waits_for_a_capture_to_end(phosd: FakePhosd) -> None:
    body = """
    start()
    keep = ok(cu.cuMemAlloc(1 << 20))
    s = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    say("capturing")
    heard()
    ok(cu.cuMemsetD8Async(keep, 7, 1 << 20, s))
    ok(cu.cuStreamEndCapture(s))
    say("done")
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert "capture" in phosd.quiesce(session, timeout_ms=200).error
        app.tell()
        assert app.line() == "done"
        app.finish()


def test_vmm_memory_on_the_host_stays_with_the_driver(phosd: FakePhosd) -> None:
    body = """
    start()
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    size = 2 << 20
    pointer = ok(cu.cuMemAddressReserve(size, 0, 0, 0))
    ok(cu.cuMemMap(pointer, size, 0, ok(cu.cuMemCreate(size, properties, 0)), 0))
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(pointer, size, [access], 1))
    fill(pointer, size, 7)
    say("ready")
    heard()
    say(read(pointer, size) == bytes([7]) * size)
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: session.uncarried.get("host-vmm") == (1, 2 << 20))
        assert not session.blocks
        phosd.toggle(session)
        app.tell()
        assert app.line() == "True"
        app.finish()


def test_managed_memory_and_arrays_are_reported(phosd: FakePhosd) -> None:
    body = """
    start()
    code, p = cu.cuMemAllocManaged(1 << 20, 1)
    d = cu.CUDA_ARRAY_DESCRIPTOR()
    d.Width, d.Height, d.NumChannels = 16, 16, 1
    d.Format = cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
    array = cu.cuArrayCreate(d)
    say(int(code), int(array[0]))
    heard()
    """
    with program(phosd, body) as (app, session):
        managed, array = (int(word) for word in app.line().split())
        if managed == 0:
            eventually(lambda: session.uncarried.get("managed") == (1, 1 << 20))
        if array == 0:
            eventually(lambda: session.uncarried.get("array", (0, 0))[0] == 1)
        if managed and array:
            pytest.fail("the software GPU has neither: nothing was tested")
        app.tell()
        app.finish()
