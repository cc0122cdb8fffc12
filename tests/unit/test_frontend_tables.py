"""A kernel that writes through addresses in device memory: in a window these are read, when they are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from phos.gen import wire_pb2 as wire
from phos.gpu_engine.cow.chunk_table import (
    COW,
    LAZY,
    POOL_FLAGS,
    SAVED,
    SHADOWED,
    UNSAVED,
    ChunkTable,
    PoolShape,
    WindowTable,
)
from phos.gpu_engine.spec.descriptor import Access, Field, FieldKind
from phos.gpu_engine.spec.ptx_flow import describe
from phos.gpu_engine.spec.table import pack
from tests.unit.frontend_fake import FakePhosd, Program, Session, built, program
from tests.unit.waiting import eventually

pytestmark = [pytest.mark.timeout(120), built]

CHUNK = 4 << 20
POOL, P, Q, OTHER, TABLE = 130 << 20, 40 << 20, 36 << 20, 48 << 20, 34 << 20

PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry through(.param .u64 table)
{
    .reg .u64 %a, %to;
    .reg .u32 %seven;
    ld.param.u64 %a, [table];
    ld.global.u64 %to, [%a+16];
    mov.u32 %seven, 7;
    st.global.u32 [%to], %seven;
    ret;
}
.visible .entry pair(.param .u64 upper, .param .u64 lower)
{
    .reg .u64 %a, %to;
    .reg .u32 %seven;
    mov.u32 %seven, 7;
    ld.param.u64 %a, [upper];
    ld.global.u64 %to, [%a];
    st.global.u32 [%to], %seven;
    ld.param.u64 %a, [lower];
    ld.global.u64 %to, [%a+16];
    st.global.u32 [%to], %seven;
    ret;
}
.visible .entry filled(.param .u64 table, .param .u64 filled, .param .u64 to)
{
    .reg .u64 %a, %b, %to, %found;
    .reg .u32 %seven;
    ld.param.u64 %a, [filled];
    ld.param.u64 %to, [to];
    st.global.u64 [%a], %to;
    ld.param.u64 %b, [table];
    ld.global.u64 %found, [%b];
    mov.u32 %seven, 7;
    st.global.u32 [%found], %seven;
    ret;
}
"""

BODY = f"""
context = start()
PTX = {PTX.encode() + bytes(1)!r}
module = ok(cu.cuModuleLoadData(PTX))
kernel, pair, filled = [ok(cu.cuModuleGetFunction(module, name)) for name in (b"through", b"pair", b"filled")]
pool, p, q, other, table = [int(ok(cu.cuMemAlloc(size))) for size in ({POOL}, {P}, {Q}, {OTHER}, {TABLE})]
stream = ok(cu.cuStreamCreate(1))
host = int(ok(cu.cuMemHostAlloc(4096, 0)))
addresses = (ctypes.c_uint64 * 4).from_address(host)
flag = host + 64
def launch(place=table + 8):
    ok(cu.cuCtxSetCurrent(context))
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, ((place,), (ctypes.c_uint64,)), 0))
def aim():
    addresses[:] = 1, q + 100, p + (8 << 20), p + (8 << 20) + 64
    ok(cu.cuMemcpyHtoDAsync(table + 8, host, 32, stream))
ok(cu.cuStreamSynchronize(stream))
ctypes.memset(host, 0, 4096)
"""

END = """
ok(cu.cuStreamSynchronize(stream))
assert read(p + (8 << 20), 4) == bytes([7, 0, 0, 0])
say("through")
"""


def test_the_descriptor_names_the_table() -> None:
    assert describe(PTX)["through"].fields == (
        Field(0, 8, Access.READ, FieldKind.POINTER),
        Field(0, 8, Access.WRITE, FieldKind.TABLE),
    )
    assert describe(PTX)["through"].indirect == Access.NONE


class Window:
    """The tables of an open window, and where each block's chunks are, by the block's size."""

    def __init__(self, chunks: ChunkTable, table: WindowTable, places: dict[int, range]) -> None:
        self.chunks, self.table, self.places = chunks, table, places

    def states(self, size: int) -> set[int]:
        return {min(self.chunks.state(chunk), SHADOWED) for chunk in self.places[size]}

    def wanted(self) -> set[int]:
        """The sizes of the blocks of which chunks are asked for now; these are then there."""
        sizes = set()
        while (chunk := self.table.next_wanted()) is not None:
            sizes |= {size for size, places in self.places.items() if chunk in places}
            self.chunks.saved(chunk)
        return sizes


@contextmanager
def opened(phosd: FakePhosd, body: str, mode: int = COW) -> Iterator[tuple[Program, Window]]:
    with program(phosd, BODY + body) as (app, session):
        assert app.line() == "ready"
        give_descriptor(session)
        assert not phosd.quiesce(session).error
        (lent,) = (number for number, block in session.blocks.items() if block.size == POOL)
        records, places, count = [], {}, 0
        for number, block in session.blocks.items():
            if number != lent or mode != COW:
                records.append((number, block.size, count))
                places[block.size] = range(count, count := count + -(-block.size // CHUNK))
        shapes = [PoolShape(0, (POOL - POOL_FLAGS) // CHUNK, POOL)] if mode == COW else []
        connection = session.connection
        assert connection is not None
        with (
            closing(ChunkTable(CHUNK, count)) as chunks,
            closing(WindowTable(0, records, shapes, 4 * count, prioritise=False, mode=mode, order=2 * count)) as table,
        ):
            shared = [chunks.descriptor, table.descriptor]
            shared += [session.blocks[lent].descriptor] if mode == COW else []
            assert not connection.ask(descriptors=shared, window_begin=wire.WindowBegin())[0].done.error
            assert not phosd.open(session).error
            app.tell()
            yield app, Window(chunks, table, places)
            chunks.close_window()
            assert not connection.ask(window_end=wire.WindowEnd())[0].done.error
        app.finish()


def give_descriptor(session: Session) -> None:
    eventually(lambda: len(session.kernels) == 3)
    connection = session.connection
    assert connection is not None
    file = os.memfd_create("table")
    os.write(file, pack([(session.module_numbers[0], described) for described in describe(PTX).values()]))
    assert not connection.ask(access_table=wire.AccessTable(), descriptors=[file])[0].done.error
    os.close(file)


def test_what_the_addresses_in_a_table_name_is_copied_aside_and_nothing_else(phosd: FakePhosd) -> None:
    with opened(phosd, 'say("ready"); heard(); aim(); launch()' + END) as (app, window):
        assert app.line() == "through"
        assert window.states(P) == window.states(Q) == {SHADOWED}
        assert window.states(OTHER) == {UNSAVED}
        assert window.states(TABLE) == {UNSAVED, SHADOWED}  # the copy into it
        assert (window.table.counts().anything, window.table.culprit()) == (0, "")


def test_tables_side_by_side_are_each_followed(phosd: FakePhosd) -> None:
    body = """
say("ready")
heard()
addresses[:] = 1, 2, p + (8 << 20), other + 64
ok(cu.cuMemcpyHtoDAsync(table + 8, host, 32, stream))
u64 = ctypes.c_uint64
ok(cu.cuLaunchKernel(pair, 1, 1, 1, 1, 1, 1, 0, stream, ((table + 32, table + 8), (u64, u64)), 0))
ok(cu.cuStreamSynchronize(stream))
assert read(other + 64, 4) == bytes([7, 0, 0, 0])
"""
    with opened(phosd, body + END) as (app, window):
        assert app.line() == "through"
        assert window.states(P) == window.states(OTHER) == {SHADOWED}
        assert window.states(Q) == {UNSAVED}
        assert window.table.counts().anything == 0


FILLED = """
say("ready")
heard()
u64 = ctypes.c_uint64
places = (table + 24, WHERE, p + (8 << 20))
addresses[:] = 1, 2, p + (8 << 20), 3
ok(cu.cuMemcpyHtoDAsync(table + 8, host, 32, stream))
ok(cu.cuLaunchKernel(filled, 1, 1, 1, 1, 1, 1, 0, stream, (places, (u64, u64, u64)), 0))
"""


def test_a_table_that_the_kernel_fills_under_another_name_may_hold_any_address(phosd: FakePhosd) -> None:
    with opened(phosd, FILLED.replace("WHERE", "table + 24") + END) as (app, window):
        eventually(lambda: window.table.culprit() == "filled")
        window.chunks.close_window()
        assert app.line() == "through"
        assert window.table.counts().anything == 1


def test_a_table_beside_what_the_kernel_fills_is_followed(phosd: FakePhosd) -> None:
    with opened(phosd, FILLED.replace("WHERE", "other") + END) as (app, window):
        assert app.line() == "through"
        assert window.states(P) == window.states(OTHER) == {SHADOWED}
        assert window.states(Q) == {UNSAVED}
        assert window.table.counts().anything == 0


BEHIND = """
say("ready")
heard()
ok(cu.cuStreamWaitValue32(stream, flag, 1, 0))
aim()
say("queued")
thread = threading.Thread(target=launch)
thread.start()
if heard() == "go":
    ctypes.memset(flag, 1, 1)
thread.join()
say("launched")
ctypes.memset(flag, 1, 1)
"""


def test_a_table_is_read_when_the_work_before_the_kernel_is_done(phosd: FakePhosd) -> None:
    with opened(phosd, "import threading\n" + BEHIND + END) as (app, window):
        assert app.line() == "queued"
        eventually(lambda: window.states(TABLE) == {UNSAVED, SHADOWED})
        assert window.states(P) == {UNSAVED}
        app.tell("go")
        assert app.line() == "launched"
        assert window.states(P) == window.states(Q) == {SHADOWED}
        assert app.line() == "through"
        assert window.table.counts().anything == 0


def test_nobody_waits_for_a_table_when_all_is_saved(phosd: FakePhosd) -> None:
    with opened(phosd, "import threading\n" + BEHIND + END) as (app, window):
        assert app.line() == "queued"
        app.tell("no")
        window.chunks.close_window()
        assert app.line() == "launched"
        assert window.states(P) == {UNSAVED}
        assert app.line() == "through"


UNKNOWN = {
    "host": "addresses[:] = 0, 0, p + (8 << 20), 0; say('ready'); heard(); fill(table, 4, 1); launch(host)",
    "graph": """
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
aim()
launch()
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
say("ready")
heard()
ok(cu.cuGraphLaunch(graph, stream))
""",
}


@pytest.mark.parametrize(("where", "name"), [("host", "through"), ("graph", "cuGraphLaunch")])
def test_before_a_table_that_cannot_be_read_everything_is_waited_for(phosd: FakePhosd, where: str, name: str) -> None:
    """The host's memory is nobody's to look through; and what a graph puts into a table is not there before it runs."""
    with opened(phosd, UNKNOWN[where] + END) as (app, window):
        eventually(lambda: window.table.culprit() == name)
        assert window.states(OTHER) == {UNSAVED}
        window.chunks.close_window()
        assert app.line() == "through"
        assert window.table.counts().anything == 1


def test_a_lazy_restore_brings_the_table_and_then_what_its_addresses_name(phosd: FakePhosd) -> None:
    with opened(phosd, 'aim()\nok(cu.cuStreamSynchronize(stream))\nsay("ready"); heard(); launch()' + END, LAZY) as (
        app,
        window,
    ):
        first: set[int] = set()
        eventually(lambda: first.update(window.wanted()) or first)
        assert first == {TABLE}
        then: set[int] = set()
        eventually(lambda: then.update(window.wanted()) or {P, Q} <= then)
        assert then == {P, Q}
        assert app.line() == "through"
        assert window.states(OTHER) == {UNSAVED}
        assert window.states(P) == {SAVED}
        assert window.table.culprit() == ""
