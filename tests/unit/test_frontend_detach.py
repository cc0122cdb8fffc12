"""Detach and attach: memory goes away and comes back, and the application cannot tell."""

from __future__ import annotations

import os
import queue

import pytest

from phos.gen import wire_pb2 as wire
from phos.gpu_engine.errors import PASSING
from tests.unit.frontend_fake import FakePhosd, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]


def test_memory_keeps_content_and_address(phosd: FakePhosd) -> None:
    body = """
    start()
    small = [ok(cu.cuMemAlloc(3000 + i)) for i in range(20)]
    large = [ok(cu.cuMemAlloc((3 + i) << 20)) for i in range(3)]
    for i, p in enumerate(small):
        fill(p, 3000, i)
    for i, p in enumerate(large):
        fill(p, 3 << 20, 100 + i)
    say("ready")
    heard()
    assert all(read(p, 3000) == bytes([i]) * 3000 for i, p in enumerate(small))
    assert all(read(p, 3 << 20) == bytes([100 + i]) * (3 << 20) for i, p in enumerate(large))
    for p in small + large:
        ok(cu.cuMemFree(p))
    say("same")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        for _ in range(3):
            phosd.toggle(session)
        app.tell()
        assert app.line() == "same"
        app.finish()
    assert session.memory_map is not None
    assert len(session.memory_map.allocations) == 23
    assert sum(a.size for a in session.memory_map.allocations) == sum(3000 + i for i in range(20)) + (12 << 20)


def test_no_descriptor_of_ours_while_detached(phosd: FakePhosd) -> None:
    body = """
    start()
    before = ok(cu.cuMemAlloc(5 << 20))
    say("ready")
    heard()
    say("done")
    """
    with program(phosd, body) as (app, session):
        app.line()
        connected = app.descriptors()
        assert any("socket" in d for d in connected)
        assert not phosd.quiesce(session).error
        done = phosd.detach(session)
        assert not done.error
        assert done.blocks == len(session.blocks) == 1
        assert done.bytes == sum(b.size for b in session.blocks.values())
        detached = app.descriptors()
        assert not [d for d in detached if d.startswith(("socket:", "anon_inode:[eventfd]"))]
        assert not [d for d in detached if "phos-" in d]
        assert not phosd.attach(session).error
        assert not phosd.open(session).error
        app.tell()
        app.finish()


def test_calls_wait_while_detached(phosd: FakePhosd) -> None:
    body = """
    start()
    p = ok(cu.cuMemAlloc(1 << 20))
    say("ready")
    heard()
    fill(p, 1 << 20, 9)
    say("filled")
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        app.tell()
        with pytest.raises(queue.Empty):
            app.line(timeout=0.3)
        assert not phosd.attach(session).error
        with pytest.raises(queue.Empty):
            app.line(timeout=0.2)
        assert not phosd.open(session).error
        assert app.line() == "filled"
        app.finish()


def test_threads_at_work(phosd: FakePhosd) -> None:
    """Threads that copy, set and allocate without pause while the process is toggled."""
    body = """
    context = start()
    stop = threading.Event()
    rounds = [0] * 4
    failures = []

    def work(n):
        try:
            ok(cu.cuCtxSetCurrent(context))
            stream = ok(cu.cuStreamCreate(0))
            keep = ok(cu.cuMemAlloc(1 << 20))
            while not stop.is_set():
                size = 1000 * (n + 1) << (rounds[n] % 12)
                p = ok(cu.cuMemAlloc(size))
                ok(cu.cuMemsetD8Async(p, n + 1, size, stream))
                ok(cu.cuMemsetD8Async(keep, n + 1, 1 << 20, stream))
                ok(cu.cuStreamSynchronize(stream))
                assert read(p, size) == bytes([n + 1]) * size
                ok(cu.cuMemFree(p))
                rounds[n] += 1
            assert read(keep, 1 << 20) == bytes([n + 1]) * (1 << 20)
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    say("ready")
    heard()
    stop.set()
    for t in threads:
        t.join()
    say(min(rounds), failures)
    """
    with program(phosd, body) as (app, session):
        app.line()
        for _ in range(15):
            phosd.toggle(session)
        app.tell()
        rounds, failures = app.line().split(" ", 1)
        assert failures == "[]"
        assert int(rounds) > 0
        app.finish()


def test_application_vmm_comes_back_with_its_access(phosd: FakePhosd) -> None:
    body = """
    start()
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    unit = 2 << 20
    base = ok(cu.cuMemAddressReserve(8 * unit, 0, 0, 0))
    handles = [ok(cu.cuMemCreate(unit, prop, 0)) for _ in range(6)]
    access = cu.CUmemAccessDesc()
    access.location = prop.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    for i, h in enumerate(handles):
        ok(cu.cuMemMap(int(base) + i * unit, unit, 0, h, 0))
    ok(cu.cuMemSetAccess(int(base), 5 * unit, [access], 1))
    for i in range(5):
        fill(int(base) + i * unit, unit, i + 1)
    ok(cu.cuCtxSynchronize())
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    ok(cu.cuMemSetAccess(int(base) + 2 * unit, unit, [access], 1))
    ok(cu.cuMemRelease(handles[0]))  # mapped, and kept by nothing else
    say("ready")
    heard()
    location = prop.location
    flags = [int(ok(cu.cuMemGetAccess(location, int(base) + i * unit))) for i in range(6)]
    assert flags == [3, 3, 1, 3, 3, 0], flags
    assert all(read(int(base) + i * unit, unit) == bytes([i + 1]) * unit for i in range(5))
    retained = ok(cu.cuMemRetainAllocationHandle(int(base) + unit))
    assert int(retained) == int(handles[1])
    ok(cu.cuMemRelease(retained))
    got = ok(cu.cuMemGetAllocationPropertiesFromHandle(handles[3]))
    assert int(got.requestedHandleTypes) == 0 and got.location.id == 0
    held = ok(cu.cuMemAlloc(unit * 9))
    for start in int(base), int(base) + unit, held:
        for size in 0, 2**64 - unit, 2**64 - 1:
            assert int(cu.cuMemUnmap(start, size)[0]) == 1, (start, size)
    fill(held, unit, 7)
    assert read(held, unit) == bytes([7]) * unit
    ok(cu.cuMemFree(held))
    ok(cu.cuMemUnmap(int(base), 6 * unit))
    for h in handles[1:]:
        ok(cu.cuMemRelease(h))
    ok(cu.cuMemAddressFree(int(base), 8 * unit))
    say("same")
    heard()
    """
    with program(phosd, body, PHOS_CACHE_BYTES="0") as (app, session):
        assert app.line() == "ready"
        eventually(lambda: len(session.blocks) == 6)
        assert {b.owner for b in session.blocks.values()} == {wire.BlockAdded.APPLICATION}
        for _ in range(2):
            phosd.toggle(session)
        app.tell()
        assert app.line() == "same"
        eventually(lambda: not session.blocks)
        app.tell()
        app.finish()


def test_pinned_memory_is_unpinned_and_pinned_again(phosd: FakePhosd) -> None:
    body = """
    start()
    size = 3 << 20
    host = int(ok(cu.cuMemHostAlloc(size, 0)))
    ctypes.memset(host, 5, size)
    own = ctypes.create_string_buffer(b"7" * (1 << 16), 1 << 16)
    ok(cu.cuMemHostRegister(ctypes.addressof(own), 1 << 16, 0))
    device = ok(cu.cuMemAlloc(size))
    say("ready")
    heard()
    assert ctypes.string_at(host, size) == bytes([5]) * size
    assert int(ok(cu.cuMemHostGetDevicePointer(host, 0))) == host
    ok(cu.cuMemcpyHtoDAsync(device, host, size, 0))
    ok(cu.cuCtxSynchronize())
    assert read(device, size) == bytes([5]) * size
    ok(cu.cuMemHostUnregister(ctypes.addressof(own)))
    ok(cu.cuMemFreeHost(host))
    say("same")
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        done = phosd.detach(session)
        assert not done.error
        assert done.host_bytes == (3 << 20) + (1 << 16)
        assert not phosd.attach(session).error
        assert not phosd.open(session).error
        assert session.memory_map is not None
        entry_points = sorted(h.entry_point for h in session.memory_map.host_allocations)
        assert entry_points == ["cuMemHostAlloc", "cuMemHostRegister"]
        app.tell()
        assert app.line() == "same"
        app.finish()


def test_failed_attach_says_why_and_can_be_tried_again(phosd: FakePhosd) -> None:
    body = """
    start()
    p = ok(cu.cuMemAlloc(4 << 20)); q = ok(cu.cuMemAlloc(17 << 20))  # the one in a slab, the other by itself
    fill(p, 4 << 20, 3); fill(q, 6 << 20, 4)
    say("ready")
    heard()
    assert read(p, 4 << 20) == bytes([3]) * (4 << 20) and read(q, 6 << 20) == bytes([4]) * (6 << 20)
    say("same")
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        first, second = session.blocks
        wrong = os.open("/dev/null", os.O_RDONLY)
        done = phosd.attach(session, {first: session.blocks[first].descriptor, second: wrong})
        os.close(wrong)
        assert "imported" in done.error
        assert "attached before" in phosd.open(session).error
        done = phosd.give(session, {first: session.blocks[first].descriptor})
        assert "did not send" in done.error
        assert not done.code
        assert not phosd.give(session).error
        assert not phosd.open(session).error
        app.tell()
        assert app.line() == "same"
        app.finish()


def test_quiesce_times_out_and_names_who_is_inside(phosd: FakePhosd) -> None:
    body = """
    context = start()
    from cuda.bindings import driver as cu
    flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
    ctypes.memset(flag, 0, 4096)
    stream = ok(cu.cuStreamCreate(0))
    ok(cu.cuStreamWaitValue32(stream, flag, 1, 0))
    say("ready")

    def inside():
        ok(cu.cuCtxSetCurrent(context))
        say("inside")
        ok(cu.cuStreamSynchronize(stream))
        say("out")

    t = threading.Thread(target=inside)
    t.start()
    heard()
    ok(cu.cuMemGetInfo())
    ctypes.memset(flag, 1, 1)
    t.join()
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert app.line() == "inside"
        # The thread may meet a closed gate before it makes its call; that is opened again when the time is over.
        eventually(
            lambda: "did not leave cuStreamSynchronize" in phosd.quiesce(session, timeout_ms=300).error,
            "the call to be named",
        )
        app.tell()
        assert app.line() == "out"
        app.finish()


def test_lost_memory_fails_every_call(phosd: FakePhosd) -> None:
    body = """
    start()
    p = ok(cu.cuMemAlloc(4 << 20))
    say("ready")
    heard()
    say(int(cu.cuMemsetD8(p, 1, 10)[0]), int(cu.cuMemAlloc(100)[0]))
    os._exit(0)
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        phosd.action = wire.Welcome.LOST
        (phosd.folder / "hold" / session.number.hex()).unlink()
        assert phosd.arrival() is session
        app.tell()
        assert app.line() == "46 46"
        eventually(lambda: "is lost: the test says so" in app.stderr)


def test_retry_asks_again_until_told_to_attach(phosd: FakePhosd) -> None:
    body = """
    start()
    p = ok(cu.cuMemAlloc(4 << 20))
    fill(p, 4 << 20, 8)
    say("ready")
    heard()
    assert read(p, 4 << 20) == bytes([8]) * (4 << 20)
    """
    with program(phosd, body) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        phosd.action = wire.Welcome.RETRY
        (phosd.folder / "hold" / session.number.hex()).unlink()
        for _ in range(3):
            assert phosd.arrival() is session
        phosd.action = wire.Welcome.ATTACH
        while session.hellos[-1].state == wire.DETACHED and session.connection is not None:
            assert phosd.arrival() is session
            if not session.connection.ended.wait(0.1):
                break
        assert not phosd.give(session).error
        assert not phosd.open(session).error
        app.tell()
        app.finish()


# Blocks: a medium slab and three of their own, in the order in which they were made. Pinned host memory: two pieces.
EVERYTHING = """
context = start()
sizes = [3 << 20, 17 << 20, 19 << 20, 21 << 20]
p = [ok(cu.cuMemAlloc(n)) for n in sizes]
host = [int(ok(cu.cuMemHostAlloc(n, 0))) for n in (5 << 20, 100)]
for i, (q, n) in enumerate(zip(p, sizes)):
    fill(q, n, i + 1)
ctypes.memset(host[0], 50, 5 << 20)
ctypes.memset(host[1], 51, 100)
ok(cu.cuCtxSynchronize())
before = len(descriptors())

def same():
    for i, (q, n) in enumerate(zip(p, sizes)):
        assert read(q, n) == bytes([i + 1]) * n, i
        assert int(ok(cu.cuMemGetAddressRange(int(q) + n - 1))[0]) == int(q)
    for h, n, value in zip(host, (5 << 20, 100), (50, 51)):
        assert ctypes.string_at(h, n) == bytes([value]) * n
        assert int(ok(cu.cuMemHostGetDevicePointer(h, 0))) == h
    extra = ok(cu.cuMemAlloc(18 << 20))
    ok(cu.cuMemcpyHtoDAsync(extra, host[0], 5 << 20, 0))
    ok(cu.cuCtxSynchronize())
    assert read(extra, 5 << 20) == bytes([50]) * (5 << 20)
    ok(cu.cuMemFree(extra))

say("ready")
while heard() == "check":
    same()
    say("same")
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("unregister-fail-at:1", "cannot be unpinned"),
        ("unregister-fail-at:2", "cannot be unpinned"),
        ("unmap-fail-at:1", "cannot be unmapped"),
        ("unmap-fail-at:4", "cannot be unmapped"),
        ("release-fail-at:1", "cannot be released"),
        ("release-fail-at:2", "cannot be released"),
        ("release-fail-at:4", "cannot be released"),
    ],
)
def test_a_detach_that_fails_leaves_everything_as_it_was(phosd: FakePhosd, fault: str, said: str) -> None:
    with program(phosd, EVERYTHING, SOFTGPU_FAULTS=fault) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        blocks = dict(session.blocks)
        assert len(blocks) == 4
        done = phosd.detach(session)
        assert said in done.error
        assert not phosd.open(session).error
        app.tell("check")
        assert app.line() == "same"
        # The fault strikes once: the next attempt succeeds, from the state that the first one left.
        phosd.toggle(session)
        app.tell("check")
        assert app.line() == "same"
        app.tell("enough")
        app.finish()
        assert app.stderr == "" or "fails from now on" not in app.stderr


def test_memory_that_cannot_be_had_back_fails_every_call(phosd: FakePhosd) -> None:
    """A handle cannot be released, and phosd has none of the others any more."""
    body = (
        EVERYTHING.split("say(", maxsplit=1)[0]
        + """
say("ready")
heard()
say(int(cu.cuMemsetD8(p[0], 1, 10)[0]))
os._exit(0)
"""
    )
    with program(phosd, body, SOFTGPU_FAULTS="release-fail-at:3") as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        for block in session.blocks.values():
            phosd.let_go(block)
        assert "cannot be released" in phosd.detach(session).error
        assert not phosd.open(session).error
        app.tell()
        assert app.line() == "46"
        eventually(lambda: "every CUDA call fails from now on" in app.stderr)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("import-fail-at:1", "cannot be imported"),
        ("import-fail-at:3", "cannot be imported"),
        ("map-fail-at:5", "cannot be mapped"),  # four were for allocating
        ("map-fail-at:7", "cannot be mapped"),
        ("access-fail-at:5+", "access to memory"),
    ],
)
def test_an_attach_that_fails_can_be_tried_again(phosd: FakePhosd, fault: str, said: str) -> None:
    with program(phosd, EVERYTHING, SOFTGPU_FAULTS=fault) as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        assert not phosd.detach(session).error
        done = phosd.attach(session)
        assert said in done.error
        assert done.code in PASSING
        assert "attached before" in phosd.open(session).error
        if fault.endswith("+"):
            assert said in phosd.give(session).error
            return  # it strikes for ever: there is no way back
        assert not phosd.give(session).error
        assert not phosd.open(session).error
        app.tell("check")
        assert app.line() == "same"
        phosd.toggle(session)
        app.tell("check")
        assert app.line() == "same"
        app.tell("enough")
        app.finish()


def test_memory_that_cannot_be_pinned_again_stays_usable(phosd: FakePhosd) -> None:
    with program(phosd, EVERYTHING, SOFTGPU_FAULTS="register-fail-at:3") as (app, session):
        app.line()
        phosd.toggle(session)
        eventually(lambda: "pageable from now on" in app.stderr)
        app.kill()


def test_memory_that_could_not_be_exported_is_tried_again_and_else_not_detached(phosd: FakePhosd) -> None:
    with program(phosd, EVERYTHING, SOFTGPU_FAULTS="export-fail-at:2") as (app, session):
        app.line()
        eventually(lambda: len(session.blocks) == 4)
        phosd.toggle(session)
        app.tell("check")
        assert app.line() == "same"
        app.kill()
    with program(phosd, EVERYTHING, SOFTGPU_FAULTS="export-fail-at:2+") as (app, session):
        app.line()
        assert not phosd.quiesce(session).error
        assert "could not be exported" in phosd.detach(session).error
        assert not phosd.open(session).error
        app.tell("check")
        assert app.line() == "same"
        app.tell("enough")
        app.finish()
