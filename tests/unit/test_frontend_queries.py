"""Questions while the gate is closed: those that the driver answers as ever are answered, the others wait."""

from __future__ import annotations

import queue

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program

pytestmark = [pytest.mark.timeout(120), built]

QUESTIONS = """
context = start()
stream, event = ok(cu.cuStreamCreate(1)), ok(cu.cuEventCreate(0))
ok(cu.cuEventRecord(event, stream))
ok(cu.cuStreamSynchronize(stream))
own = cu.CUstream(cu.CU_STREAM_PER_THREAD)
relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
answered = [
    lambda: cu.cuDevicePrimaryCtxGetState(0),
    lambda: cu.cuThreadExchangeStreamCaptureMode(relaxed),
]
for of in (stream, cu.CUstream(0), cu.CUstream(cu.CU_STREAM_LEGACY)):
    answered += [
        lambda of=of: cu.cuStreamIsCapturing(of),
        lambda of=of: cu.cuStreamGetCaptureInfo(of),
        lambda of=of: cu.cuStreamGetCtx(of),
        lambda of=of: cu.cuStreamGetPriority(of),
        lambda of=of: cu.cuStreamGetFlags(of),
        lambda of=of: cu.cuStreamGetId(of),
        lambda of=of: cu.cuStreamGetDevice(of),
    ]
waiting = [
    lambda: cu.cuDeviceGetName(64, 0),
    lambda: cu.cuDeviceGetProperties(0),
    lambda: cu.cuStreamQuery(stream),
    lambda: cu.cuEventQuery(event),
    lambda: cu.cuStreamIsCapturing(own),
    lambda: cu.cuStreamGetCaptureInfo(own),
    lambda: cu.cuStreamGetFlags(own),
    lambda: cu.cuStreamGetDevice(own),
]
def ask(question):
    cu.cuCtxSetCurrent(context)
    if int(question()[0]) != 0:
        os._exit(3)
say("ready")
heard()
for question in answered:
    ask(question)
say("answered")
threads = [threading.Thread(target=ask, args=(question,)) for question in waiting]
for thread in threads:
    thread.start()
heard()
say(sum(thread.is_alive() for thread in threads))
heard()
for thread in threads:
    thread.join()
say("all")
"""


@pytest.mark.parametrize("detached", [False, True])
def test_what_is_answered_while_the_gate_is_closed(phosd: FakePhosd, detached: bool) -> None:
    with program(phosd, QUESTIONS) as (app, session):
        assert app.line() == "ready"
        assert not phosd.quiesce(session).error
        if detached:
            assert not phosd.detach(session).error
        app.tell()
        assert app.line() == "answered"
        with pytest.raises(queue.Empty):
            app.line(0.5)  # it waits to be told, and meanwhile the threads to be let through
        app.tell()
        assert app.line() == "8"
        if detached:
            assert not phosd.attach(session).error
        assert not phosd.open(session).error
        app.tell()
        assert app.line() == "all"
        app.finish()
