"""Work that waits for what the program does next: nobody waits for it for ever, and no capture is spoilt."""

from __future__ import annotations

from pathlib import Path

import pytest

from phos.gen import wire_pb2 as wire
from tests.unit.frontend_fake import WAITING, FakePhosd, alone, built, program
from tests.unit.test_frontend_uncarried import over_a_driver_of_its_own, whole

pytestmark = [pytest.mark.timeout(120), built]


def test_a_quiesce_ends_though_the_work_waits_for_the_program(phosd: FakePhosd) -> None:
    body = (
        WAITING
        + """
p = ok(cu.cuMemAlloc(1 << 20))
say("waiting")
heard()
fill(p, 1 << 20, 7)  # the gate is open again
let_go()
ok(cu.cuCtxSynchronize())
say("through")
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "waiting"
        error = phosd.quiesce(session, timeout_ms=200).error
        assert "the work on device 0 did not end in time" in error
        app.tell()
        assert app.line() == "through"
        phosd.toggle(session)
        app.finish()


@pytest.mark.parametrize("inside", [False, True])
def test_a_quiesce_ends_with_its_phosd(phosd: FakePhosd, inside: bool) -> None:
    """While it waits for the GPU, or for a thread that waits for it."""
    body = (
        f"inside = {inside}"
        + WAITING
        + """
p = ok(cu.cuMemAlloc(1 << 20))
context = ok(cu.cuCtxGetCurrent())
calls, going = 0, True
def call():
    global calls
    ok(cu.cuCtxSetCurrent(context))
    while going:
        fill(p, 4096, 1)
        calls += 1
threads = [threading.Thread(target=call)]
if inside:
    threads.append(threading.Thread(target=cu.cuStreamSynchronize, args=(waiting,)))
for thread in threads:
    thread.start()
say("waiting")
heard()
before = -1
while before != calls:
    before = calls
    time.sleep(0.3)
say("closed")
while before == calls:
    time.sleep(0.01)
say("open")
let_go()
going = False
for thread in threads:
    thread.join()
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "waiting"
        connection = session.connection
        assert connection is not None
        connection.send(wire.Envelope(id=1, quiesce=wire.Quiesce(timeout_ms=30000)))
        app.tell()
        assert app.line() == "closed"
        connection.close()
        assert app.line(5) == "open"
        app.finish()


def test_a_quiesce_waits_for_work_that_ends(phosd: FakePhosd) -> None:
    body = (
        WAITING
        + """
p = ok(cu.cuMemAlloc(1 << 20))
ok(cu.cuMemsetD8Async(p, 5, 1 << 20, waiting))
say("waiting")
heard()
time.sleep(0.2)
let_go()
heard()
assert read(p, 1 << 20) == bytes([5]) * (1 << 20)
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "waiting"
        app.tell()
        phosd.toggle(session)
        app.tell()
        app.finish()


def test_no_stream_waits_for_another_after_a_checkpoint(phosd: FakePhosd) -> None:
    """The driver makes all wait for the first kernel after the stack limit changed: it is not one of the program's."""
    body = (
        WAITING
        + """
let_go()
size = 1 << 20
p, q = ok(cu.cuMemAlloc(size)), ok(cu.cuMemAlloc(size))
other = ok(cu.cuStreamCreate(1))
limit = ok(cu.cuCtxGetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE))
say("ready")
heard()
assert ok(cu.cuCtxGetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE)) == limit
ok(cu.cuStreamWaitValue32(waiting, flag, 2, 0))
ok(cu.cuMemsetD8Async(p, 5, size, waiting))
ok(cu.cuMemsetD8Async(q, 6, size, other))
ok(cu.cuStreamSynchronize(other))
ctypes.memset(flag, 2, 1)
ok(cu.cuStreamSynchronize(waiting))
assert read(p, size) == bytes([5]) * size and read(q, size) == bytes([6]) * size
say("through")
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        app.tell()
        assert app.line() == "through"
        app.finish()


CAPTURE = """
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
captured = ok(cu.cuStreamCreate(1))
def capture(meanwhile):
    ok(cu.cuStreamBeginCapture(captured, RELAXED))
    meanwhile()
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(captured))))
"""


def test_a_capture_begins_though_another_thread_waits_for_work(phosd: FakePhosd) -> None:
    body = (
        WAITING
        + CAPTURE
        + """
p, q = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
freeing = threading.Thread(target=cu.cuMemFree, args=(p,))
freeing.start()
time.sleep(0.1)  # it waits by now, most likely
capture(lambda: ok(cu.cuMemsetD8Async(q, 7, 1 << 20, captured)))
let_go()
freeing.join()
say("done")
"""
    )
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_pinned_memory_freed_during_a_capture_stays_until_the_work_that_reads_it_is_done(phosd: FakePhosd) -> None:
    body = (
        WAITING
        + CAPTURE
        + """
size = 4 << 20
pinned = int(ok(cu.cuMemHostAlloc(size, 0)))
ctypes.memset(pinned, 3, size)
p = ok(cu.cuMemAlloc(size))
ok(cu.cuMemcpyHtoDAsync(p, pinned, size, waiting))
capture(lambda: ok(cu.cuMemFreeHost(pinned)))
assert int(cu.cuMemFreeHost(pinned)[0]) == 1  # it is gone as far as the program is concerned
let_go()
ok(cu.cuCtxSynchronize())
assert read(p, size) == bytes([3]) * size
say("ready")
heard()
assert int(cu.cuMemHostGetFlags(pinned)[0]) != 0, "it is still pinned"
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        app.tell()
        app.finish()


def test_memory_of_another_process_closed_during_a_capture_stays_until_the_work_is_done(phosd: FakePhosd) -> None:
    owner = """
    start()
    p = ok(cu.cuMemAlloc(4 << 20))
    fill(p, 4 << 20, 6)
    say(bytes(ok(cu.cuIpcGetMemHandle(p)).reserved).hex())
    heard()
    """
    reader = (
        WAITING
        + CAPTURE
        + """
size = 4 << 20
handle = cu.CUipcMemHandle()
handle.reserved = bytes.fromhex(heard())
p = ok(cu.cuMemAlloc(size))
other = ok(cu.cuIpcOpenMemHandle(handle, 1))
ok(cu.cuMemcpyDtoDAsync(p, other, size, waiting))
capture(lambda: ok(cu.cuIpcCloseMemHandle(other)))
assert int(cu.cuIpcCloseMemHandle(other)[0]) == 1
again = ok(cu.cuIpcOpenMemHandle(handle, 1))
let_go()
ok(cu.cuCtxSynchronize())
assert read(p, size) == bytes([6]) * size
ok(cu.cuMemFree(p))  # which gives back what was deferred: not what was opened again
assert read(again, size) == bytes([6]) * size
ok(cu.cuIpcCloseMemHandle(again))
say("done")
"""
    )
    with program(phosd, owner) as (first, _), program(phosd, reader) as (second, _):
        second.tell(first.line())
        assert second.line() == "done"
        second.finish()
        first.tell()
        first.finish()


def test_memory_freed_during_a_capture_is_found_when_memory_is_short() -> None:
    body = (
        WAITING
        + CAPTURE
        + """
size = 120 << 20
p = ok(cu.cuMemAlloc(size))
capture(lambda: ok(cu.cuMemFree(p)))
assert int(cu.cuMemAlloc(size)[0]) == 2, "memory was given out that work may still use"
let_go()
ok(cu.cuStreamSynchronize(waiting))
ok(cu.cuMemAlloc(size))
say("done")
"""
    )
    with alone(body, SOFTGPU_MEMORY="200M", PHOS_CACHE_BYTES="0") as app:
        assert app.line() == "done"
        app.finish()


def test_memory_freed_during_a_capture_is_found_for_what_is_left_to_the_driver() -> None:
    body = (
        WAITING
        + CAPTURE
        + """
size = 120 << 20
p = ok(cu.cuMemAlloc(size))
capture(lambda: ok(cu.cuMemFree(p)))
assert int(cu.cuMemAllocAsync(size, 0)[0]) == 2, "memory was given back that work may still use"
let_go()
ok(cu.cuStreamSynchronize(waiting))
ok(cu.cuMemAllocAsync(size, 0))
say("done")
"""
    )
    with alone(body, SOFTGPU_MEMORY="200M", PHOS_CACHE_BYTES="0", PHOS_CARRY_POOLS="0") as app:
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize("primary", [False, True], ids=["own", "primary"])
def test_a_context_that_ends_during_a_capture_keeps_its_memory_until_its_work_is_done(primary: bool) -> None:
    """The capture is another context's, and survives."""
    body = (
        f"primary = {primary}\n"
        + """
first = start()
second = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
ending, staying = (first, second) if primary else (second, first)
ok(cu.cuCtxSetCurrent(ending))
flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
ctypes.memset(flag, 0, 4096)
p, q = ok(cu.cuMemAlloc(40 << 20)), ok(cu.cuMemAllocAsync(40 << 20, 0))
waiting = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamWaitValue32(waiting, flag, 1, 0))
ok(cu.cuMemsetD8Async(p, 5, 40 << 20, waiting))
ok(cu.cuMemsetD8Async(q, 5, 40 << 20, waiting))
ok(cu.cuCtxSetCurrent(staying))
captured = ok(cu.cuStreamCreate(1))
other = ok(cu.cuMemAlloc(1 << 20))
ended = []
def end():
    ended.append(cu.cuDevicePrimaryCtxReset(0) if primary else cu.cuCtxDestroy(ending))
ok(cu.cuStreamBeginCapture(captured, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
thread = threading.Thread(target=end, daemon=True)
thread.start()
time.sleep(0.3)  # it waits by now, most likely
mine = [int(ok(cu.cuMemAlloc(40 << 20))) for _ in range(2)]
assert not ended, "the work was not waited for"
assert int(p) not in mine, "memory was given out that work still uses"
ctypes.memset(flag, 1, 1)
thread.join()
ok(ended[0])
ok(cu.cuMemsetD8Async(other, 7, 1 << 20, captured))
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(captured)), 0))
ok(cu.cuGraphLaunch(graph, captured))
ok(cu.cuStreamSynchronize(captured))
assert read(other, 1 << 20) == bytes([7]) * (1 << 20)
say("done")
"""
    )
    with alone(body, PHOS_CACHE_BYTES="400M") as app:
        assert app.line() == "done"
        app.finish()


def captures_until_told(phosd: FakePhosd, body: str) -> None:
    """The program says when it is capturing, and when it is no longer: only then it can be checkpointed."""
    with program(phosd, body) as (app, session):
        assert app.line() == "capturing"
        assert "a stream capture did not end in time" in phosd.quiesce(session, timeout_ms=100).error
        app.tell()
        assert app.line() == "done"
        phosd.toggle(session)
        app.tell()
        app.finish()


@pytest.mark.parametrize("end", ["cuCtxDestroy(ending)", "cuDevicePrimaryCtxReset(0)", "cuDevicePrimaryCtxRelease(0)"])
def test_a_capture_ends_with_its_context(phosd: FakePhosd, end: str) -> None:
    body = f"""
    first = start()
    second = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
    ending, staying = (second, first) if "Destroy" in "{end}" else (first, second)
    ok(cu.cuCtxSetCurrent(ending))
    captured = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamBeginCapture(captured, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    ok(cu.{end})
    ok(cu.cuCtxSetCurrent(staying))
    other = ok(cu.cuStreamCreate(1))
    ok(cu.cuStreamBeginCapture(other, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    say("capturing")
    heard()
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(other))))
    say("done")
    heard()
    """
    captures_until_told(phosd, body)


def test_a_capture_in_a_threads_own_stream_ends_with_the_thread(phosd: FakePhosd) -> None:
    """Nobody else can end it."""
    body = """
    start()
    RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    context = ok(cu.cuCtxGetCurrent())
    own = cu.CUstream(cu.CU_STREAM_PER_THREAD)
    def begins():
        ok(cu.cuCtxSetCurrent(context))
        ok(cu.cuStreamBeginCapture(own, RELAXED))
    ok(cu.cuStreamBeginCapture(own, RELAXED))
    thread = threading.Thread(target=begins)
    thread.start()
    thread.join()
    say("capturing")
    heard()
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(own))))
    say("done")
    heard()
    """
    captures_until_told(phosd, body)


def test_a_capture_does_not_end_with_a_stream_that_joined_it(phosd: FakePhosd) -> None:
    """It is spoilt, as without PhOS; another capture is not."""
    body = """
    start()
    RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    first, joined, other = (ok(cu.cuStreamCreate(1)) for _ in range(3))
    event = ok(cu.cuEventCreate(2))
    p, q = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
    ok(cu.cuStreamBeginCapture(other, RELAXED))
    ok(cu.cuStreamBeginCapture(first, RELAXED))
    ok(cu.cuEventRecord(event, first))
    ok(cu.cuStreamWaitEvent(joined, event, 0))
    ok(cu.cuStreamDestroy(joined))
    assert int(cu.cuStreamEndCapture(first)[0]) == 901
    ok(cu.cuMemFree(p))
    ok(cu.cuMemsetD8Async(q, 7, 1 << 20, other))
    say("capturing")
    heard()
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(other))))
    say("done")
    heard()
    """
    captures_until_told(phosd, body)


def test_memory_freed_during_a_capture_is_not_carried_along(phosd: FakePhosd) -> None:
    body = (
        WAITING
        + CAPTURE
        + """
let_go()
p = ok(cu.cuMemAlloc(20 << 20))
capture(lambda: ok(cu.cuMemFree(p)))
say("ready")
heard()
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        assert session.memory_map is not None
        assert not session.memory_map.blocks
        app.tell()
        app.finish()


def test_stream_ordered_memory_can_be_freed_like_other_memory_during_a_capture(phosd: FakePhosd) -> None:
    body = (
        WAITING
        + CAPTURE
        + """
let_go()
p = ok(cu.cuMemAllocAsync(4 << 20, 0))
ok(cu.cuCtxSynchronize())
captured = ok(cu.cuStreamCreate(0))
capture(lambda: ok(cu.cuMemFree(p)))
say("done")
"""
    )
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


# A thread frees, by free(), what work may use that waits for let_go(); this one needs memory meanwhile.
WAITS_ALONE = """
freeing = threading.Thread(target=free)
freeing.start()
time.sleep(0.3)
q = ok(cu.cuMemAlloc(1 << 20))
ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, q))
assert freeing.is_alive()
let_go()
freeing.join()
"""


@pytest.mark.parametrize(
    ("allocate", "free", "left"),
    [
        ("cu.cuMemAllocManaged(1 << 20, 1)", "cu.cuMemFree", ""),
        ("cu.cuMemHostAlloc(1 << 20, 0)", "cu.cuMemFreeHost", "PHOS_CARRY_HOST"),
    ],
    ids=["managed", "pinned"],
)
def test_who_frees_what_the_driver_has_keeps_no_other_thread_waiting(allocate: str, free: str, left: str) -> None:
    """The driver waits for work that may wait for what the other thread does next: neither would go on."""
    body = (
        WAITING
        + f"""
import threading
memory = ok({allocate})
context = ok(cu.cuCtxGetCurrent())
def free():
    ok(cu.cuCtxSetCurrent(context))
    ok({free}(memory))
{WAITS_ALONE}
say("done")
"""
    )
    with alone(body, **{left or "PHOS_CARRY_HOST": "0" if left else "1"}) as app:
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize("left", ["", "PHOS_CARRY_POOLS"], ids=["ours", "the driver's"])
def test_who_frees_in_a_stream_that_is_full_keeps_no_other_thread_waiting(left: str) -> None:
    """The driver waits for room in the stream, which may wait for what the other thread does next."""
    body = (
        WAITING
        + """
context = ok(cu.cuCtxGetCurrent())
other = ok(cu.cuStreamCreate(1))
pieces = [ok(cu.cuMemAllocAsync(1 << 20, other)) for _ in range(8)]
ok(cu.cuStreamSynchronize(other))
def free():
    ok(cu.cuCtxSetCurrent(context))
    for piece in pieces:
        ok(cu.cuMemFreeAsync(piece, waiting))
freeing = threading.Thread(target=free)
freeing.start()
time.sleep(0.3)  # the stream is full by now, most likely
p, q = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAllocAsync(1 << 20, other))
assert int(p) not in map(int, pieces) and int(q) not in map(int, pieces), "memory was given out that work still uses"
ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p))
ok(cu.cuMemFreeAsync(q, other))
assert freeing.is_alive()
let_go()
freeing.join()
ok(cu.cuCtxSynchronize())
assert all(int(cu.cuMemFreeAsync(piece, waiting)[0]) for piece in pieces), "it is freed twice"
say("done")
"""
    )
    with alone(body, SOFTGPU_QUEUE="4", **{left or "PHOS_CARRY_POOLS": "0" if left else "1"}) as app:
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize("how", ["at once", "after a capture", "with its context"])
def test_who_unpins_memory_keeps_no_other_thread_waiting(how: str) -> None:
    """Its own context is idle; another, whose work waits for the other thread, is not."""
    body = (
        WAITING
        + CAPTURE
        + f"""
how = "{how}"
waits = ok(cu.cuCtxGetCurrent())
idle = ok(cu.cuCtxCreate(None, 0, 0))
captured = ok(cu.cuStreamCreate(1))
pinned = int(ok(cu.cuMemHostAlloc(1 << 20, 0)))
p = ok(cu.cuMemAlloc(1 << 20))
if how == "after a capture":
    capture(lambda: ok(cu.cuMemFreeHost(pinned)))
def free():
    ok(cu.cuCtxSetCurrent(idle))
    if how == "at once":
        ok(cu.cuMemFreeHost(pinned))
    elif how == "after a capture":
        ok(cu.cuMemFree(p))  # what was freed during the capture goes now
    else:
        ok(cu.cuCtxDestroy(idle))
ok(cu.cuCtxSetCurrent(waits))
{WAITS_ALONE}
assert int(cu.cuMemFreeHost(pinned)[0]) == 1
assert int(cu.cuMemHostGetFlags(pinned)[0]), "it is still pinned"
say("done")
"""
    )
    with alone(body, SOFTGPU_FAULTS="unregister-waits") as app:
        assert app.line() == "done"
        app.finish()


def test_pinned_memory_can_be_registered_anew_while_another_thread_lets_go_of_it(phosd: FakePhosd) -> None:
    """Its record is the one of the last registration, whatever came between."""
    body = """
    start()
    import mmap, threading
    memory = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stop = threading.Event()
    def again():
        while not stop.is_set():
            if int(cu.cuMemHostRegister(address, 1 << 20, 0)[0]) == 0:
                ok(cu.cuMemHostUnregister(address))
    threads = [threading.Thread(target=again) for _ in range(3)]
    [thread.start() for thread in threads]
    time.sleep(1)
    stop.set()
    [thread.join() for thread in threads]
    assert int(cu.cuMemHostUnregister(address)[0]) == 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    ok(cu.cuMemHostRegister(address, 1 << 20, 0))
    say("ready")
    heard()
    ok(cu.cuMemHostUnregister(address))
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        app.finish()


@whole
def test_who_launches_a_twin_in_a_stream_that_is_full_keeps_no_other_thread_waiting(tmp_path: Path) -> None:
    """What stands behind the twin is queued without a lock."""
    over_a_driver_of_its_own(tmp_path, "twin_cases")
