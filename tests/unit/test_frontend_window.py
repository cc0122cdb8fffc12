"""The window of a concurrent checkpoint stops no program, and outlives neither its contexts nor its memory."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from phos.gen import wire_pb2 as wire
from phos.gpu_engine.cow.chunk_table import LAZY, POOL_FLAGS, SHADOWED, UNSAVED, ChunkTable, PoolShape, WindowTable
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Field, FieldKind, Parameter, Source
from phos.gpu_engine.spec.table import pack
from tests.unit.frontend_fake import WAITING, Connection, FakePhosd, Session, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]

CHUNK = 4 << 20


OWNER = """
    start()
    p = ok(cu.cuMemAlloc(4 << 20))
    fill(p, 4 << 20, 6)
    say(bytes(ok(cu.cuIpcGetMemHandle(p)).reserved).hex())
    heard()
"""

READER = """
    start()
    say("ready")
    handle = cu.CUipcMemHandle()
    handle.reserved = bytes.fromhex(heard())
    other = ok(cu.cuIpcOpenMemHandle(handle, 1))
    assert read(other, 4 << 20) == bytes([6]) * (4 << 20)
    say("read")
"""


def begin_empty(phosd: FakePhosd, session: Session, chunks: ChunkTable, table: WindowTable) -> Connection:
    """Begin a window that saves nothing, copying nothing aside."""
    assert not phosd.quiesce(session).error
    connection = session.connection
    assert connection is not None
    tables = [chunks.descriptor, table.descriptor]
    assert not connection.ask(descriptors=tables, window_begin=wire.WindowBegin())[0].done.error
    assert not phosd.open(session).error
    return connection


def test_the_end_of_a_window_does_not_keep_phosds_answers_from_who_waits_for_them(phosd: FakePhosd) -> None:
    chunks = ChunkTable(4 << 20, 0)
    table = WindowTable(0, [], [], 16, prioritise=False)
    try:
        with program(phosd, OWNER) as (first, _), program(phosd, READER) as (second, session):
            exported = first.line()
            assert second.line() == "ready"
            phosd.questions = queue.Queue()
            connection = begin_empty(phosd, session, chunks, table)
            second.tell(exported)
            with pytest.raises(queue.Empty):
                phosd.questions.get(timeout=0.3)  # the window would know nothing of what it maps now
            chunks.close_window()
            question = phosd.questions.get(timeout=30)  # its call began traced
            connection.send(wire.Envelope(id=1, window_end=wire.WindowEnd()))
            connection.resolve(question)
            assert second.line() == "read"
            assert not connection.replies.get(timeout=30)[0].done.error
            second.finish()
            first.tell()
            first.finish()
    finally:
        table.close()
        chunks.close()


def test_who_imports_memory_when_phosd_dies_in_a_window_gets_it_by_the_next_one(tmp_path: Path) -> None:
    """The window ends before anybody connects again, so its end must not wait for who needs that."""
    with (
        closing(ChunkTable(4 << 20, 0)) as chunks,
        closing(WindowTable(0, [], [], 16, prioritise=False)) as table,
        FakePhosd(tmp_path) as phosd,
        program(phosd, OWNER) as (first, _),
        program(phosd, READER) as (second, session),
    ):
        exported = first.line()
        assert second.line() == "ready"
        begin_empty(phosd, session, chunks, table)
        second.tell(exported)
        with pytest.raises(queue.Empty):
            second.lines.get(timeout=0.3)
        phosd.stop()
        with FakePhosd(tmp_path):
            assert second.line(15) == "read"
            second.finish()
            first.tell()
            first.finish()


@pytest.mark.parametrize("how", ["cuIpcGetMemHandle", "cuMemExportToShareableHandle"])
def test_who_exports_memory_when_phosd_dies_in_a_window_has_it_held_by_the_next_one(tmp_path: Path, how: str) -> None:
    exporter = f"""
    start()
    FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.requestedHandleTypes = FD
    p, handle = ok(cu.cuMemAlloc(4 << 20)), ok(cu.cuMemCreate(2 << 20, prop, 0))
    say("ready")
    heard()
    if "{how}" == "cuIpcGetMemHandle":
        ok(cu.cuIpcGetMemHandle(p))
    else:
        token = ok(cu.cuMemExportToShareableHandle(handle, FD, 0))
        assert os.readlink("/proc/self/fd/%d" % int(token)).startswith("/memfd:phos-memory")
    say("exported")
    """
    with (
        closing(ChunkTable(4 << 20, 0)) as chunks,
        closing(WindowTable(0, [], [], 16, prioritise=False)) as table,
        FakePhosd(tmp_path) as phosd,
        program(phosd, exporter) as (app, session),
    ):
        assert app.line() == "ready"
        begin_empty(phosd, session, chunks, table)
        phosd.questions = queue.Queue()
        app.tell()
        phosd.questions.get(timeout=30)  # it is waiting for the answer
        phosd.stop()
        with FakePhosd(tmp_path):
            assert app.line(4) == "exported"
            app.finish()


@contextmanager
def window(
    phosd: FakePhosd, session: Session, pool: int, *, prioritise: bool = False
) -> Iterator[tuple[ChunkTable, WindowTable]]:
    """A window that phosd saves nothing in; the one block of ``pool`` bytes is what is lent to it for shadows."""
    assert not phosd.quiesce(session).error
    (lent,) = (number for number, block in session.blocks.items() if block.size == pool)
    records, count = [], 0
    for number, block in session.blocks.items():
        if number != lent:
            records.append((number, block.size, count))
            count += -(-block.size // CHUNK)
    shape = PoolShape(0, (pool - POOL_FLAGS) // CHUNK, pool)
    connection = session.connection
    assert connection is not None
    with (
        closing(ChunkTable(CHUNK, count)) as chunks,
        closing(WindowTable(0, records, [shape], 4 * count, prioritise=prioritise, order=2 * count)) as table,
    ):
        tables = [chunks.descriptor, table.descriptor, session.blocks[lent].descriptor]
        begun, _ = connection.ask(descriptors=tables, window_begin=wire.WindowBegin())
        assert not begun.done.error
        assert not phosd.open(session).error
        yield chunks, table
        chunks.close_window()
        ended, _ = connection.ask(window_end=wire.WindowEnd())
        assert not ended.done.error
        assert table.counts().shadowed > 0
        assert not table.counts().failures


def wanted(table: WindowTable) -> int:
    """The next chunk that the program wants to be seen to."""
    found: list[int] = []
    eventually(lambda: found.extend(c for c in [table.next_wanted()] if c is not None) or found)
    return found[0]


def test_in_a_window_no_stream_waits_for_work_that_waits_for_the_program(phosd: FakePhosd) -> None:
    """Two streams write to one chunk: the second goes on when that is copied aside, whatever the first waits for."""
    body = """
    start()
    flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
    ctypes.memset(flag, 0, 4096)
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(40 << 20))
    waiting, other = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
    fill(p, 40 << 20, 3)
    say("ready")
    heard()
    ok(cu.cuStreamWaitValue32(waiting, flag, 1, 0))
    ok(cu.cuMemsetD8Async(p, 5, 1 << 20, waiting))
    ok(cu.cuMemsetD8Async(int(p) + (1 << 20), 6, 1 << 20, other))
    ok(cu.cuStreamSynchronize(other))
    ctypes.memset(flag, 1, 1)
    ok(cu.cuStreamSynchronize(waiting))
    assert read(p, 3 << 20) == b"".join(bytes([value]) * (1 << 20) for value in (5, 6, 3))
    say("through")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20):
            app.tell()
            assert app.line() == "through"
        app.finish()


@pytest.mark.parametrize("how", ["shadows", "one shadow", "transfers"])
def test_in_a_window_nobody_waits_for_who_waits_for_room_in_a_stream(phosd: FakePhosd, how: str) -> None:
    """The stream waits for what another thread does next, whose memory is not saved either."""
    body = f"""{WAITING}
how = "{how}"
context = ok(cu.cuCtxGetCurrent())
size = 2 << 20
pinned = int(ok(cu.cuMemHostAlloc(size, 0)))
ctypes.memset(pinned, 5, size)
pool = ok(cu.cuMemAlloc(70 << 20))
p = int(ok(cu.cuMemAlloc(40 << 20)))
other = ok(cu.cuStreamCreate(1))
fill(p, 40 << 20, 3)
let_go()
ok(cu.cuCtxSynchronize())
say("ready")
heard()
ok(cu.cuStreamWaitValue32(waiting, flag, 2, 0))
time.sleep(0.1)  # it has begun by now, most likely
def work():
    ok(cu.cuCtxSetCurrent(context))
    for at in range(4):
        to = p + (0 if how == "one shadow" else at << 22)
        if how == "transfers":
            ok(cu.cuMemcpyHtoDAsync(to, pinned, size, waiting))
        else:
            ok(cu.cuMemsetD8Async(to, 5, size, waiting))
working = threading.Thread(target=work, daemon=True)
working.start()
time.sleep(0.3)  # the stream is full by now, most likely
for at in (1, 6, 7):
    ok(cu.cuMemsetD8Async(p + (at << 22) + size, 6, size, other))
ok(cu.cuMemcpyHtoDAsync(p + (8 << 22), pinned, size, other))
ok(cu.cuStreamSynchronize(other))
assert working.is_alive()
ctypes.memset(flag, 2, 1)
working.join()
ok(cu.cuCtxSynchronize())
assert read(p, size) == bytes([5]) * size and read(p + (1 << 22) + size, size) == bytes([6]) * size
say("through")
"""
    with program(phosd, body, SOFTGPU_QUEUE="2") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 70 << 20, prioritise=how == "transfers"):
            app.tell()
            assert app.line() == "through"
        app.finish()


NEWER = """
    start()
    pool = ok(cu.cuMemAlloc(34 << 20))
    p, source = ok(cu.cuMemAlloc(8 << 20)), ok(cu.cuMemAlloc(2 << 20))
    stream = ok(cu.cuStreamCreate(1))
    fill(p, 8 << 20, 3)
    fill(source, 2 << 20, 4)
    ok(cu.cuCtxSynchronize())
    attributes = cu.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    copy = newer("cuMemcpyWithAttributesAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p,
                 ctypes.c_void_p)
    later = newer("cuLaunchHostFunc", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    called = threading.Event()
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: called.set())
    say("ready")
    heard()
    say("asks")
    assert later(int(stream), ctypes.cast(note, ctypes.c_void_p), None, 1) == 0 # the second form: waiting actively
    assert called.wait(30)
    say("called")
    assert copy(int(p), int(source), 2 << 20, attributes.getPtr(), int(stream)) == 0
    ok(cu.cuStreamSynchronize(stream))
    assert read(p, 4 << 20) == bytes([4]) * (2 << 20) + bytes([3]) * (2 << 20)
    say("through")
"""


def test_calls_of_newer_drivers_wait_at_the_closed_gate(phosd: FakePhosd) -> None:
    with program(phosd, NEWER, SOFTGPU_DRIVER_VERSION="13050") as (app, session):
        assert app.line() == "ready"
        assert not phosd.quiesce(session).error
        app.tell()
        assert app.line() == "asks"
        with pytest.raises(queue.Empty):
            app.line(0.3)
        assert not phosd.open(session).error
        assert [app.line(), app.line()] == ["called", "through"]
        app.finish()


def test_copies_of_newer_drivers_do_not_overwrite_what_is_not_saved(phosd: FakePhosd) -> None:
    with program(phosd, NEWER, SOFTGPU_DRIVER_VERSION="13050") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20) as (_, table):
            app.tell()
            assert [app.line(), app.line(), app.line()] == ["asks", "called", "through"]
            assert table.counts().shadowed == 1
        app.finish()


def test_contexts_may_begin_and_end_in_a_window(phosd: FakePhosd) -> None:
    body = """
    first = start()
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(40 << 20))
    fill(p, 40 << 20, 3)
    say("ready")
    heard()
    for i in range(3):
        context = ok(cu.cuCtxCreate(None, 0, 0))
        fill(int(p) + (8 << 20) * i, 1 << 20, i)
        ok(cu.cuCtxDestroy(context))
        ok(cu.cuCtxSetCurrent(first))
        assert read(int(p) + (8 << 20) * i, 2 << 20) == bytes([i]) * (1 << 20) + b"\\3" * (1 << 20)
    say("through")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20):
            app.tell()
            assert app.line() == "through"
        app.finish()


def test_a_context_may_end_while_the_end_of_a_window_waits_for_a_transfer(phosd: FakePhosd) -> None:
    body = """
    first = start()
    second = ok(cu.cuCtxCreate(None, 0, 0))
    ok(cu.cuCtxSetCurrent(first))
    size = 2 << 20
    flag, pinned = int(ok(cu.cuMemHostAlloc(4096, 0))), int(ok(cu.cuMemHostAlloc(size, 0)))
    ctypes.memset(flag, 0, 4096)
    ctypes.memset(pinned, 5, size)
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(40 << 20))
    waiting = ok(cu.cuStreamCreate(1))
    say("ready")
    heard()
    ok(cu.cuStreamWaitValue32(waiting, flag, 1, 0))
    ok(cu.cuMemcpyHtoDAsync(p, pinned, size, waiting))
    say("queued")
    heard()
    time.sleep(0.3)  # the window ends by now, most likely
    ok(cu.cuCtxDestroy(second))
    ctypes.memset(flag, 1, 1)
    ok(cu.cuStreamSynchronize(waiting))
    assert read(p, size) == bytes([5]) * size
    say("through")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20, prioritise=True):
            app.tell()
            assert app.line() == "queued"
            app.tell()
        assert app.line() == "through"
        app.finish()


def test_no_flag_behind_a_transfer_waits_for_what_came_after_it(phosd: FakePhosd, tmp_path: Path) -> None:
    """A transfer in the default stream; before it has returned another stream waits for the thread that made it."""
    body = """
    start()
    size = 2 << 20
    flag, pinned = int(ok(cu.cuMemHostAlloc(4096, 0))), int(ok(cu.cuMemHostAlloc(size, 0)))
    ctypes.memset(flag, 0, 4096)
    ctypes.memset(pinned, 5, size)
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(40 << 20))
    waiting, other = ok(cu.cuStreamCreate(0)), ok(cu.cuStreamCreate(0))
    context = ok(cu.cuCtxGetCurrent())
    say("ready")
    heard()
    def transfer():
        ok(cu.cuCtxSetCurrent(context))
        ok(cu.cuMemcpyHtoD(p, pinned, size))
        ok(cu.cuMemsetD8Async(int(p) + size, 6, size, other))
        ok(cu.cuStreamSynchronize(other))
        ctypes.memset(flag, 1, 1)
    thread = threading.Thread(target=transfer, daemon=True)
    thread.start()
    time.sleep(0.3)  # it is under way by now, most likely
    ok(cu.cuStreamWaitValue32(waiting, flag, 1, 0))
    os.unlink(os.environ["SOFTGPU_COPY_HOLD"])
    thread.join()
    assert read(p, 2 * size) == bytes([5]) * size + bytes([6]) * size
    say("through")
    """
    held = tmp_path / "held"
    held.touch()
    with program(phosd, body, SOFTGPU_COPY_HOLD=str(held)) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20, prioritise=True):
            app.tell()
            assert app.line() == "through"
        app.finish()


def test_what_copied_in_a_primary_context_that_was_released_is_used_no_more(phosd: FakePhosd) -> None:
    """What the driver makes after that may have the handles of what ended with it."""
    body = """
    start()
    second = ok(cu.cuCtxCreate(None, 0, 0))
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(40 << 20))
    fill(p, 40 << 20, 3)
    say("ready")
    heard()
    def wrote(chunk):
        fill(int(p) + (chunk << 22), 1 << 20, chunk)
        return read(int(p) + (chunk << 22), 2 << 20) == bytes([chunk]) * (1 << 20) + b"\\3" * (1 << 20)
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    assert wrote(0)
    for _ in range(2):
        ok(cu.cuDevicePrimaryCtxRelease(0))
    assert not ok(cu.cuDevicePrimaryCtxGetState(0))[1]
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    time.sleep(0.3)  # the software GPU has let go of it by now, most likely
    streams = [ok(cu.cuStreamCreate(1)) for _ in range(2000)]
    identities = [ok(cu.cuStreamGetId(stream)) for stream in streams]
    assert wrote(1)
    assert [ok(cu.cuStreamGetId(stream)) for stream in streams] == identities
    say("through")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20):
            app.tell()
            assert app.line() == "through"
        app.finish()


def test_what_is_allocated_in_a_new_primary_context_does_not_go_with_the_former(phosd: FakePhosd) -> None:
    """One thread lets go of it for the last time, another takes it anew, while the first waits for a lock."""
    body = """
    start()
    second = ok(cu.cuCtxCreate(None, 0, 0))
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(40 << 20))
    fill(p, 40 << 20, 3)
    say("ready")
    heard()
    fill(p, 1 << 20, 4)  # copied aside in the second: a question of what came of that takes long, with the lock held
    slowly = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(0.25))
    def again():
        while ok(cu.cuDevicePrimaryCtxGetState(0))[1]:
            time.sleep(0.001)
        time.sleep(0.5)
        ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
        mine.append(ok(cu.cuMemAlloc(2 << 20)))
        fill(mine[0], 2 << 20, 9)
    mine = []
    other = threading.Thread(target=again)
    other.start()
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    ok(cu.cuLaunchHostFunc(0, cu.CUhostFn(_ptr=ctypes.addressof(slowly)), 0))
    for _ in range(2):
        ok(cu.cuDevicePrimaryCtxRelease(0))
    other.join()
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    assert read(mine[0], 16) == bytes([9]) * 16
    ok(cu.cuMemFree(mine[0]))
    say("through")
    """
    with program(phosd, body, SOFTGPU_POLL_US="1500000", SOFTGPU_FAULTS="same-primary") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20):
            app.tell()
            assert app.line() == "through"
        app.finish()


def test_what_a_gpu_has_no_access_to_is_not_copied_aside_by_it(phosd: FakePhosd) -> None:
    """The driver lets it write there all the same: cuMemcpyPeer goes another way."""
    body = """
    first, second = start(0), start(1)
    q = ok(cu.cuMemAlloc(40 << 20))
    fill(q, 40 << 20, 4)
    ok(cu.cuCtxSetCurrent(first))
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(48 << 20))
    fill(p, 48 << 20, 3)
    stream = ok(cu.cuStreamCreate(1))
    say("ready")
    heard()
    fill(p, 1 << 20, 5)
    ok(cu.cuCtxSynchronize())
    ok(cu.cuMemcpyPeerAsync(q, second, p, first, 1 << 20, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuCtxSetCurrent(second))
    assert read(q, 2 << 20) == bytes([5]) * (1 << 20) + bytes([4]) * (1 << 20)
    say("through")
    """
    with program(phosd, body, SOFTGPU_DEVICES="2") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20) as (chunks, table):
            app.tell()
            its_own, another = wanted(table), wanted(table)
            assert chunks.state(its_own) >= SHADOWED
            assert chunks.claim(another) == UNSAVED
            chunks.saved(another)
            assert app.line() == "through"
        app.finish()


def test_no_flag_is_written_to_a_pool_that_is_gone(phosd: FakePhosd) -> None:
    """A transfer in a stream of another context than the current one, which ends after the window."""
    body = """
    first = start()
    size = 2 << 20
    flag, pinned = int(ok(cu.cuMemHostAlloc(4096, 0))), int(ok(cu.cuMemHostAlloc(size, 0)))
    ctypes.memset(flag, 0, 4096)
    ctypes.memset(pinned, 5, size)
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(40 << 20))
    second = ok(cu.cuCtxCreate(None, 0, 0))
    waiting = ok(cu.cuStreamCreate(1))
    ok(cu.cuCtxSetCurrent(first))
    say("ready")
    heard()
    ok(cu.cuStreamWaitValue32(waiting, flag, 1, 0))
    ok(cu.cuMemcpyHtoDAsync(p, pinned, size, waiting))
    say("queued")
    heard()
    ctypes.memset(flag, 1, 1)
    ok(cu.cuStreamSynchronize(waiting))
    assert read(p, size) == bytes([5]) * size
    say("through")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20, prioritise=True):
            app.tell()
            assert app.line() == "queued"
        app.tell()
        assert app.line() == "through"
        app.finish()


def test_what_is_freed_in_a_window_stays_mapped_until_its_end(phosd: FakePhosd) -> None:
    """The arguments of a kernel may name it: then it is copied aside, by its address."""
    body = """
    start()
    pool = ok(cu.cuMemAlloc(34 << 20))
    pieces = [ok(cu.cuMemAlloc(40 << 20)) for _ in range(10)]
    say("ready")
    heard()
    fill(pieces[0], 4 << 20, 3)
    for p in pieces:
        ok(cu.cuMemFree(p))
    say("freed")
    """
    with program(phosd, body, PHOS_CACHE_BYTES="100M") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20):
            there = len(session.blocks)
            app.tell()
            assert app.line() == "freed"
            time.sleep(0.3)  # ten times as long as it takes otherwise
            assert len(session.blocks) == there
        eventually(lambda: len(session.blocks) == there - 8)
        app.finish()


@pytest.mark.parametrize("own", [False, True], ids=["cuMemAlloc", "cuMemMap"])
def test_the_end_of_an_allocation_stands_for_it(phosd: FakePhosd, own: bool) -> None:
    """As kernels are called that walk backwards (thrust::reverse_iterator)."""
    body = f"""
    start()
    pool = ok(cu.cuMemAlloc(34 << 20))
    if {own}:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access = cu.CUmemAccessDesc()
        access.location.type = properties.location.type
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        p = ok(cu.cuMemAddressReserve(32 << 20, 0, 0, 0))
        for part in range(2):
            handle = ok(cu.cuMemCreate(16 << 20, properties, 0))
            ok(cu.cuMemMap(int(p) + part * (16 << 20), 16 << 20, 0, handle, 0))
        ok(cu.cuMemSetAccess(p, 32 << 20, [access], 1))
    else:
        p = ok(cu.cuMemAlloc(32 << 20))
    ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry one(.param .u64 to) {{ ret; }}\\0"
    kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), b"one"))
    ok(cu.cuCtxSynchronize())
    say("ready")
    heard()
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(p) + (32 << 20),), (ctypes.c_uint64,)), 0))
    ok(cu.cuCtxSynchronize())
    say("through")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20) as (_, table):
            app.tell()
            assert app.line() == "through"
            assert table.counts().shadowed == 8
        app.finish()


@pytest.mark.parametrize(
    ("unmap", "kept", "memory"),
    [
        ("ok(cu.cuMemAlloc(90 << 20))", "100M", "150M"),
        ("ok(cu.cuMemPoolTrimTo(ok(cu.cuDeviceGetDefaultMemPool(0)), 0))", "100M", "150M"),
        # More than the limit and half of the GPU's memory. In another context: freeing waits for a context's work.
        ("ok(cu.cuCtxSetCurrent(other)); ok(cu.cuMemFree(others.pop()))", "40M", "300M"),
    ],
    ids=["to make room", "to trim a pool", "to keep no more than a limit"],
)
def test_nothing_is_unmapped_that_is_being_copied_aside(phosd: FakePhosd, unmap: str, kept: str, memory: str) -> None:
    """The arguments of a kernel name memory that was freed; then memory runs out, and it is given back."""
    body = f"""
    start()
    pool = ok(cu.cuMemAlloc(34 << 20))
    p = ok(cu.cuMemAlloc(32 << 20))
    fill(p, 32 << 20, 3)
    ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry one(.param .u64 to) {{ ret; }}\\0"
    kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), b"one"))
    ok(cu.cuMemFree(p))
    extra = ok(cu.cuMemAllocAsync(1 << 20, 0))
    ok(cu.cuCtxSynchronize())
    first, others = ok(cu.cuCtxGetCurrent()), []
    if "{memory}" == "300M":
        other = ok(cu.cuCtxCreate(None, 0, 0))
        others = [ok(cu.cuMemAlloc(36 << 20)) for _ in range(5)]
        ok(cu.cuCtxSetCurrent(first))
    say("ready")
    heard()
    while len(others) > 1:
        ok(cu.cuMemFree(others.pop()))
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(p),), (ctypes.c_uint64,)), 0))
    {unmap}
    ok(cu.cuCtxSetCurrent(first))
    ok(cu.cuCtxSynchronize())
    say("through")
    """
    with program(phosd, body, PHOS_CACHE_BYTES=kept, SOFTGPU_MEMORY=memory) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20):
            app.tell()
            assert app.line() == "through"
        app.finish()


def test_nothing_is_unmapped_that_is_being_copied_aside_when_a_window_is_given_up(phosd: FakePhosd) -> None:
    """Its calls are traced no more, and what they have queued is yet to be done."""
    body = f"""{WAITING}
pool = ok(cu.cuMemAlloc(34 << 20))
p, q = ok(cu.cuMemAlloc(32 << 20)), ok(cu.cuMemAlloc(4 << 20))
fill(p, 32 << 20, 3)
ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry one(.param .u64 to) {{ ret; }}\\n"
ptx += b".visible .entry first() {{ ret; }}\\0"
module = ok(cu.cuModuleLoadData(ptx))
one, first = (ok(cu.cuModuleGetFunction(module, name)) for name in (b"one", b"first"))
stream = ok(cu.cuStreamCreate(1))
extra = ok(cu.cuMemAllocAsync(40 << 20, stream))
let_go()
ok(cu.cuCtxSynchronize())
say("ready")
heard()
ok(cu.cuMemFree(p))
ok(cu.cuMemFreeAsync(extra, stream))
ok(cu.cuStreamSynchronize(stream))
# All that is queued waits for the first kernel after that.
ok(cu.cuCtxSetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE, 4096))
ok(cu.cuStreamWaitValue32(waiting, flag, 2, 0))
ok(cu.cuLaunchKernel(first, 1, 1, 1, 1, 1, 1, 0, waiting, 0, 0))
ok(cu.cuLaunchKernel(one, 1, 1, 1, 1, 1, 1, 0, stream, ((int(p),), (ctypes.c_uint64,)), 0))
say("queued")
heard()
ok(cu.cuMemAllocAsync(1 << 20, stream))  # what was freed in a stream is given back
ctypes.memset(flag, 2, 1)
ok(cu.cuCtxSynchronize())
say("through")
"""
    with program(phosd, body, PHOS_CACHE_BYTES="0") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20) as (_, table):
            there = len(session.blocks)
            app.tell()
            assert app.line() == "queued"
            assert table.counts().shadowed == 8
            connection = session.connection
            assert connection is not None
            connection.send(wire.Envelope(id=1, window_end=wire.WindowEnd()))
            time.sleep(0.3)  # no call is traced by now, most likely
            app.tell()
            assert app.line() == "through"
            assert not connection.replies.get(timeout=30)[0].done.error
            eventually(lambda: len(session.blocks) == there - 1)  # two less, and one for what was allocated
        app.finish()


LAUNCHES = """
    start()
    p, q = ok(cu.cuMemAlloc(40 << 20)), ok(cu.cuMemAlloc(48 << 20))
    ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry one(.param .u64 to) { ret; }\\n"
    ptx += b".visible .entry two(.param .u64 to) { ret; }\\0"
    module = ok(cu.cuModuleLoadData(ptx))
    kernels = [ok(cu.cuModuleGetFunction(module, name)) for name in (b"one", b"two")]
    stream = ok(cu.cuStreamCreate(1))
    def work():
        for kernel in kernels:
            ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, ((int(p),), (ctypes.c_uint64,)), 0))
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    work()
    graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
    say("ready")
    if heard() == "graph":
        ok(cu.cuGraphLaunch(graph, stream))
    else:
        work()
    ok(cu.cuStreamSynchronize(stream))
    say("through")
"""


@pytest.mark.parametrize("how", ["kernel", "graph"])
@pytest.mark.parametrize(
    ("source", "guessed", "waits"),
    [(Source.SASS, False, False), (Source.SASS, True, True), (Source.NAME, False, True), (Source.PTX, False, False)],
)
def test_before_a_kernel_whose_code_cannot_be_followed_a_fast_lazy_restore_waits_for_everything(
    phosd: FakePhosd, how: str, source: Source, guessed: bool, waits: bool
) -> None:
    """What it reads beyond its arguments nobody knows, and nothing would find out. The other is known."""
    fields = (Field(0, 8, Access.READ, FieldKind.POINTER),)
    one = AccessDescriptor("one", (Parameter(0, 8),), fields, Access.NONE, source, guessed)
    two = AccessDescriptor("two", (Parameter(0, 8),), fields, Access.NONE, Source.SASS)
    with program(phosd, LAUNCHES) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: len(session.kernels) == 2)
        connection = session.connection
        assert connection is not None
        file = os.memfd_create("table")
        os.write(file, pack([(session.module_numbers[0], each) for each in (one, two)]))
        assert not connection.ask(access_table=wire.AccessTable(), descriptors=[file])[0].done.error
        os.close(file)
        assert not phosd.quiesce(session).error
        records, count = [], 0
        for number, block in session.blocks.items():
            records.append((number, block.size, count))
            count += -(-block.size // CHUNK)
        with (
            closing(ChunkTable(CHUNK, count)) as chunks,
            closing(WindowTable(0, records, [], 4 * count, prioritise=False, mode=LAZY, order=2 * count)) as table,
        ):
            for _, size, first in records:
                for chunk in range(first, first + -(-size // CHUNK)) if size == 40 << 20 else ():
                    chunks.saved(chunk)
            tables = [chunks.descriptor, table.descriptor]
            assert not connection.ask(descriptors=tables, window_begin=wire.WindowBegin())[0].done.error
            assert not phosd.open(session).error
            app.tell(how)
            if waits:
                eventually(lambda: table.culprit() == ("cuGraphLaunch" if how == "graph" else "one"))
                chunks.close_window()
            assert app.line() == "through"
            assert bool(table.culprit()) == waits
            chunks.close_window()
            assert not connection.ask(window_end=wire.WindowEnd())[0].done.error
        app.finish()
