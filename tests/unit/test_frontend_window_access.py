"""In a window memory of others, and a peer's, can be reached until it has been copied aside."""

from __future__ import annotations

import os
import textwrap

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program
from tests.unit.test_frontend_window import window
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]

OWNER = """
start()
p = ok(cu.cuMemAlloc(32 << 20))
say(bytes(ok(cu.cuIpcGetMemHandle(p)).reserved).hex())
heard()
"""

GUEST = r"""
def two_contexts():
    start()
    global pool
    pool = ok(cu.cuMemAlloc(34 << 20))
    ptx = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry one(.param .u64 to) { ret; }\0"
    kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), b"one"))
    first = ok(cu.cuCtxGetCurrent())
    other = ok(cu.cuCtxCreate(None, 0, 0))
    return first, other, kernel
"""


def closed_in_a_window(phosd: FakePhosd, body: str, blocks: int) -> None:
    """A program that opens the owner's memory, and closes it while a kernel's arguments name it."""
    guest = GUEST + textwrap.dedent(body)
    with program(phosd, OWNER) as (owning, _), program(phosd, guest) as (app, session):
        app.tell(owning.line())
        assert app.line() == "ready"
        eventually(lambda: len(session.blocks) == blocks)
        with window(phosd, session, 34 << 20):
            app.tell()
            assert app.line() == "through"
        app.finish()
        owning.tell()
        owning.finish()


def test_what_is_closed_in_a_window_is_not_being_copied_aside(phosd: FakePhosd) -> None:
    """Memory of another process. In another context: closing it waits for a context's work."""
    body = """
    first, other, kernel = two_contexts()
    ok(cu.cuCtxSetCurrent(first))
    handle = cu.CUipcMemHandle()
    handle.reserved = bytes.fromhex(heard())
    p = ok(cu.cuIpcOpenMemHandle(handle, 1))
    say("ready")
    heard()
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(p),), (ctypes.c_uint64,)), 0))
    ok(cu.cuCtxSetCurrent(other))
    ok(cu.cuIpcCloseMemHandle(p))
    ok(cu.cuCtxSetCurrent(first))
    ok(cu.cuCtxSynchronize())
    say("through")
    """
    closed_in_a_window(phosd, body, 2)


def test_what_was_closed_during_a_capture_is_not_being_copied_aside_when_it_goes(phosd: FakePhosd) -> None:
    """It goes with the next memory that is freed in its context, and a kernel's arguments may still name it."""
    body = """
    first, other, kernel = two_contexts()
    more = ok(cu.cuMemAlloc(1 << 20))
    stream = ok(cu.cuStreamCreate(1))
    handle = cu.CUipcMemHandle()
    handle.reserved = bytes.fromhex(heard())
    p = ok(cu.cuIpcOpenMemHandle(handle, 1))
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    ok(cu.cuIpcCloseMemHandle(p))
    ok(cu.cuStreamEndCapture(stream))
    ok(cu.cuCtxSetCurrent(first))
    say("ready")
    heard()
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(p),), (ctypes.c_uint64,)), 0))
    ok(cu.cuCtxSetCurrent(other))
    ok(cu.cuMemFree(more))
    ok(cu.cuCtxSetCurrent(first))
    ok(cu.cuCtxSynchronize())
    say("through")
    """
    closed_in_a_window(phosd, body, 3)


def test_no_access_is_taken_from_what_is_being_copied_aside(phosd: FakePhosd) -> None:
    """The arguments of a kernel name memory of a peer, and the program is done with that."""
    body = """
    first = start()
    pool = ok(cu.cuMemAlloc(34 << 20))
    ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry one(.param .u64 to) { ret; }\\0"
    kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), b"one"))
    peer = ok(cu.cuDevicePrimaryCtxRetain(1))
    ok(cu.cuCtxSetCurrent(peer))
    p = ok(cu.cuMemAlloc(32 << 20))
    ok(cu.cuCtxSetCurrent(first))
    ok(cu.cuCtxEnablePeerAccess(peer, 0))
    say("ready")
    heard()
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((int(p),), (ctypes.c_uint64,)), 0))
    ok(cu.cuCtxDisablePeerAccess(peer))
    say("taken")
    heard()
    """
    with program(phosd, body, SOFTGPU_DEVICES="2") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20):
            app.tell()
            assert app.line() == "taken"
            (lent,) = (block for block in session.blocks.values() if block.size == 34 << 20)
            flags = memoryview(os.pread(lent.descriptor, 8 * 4, 0)).cast("I")
            assert all(flags), "some of it is still to be copied"
            app.tell()
        app.finish()
