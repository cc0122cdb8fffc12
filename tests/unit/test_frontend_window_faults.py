"""In a window a context may get an error: what was to be copied aside in it never will be, and phosd is told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.unit.frontend_fake import FakePhosd, built, program
from tests.unit.test_frontend_window import window
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]

POOL = 130 << 20
SLOTS = 32
BODY = """
start()
second = ok(cu.cuCtxCreate(None, 0, 0))
first = ok(cu.cuDevicePrimaryCtxRetain(0))
pool, p, q = [ok(cu.cuMemAlloc(size << 20)) for size in (130, 120, 8)]
ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry bad() { trap; }\\n"
ptx += b".visible .entry one(.param .u64 to) { ret; }\\0"
def kernel(name):
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), name))
def touch(function, address):
    ok(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((int(address),), (ctypes.c_uint64,)), 0))
in_second = kernel(b"one")
ok(cu.cuCtxSetCurrent(first))
one, bad = kernel(b"one"), kernel(b"bad")
aside = ok(cu.cuStreamCreate(1))
ok(cu.cuCtxSynchronize())
say("ready")
heard()
touch(one, p)
ok(cu.cuLaunchKernel(bad, 1, 1, 1, 1, 1, 1, 0, aside, 0, 0))
assert cu.cuStreamSynchronize(aside)[0]
"""


def test_a_context_with_an_error_is_told_of(phosd: FakePhosd) -> None:
    """It copies nothing aside any more: phosd would wait for ever."""
    with program(phosd, BODY + "say('failed')") as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, POOL) as (_, table):
            assert not table.faulted()
            app.tell()
            assert app.line() == "failed"
            eventually(lambda: table.faulted() == 1)
        app.finish()


@pytest.mark.parametrize(
    "end",
    [
        "ok(cu.cuDevicePrimaryCtxReset(0))",
        "[ok(cu.cuDevicePrimaryCtxRelease(0)) for _ in range(2)]",
        "ok(cu.cuCtxSetCurrent(second)); threading.Thread(target=touch, args=(in_second, q), daemon=True).start()",
    ],
    ids=["it is reset", "it is released", "another copies"],
)
def test_an_error_is_told_of_although_its_context_does_not_copy_any_more(phosd: FakePhosd, end: str) -> None:
    """Nobody would find it there later."""
    body = f"import threading\n{BODY}\n{end}\nsay('over')\n"
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, POOL) as (_, table):
            app.tell()
            assert app.line() == "over"
            (lent,) = (block for block in session.blocks.values() if block.size == POOL)
            assert not any(os.pread(lent.descriptor, 4 * SLOTS, 0)), "something was copied all the same"
            eventually(lambda: table.faulted() == 1)
            assert table.counts().shadowed == 30, "something is still copied aside"
        app.finish()


PAUSES_IN_EXIT = """
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)  # called after the frontend and the driver have heard of the exit
    start()
    pool, p = ok(cu.cuMemAlloc(34 << 20)), ok(cu.cuMemAlloc(8 << 20))
"""


def test_a_window_ends_without_the_driver_once_the_process_exits(phosd: FakePhosd) -> None:
    """What the driver has been told to put away it answers with an error, which is nobody's business any more."""
    body = f"""{PAUSES_IN_EXIT}
    ok(cu.cuCtxSynchronize())
    say("ready")
    heard()
    fill(p, 64, 1)
    ok(cu.cuCtxSynchronize())
    say("exits")
    """
    with program(phosd, body) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20) as (_, table):
            app.tell()
            assert app.line() == "exits"
            app.tell()
            eventually(lambda: "pause" in Path(f"/proc/{app.process.pid}/wchan").read_text())
            assert not table.faulted()
        app.kill()
        assert "unmapped" not in app.stderr


def test_the_driver_is_not_asked_for_errors_once_the_process_exits(phosd: FakePhosd, tmp_path: Path) -> None:
    """It may have gone away, and then says of anything that it failed: what is queued may be done all the same."""
    body = f"""{PAUSES_IN_EXIT}
    ptx = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry bad() {{ trap; }}\\0"
    bad = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx)), b"bad"))
    host, stream = ok(cu.cuMemHostAlloc(64, 0)), ok(cu.cuStreamCreate(1))
    ok(cu.cuCtxSynchronize())
    say("ready")
    heard()
    fill(p, 64, 1)
    ok(cu.cuCtxSynchronize())
    say("copied aside")
    heard()
    ok(cu.cuMemcpyDtoHAsync(host, p, 64, stream))
    ok(cu.cuLaunchKernel(bad, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
    say("exits")
    """
    hold = tmp_path / "hold"
    with program(phosd, body, SOFTGPU_COPY_HOLD=str(hold)) as (app, session):
        assert app.line() == "ready"
        with window(phosd, session, 34 << 20) as (_, table):
            app.tell()
            assert app.line() == "copied aside"
            hold.touch()
            app.tell()
            assert app.line() == "exits"
            app.tell()
            eventually(lambda: "pause" in Path(f"/proc/{app.process.pid}/wchan").read_text())
            hold.unlink()
            time.sleep(0.5)
            assert not table.faulted()
        app.kill()
