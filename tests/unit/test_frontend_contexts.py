"""Contexts that end: what was theirs, and calls with one that is gone.

The driver lets a destroyed context be made current, answers most calls with it, and crashes at others (580.159.04,
H100); so does the software GPU.
"""

from __future__ import annotations

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(240), built]

GONE = 709  # CUDA_ERROR_CONTEXT_IS_DESTROYED


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
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        app.tell()
        assert app.line() == "done"
        app.tell()
        app.finish()


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
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        app.tell()
        assert app.line() == "done"
        app.tell()
        app.finish()
