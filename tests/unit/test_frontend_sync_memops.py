"""CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which the driver refuses for VMM memory: what MPI, UCX and GDRCopy ask for."""

from __future__ import annotations

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program

pytestmark = [pytest.mark.timeout(120), built]

SETTING = """
SYNC = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
FLAG = int(cu.CUctx_flags.CU_CTX_SYNC_MEMOPS)

def let(pointer, value=1):
    ok(cu.cuPointerSetAttribute(value, SYNC, pointer))

def asked(pointer):
    return int(ok(cu.cuPointerGetAttribute(SYNC, pointer)))

def synchronous():
    return bool(ok(cu.cuCtxGetFlags()) & FLAG)
"""


def test_it_holds_for_the_allocation_and_the_context_through_checkpoints(phosd: FakePhosd) -> None:
    body = (
        SETTING
        + """
start()
other = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
ok(cu.cuCtxPopCurrent())
p, q = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
let(q, 0)
assert not synchronous() and not asked(p)
ok(cu.cuCtxPushCurrent(other))
let(int(p) + 5000)
assert not synchronous(), "it is the memory's context that matters"
ok(cu.cuCtxPopCurrent())
assert synchronous() and (asked(p), asked(q)) == (1, 0)
say("ready")
heard()
assert synchronous() and (asked(p), asked(q)) == (1, 0)
ok(cu.cuCtxSetFlags(int(cu.CUctx_flags.CU_CTX_SCHED_YIELD)))
assert synchronous() and ok(cu.cuCtxGetFlags()) & int(cu.CUctx_flags.CU_CTX_SCHED_YIELD)
ok(cu.cuDevicePrimaryCtxSetFlags(ok(cu.cuDeviceGet(0)), int(cu.CUctx_flags.CU_CTX_SCHED_SPIN)))
assert synchronous()
let(p, 0)
assert not asked(p)
let(p)
ok(cu.cuMemFree(p))
again = ok(cu.cuMemAlloc(1 << 20))
assert int(again) == int(p) and not asked(again), "another allocation at the same place"
say("done")
"""
    )
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        phosd.toggle(session)
        app.tell()
        assert app.line() == "done"
        app.finish()


def test_it_waits_for_what_was_begun_before_but_not_in_a_capture(phosd: FakePhosd) -> None:
    body = (
        SETTING
        + """
start()
p = ok(cu.cuMemAlloc(8 << 20))
host = int(ok(cu.cuMemHostAlloc(4096, 0)))
ctypes.memset(host, 0, 4096)
ok(cu.cuStreamWaitValue32(0, host, 1, 0))
ok(cu.cuMemsetD8Async(p, 3, 8 << 20, 0))
threading.Timer(0.5, lambda: ctypes.memset(host, 1, 1)).start()
let(p)
assert ok(cu.cuStreamQuery(0)) == (), "what was in the default stream is done"
other = ok(cu.cuCtxCreate(None, 0, ok(cu.cuDeviceGet(0))))
q = ok(cu.cuMemAlloc(1 << 20))
stream = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
let(q)
assert asked(q) and not synchronous(), "the driver would synchronise the context, and end the capture"
ok(cu.cuMemsetD8Async(q, 1, 100, stream))
ok(cu.cuStreamEndCapture(stream))
assert synchronous()
say("done")
"""
    )
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize("end", ["stream", "other", "same"])
def test_what_was_put_off_is_done_when_the_last_capture_has_ended(phosd: FakePhosd, end: str) -> None:
    body = (
        SETTING
        + f"""
context = start()
p = ok(cu.cuMemAlloc(1 << 20))
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
one, two = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
ok(cu.cuStreamBeginCapture(one, RELAXED))
let(p)
if {end!r} == "stream":
    ok(cu.cuStreamDestroy(one))
elif {end!r} == "other":
    ok(cu.cuStreamBeginCapture(two, RELAXED))
    ok(cu.cuStreamEndCapture(one))
    assert not synchronous(), "there is another one"
    ok(cu.cuStreamEndCapture(two))
else:
    ok(cu.cuStreamEndCapture(one))
assert synchronous()
ok(cu.cuMemFree(p))
q, own = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuCtxCreate(None, 0, 0))
assert not synchronous(), "no other context is given it"
ok(cu.cuCtxSetFlags(int(cu.CUctx_flags.CU_CTX_SCHED_YIELD)))
assert not synchronous()
say("done")
"""
    )
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()


def test_memory_of_another_process_takes_it_too(phosd: FakePhosd) -> None:
    exporter = """
    start()
    p = ok(cu.cuMemAlloc(1000))
    say(bytes(ok(cu.cuIpcGetMemHandle(p)).reserved).hex())
    heard()
    """
    importer = (
        SETTING
        + """
start()
handle = cu.CUipcMemHandle()
handle.reserved = bytes.fromhex(heard())
p = ok(cu.cuIpcOpenMemHandle(handle, 1))
let(p)
assert synchronous()
ok(cu.cuIpcCloseMemHandle(p))
say("done")
"""
    )
    with program(phosd, exporter) as (one, _), program(phosd, importer) as (two, _):
        two.tell(one.line())
        assert two.line() == "done"
        two.finish()
        one.tell()
        one.finish()
