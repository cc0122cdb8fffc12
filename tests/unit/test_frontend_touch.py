"""What calls are said to touch, on the software GPU: copies, memsets, kernels with and without descriptors, graphs."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phos.gen import wire_pb2 as wire
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor, Field, FieldKind, Parameter, Source
from phos.gpu_engine.spec.table import pack
from tests.unit.frontend_fake import BUILD, CUDA_INCLUDE, LIBPHOS, ROOT, SOFTGPU, FakePhosd, Program, Session, program
from tests.unit.library_fakes import Workshop
from tests.unit.waiting import eventually

OBJECTS = BUILD / "obj" / "frontend"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not (LIBPHOS.exists() and (SOFTGPU / "libcuda.so.1").exists() and (CUDA_INCLUDE / "cuda.h").exists()),
        reason="not built",
    ),
]

TOOLS = r'''
import ctypes
phos = ctypes.CDLL(os.environ["LD_PRELOAD"])
phos.phos_test_touches.restype = ctypes.c_char_p
PER_THREAD = 2

def touched(call):
    """What `call` touched, in a window: a line an entry point."""
    phos.phos_test_trace(1)
    call()
    phos.phos_test_trace(0)
    return phos.phos_test_touches().decode().splitlines()

def spoken(lines, **names):
    """The same with addresses as name+offset."""
    out = []
    for line in lines:
        words = line.split()
        fields = [w.split(":") for w in words[8:]]
        said = []
        for address, size, access in fields:
            base = max((n for n in names if names[n] <= int(address)), key=lambda n: names[n], default=None)
            place = f"{base}+{int(address) - names[base]}" if base else "?"
            said.append(f"{place}:{size}:{'-rwb'[int(access)]}")
        out.append(" ".join(words[:1] + words[2:8] + sorted(said)))
    return out

PTX = rb"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 to, .param .u64 from, .param .u32 n) { ret; }
.visible .entry packed(.param .align 8 .b8 both[24], .param .u32 n) { ret; }
.visible .entry none() { ret; }
""" + bytes(1)

def load():
    module = ok(cu.cuModuleLoadData(PTX))
    return module, ok(cu.cuModuleGetFunction(module, b"add"))

u64, u32 = ctypes.c_uint64, ctypes.c_uint32
def launch(kernel, to, source, n=1, stream=0):
    values = ((int(to), int(source), n), (u64, u64, u32))
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, values, 0))
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The frontend with a window that writes down what calls touch."""
    folder = tmp_path_factory.mktemp("touch")
    window = folder / "touch_window.o"
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"]
    if os.environ.get("PHOS_SANITIZE"):
        flags.append(f"-fsanitize={os.environ['PHOS_SANITIZE']}")
    include = [f"-I{ROOT / 'frontend'}", f"-I{BUILD / 'gen'}", "-isystem", str(CUDA_INCLUDE)]
    subprocess.run(["gcc", *flags, *include, "-c", "-o", window, ROOT / "tests/unit/touch_window.c"], check=True)
    objects = [o for o in OBJECTS.glob("*.o") if not o.name.startswith("window")]
    objects = [o for o in objects if (ROOT / "frontend" / f"{o.stem}.c").exists()]
    made = folder / "libphos.so"
    link: list[str | Path] = [
        "gcc",
        *flags,
        "-shared",
        "-pthread",
        f"-Wl,--version-script={ROOT / 'frontend/libphos.map'}",
        "-o",
        made,
    ]
    rest: list[str | Path] = [BUILD / "obj/gen/wire.pb-c.o", "-Wl,--exclude-libs,ALL", "-l:libprotobuf-c.a", "-ldl"]
    subprocess.run([*link, *objects, window, *rest], check=True)
    return made


@contextmanager
def tracing(phosd: FakePhosd, library: Path, body: str, **environment: str) -> Iterator[tuple[Program, Session]]:
    """A program with a window of its own."""
    with program(phosd, TOOLS + textwrap.dedent(body), LD_PRELOAD=str(library), **environment) as both:
        yield both


def give(session: Session, content: bytes) -> str:
    """Send a table of descriptors; what the frontend says to it."""
    file = os.memfd_create("table")
    try:
        os.write(file, content)
        assert session.connection is not None
        return session.connection.ask(access_table=wire.AccessTable(), descriptors=[file])[0].done.error
    finally:
        os.close(file)


def rest_of(app: Program) -> list[str]:
    """All lines up to "end"."""
    return list(iter(app.line, "end"))


COPIES = """
start()
a, b = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
A, B = int(a), int(b)
host = bytearray(4096)
stream = ok(cu.cuStreamCreate(1))
def show(call):
    for line in spoken(touched(call), a=A, b=B):
        say(line.replace(f"{int(stream):x}", "stream"))
def flat():
    ok(cu.cuMemcpyHtoD(a, host, 100))
    ok(cu.cuMemcpyDtoH(host, A + 8, 200))
    ok(cu.cuMemcpyDtoD(A + 16, B + 32, 300))
    ok(cu.cuMemcpyDtoDAsync(A, B, 64, stream))
    ok(cu.cuMemcpyHtoDAsync(A, host, 64, cu.CUstream(PER_THREAD)))
    ok(cu.cuMemcpyAsync(A, B, 72, stream))
    ok(cu.cuMemcpyDtoD(A, B, 0))
show(flat)
def sets():
    ok(cu.cuMemsetD8(A, 1, 10))
    ok(cu.cuMemsetD16(A, 1, 10))
    ok(cu.cuMemsetD32Async(A, 1, 10, stream))
    ok(cu.cuMemsetD2D32(A, 512, 1, 8, 3))
show(sets)
copy = cu.CUDA_MEMCPY2D()
copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
copy.srcDevice, copy.dstDevice, copy.srcPitch, copy.dstPitch = A, B, 256, 512
copy.WidthInBytes, copy.Height, copy.srcXInBytes, copy.srcY = 100, 4, 4, 2
show(lambda: ok(cu.cuMemcpy2DAsync(copy, stream)))
cube = cu.CUDA_MEMCPY3D()
cube.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
cube.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
cube.srcHost, cube.srcPitch, cube.srcHeight = host, 64, 4
cube.dstDevice, cube.dstPitch, cube.dstHeight, cube.dstZ = B, 64, 8, 1
cube.WidthInBytes, cube.Height, cube.Depth = 32, 4, 2
show(lambda: ok(cu.cuMemcpy3D(cube)))
def wrong():  # called host memory, and a device's
    ok(cu.cuMemcpyDtoH(A, B, 64))
    ok(cu.cuMemcpyHtoDAsync(A, B, 64, stream))
    cube.srcHost, cube.srcPitch = A + 4096, 64
    ok(cu.cuMemcpy3D(cube))
show(wrong)
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
show(lambda: ok(cu.cuMemsetD8Async(A, 1, 10, stream)))
ok(cu.cuStreamEndCapture(stream))
assert not touched(lambda: ok(cu.cuCtxSynchronize()))
ok(cu.cuMemsetD8(A, 1, 10))
assert not phos.phos_test_touches(), "a call was traced outside a window"
say("end")
"""


def test_copies_and_memsets(phosd: FakePhosd, library: Path) -> None:
    with tracing(phosd, library, COPIES) as (app, _):
        # name, source, stream, nothing, anything, host copy, synchronous, places
        assert rest_of(app) == [
            "cuMemcpyHtoD_v2 255 0 0 0 1 1 a+0:100:w",
            "cuMemcpyDtoH_v2 255 0 0 0 1 1 a+8:200:r",
            "cuMemcpyDtoD_v2 255 0 0 0 0 0 a+16:300:w b+32:300:r",
            "cuMemcpyDtoDAsync_v2 255 stream 0 0 0 0 a+0:64:w b+0:64:r",
            "cuMemcpyHtoDAsync_v2 255 2 0 0 1 0 a+0:64:w",
            "cuMemcpyAsync 255 stream 0 0 0 0 a+0:72:w b+0:72:r",
            "cuMemcpyDtoD_v2 255 0 1 0 0 0",
            "cuMemsetD8_v2 255 0 0 0 0 0 a+0:10:w",
            "cuMemsetD16_v2 255 0 0 0 0 0 a+0:20:w",
            "cuMemsetD32Async 255 stream 0 0 0 0 a+0:40:w",
            "cuMemsetD2D32_v2 255 0 0 0 0 0 a+0:1056:w",
            "cuMemcpy2DAsync_v2 255 stream 0 0 0 0 a+516:868:r b+0:1636:w",
            "cuMemcpy3D_v2 255 0 0 0 1 1 b+512:736:w",
            "cuMemcpyDtoH_v2 255 0 0 0 1 1 a+0:64:w b+0:64:r",
            "cuMemcpyHtoDAsync_v2 255 stream 0 0 1 0 a+0:64:w b+0:64:r",
            "cuMemcpy3D_v2 255 0 0 0 1 1 a+4096:480:r b+512:736:w",
            "cuMemsetD8Async 255 stream 1 0 0 0 a+0:10:w",
        ]
        app.finish()


NEWER_COPIES = """
start()
a, b = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
A, B = int(a), int(b)
host = ok(cu.cuMemHostAlloc(4096, 0))
stream = ok(cu.cuStreamCreate(1))
pointer, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
def show(call):
    for line in spoken(touched(call), a=A, b=B, host=int(host)):
        say(line.replace(f"{int(stream):x}", "stream"))
attributes = cu.CUmemcpyAttributes()
attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
flat = newer("cuMemcpyWithAttributesAsync", u64, u64, size, pointer, pointer)
def copies():
    assert not flat(A, B, 72, attributes.getPtr(), int(stream))
    assert not flat(A, int(host), 64, attributes.getPtr(), int(stream))
show(copies)
box = cu.CUDA_MEMCPY3D_BATCH_OP()
for operand, at, rows in ((box.src, B + 4096, 8), (box.dst, A, 4)):
    operand.type = cu.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
    operand.op.ptr.ptr, operand.op.ptr.rowLength, operand.op.ptr.layerHeight = at, 64, rows
box.extent.width, box.extent.height, box.extent.depth = 32, 4, 2
deep = newer("cuMemcpy3DWithAttributesAsync", pointer, flags, pointer)
show(lambda: deep(box.getPtr(), 0, int(stream)))
class Operand(ctypes.Structure): # of CUDA 13.5: a pointer and where it is, or an endpoint's number and an offset
    _fields_ = [("type", ctypes.c_int), ("at", u64), ("more", u64)]
class Copy(ctypes.Structure):
    _fields_ = [("src", Operand), ("dst", Operand), ("size", size), ("flags", u32)]
fabric = newer("cuFabricCpyBatchAsync", size, pointer, flags, pointer)
for list in [(Copy(Operand(1, B), Operand(1, A), 64), Copy(Operand(1, B + 64), Operand(1, A + 64), 0)),
             (Copy(Operand(1, B), Operand(2, 7, 512), 64),), (Copy(Operand(2, 7), Operand(1, A), 64),)]:
    show(lambda: fabric(len(list), (Copy * len(list))(*list), 0, int(stream)))
say("end")
"""


def test_copies_of_newer_drivers(phosd: FakePhosd, library: Path) -> None:
    """What is behind a logical endpoint is not known: a copy from or to one may be about all memory."""
    with tracing(phosd, library, NEWER_COPIES, SOFTGPU_DRIVER_VERSION="13050") as (app, _):
        assert rest_of(app) == [
            "cuMemcpyWithAttributesAsync 255 stream 0 0 0 0 a+0:72:w b+0:72:r",
            "cuMemcpyWithAttributesAsync 255 stream 0 0 1 0 a+0:64:w host+0:64:r",
            "cuMemcpy3DWithAttributesAsync 255 stream 0 0 0 0 a+0:480:w b+4096:736:r",
            "cuFabricCpyBatchAsync 255 stream 0 0 0 0 a+0:64:w b+0:64:r",
            "cuFabricCpyBatchAsync 255 stream 0 2 0 0 b+0:64:r",
            "cuFabricCpyBatchAsync 255 stream 0 1 0 0 a+0:64:w",
        ]
        app.finish()


LAUNCHES = """
start()
a, b = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
A, B = int(a), int(b)
module, add = load()
packed = ok(cu.cuModuleGetFunction(module, b"packed"))
none = ok(cu.cuModuleGetFunction(module, b"none"))
class Both(ctypes.Structure):
    _fields_ = [("number", u64), ("to", u64), ("from_", u64)]
def show():
    def calls():
        launch(add, a, B + 64)
        argument, n = Both(12345, A + 8, B + 16), u32(1)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(argument), ctypes.addressof(n))
        ok(cu.cuLaunchKernel(packed, 1, 1, 1, 1, 1, 1, 0, 0, ctypes.addressof(pointers), 0))
        block = (ctypes.c_char * 28)()
        ctypes.memmove(block, ctypes.byref(argument), 24)
        size = ctypes.c_size_t(28)
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(block), 2, ctypes.addressof(size), 0)
        ok(cu.cuLaunchKernel(packed, 1, 1, 1, 1, 1, 1, 0, 0, 0, ctypes.addressof(extra)))
        ok(cu.cuLaunchKernel(none, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    for line in spoken(touched(calls), a=A, b=B):
        say(line)
    say("end")
show()
heard()
show()
heard()
show()
"""


def _descriptor(
    name: str, parameters: tuple[Parameter, ...], fields: tuple[Field, ...], indirect: Access = Access.NONE
) -> AccessDescriptor:
    return AccessDescriptor(name, parameters, fields, indirect, Source.PTX)


ADD = (Parameter(0, 8), Parameter(8, 8), Parameter(16, 4))
PACKED = (Parameter(0, 24), Parameter(24, 4))


def test_kernels_by_layout_and_by_descriptor(phosd: FakePhosd, library: Path) -> None:
    with tracing(phosd, library, LAUNCHES) as (app, session):
        assert rest_of(app) == [
            "add 3 0 0 0 0 0 a+0:0:b b+64:0:b",
            "packed 3 0 0 0 0 0 a+8:0:b b+16:0:b",
            "packed 3 0 0 0 0 0 a+8:0:b b+16:0:b",
            "none 3 0 1 0 0 0",
        ]
        eventually(lambda: {name for _, name in session.kernels} == {"add", "packed", "none"})
        module = session.module_numbers[0]
        pointer = FieldKind.POINTER
        add = _descriptor("add", ADD, (Field(0, 8, Access.WRITE, pointer), Field(8, 8, Access.READ, pointer)))
        packed = _descriptor("packed", PACKED, (Field(8, 8, Access.WRITE, pointer),), Access.READ)
        assert not give(session, pack([(module, add), (module, packed), (module + 1, add)]))
        app.tell()
        assert rest_of(app) == [
            "add 0 0 0 0 0 0 a+0:0:w b+64:0:r",
            "packed 0 0 0 1 0 0 a+8:0:w",
            "packed 0 0 0 1 0 0 a+8:0:w",
            "none 3 0 1 0 0 0",
        ]
        # A row for a kernel with other parameters is not this kernel's.
        other = _descriptor("add", (Parameter(0, 8),), (Field(0, 8, Access.READ, pointer),))
        assert not give(session, pack([(module, other)]))
        app.tell()
        assert rest_of(app)[:2] == ["add 3 0 0 0 0 0 a+0:0:b b+64:0:b", "packed 3 0 0 0 0 0 a+8:0:b b+16:0:b"]
        app.finish()


def test_a_damaged_table_is_not_taken(phosd: FakePhosd, library: Path) -> None:
    with tracing(phosd, library, "start()\nsay('ready')\n") as (app, session):
        app.line()
        pointer = Field(0, 8, Access.WRITE, FieldKind.POINTER)
        good = pack([(1, _descriptor("add", ADD, (pointer,))), (2, _descriptor("add", ADD, (pointer,)))])
        assert not give(session, good)
        assert "header" in give(session, good[:10])
        assert "size" in give(session, good + bytes(8))
        assert "not a table" in give(session, b"x" + good[1:])
        for at, value in ((16, 200), (24, 3), (24 + 16, 77), (24 + 20, 9), (24 + 28, 3), (24 + 32, 4)):
            damaged = bytearray(good)
            damaged[at] = value
            assert give(session, bytes(damaged)), f"byte {at}"
        app.finish()


def test_modules_and_kernels_are_told_of_again(phosd: FakePhosd, library: Path, tmp_path: Path) -> None:
    body = """
    start()
    first, _ = load()
    second, _ = load()
    other = ok(cu.cuModuleLoadData(PTX.replace(b"packed", b"another")))
    ok(cu.cuModuleGetFunction(other, b"another"))
    ok(cu.cuModuleUnload(first))
    library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    ok(cu.cuLibraryGetKernel(library, b"none"))
    say("ready")
    heard()
    third, _ = load()
    say("loaded")
    """
    with tracing(phosd, library, body) as (app, session):
        app.line()
        eventually(lambda: len(session.kernels) == 3)
        assert session.module_numbers == [1, 2]
        assert sorted(session.kernels) == [(1, "add"), (1, "none"), (2, "another")]
        phosd.stop()
        with FakePhosd(phosd.folder) as fresh:
            again = fresh.arrival()
            eventually(lambda: len(again.kernels) == 3)
            assert again.module_numbers == [1, 2]
            assert sorted(again.kernels) == sorted(session.kernels)
            app.tell()
            app.line()
            assert again.module_numbers == [1, 2], "the same bytes were told of twice"
            app.finish()


GRAPHS = """
start()
a, b = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
A, B = int(a), int(b)
module, add = load()
stream = ok(cu.cuStreamCreate(1))
def captured(work):
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    work()
    return ok(cu.cuStreamEndCapture(stream))
def show(graph):
    for line in spoken(touched(lambda: ok(cu.cuGraphLaunch(graph, stream))), a=A, b=B):
        say(line.replace(f"{int(stream):x}", "stream"))
def first():
    launch(add, A, B, stream=stream)
    launch(add, A, B, stream=stream)
    ok(cu.cuMemsetD8Async(B + 4096, 1, 16, stream))
    ok(cu.cuMemcpyDtoDAsync(A + 512, B + 512, 64, stream))
graph = captured(first)
exec_ = ok(cu.cuGraphInstantiate(graph, 0))
show(exec_)
count = ok(cu.cuGraphGetNodes(graph, 0))[1]
nodes = ok(cu.cuGraphGetNodes(graph, count))[0]
kernels = [n for n in nodes if ok(cu.cuGraphNodeGetType(n)) == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL]
sets = [n for n in nodes if ok(cu.cuGraphNodeGetType(n)) == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET]
p = ok(cu.cuGraphMemsetNodeGetParams(sets[0]))
p.dst = A + 9000
ok(cu.cuGraphExecMemsetNodeSetParams(exec_, sets[0], p, ok(cu.cuCtxGetCurrent())))
show(exec_)
ok(cu.cuGraphExecUpdate(exec_, captured(lambda: (
    launch(add, A + 1024, B, stream=stream), launch(add, A, B, stream=stream),
    ok(cu.cuMemsetD8Async(B, 1, 16, stream)), ok(cu.cuMemcpyDtoDAsync(A + 512, B + 512, 64, stream))))))
show(exec_)
inner = captured(lambda: launch(add, A + 2048, B + 2048, stream=stream))
outer = ok(cu.cuGraphCreate(0))
child = ok(cu.cuGraphAddChildGraphNode(outer, [], 0, inner))
nested = ok(cu.cuGraphInstantiate(outer, 0))
show(nested)
again = ok(cu.cuGraphInstantiate(graph, 0))
ok(cu.cuGraphNodeSetEnabled(again, sets[0], 0))
for kernel in kernels:
    k = ok(cu.cuGraphKernelNodeGetParams(kernel))
    k.kernelParams = ((A + 8192, B, 1), (u64, u64, u32))
    ok(cu.cuGraphExecKernelNodeSetParams(again, kernel, k))
show(again)
ok(cu.cuGraphExecDestroy(again))
empty = ok(cu.cuGraphInstantiate(ok(cu.cuGraphCreate(0)), 0))
show(empty)
say("end")
heard()
show(exec_)
say("end")
"""


def test_graphs(phosd: FakePhosd, library: Path) -> None:
    with tracing(phosd, library, GRAPHS) as (app, session):
        to, source = "a+512:64:w", "b+512:64:r"
        assert rest_of(app) == [
            f"cuGraphLaunch 255 stream 0 0 0 0 a+0:0:b {to} b+0:0:b b+4096:16:w {source}",
            f"cuGraphLaunch 255 stream 0 0 0 0 a+0:0:b {to} a+9000:16:w b+0:0:b {source}",
            f"cuGraphLaunch 255 stream 0 0 0 0 a+0:0:b a+1024:0:b {to} b+0:0:b b+0:16:w {source}",
            "cuGraphLaunch 255 stream 0 0 0 0 a+2048:0:b b+2048:0:b",
            f"cuGraphLaunch 255 stream 0 0 0 0 {to} a+8192:0:b b+0:0:b {source}",
            "cuGraphLaunch 255 stream 1 0 0 0",
        ]
        pointer = FieldKind.POINTER
        add = _descriptor("add", ADD, (Field(0, 8, Access.WRITE, pointer), Field(8, 8, Access.READ, pointer)))
        eventually(lambda: bool(session.kernels))
        assert not give(session, pack([(session.module_numbers[0], add)]))
        app.tell()
        assert rest_of(app) == [
            f"cuGraphLaunch 255 stream 0 0 0 0 a+0:0:w a+1024:0:w {to} b+0:0:r b+0:16:w {source}",
        ]
        app.finish()


FORMER_FORMS = """
start()
a, b = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
A, B = int(a), int(b)
module, add = load()
stream = ok(cu.cuStreamCreate(1))
driver = ctypes.CDLL("libcuda.so.1")

class Kernel(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v1
    _fields_ = [("func", ctypes.c_void_p), ("sizes", ctypes.c_uint * 7), ("kernelParams", ctypes.c_void_p),
                ("extra", ctypes.c_void_p)]

def packed(*pointers):
    values = (u64 * 3)(*pointers, 1)
    size = ctypes.c_size_t(20)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(values), 2, ctypes.addressof(size), 0)
    made = Kernel(int(add), (ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, 0), None, ctypes.addressof(extra))
    made.kept = values, size, extra
    return made

graph = ok(cu.cuGraphCreate(0))
node = ctypes.c_void_p()
assert not driver.cuGraphAddKernelNode(
    ctypes.byref(node), ctypes.c_void_p(int(graph)), None, ctypes.c_size_t(0), ctypes.byref(packed(A, B)))
run_it = ok(cu.cuGraphInstantiate(graph, 0))
def show():
    for line in spoken(touched(lambda: ok(cu.cuGraphLaunch(run_it, stream))), a=A, b=B):
        say(line.replace(f"{int(stream):x}", "stream"))
show()
assert not driver.cuGraphExecKernelNodeSetParams(
    ctypes.c_void_p(int(run_it)), node, ctypes.byref(packed(A + 4096, B + 8192)))
show()
former = Kernel()
assert not driver.cuGraphKernelNodeGetParams(node, ctypes.byref(former))
assert former.func == int(add) and list(former.sizes) == [1, 1, 1, 1, 1, 1, 0]
assert not driver.cuGraphKernelNodeSetParams(node, ctypes.byref(packed(A + 512, B)))
run_it = ok(cu.cuGraphInstantiate(graph, 0))
show()
say("end")
"""


def test_kernels_in_graphs_by_names_of_former_forms_and_with_packed_arguments(phosd: FakePhosd, library: Path) -> None:
    """As of programs that look the driver's symbols up by name, without cuGetProcAddress."""
    with tracing(phosd, library, FORMER_FORMS) as (app, _):
        assert rest_of(app) == [
            "cuGraphLaunch 255 stream 0 0 0 0 a+0:0:b b+0:0:b",
            "cuGraphLaunch 255 stream 0 0 0 0 a+4096:0:b b+8192:0:b",
            "cuGraphLaunch 255 stream 0 0 0 0 a+512:0:b b+0:0:b",
        ]
        app.finish()


KERNELS_OF_LIBRARIES = """
start()
a, b = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
A, B = int(a), int(b)
load_library = lambda text: ok(cu.cuLibraryLoadData(text, [], [], 0, [], [], 0))
libraries = [load_library(PTX.replace(b"none", other)) for other in (b"first", b"second")]
first, second = [ok(cu.cuLibraryGetKernel(each, b"add")) for each in libraries]
stream = ok(cu.cuStreamCreate(1))
def captured(kernel):
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    launch(cu.CUfunction(int(kernel)), A, B, stream=stream)
    return ok(cu.cuStreamEndCapture(stream))
def added(kernel):
    graph = ok(cu.cuGraphCreate(0))
    p = cu.CUDA_KERNEL_NODE_PARAMS()
    p.kern, p.ctx, p.kernelParams = kernel, ok(cu.cuCtxGetCurrent()), ((A, B, 1), (u64, u64, u32))
    p.gridDimX = p.gridDimY = p.gridDimZ = p.blockDimX = p.blockDimY = p.blockDimZ = 1
    ok(cu.cuGraphAddKernelNode(graph, [], 0, p))
    return graph
graphs = [ok(cu.cuGraphInstantiate(graph, 0)) for graph in (captured(first), added(first), captured(second))]
other = ok(cu.cuCtxCreate(None, 0, 0))
graphs.append(ok(cu.cuGraphInstantiate(added(first), 0)))
theirs = ok(cu.cuStreamCreate(1))
for call in (lambda: cu.cuGraphExecDestroy(graphs[0]), lambda: cu.cuLibraryUnload(libraries[0])):  # as if never asked
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    assert int(call()[0]) == 900 and int(cu.cuStreamEndCapture(stream)[0]) == 901
say("ready")
heard()
for graph, where in zip(graphs, (stream, stream, stream, theirs)):
    say(spoken(touched(lambda: ok(cu.cuGraphLaunch(graph, where))), a=A, b=B)[0].split(" ", 3)[3])
say("end")
"""


def test_a_kernel_of_a_library_is_known_in_a_graph(phosd: FakePhosd, library: Path) -> None:
    """The driver names such a node's kernel by a function that nobody was given; in each context by another."""
    with tracing(phosd, library, KERNELS_OF_LIBRARIES) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: sorted(session.kernels) == [(1, "add"), (2, "add")])
        pointer = FieldKind.POINTER
        add = _descriptor("add", ADD, (Field(0, 8, Access.WRITE, pointer), Field(8, 8, Access.READ, pointer)))
        assert not give(session, pack([(1, add)]))
        app.tell()
        known, unknown = "0 0 0 0 a+0:0:w b+0:0:r", "0 0 0 0 a+0:0:b b+0:0:b"
        assert rest_of(app) == [known, known, unknown, known]
        app.finish()


IN_CALLS = """
start()
a, b = ok(cu.cuMemAlloc(1 << 20)), ok(cu.cuMemAlloc(1 << 20))
A, B = int(a), int(b)
blas = ctypes.CDLL(BLAS)
module, add = load()
stream = ok(cu.cuStreamCreate(1))
@ctypes.CFUNCTYPE(None)
def calls():
    # What a library does the first time: it asks for its kernel, and launches it.
    global own
    own = ok(cu.cuModuleGetFunction(module, b"packed"))
    queue(own, 0)
def queue(kernel, stream):
    class Both(ctypes.Structure):
        _fields_ = [("number", u64), ("to", u64), ("from_", u64)]
    argument, n = Both(0, A + 8, 0), u32(1)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(argument), ctypes.addressof(n))
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(pointers), 0))
blas.fake_callback(calls)
p = ctypes.c_void_p
def axpy():
    assert blas.cublasSaxpy_v2(1, 16, p(7), p(B), 1, p(A), 1) == 1300
axpy()
def captured(work):
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    work()
    return ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
theirs, ours = captured(lambda: queue(own, stream)), captured(lambda: launch(add, a, b, stream=stream))
say("ready")
heard()
for call in (axpy, lambda: queue(own, 0), lambda: ok(cu.cuGraphLaunch(theirs, 0)),
             lambda: launch(add, a, b), lambda: ok(cu.cuGraphLaunch(ours, 0))):
    say(spoken(touched(call), a=A, b=B)[0])
say("end")
"""


@pytest.mark.parametrize("guessed", [False, True])
def test_kernels_that_seem_to_write_anywhere(phosd: FakePhosd, library: Path, tmp_path: Path, guessed: bool) -> None:
    """One of cuBLAS writes what its call documents, in a graph through its arguments. Any other one writes anywhere."""
    path = Workshop(tmp_path).cublas(13)
    with tracing(phosd, library, IN_CALLS.replace("BLAS", repr(str(path)), 1)) as (app, session):
        assert app.line() == "ready"
        eventually(lambda: {name for _, name in session.kernels} == {"add", "packed"})
        module, pointer = session.module_numbers[0], FieldKind.POINTER
        indirect = Access.NONE if guessed else Access.READ | Access.WRITE
        rows = [
            (
                module,
                AccessDescriptor(
                    name, parameters, (Field(8, 8, Access.WRITE, pointer),), indirect, Source.SASS, guessed
                ),
            )
            for name, parameters in (("add", ADD), ("packed", PACKED))
        ]
        assert not give(session, pack(rows))
        app.tell()
        reads, anything = (0, 0) if guessed else (1, 3)
        assert rest_of(app) == [
            "packed 1 0 0 0 0 0 a+0:64:b a+0:64:w b+0:64:r",
            f"packed 1 0 0 {reads} 0 0 a+8:0:w",
            f"cuGraphLaunch 255 0 0 {reads} 0 0 a+8:0:w",
            f"add 1 0 0 {anything} 0 0 b+0:0:w",
            f"cuGraphLaunch 255 0 0 {anything} 0 0 b+0:0:w",
        ]
        app.finish()


COMMUNICATES = """
start()
module = ok(cu.cuModuleLoadData(PTX.replace(b"none()", b"_Z20ncclDevKernel_Reducev()")))
kernel = ok(cu.cuModuleGetFunction(module, b"_Z20ncclDevKernel_Reducev"))
ok(cu.cuMemAlloc(20 << 20))
exported = ok(cu.cuMemAlloc(20 << 20))
properties = cu.CUmemAllocationProp()
properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
made = ok(cu.cuMemAddressReserve(4 << 20, 0, 0, 0))
for at in (0, 2 << 20):
    ok(cu.cuMemMap(int(made) + at, 2 << 20, 0, ok(cu.cuMemCreate(2 << 20, properties, 0)), 0))
stream = ok(cu.cuStreamCreate(1))
def show(call):
    for line in spoken(touched(call), made=int(made), exported=int(exported)):
        say(line.replace(f"{int(stream):x}", "stream"))
def launch(stream=0):
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
show(launch)
ok(cu.cuIpcGetMemHandle(exported))
show(launch)
report = ctypes.CDLL(None)["_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"]
report.argtypes = [u64, ctypes.c_int64, u64, u64, ctypes.c_uint16]
for pointer in (int(made) + (3 << 20), int(exported)):
    report(pointer, 512, 0, 0, 1)  # what PyTorch has handed out there
show(launch)
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
launch(stream)
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
ok(cu.cuMemUnmap(made, 2 << 20))
show(lambda: ok(cu.cuGraphLaunch(graph, stream)))
say("end")
"""


def test_a_kernel_of_nccl_touches_what_processes_share(phosd: FakePhosd, library: Path) -> None:
    """Its arguments name none of it. What it is changes while a graph stays the same.

    A segment of PyTorch's is none of it, but in a graph, of which nobody says what was handed out when it was made.
    """
    with tracing(phosd, library, COMMUNICATES) as (app, _):
        name, half = "_Z20ncclDevKernel_Reducev", 2 << 20
        assert rest_of(app) == [
            f"{name} 3 0 0 0 0 0 made+0:{2 * half}:b",
            f"{name} 3 0 0 0 0 0 exported+0:{10 * half}:b made+0:{2 * half}:b",
            f"{name} 3 0 0 0 0 0 exported+0:{10 * half}:b made+0:{half}:b",
            f"cuGraphLaunch 255 stream 0 0 0 0 exported+0:{10 * half}:b made+{half}:{half}:b",
        ]
        app.finish()
