"""What a stream capture forbids is refused in the driver's place, and nothing is forgotten because of it."""

from __future__ import annotations

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program

pytestmark = [pytest.mark.timeout(120), built]

CAPTURE = """
GLOBAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
context = start()
captured, idle = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))

def refused(call):
    ok(cu.cuStreamBeginCapture(captured, GLOBAL))
    codes = []
    thread = threading.Thread(target=lambda: codes.append(int(call()[0])))  # no context is current in it
    thread.start()
    thread.join()
    return codes[0], int(cu.cuStreamEndCapture(captured)[0])
"""


def test_also_where_no_context_is_current(phosd: FakePhosd) -> None:
    """The stream says which one it is about."""
    body = (
        CAPTURE
        + """
pool = ok(cu.cuDeviceGetDefaultMemPool(0))
p = ok(cu.cuMemAllocAsync(5000, idle))
ok(cu.cuStreamSynchronize(idle))
for call in (lambda: cu.cuMemAllocAsync(16, idle), lambda: cu.cuMemAllocFromPoolAsync(16, pool, idle),
             lambda: cu.cuMemFreeAsync(p, idle)):
    assert refused(call) == (900, 901)
ok(cu.cuMemFreeAsync(p, idle))  # it is still there
say("done")
"""
    )
    with program(phosd, body) as (app, _):
        assert app.line() == "done"
        app.finish()
