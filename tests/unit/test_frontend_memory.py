"""Where an application's memory comes from, and what phosd is told of it."""

from __future__ import annotations

import subprocess

import pytest

from tests.unit.frontend_fake import SLAB, SOFTGPU, UNIT, FakePhosd, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(240), built]


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


@pytest.mark.parametrize("limit", ["much", "-1", "K", "1T", "17179869184G"])
def test_a_limit_without_a_meaning_is_said(phosd: FakePhosd, limit: str) -> None:
    """-1 would be no limit at all, and what a shift of bits leaves of too large a number any."""
    with program(phosd, "start()", PHOS_CACHE_BYTES=limit) as (app, _):
        app.finish()
        app.error_reader.join(5)
        assert f"PHOS_CACHE_BYTES={limit} is not a number of bytes" in app.stderr


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


def test_the_last_context_of_a_gpu_takes_freed_memory_along(phosd: FakePhosd) -> None:
    body = """
    ok(cu.cuInit(0))
    contexts = [ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0)))) for _ in range(2)]
    for context in contexts:
        ok(cu.cuCtxSetCurrent(context))
        ok(cu.cuMemFree(ok(cu.cuMemAlloc(20 << 20))))
    ok(cu.cuCtxDestroy(contexts[1]))
    say("one")
    heard()
    ok(cu.cuCtxSetCurrent(contexts[0]))
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(20 << 20))))
    ok(cu.cuCtxDestroy(contexts[0]))
    say("none")
    heard()
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "one"
        eventually(lambda: len(session.blocks) == 1)
        app.tell()
        assert app.line() == "none"
        eventually(lambda: not session.blocks)
        app.tell()
        app.finish()


def test_a_primary_context_that_cannot_be_destroyed_keeps_its_memory(phosd: FakePhosd) -> None:
    body = """
    context = start()
    stream = ok(cu.cuStreamCreate(0))
    p, q = ok(cu.cuMemAlloc(3 << 20)), ok(cu.cuMemAllocAsync(5000, stream))
    fill(p, 3 << 20, 7)
    assert int(cu.cuCtxDestroy(context)[0]) != 0
    assert read(p, 3 << 20) == bytes([7]) * (3 << 20)
    ok(cu.cuMemFreeAsync(q, stream))
    ok(cu.cuMemFree(p))
    say("done")
    """
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_peer_access_to_a_context_that_the_frontend_has_not_seen(phosd: FakePhosd) -> None:
    """As one that the runtime library made through the driver's private tables."""
    listed = subprocess.run(["nm", "-D", SOFTGPU / "libcuda.so.1"], capture_output=True, text=True, check=True).stdout
    at = {line.split()[-1]: int(line.split()[0], 16) for line in listed.splitlines() if len(line.split()) == 3}
    body = f"""
    start()
    get = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuDeviceGet, ctypes.c_void_p).value  # not wrapped
    retain = get + {at["cuDevicePrimaryCtxRetain"] - at["cuDeviceGet"]}
    context = ctypes.c_void_p()
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(retain)(ctypes.addressof(context), 1) == 0
    peer = cu.CUcontext(context.value)
    ok(cu.cuCtxEnablePeerAccess(peer, 0))
    ok(cu.cuCtxSetCurrent(peer))
    location = cu.CUmemLocation()
    location.type, location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    assert int(ok(cu.cuMemGetAccess(location, ok(cu.cuMemAlloc(5 << 20))))) == 3
    say("done")
    """
    with program(phosd, body, SOFTGPU_DEVICES="2") as (app, _):
        assert app.line() == "done"
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
    ok(cu.cuMemFree(pieces[2]))
    pieces[2] = ok(cu.cuMemAlloc(3 << 20))
    fill(pieces[2], 3 << 20, 3)
    ok(cu.cuCtxSynchronize())
    say(bytes(ok(cu.cuIpcGetMemHandle(pieces[2])).reserved).hex())
    heard()
    assert [read(p, 3 << 20) for p in pieces] == [bytes([v]) * (3 << 20) for v in (1, 9, 3)]
    say("same")
    """
    importer = """
    start()
    opened, sizes = [], [5 << 20, 5 << 20]

    def open_handle(text):
        h = cu.CUipcMemHandle()
        h.reserved = bytes.fromhex(text)
        return int(ok(cu.cuIpcOpenMemHandle(h, 1)))

    for text in heard().split():
        opened.append(open_handle(text))
    assert [read(p, 5 << 20)[0] for p in opened] == [2, 3]

    def ranges():
        start = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        size = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
        for p, whole in zip(opened, sizes):
            inside = p + whole - 1
            base, length = ok(cu.cuMemGetAddressRange(inside))
            assert (int(base), length) == (p, whole)
            assert int(ok(cu.cuPointerGetAttribute(start, inside))) == p
            assert [int(v) for v in ok(cu.cuPointerGetAttributes(2, [start, size], inside))] == [p, whole]

    ranges()
    say("opened")
    heard()
    ranges()
    say("asked")
    assert open_handle(heard()) == opened[1]  # another allocation at the same place
    sizes[1] = 3 << 20
    ranges()
    assert [read(p, 5 << 20)[-1] for p in opened] == [2, 3]
    fill(opened[0], 5 << 20, 9)
    ok(cu.cuCtxSynchronize())
    for p in opened + opened[1:]:
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
        assert two.line() == "asked"
        one.tell()
        two.tell(one.line())
        assert two.line() == "closed"
        one.tell()
        assert one.line() == "same"
        two.finish()
        one.finish()


@pytest.mark.parametrize("end", ["cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxRelease"])
def test_memory_of_another_process_goes_with_the_context_that_opened_it(phosd: FakePhosd, end: str) -> None:
    exporter = """
    start()
    say(*(bytes(ok(cu.cuIpcGetMemHandle(ok(cu.cuMemAlloc(size << 20)))).reserved).hex() for size in (20, 40)))
    """
    importer = f"""
    first, second = start(0), start(1)

    def opened(text):
        h = cu.CUipcMemHandle()
        h.reserved = bytes.fromhex(text)
        return ok(cu.cuIpcOpenMemHandle(h, 1))

    alone, shared = heard().split()
    p = opened(shared)
    ok(cu.cuCtxSetCurrent(first))
    assert int(opened(shared)) == int(p)
    opened(alone), opened(alone)
    say("opened")
    heard()
    ok(cu.{end}(0))
    ok(cu.cuCtxSetCurrent(second))
    fill(p, 40 << 20, 5)
    assert read(p, 40 << 20) == bytes([5]) * (40 << 20)
    say("ended")
    heard()
    for _ in range(2):
        ok(cu.cuIpcCloseMemHandle(p))
    say("closed")
    heard()
    """
    with (
        program(phosd, exporter, SOFTGPU_DEVICES="2") as (one, _),
        program(phosd, importer, SOFTGPU_DEVICES="2") as (two, second),
    ):
        two.tell(one.line())
        assert two.line() == "opened"
        eventually(lambda: len(second.blocks) == 2)
        two.tell()
        assert two.line() == "ended"
        eventually(lambda: [b.size for b in second.blocks.values()] == [40 << 20])
        two.tell()
        assert two.line() == "closed"
        eventually(lambda: not second.blocks)
        two.tell()
        two.finish()
        one.finish()


def test_memory_of_another_process_that_a_device_cannot_have_is_let_go_of(phosd: FakePhosd) -> None:
    exporter = """
    start()
    say(bytes(ok(cu.cuIpcGetMemHandle(ok(cu.cuMemAlloc(5 << 20)))).reserved).hex())
    """
    importer = """
    start(1)
    h = cu.CUipcMemHandle()
    h.reserved = bytes.fromhex(heard())
    say(int(cu.cuIpcOpenMemHandle(h, 1)[0]))
    """
    refused = {"SOFTGPU_DEVICES": "2", "SOFTGPU_FAULTS": "access-fail-at:2"}  # for its own device it is given
    with (
        program(phosd, exporter, SOFTGPU_DEVICES="2") as (one, _),
        program(phosd, importer, **refused) as (two, second),
    ):
        two.tell(one.line())
        assert two.line() == "2"
        phosd.toggle(second)
        assert not second.blocks
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


@pytest.mark.parametrize("host_first", [False, True])
def test_one_unmap_of_our_memory_and_the_drivers(phosd: FakePhosd, host_first: bool) -> None:
    """The driver takes a range of several whole mappings, whosever memory is behind them."""
    body = f"""
    start()
    locations = cu.CUmemLocationType
    size = 2 << 20
    pointer = int(ok(cu.cuMemAddressReserve(2 * size, 0, 0, 0)))
    kinds = [locations.CU_MEM_LOCATION_TYPE_DEVICE, locations.CU_MEM_LOCATION_TYPE_HOST_NUMA]
    for n in range(2):
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = kinds[n ^ {int(host_first)}]
        handle = ok(cu.cuMemCreate(size, properties, 0))
        ok(cu.cuMemMap(pointer + n * size, size, 0, handle, 0))
        ok(cu.cuMemRelease(handle))
    say("mapped")
    heard()
    assert int(cu.cuMemUnmap(pointer, size + size // 2)[0]) == 1  # not whole mappings
    say("refused")
    heard()
    ok(cu.cuMemUnmap(pointer, 2 * size))
    ok(cu.cuMemAddressFree(pointer, 2 * size))
    say("unmapped")
    heard()
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "mapped"
        eventually(lambda: session.uncarried.get("host-vmm") == (1, 2 << 20))
        app.tell()
        assert app.line() == "refused"
        assert [b.size for b in session.blocks.values()] == [2 << 20]
        app.tell()
        assert app.line() == "unmapped"
        eventually(lambda: not session.blocks)
        eventually(lambda: session.uncarried.get("host-vmm") == (0, 0))
        phosd.toggle(session)
        app.tell()
        app.finish()


def test_memory_that_is_left_to_the_driver_is_counted_until_it_is_gone(phosd: FakePhosd) -> None:
    body = """
    context = start()
    flat, managed = ok(cu.cuMemAlloc(100 << 20)), ok(cu.cuMemAllocManaged(1 << 20, 1))
    pitched, pitch = ok(cu.cuMemAllocPitch(1000, 10, 4))
    pinned, plain = ok(cu.cuMemHostAlloc(3 << 20, 0)), ctypes.create_string_buffer(5000)
    registered = ctypes.addressof(plain)
    ok(cu.cuMemHostRegister(registered, 5000, 0))
    pooled = ok(cu.cuMemAllocAsync(5 << 20, 0)), ok(cu.cuMemAllocAsync(6 << 20, 0))
    say(pitch * 10)
    heard()
    for p in flat, managed, pitched, pooled[0]:
        assert int(cu.cuMemFree(p)[0]) == 0 and int(cu.cuMemFree(p)[0]) != 0
    ok(cu.cuMemFreeAsync(pooled[1], 0))
    ok(cu.cuMemFreeHost(pinned))
    ok(cu.cuMemHostUnregister(registered))
    say("freed")
    heard()
    other = ok(cu.cuCtxCreate(None, 0, 0))
    ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAllocManaged(1 << 20, 1)), ok(cu.cuMemHostAlloc(1 << 20, 0))
    say("made")
    heard()
    ok(cu.cuCtxDestroy(other))
    say("ended")
    heard()
    """
    with program(phosd, body, PHOS_CARRY_DEVICE="0", PHOS_CARRY_HOST="0", PHOS_CARRY_POOLS="0") as (app, session):

        def counted(**kinds: tuple[int, int]) -> bool:
            names = {"device": (0, 0), "managed": (0, 0), "pinned-host": (0, 0), "pool": (0, 0)} | kinds
            return {name: session.uncarried.get(name) for name in names} == names

        pitched = int(app.line())
        mib = 1 << 20
        there = {"device": (2, 100 * mib + pitched), "managed": (1, mib), "pinned-host": (2, 3 * mib + 5000)}
        eventually(lambda: counted(**there, pool=(2, 11 * mib)))
        app.tell()
        assert app.line() == "freed"
        eventually(counted)
        app.tell()
        assert app.line() == "made"
        there = {"device": (1, mib), "managed": (1, mib), "pinned-host": (1, mib)}
        eventually(lambda: counted(**there))
        app.tell()
        assert app.line() == "ended"
        eventually(counted)
        app.tell()
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
