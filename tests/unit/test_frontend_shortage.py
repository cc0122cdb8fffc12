"""What happens when GPU memory runs out: what is free is given back, and waited for."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.unit.frontend_fake import LIBPHOS, ROOT, WAITING, FakePhosd, Program, Session, alone, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(240), built]


SHORT_OF_MEMORY = """
context = start()
free, total = ok(cu.cuMemGetInfo())
heard()
pieces = [ok(cu.cuMemAlloc(20 << 20)) for _ in range(6)]
begun = time.monotonic()
assert int(cu.cuMemAlloc(free)[0]) == 2
say(time.monotonic() - begun)  # what running out takes here and now, with nothing to wait for
heard()
for p in pieces:
    ok(cu.cuMemFree(p))
begun = time.monotonic()
code, everything = cu.cuMemAlloc(free)
say(int(code), time.monotonic() - begun)
"""


def run_short(phosd: FakePhosd, app: Program, session: Session) -> tuple[int, float]:
    """The answer to asking for all memory just after much was freed, and how many seconds were spent waiting."""
    app.tell()
    usual = float(app.line())
    eventually(lambda: len(session.blocks) == 6)
    phosd.reluctant = True
    app.tell()
    code, seconds = app.line().split()
    return int(code), float(seconds) - usual


SHORT = {"SOFTGPU_MEMORY": "200M", "PHOS_CACHE_BYTES": "0"}


def test_freed_memory_is_waited_for_until_phosd_lets_go(phosd: FakePhosd) -> None:
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        code, _ = run_short(phosd, app, session)
        assert code == 0
        assert session.settled == 1
        app.finish()


def test_a_phosd_that_does_not_answer_costs_a_second(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        code, seconds = run_short(phosd, app, session)
        assert code == 2
        assert 0.8 < seconds < 5
        app.finish()


def test_nobody_waits_for_a_phosd_that_has_gone(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        threading.Thread(target=lambda: (eventually(lambda: session.settled > 0), phosd.stop())).start()
        _, seconds = run_short(phosd, app, session)
        assert seconds < 0.9
        app.finish()


def test_who_waits_for_memory_does_not_hold_up_a_quiesce(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        app.tell()
        app.line()
        eventually(lambda: len(session.blocks) == 6)
        phosd.reluctant = True
        app.tell()
        eventually(lambda: session.settled > 0)
        # The waiting thread is inside: it leaves when its second is over.
        assert not phosd.quiesce(session).error
        assert not phosd.open(session).error
        assert app.line().startswith("2 ")  # nobody has let go of anything
        phosd.settles = True
        app.finish()


def test_nothing_freed_is_nothing_to_wait_for(phosd: FakePhosd) -> None:
    phosd.settles = False
    with program(phosd, SHORT_OF_MEMORY, **SHORT) as (app, session):
        app.tell()
        app.line()
        assert session.settled == 0
        app.kill()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
def test_memory_opened_again_while_phosd_is_told_of_it_is_not_waited_for(tmp_path: Path) -> None:
    """Between closing and opening only what is being told kept it."""
    exporter = """
    start()
    say(bytes(ok(cu.cuIpcGetMemHandle(ok(cu.cuMemAlloc(1000)))).reserved).hex())
    heard()
    """
    importer = """
    start()
    free, total = ok(cu.cuMemGetInfo())
    handle = cu.CUipcMemHandle()
    handle.reserved = bytes.fromhex(heard())
    other = ok(cu.cuIpcOpenMemHandle(handle, 1))
    def run_out():
        begun = time.monotonic()
        assert int(cu.cuMemAlloc(free + (1 << 20))[0]) == 2
        return time.monotonic() - begun
    say(run_out())
    heard()
    ok(cu.cuIpcCloseMemHandle(other))
    ok(cu.cuIpcOpenMemHandle(handle, 1))
    say("again")
    heard()
    say(run_out())
    """
    library, held_up = tmp_path / "sending_held_up.so", tmp_path / "held_up"
    source = ROOT / "tests/unit/sending_held_up.c"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)
    environment = {**SHORT, "LD_PRELOAD": f"{library} {LIBPHOS}", "SENDING_HELD_UP": str(held_up)}
    with (
        FakePhosd(tmp_path) as first,
        program(first, exporter) as (owner, _),
        program(first, importer, **environment) as (app, session),
    ):
        app.tell(owner.line())
        usual = float(app.line())
        eventually(lambda: len(session.blocks) == 1)
        held_up.write_text("not yet")
        first.stop()
        with FakePhosd(tmp_path) as second:
            eventually(lambda: not held_up.read_text())  # it says hello, and every block is about to be told
            app.tell()
            assert app.line() == "again"
            held_up.unlink()
            while (session := second.arrival()).pid != app.process.pid:
                pass
            eventually(lambda: len(session.blocks) == 1)
            app.tell()
            assert float(app.line()) - usual < 0.5
            app.finish()
            owner.tell()
            owner.finish()


def test_memory_that_was_freed_serves_physical_allocations_too() -> None:
    body = """
    start()
    size = 120 << 20
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(size))))
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    ok(cu.cuMemRelease(ok(cu.cuMemCreate(size, prop, 0))))
    ok(cu.cuMemFreeAsync(ok(cu.cuMemAllocAsync(size, 0)), 0))
    ok(cu.cuCtxSynchronize())
    ok(cu.cuMemRelease(ok(cu.cuMemCreate(size, prop, 0))))
    say("done")
    """
    with alone(body, SOFTGPU_MEMORY="200M", PHOS_CACHE_BYTES="150M") as app:
        assert app.line() == "done"
        app.finish()


FREED_IN_A_STREAM = (
    WAITING
    + """
for size in sizes:
    p = ok(cu.cuMemAllocAsync(size << 20, waiting))
    ok(cu.cuMemsetD8Async(p, 5, size << 20, waiting))
    ok(cu.cuMemFreeAsync(p, waiting))
    if len(sizes) > 1:
        ok(cu.cuStreamWaitValue32(waiting, flag + 4 * size, 1, 0))
"""
)


@pytest.mark.parametrize("wanted", ["cu.cuMemAllocAsync(150 << 20, waiting)", "cu.cuMemAlloc(150 << 20)"])
def test_memory_freed_in_a_stream_is_waited_for(wanted: str) -> None:
    """The driver lets the stream wait, and gives it; the program is ahead of its GPU."""
    body = f"""
sizes = [120]
{FREED_IN_A_STREAM}
threading.Timer(0.5, let_go).start()
begun = time.monotonic()
p = ok({wanted})
assert time.monotonic() - begun > 0.4
fill(p, 150 << 20, 6)
say("done")
"""
    with alone(body, SOFTGPU_MEMORY="200M", PHOS_CACHE_BYTES="0") as app:
        assert app.line() == "done"
        app.finish()


def test_as_much_memory_freed_in_a_stream_is_waited_for_as_is_needed() -> None:
    """One piece after the other becomes free, and the last one is not needed."""
    body = f"""
sizes = [40, 50, 60]
{FREED_IN_A_STREAM}
def let_go_on():
    for at in (0, 40, 50):  # after the last nothing comes
        time.sleep(0.3)
        ctypes.memset(flag + 4 * at, 1, 1)
threading.Thread(target=let_go_on).start()
begun = time.monotonic()
ok(cu.cuMemAllocAsync(190 << 20, waiting)) if all_of_it else ok(cu.cuMemAllocAsync(120 << 20, waiting))
say(time.monotonic() - begun)
ctypes.memset(flag + 4 * 60, 1, 1)
"""
    for all_of_it, least in ((False, 0.5), (True, 0.8)):
        with alone(f"all_of_it = {all_of_it}\n{body}", SOFTGPU_MEMORY="200M", PHOS_CACHE_BYTES="0") as app:
            assert float(app.line()) > least
            app.finish()


def test_memory_freed_in_a_stream_that_does_not_go_on_is_given_up() -> None:
    body = f"""
sizes = [120]
{FREED_IN_A_STREAM}
begun = time.monotonic()
assert int(cu.cuMemAlloc(150 << 20)[0]) == 2
say(time.monotonic() - begun)
let_go()
"""
    with alone(body, SOFTGPU_MEMORY="200M", PHOS_CACHE_BYTES="0") as app:
        assert 9 < float(app.line()) < 30
        app.finish()


def test_what_others_free_meanwhile_keeps_nobody_waiting() -> None:
    """There never is as much as is asked for, and always something that was freed a moment ago."""
    body = """
    context = start()
    kept = ok(cu.cuMemAlloc(60 << 20))
    stop = threading.Event()
    def work():
        ok(cu.cuCtxSetCurrent(context))
        stream = ok(cu.cuStreamCreate(1))
        while not stop.is_set():
            for size in range(1, 8):
                code, p = cu.cuMemAllocAsync(size << 20, stream)
                if int(code) == 0:
                    ok(cu.cuMemFreeAsync(p, stream))
    workers = [threading.Thread(target=work) for _ in range(2)]
    [worker.start() for worker in workers]
    time.sleep(0.2)
    begun = time.monotonic()
    assert int(cu.cuMemAlloc(150 << 20)[0]) == 2
    say(time.monotonic() - begun)
    stop.set()
    [worker.join() for worker in workers]
    """
    with alone(body, SOFTGPU_MEMORY="200M", PHOS_CACHE_BYTES="0") as app:
        assert float(app.line()) < 5
        app.finish()


# Pieces of a pool that is left to the driver, and physical memory that may back sparse arrays, are not the frontend's.
DRIVERS_OWN = """
def from_the_pool(size):
    return cu.cuMemAllocAsync(size, 0)

prop = cu.CUmemAllocationProp()
prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.allocFlags.usage = 1  # CU_MEM_CREATE_USAGE_TILE_POOL
def for_tiles(size):
    return cu.cuMemCreate(size, prop, 0)
"""

LEFT = {"SOFTGPU_MEMORY": "200M", "PHOS_CACHE_BYTES": "150M", "PHOS_CARRY_POOLS": "0"}


@pytest.mark.parametrize("served", ["from_the_pool", "for_tiles"])
def test_memory_that_was_freed_serves_what_is_left_to_the_driver(served: str) -> None:
    body = f"""
start()
size = 120 << 20
ok(cu.cuMemFree(ok(cu.cuMemAlloc(size))))
assert ok(cu.cuMemGetInfo())[0] >= size
ok({served}(size))
assert int({served}(size)[0]) == 2, "there is no more"
assert int({served}(300 << 20)[0]) == 2, "there never was so much"
say("done")
"""
    with alone(DRIVERS_OWN + body, **LEFT) as app:
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize("served", ["from_the_pool", "for_tiles"])
def test_what_is_left_to_the_driver_waits_for_phosd_too(phosd: FakePhosd, served: str) -> None:
    body = f"""
start()
free = ok(cu.cuMemGetInfo())[0]
pieces = [ok(cu.cuMemAlloc(20 << 20)) for _ in range(6)]
heard()
for p in pieces:
    ok(cu.cuMemFree(p))
ok({served}(free))
say("done")
"""
    with program(phosd, DRIVERS_OWN + body, **LEFT | {"PHOS_CACHE_BYTES": "0"}) as (app, session):
        eventually(lambda: len(session.blocks) == 6)
        phosd.reluctant = True
        app.tell()
        assert app.line() == "done"
        assert session.settled == 1
        app.finish()


MODULE = b"""
.version 7.0
.target sm_70
.address_size 64
.global .align 16 .b8 large[125829120];
.visible .entry nothing() { ret; }
""" + bytes(1)


def test_memory_that_was_freed_serves_modules() -> None:
    body = f"""
    start()
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(120 << 20))))
    module = ok(cu.cuModuleLoadData({MODULE!r}))
    assert ok(cu.cuModuleGetGlobal(module, b"large"))[1] == 120 << 20
    assert int(cu.cuModuleLoadData({MODULE!r})[0]) == 2, "there is no more"
    say("done")
    """
    with alone(body, **LEFT) as app:
        assert app.line() == "done"
        app.finish()


@pytest.mark.parametrize(("fault", "answer"), [("upload-oom-at:1", 0), ("upload-oom-at:1+", 2)])
def test_memory_that_was_freed_serves_a_graph_that_is_uploaded(fault: str, answer: int) -> None:
    """As one that is launched: its code and its memory nodes are mapped then."""
    body = """
    start()
    graph = ok(cu.cuGraphInstantiate(ok(cu.cuGraphCreate(0)), 0))
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(120 << 20))))
    say(int(cu.cuGraphUpload(graph, 0)[0]))
    """
    with alone(body, SOFTGPU_FAULTS=fault, **LEFT) as app:
        assert app.line() == str(answer)
        app.finish()


@pytest.mark.parametrize(("fault", "answer"), [("launch-oom-at:1", 0), ("launch-oom-at:1+", 2)])
def test_memory_that_was_freed_serves_code_that_is_loaded_at_its_first_launch(fault: str, answer: int) -> None:
    body = f"""
    start()
    kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData({MODULE.replace(b"125829120", b"16")!r})), b"nothing"))
    ok(cu.cuMemFree(ok(cu.cuMemAlloc(120 << 20))))
    say(int(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)[0]))
    """
    with alone(body, SOFTGPU_FAULTS=fault, **LEFT) as app:
        assert app.line() == str(answer)
        app.finish()
