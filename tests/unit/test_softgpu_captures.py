"""What is refused while a stream is captured, as an H200's driver 580.159.04 refuses it."""

from __future__ import annotations

import pytest

from tests.unit.softgpu_host import run

CALLS = """
import itertools, threading
start()
context = ok(cu.cuCtxGetCurrent())
MODES = cu.CUstreamCaptureMode
captured, idle = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
event, p = ok(cu.cuEventCreate(0)), ok(cu.cuMemAlloc(4096))

def elsewhere(call):
    found = []
    def work():
        ok(cu.cuCtxSetCurrent(context))
        found.append(call())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]

def outcome(mode, by, call):
    ok(cu.cuStreamBeginCapture(captured, mode))
    code = int((elsewhere(call) if by == "another" else call())[0])
    return code, int(cu.cuStreamEndCapture(captured)[0])
"""


@pytest.mark.parametrize(
    ("mode", "by", "thread", "refused"),
    [
        ("GLOBAL", "itself", "GLOBAL", True),
        ("GLOBAL", "another", "GLOBAL", True),
        ("GLOBAL", "another", "THREAD_LOCAL", False),
        ("GLOBAL", "another", "RELAXED", False),
        ("GLOBAL", "itself", "RELAXED", False),
        ("THREAD_LOCAL", "itself", "GLOBAL", True),
        ("THREAD_LOCAL", "another", "GLOBAL", False),
        ("RELAXED", "itself", "GLOBAL", False),
        ("RELAXED", "another", "GLOBAL", False),
    ],
)
def test_an_unsafe_call(mode: str, by: str, thread: str, refused: bool) -> None:
    run(
        CALLS
        + f"""
mode, own = (getattr(MODES, "CU_STREAM_CAPTURE_MODE_" + name) for name in ({mode!r}, {thread!r}))
def relaxed(call):
    before = ok(cu.cuThreadExchangeStreamCaptureMode(own))
    try:
        return call()
    finally:
        ok(cu.cuThreadExchangeStreamCaptureMode(before))
expected = (900, 901) if {refused} else (0, 0)
for call in (lambda: cu.cuMemAlloc(16), lambda: cu.cuMemFree(0), lambda: cu.cuStreamSynchronize(idle),
             lambda: cu.cuStreamQuery(0), lambda: cu.cuEventQuery(event), lambda: cu.cuMemHostAlloc(16, 0),
             lambda: cu.cuMemAllocAsync(16, idle), lambda: cu.cuCtxSetLimit(cu.CUlimit(0), 2048)):
    found = outcome(mode, {by!r}, lambda: relaxed(call))
    assert found == expected, found
for call in (lambda: cu.cuMemsetD8Async(p, 1, 16, idle), lambda: cu.cuEventRecord(event, idle),
             lambda: cu.cuMemCreate(2 << 20, properties(), 0), lambda: cu.cuStreamCreate(1)):
    assert outcome(mode, {by!r}, call) == (0, 0)
        """
    )


def test_whoever_asks_about_the_capturing_stream_ends_its_capture() -> None:
    run(
        CALLS
        + """
for mode, by in itertools.product((MODES(0), MODES(1), MODES(2)), ("itself", "another")):
    for call in (lambda: cu.cuStreamQuery(captured), lambda: cu.cuStreamSynchronize(captured), cu.cuCtxSynchronize):
        assert outcome(mode, by, call) == (900, 901)
"""
    )


def test_who_may_end_a_capture() -> None:
    run(
        CALLS
        + """
for mode, expected in ((0, 908), (1, 908), (2, 0)):
    ok(cu.cuStreamBeginCapture(captured, MODES(mode)))
    assert int(elsewhere(lambda: cu.cuStreamEndCapture(captured))[0]) == expected
    if expected:
        assert int(cu.cuStreamEndCapture(captured)[0]) == 901
ok(cu.cuStreamBeginCapture(captured, MODES(0)))
ok(cu.cuStreamDestroy(captured))  # which ends it
ok(cu.cuMemAlloc(16))
"""
    )
