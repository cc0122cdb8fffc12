"""Contexts that end: what was theirs, and calls with one that is gone.

The driver lets a destroyed context be made current, answers most calls with it, and crashes at others (580.159.04,
H100); so does the software GPU.
"""

from __future__ import annotations

import pytest

from phos.gen import wire_pb2 as wire
from tests.unit.frontend_fake import FakePhosd, built, program
from tests.unit.test_frontend_window import window
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(240), built]

GONE = 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED


def toggled_at_ready(phosd: FakePhosd, body: str) -> None:
    """A program that is detached and attached when it has said that it is ready, and goes on to say that it is done."""
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        app.tell()
        assert app.line() == "done"
        app.tell()
        app.finish()


def test_calls_with_a_destroyed_context_are_answered_as_by_the_driver(phosd: FakePhosd) -> None:
    body = f"""
    start()
    context = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
    ok(cu.cuCtxDestroy(context))
    ok(cu.cuCtxPushCurrent(context))
    for call in (
        lambda: cu.cuMemAlloc(4096),
        lambda: cu.cuMemAllocPitch(4096, 4, 4),
        lambda: cu.cuMemAllocAsync(4096, 0),
        lambda: cu.cuMemHostAlloc(4096, 0),
        lambda: cu.cuMemAllocHost(4096),
        lambda: cu.cuMemGetInfo(),
        lambda: cu.cuMemcpyDtoD(4096, 8192, 16),
    ):
        result = int(call()[0])
        assert result == {GONE}, result
    say("done")
    """
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize("end", ["cuCtxDestroy", "cuCtxDetach"])
def test_pinned_memory_of_a_context_that_ended_is_not_in_the_way_of_a_checkpoint(phosd: FakePhosd, end: str) -> None:
    body = f"""
    first = start()
    second = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
    pinned = ok(cu.cuMemHostAlloc(1 << 20, 0))
    own = (ctypes.c_char * (1 << 20))()
    ok(cu.cuMemHostRegister(own, 1 << 20, 0))
    ok(cu.{end}(second))
    ok(cu.cuCtxSetCurrent(first))
    p = ok(cu.cuMemAlloc(3 << 20))
    fill(p, 3 << 20, 7)
    say("ready")
    heard()
    assert read(p, 3 << 20) == bytes([7]) * (3 << 20)
    ok(cu.cuMemHostRegister(own, 1 << 20, 0))  # it ended with the context, and is not back
    say("done")
    heard()
    """
    toggled_at_ready(phosd, body)


def test_a_context_ends_with_the_last_detach(phosd: FakePhosd) -> None:
    body = """
    ok(cu.cuInit(0))
    first = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
    p, q = ok(cu.cuMemAlloc(20 << 20)), ok(cu.cuMemAllocAsync(20 << 20, 0))
    ok(cu.cuMemFreeAsync(q, 0))
    assert int(ok(cu.cuCtxAttach(0))) == int(first)
    ok(cu.cuCtxDetach(first))
    fill(p, 20 << 20, 7)
    assert read(p, 20 << 20) == bytes([7]) * (20 << 20)
    ok(cu.cuCtxDetach(first))
    second = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
    p = ok(cu.cuMemAlloc(3 << 20))
    fill(p, 3 << 20, 5)
    say("ready")
    heard()
    assert read(p, 3 << 20) == bytes([5]) * (3 << 20)
    say("done")
    heard()
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: len(session.blocks) == 1)
        phosd.toggle(session)
        app.tell()
        assert app.line() == "done"
        app.tell()
        app.finish()


GREEN = """
def green_context():
    resource = ok(cu.cuDeviceGetDevResource(0, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    green = ok(cu.cuGreenCtxCreate(ok(cu.cuDevResourceGenerateDesc([resource], 1)), 0, 1))
    return green, ok(cu.cuCtxFromGreenCtx(green))
"""


def test_a_green_context_does_not_cost_a_checkpointed_process_its_stack_limit(phosd: FakePhosd) -> None:
    body = (
        GREEN
        + """
start()
STACK = cu.CUlimit.CU_LIMIT_STACK_SIZE
ok(cu.cuCtxSetLimit(STACK, 4096))
green, context = green_context()
say("ready")
heard()
assert ok(cu.cuCtxGetLimit(STACK)) == 4096, ok(cu.cuCtxGetLimit(STACK))
say("done")
heard()
"""
    )
    toggled_at_ready(phosd, body)


@pytest.mark.parametrize("last", [False, True])
def test_what_was_made_in_a_green_context_is_its_primary_contexts(phosd: FakePhosd, last: bool) -> None:
    body = (
        GREEN
        + f"last = {last}"
        + """
ok(cu.cuInit(0))
primary = None if last else ok(cu.cuDevicePrimaryCtxRetain(0))
green, context = green_context()
ok(cu.cuCtxPushCurrent(context))
p, q = ok(cu.cuMemAlloc(3 << 20)), ok(cu.cuMemAllocAsync(3 << 20, 0))
r, pinned = ok(cu.cuMemAllocAsync(3 << 20, 0)), ok(cu.cuMemHostAlloc(1 << 20, 0))
fill(p, 3 << 20, 7)
ok(cu.cuMemFreeAsync(r, 0))
assert int(cu.cuCtxDestroy(context)[0]) != 0
assert read(p, 3 << 20) == bytes([7]) * (3 << 20)
OWNER = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
owner = int(ok(cu.cuPointerGetAttribute(OWNER, p)))
assert owner != int(context)
ok(cu.cuCtxPopCurrent())
ok(cu.cuGreenCtxDestroy(green))
ok(cu.cuCtxPushCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
if last:
    assert int(cu.cuMemFree(p)[0]) != 0
else:
    assert owner == int(primary)
    assert read(p, 3 << 20) == bytes([7]) * (3 << 20)
say("ready")
heard()
if not last:
    assert read(p, 3 << 20) == bytes([7]) * (3 << 20)
    ok(cu.cuMemFree(p))
    ok(cu.cuMemFree(q))
    ok(cu.cuMemFreeHost(pinned))
say("done")
heard()
"""
    )
    toggled_at_ready(phosd, body)


def test_what_ends_with_a_primary_context_ends_though_a_green_one_takes_it_anew(phosd: FakePhosd) -> None:
    """Both at once: whoever lets go of it for the last time must not find it active again by then."""
    body = """
start()
free = ok(cu.cuMemGetInfo())[0]
ok(cu.cuDevicePrimaryCtxRelease(0))
resource = ok(cu.cuDeviceGetDevResource(0, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
description = ok(cu.cuDevResourceGenerateDesc([resource], 1))
through = threading.Event()
def take():
    while not through.is_set():
        ok(cu.cuGreenCtxDestroy(ok(cu.cuGreenCtxCreate(description, 0, 1))))
taker = threading.Thread(target=take)
taker.start()
for _ in range(300):
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    ok(cu.cuMemAlloc(8 << 20))
    ok(cu.cuDevicePrimaryCtxRelease(0))
    ok(cu.cuCtxSetCurrent(0))
through.set()
taker.join()
start()
until = time.monotonic() + 10
while (lost := free - ok(cu.cuMemGetInfo())[0]) and time.monotonic() < until:
    time.sleep(0.01)  # the driver may believe an older figure for a moment
say(lost)
"""
    with program(phosd, body) as (app, _):
        assert app.line() == "0"
        app.finish()


def test_a_green_context_that_ends_in_a_window_is_no_context_with_an_error(phosd: FakePhosd) -> None:
    body = (
        GREEN
        + """
start()
pool = ok(cu.cuMemAlloc(34 << 20))
p = ok(cu.cuMemAlloc(40 << 20))
fill(p, 40 << 20, 3)
say("ready")
heard()
green, context = green_context()
ok(cu.cuCtxPushCurrent(context))
fill(p, 1 << 20, 5)
ok(cu.cuCtxPopCurrent())
ok(cu.cuGreenCtxDestroy(green))
say("ended")
heard()
fill(int(p) + (8 << 20), 1 << 20, 6)
assert read(int(p) + (8 << 20), 2 << 20) == b"\\6" * (1 << 20) + b"\\3" * (1 << 20)
say("through")
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20) as (_, table):
            app.tell()
            assert app.line() == "ended"
            assert session.connection is not None
            for _ in range(2):  # before it waits for the second one, it looks at what copies aside
                session.connection.ask(prepare_residue=wire.PrepareResidue())
            assert not table.faulted()
            app.tell()
            assert app.line() == "through"
        app.finish()
