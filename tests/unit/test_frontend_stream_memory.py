"""Memory that comes and goes in the order of a stream, and allocation while one is captured."""

from __future__ import annotations

import textwrap
import time

import pytest

from tests.unit.frontend_fake import WAITING, FakePhosd, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(240), built]


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


def test_memory_freed_in_a_stream_of_another_context_outlives_its_own(phosd: FakePhosd) -> None:
    body = """
    usual = start()
    size = 8 << 20
    first = ok(cu.cuCtxCreate(None, 0, 0))
    p = ok(cu.cuMemAlloc(size))
    ok(cu.cuCtxSetCurrent(usual))
    s = ok(cu.cuStreamCreate(1))
    flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
    ctypes.memset(flag, 0, 4096)
    ok(cu.cuStreamWaitValue32(s, flag, 1, 0))
    ok(cu.cuMemsetD8Async(p, 1, size, s))
    ok(cu.cuMemFreeAsync(p, s))
    ok(cu.cuCtxDestroy(first))
    early = ok(cu.cuMemAlloc(size))
    ctypes.memset(flag, 1, 1)
    ok(cu.cuCtxSynchronize())
    assert int(early) != int(p), "memory was given out that work in a stream still writes"
    late = [int(ok(cu.cuMemAlloc(size))) for _ in range(3)] + [int(early)]
    assert len(set(late)) == len(late), "memory was given out twice"
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    attribute = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
    again = ok(cu.cuMemAllocAsync(size, s))
    assert int(again) not in late
    assert int(ok(cu.cuMemPoolGetAttribute(pool, attribute))) == size
    say("done")
    """
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_stream_ordered_memory_outlives_its_context(phosd: FakePhosd) -> None:
    body = """
    usual = start()
    first = ok(cu.cuCtxCreate(None, 0, 0))
    p = ok(cu.cuMemAllocAsync(8 << 20, 0))
    fill(p, 8 << 20, 3)
    ok(cu.cuCtxSetCurrent(usual))
    ok(cu.cuCtxDestroy(first))
    assert read(p, 8 << 20) == bytes([3]) * (8 << 20)
    ok(cu.cuMemFree(p))
    say("done")
    """
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_stream_ordered_memory_is_freed_without_a_wait(phosd: FakePhosd) -> None:
    """By cuMemFree, which cuda.h says of it; other work may wait for what the program does next."""
    body = """
    pool = ok(cu.cuMemPoolCreate(pool_properties()))
    for size in (300, 5 << 20, 40 << 20):
        for p in ok(cu.cuMemAllocAsync(size, 0)), ok(cu.cuMemAllocFromPoolAsync(size, pool, 0)):
            fill(p, size, 1)
            ok(cu.cuStreamSynchronize(0))
            ok(cu.cuMemFree(p))
            assert int(cu.cuMemFree(p)[0]) == 1
    used = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    assert int(ok(cu.cuMemPoolGetAttribute(pool, used))) == 0
    say("freed", int(cu.cuStreamQuery(waiting)[0]))
    let_go()
    """
    properties = """
def pool_properties():
    props = cu.CUmemPoolProps()
    props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type, props.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    return props
"""
    with program(phosd, WAITING + properties + textwrap.dedent(body)) as (app, _):
        assert app.line() == "freed 600"
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


POOL = """
    start()
    def pool_of(**wanted):
        props = cu.CUmemPoolProps()
        props.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = 0
        for name, value in wanted.items():
            setattr(props, name, value)
        return ok(cu.cuMemPoolCreate(props))
"""


def test_a_pool_gives_no_more_than_its_largest_size(phosd: FakePhosd) -> None:
    body = (
        POOL
        + """
    pool, other = pool_of(maxSize=8 << 20), pool_of()
    assert int(cu.cuMemAllocFromPoolAsync(9 << 20, pool, 0)[0]) == 2
    p = ok(cu.cuMemAllocFromPoolAsync(5 << 20, pool, 0))
    q = ok(cu.cuMemAllocFromPoolAsync(3 << 20, pool, 0))
    assert int(cu.cuMemAllocFromPoolAsync(1, pool, 0)[0]) == 2
    ok(cu.cuMemAllocFromPoolAsync(9 << 20, other, 0))
    ok(cu.cuMemFreeAsync(p, 0))
    ok(cu.cuMemAllocFromPoolAsync(5 << 20, pool, 0))
    ok(cu.cuMemFree(q))
    ok(cu.cuMemAllocFromPoolAsync(3 << 20, pool, 0))
    say("done")
    """
    )
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_a_pool_for_a_special_use_stays_with_the_driver(phosd: FakePhosd) -> None:
    body = (
        POOL
        + """
    p = ok(cu.cuMemAllocFromPoolAsync(5 << 20, pool_of(usage=2), 0))  # CU_MEM_POOL_CREATE_USAGE_HW_DECOMPRESS
    fill(p, 5 << 20, 6)
    say("ready")
    heard()
    assert read(p, 5 << 20) == bytes([6]) * (5 << 20)
    ok(cu.cuMemFreeAsync(p, 0))
    say("done")
    """
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: session.uncarried.get("pool") == (1, 5 << 20))
        assert not session.blocks
        app.tell()
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize("flags", ["READ", "READWRITE"])
def test_a_pool_is_opened_to_another_device(phosd: FakePhosd, flags: str) -> None:
    body = (
        POOL
        + f"""
    pool = pool_of()
    early = ok(cu.cuMemAllocFromPoolAsync(5 << 20, pool, 0))
    wanted = cu.CUmemAccessDesc()
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 1
    assert int(ok(cu.cuMemGetAccess(wanted.location, early))) == 0
    wanted.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_{flags}
    ok(cu.cuMemPoolSetAccess(pool, [wanted], 1))
    late = ok(cu.cuMemAllocFromPoolAsync(50 << 20, pool, 0))
    for pointer in (early, late):
        assert int(ok(cu.cuMemGetAccess(wanted.location, pointer))) & 1
    say("done")
    """
    )
    with program(phosd, body, SOFTGPU_DEVICES="2") as (app, _):
        assert app.line() == "done"
        app.finish()


def test_a_pool_stays_open_to_a_device_whose_context_wants_no_access_any_more(phosd: FakePhosd) -> None:
    """And memory does to a context, where another one of its device wants none any more."""
    body = (
        POOL
        + """
    here, there = ok(cu.cuCtxGetCurrent()), ok(cu.cuDevicePrimaryCtxRetain(1))
    wanted = cu.CUmemAccessDesc()
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 1
    wanted.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def access(pointer):
        return int(ok(cu.cuMemGetAccess(wanted.location, pointer)))

    early = ok(cu.cuMemAlloc(5 << 20))
    other = ok(cu.cuCtxCreate(None, 0, 1))
    for context in (there, other):
        ok(cu.cuCtxSetCurrent(context))
        ok(cu.cuCtxEnablePeerAccess(here, 0))
    ok(cu.cuCtxDisablePeerAccess(here))
    assert access(early) == 3
    ok(cu.cuCtxSetCurrent(there))
    ok(cu.cuCtxDisablePeerAccess(here))
    assert access(early) == 0
    pool = pool_of()
    ok(cu.cuMemPoolSetAccess(pool, [wanted], 1))
    ok(cu.cuCtxEnablePeerAccess(here, 0))
    ok(cu.cuCtxDisablePeerAccess(here))
    ok(cu.cuCtxSetCurrent(here))
    for size in (5 << 20, 50 << 20):
        assert access(ok(cu.cuMemAllocFromPoolAsync(size, pool, 0))) == 3
    say("done")
    """
    )
    with program(phosd, body, SOFTGPU_DEVICES="2") as (app, _):
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


def test_pinned_memory_freed_during_captures_does_not_pile_up(phosd: FakePhosd) -> None:
    body = """
    start()
    s = ok(cu.cuStreamCreate(1))

    def free_during_a_capture(*pinned):
        ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        for p in pinned:
            ok(cu.cuMemFreeHost(p))
        ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(s))))

    def pin():
        return int(ok(cu.cuMemHostAlloc(1 << 20, 0)))

    def known(p):
        return not int(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p)[0])

    places = set()
    for _ in range(20):
        p = pin()
        places.add(p)
        free_during_a_capture(p)
    assert len(places) < 5, len(places)
    early, other, late = pin(), pin(), pin()
    free_during_a_capture(early, other)
    assert known(early) and known(other)
    ok(cu.cuMemFreeHost(late))
    assert not known(early) and not known(other)
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


@pytest.mark.parametrize(("keep", "left"), [(0, 0), (1 << 40, 1)], ids=["by default", "a pool that is to keep it"])
def test_memory_freed_in_a_stream_goes_back_when_nobody_wants_it(phosd: FakePhosd, keep: int, left: int) -> None:
    """Other processes may want it. A program that uses it again and again keeps it, without an allocation each time."""
    body = f"""
    start()
    pool = ok(cu.cuDeviceGetDefaultMemPool(0))
    threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    ok(cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t({keep})))
    stream = ok(cu.cuStreamCreate(1))
    def use():
        p = ok(cu.cuMemAllocAsync(100 << 20, stream))
        ok(cu.cuMemFreeAsync(p, stream))
    until = time.monotonic() + 4
    while time.monotonic() < until:
        use()
        time.sleep(0.1)
    ok(cu.cuStreamSynchronize(stream))
    say("rests")
    heard()
    use()
    say("used")
    """
    with program(phosd, body, PHOS_CACHE_BYTES="0") as (app, session):
        assert app.line() == "rests"
        assert list(session.blocks) == [1], "it was allocated once"
        if left:
            time.sleep(5)
        eventually(lambda: len(session.blocks) == left)
        app.tell()
        assert app.line() == "used"
        app.finish()
