"""Work that waits for what the program does next: nobody waits for it for ever, and no capture is spoilt."""

from __future__ import annotations

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program

pytestmark = [pytest.mark.timeout(120), built]

# Work in a stream of its own that waits until the program writes 1 to `flag`.
WAITING = """
start()
flag = int(ok(cu.cuMemHostAlloc(4096, 0)))
ctypes.memset(flag, 0, 4096)
waiting = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamWaitValue32(waiting, flag, 1, 0))
def let_go():
    ctypes.memset(flag, 1, 1)
"""


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
