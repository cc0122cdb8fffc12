"""What the driver allows while a stream is being captured, and what becomes of the capture: the same with the frontend.

In each mode of capturing each call is made, once by the thread that captures and once by another.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from cuda.bindings import driver as cu
from driver_calls import called, ok, other, out, written

MIB = 1 << 20
ok(cu.cuInit(0))
context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(0))))
ok(cu.cuCtxSetCurrent(context))
unit = 2 * MIB
properties = cu.CUmemAllocationProp()
properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
pool_properties = cu.CUmemPoolProps()
pool_properties.allocType = properties.type
pool_properties.location.type = properties.location.type
access = cu.CUmemAccessDesc()
access.location.type = properties.location.type
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

# A software GPU may not know it.
PTX = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n"
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


def address(structure: Any) -> ctypes.c_void_p:
    """Of one of cuda-python's structures."""
    return ctypes.c_void_p(structure.getPtr())


class Things:
    """What calls are made with: new each time, because a call may use it up. Most goes with the context."""

    kept: ClassVar[list[Things]] = []  # registered memory is given to nobody else

    def __init__(self) -> None:
        self.captured, self.idle, self.spare = (int(ok(cu.cuStreamCreate(1))) for _ in range(3))
        self.blocking = int(ok(cu.cuStreamCreate(0)))
        self.event, self.recorded = (int(ok(cu.cuEventCreate(0))) for _ in range(2))
        ok(cu.cuEventRecord(self.recorded, self.idle))
        self.p, self.p2, self.q = (int(ok(cu.cuMemAlloc(size))) for size in (MIB, 4096, 100))
        self.stream_memory = int(ok(cu.cuMemAllocAsync(4096, self.idle)))
        self.host = int(ok(cu.cuMemHostAlloc(4096, 0)))
        self.plain = ctypes.create_string_buffer(3 * 4096)
        self.own = (ctypes.addressof(self.plain) + 4095) & ~4095
        self.unregistered = ctypes.create_string_buffer(3 * 4096)
        ok(cu.cuMemHostRegister(self.own, 4096, 0))
        self.handle = int(ok(cu.cuMemCreate(unit, properties, 0)))
        self.at = int(ok(cu.cuMemAddressReserve(2 * unit, 0, 0, 0)))
        ok(cu.cuMemMap(self.at, unit, 0, self.handle, 0))
        ok(cu.cuMemSetAccess(self.at, unit, [access], 1))
        self.pool = int(ok(cu.cuMemPoolCreate(pool_properties)))
        self.default_pool = int(ok(cu.cuDeviceGetDefaultMemPool(0)))
        loaded = cu.cuModuleLoadData(PTX)
        self.module = int(loaded[1]) if not int(loaded[0]) else 0
        loaded = cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0)
        self.library = int(loaded[1]) if not int(loaded[0]) else 0
        self.array_shape = cu.CUDA_ARRAY_DESCRIPTOR()
        self.array_shape.Width, self.array_shape.Height, self.array_shape.NumChannels = 64, 4, 1
        self.array_shape.Format = cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8
        made = cu.cuArrayCreate(self.array_shape)
        self.array = int(made[1]) if not int(made[0]) else 0
        self.graph = int(ok(cu.cuGraphCreate(0)))
        self.executable = int(ok(cu.cuGraphInstantiate(self.graph, 0)))
        ok(cu.cuCtxSynchronize())
        self.kept.append(self)

    def own_context(self) -> int:
        """Another context, which is not current."""
        made = int(ok(cu.cuCtxCreate(None, 0, 0)))
        ok(cu.cuCtxPopCurrent())
        return made

    def release(self, used: set[int]) -> None:
        """Let go of what would stay, or of which there may only be some hundreds; not of what a call has used up."""
        if self.stream_memory not in used:
            called("cuMemFreeAsync", self.stream_memory, self.idle)
        if self.pool not in used:
            called("cuMemPoolDestroy", self.pool)
        for stream in {self.captured, self.idle, self.blocking, self.spare} - used:
            called("cuStreamDestroy_v2", stream)
        for where in {self.at, self.at + unit}:
            called("cuMemUnmap", where, unit)
        called("cuMemAddressFree", self.at, 2 * unit)
        if self.handle not in used:
            called("cuMemRelease", self.handle)


CALLS: list[tuple[str, Callable[[Things], tuple[Any, ...]]]] = [
    (name, arguments)
    for name, *all_arguments in (
        ("cuMemAlloc_v2", lambda t: (out, 16), lambda t: (out, MIB)),
        ("cuMemAllocPitch_v2", lambda t: (out, other, 100, 4, 4)),
        ("cuMemFree_v2", lambda t: (t.p,), lambda t: (t.q,), lambda t: (0,), lambda t: (t.stream_memory,)),
        ("cuMemGetInfo_v2", lambda t: (out, other)),
        ("cuMemHostAlloc", lambda t: (out, 4096, 0)),
        ("cuMemAllocHost_v2", lambda t: (out, 4096)),
        ("cuMemFreeHost", lambda t: (t.host,)),
        ("cuMemHostRegister_v2", lambda t: ((ctypes.addressof(t.unregistered) + 4095) & ~4095, 4096, 0)),
        ("cuMemHostUnregister", lambda t: (t.own,)),
        ("cuMemHostGetDevicePointer_v2", lambda t: (out, t.host, 0)),
        ("cuMemHostGetFlags", lambda t: (out, t.host)),
        ("cuMemAllocAsync", lambda t: (out, 16, t.captured), lambda t: (out, 16, t.idle), lambda t: (out, 16, 0)),
        ("cuMemAllocFromPoolAsync", lambda t: (out, 16, t.pool, t.idle)),
        ("cuMemFreeAsync", lambda t: (t.stream_memory, t.captured), lambda t: (t.stream_memory, t.idle)),
        ("cuMemFreeAsync", lambda t: (t.p, t.captured), lambda t: (t.p, t.idle)),
        ("cuMemPoolCreate", lambda t: (out, address(pool_properties))),
        ("cuMemPoolTrimTo", lambda t: (t.pool, 0)),
        ("cuMemPoolDestroy", lambda t: (t.pool,)),
        ("cuMemPoolGetAttribute", lambda t: (t.pool, 7, out), lambda t: (t.pool, 4, out)),
        ("cuMemPoolSetAttribute", lambda t: (t.pool, 4, ctypes.byref(ctypes.c_uint64(0)))),
        ("cuMemPoolSetAccess", lambda t: (t.pool, address(access), 1)),
        ("cuMemPoolGetAccess", lambda t: (out, t.pool, address(access))),
        ("cuMemPoolExportToShareableHandle", lambda t: (out, t.pool, 1, 0)),
        ("cuDeviceGetMemPool", lambda t: (out, 0)),
        ("cuDeviceSetMemPool", lambda t: (0, t.default_pool)),
        ("cuMemcpyDtoH_v2", lambda t: (t.host, t.p, 16), lambda t: (t.host, t.p, 4096)),
        ("cuMemcpyHtoD_v2", lambda t: (t.p, t.host, 16)),
        ("cuMemcpyDtoD_v2", lambda t: (t.p, t.p2, 16)),
        ("cuMemcpyDtoHAsync_v2", lambda t: (t.host, t.p, 16, t.captured), lambda t: (t.host, t.p, 16, t.idle)),
        ("cuMemcpyDtoDAsync_v2", lambda t: (t.p, t.p2, 16, t.captured), lambda t: (t.p, t.p2, 16, 0)),
        ("cuMemcpy", lambda t: (t.p, t.p2, 16)),
        ("cuMemsetD8_v2", lambda t: (t.p, 1, 16)),
        ("cuMemsetD8Async", lambda t: (t.p, 1, 16, t.captured), lambda t: (t.p, 1, 16, t.idle)),
        ("cuMemsetD8Async", lambda t: (t.p, 1, 16, 0), lambda t: (t.p, 1, 16, t.blocking), lambda t: (t.p, 1, 16, 2)),
        ("cuStreamSynchronize", lambda t: (t.captured,), lambda t: (t.idle,), lambda t: (0,), lambda t: (t.blocking,)),
        ("cuStreamQuery", lambda t: (t.captured,), lambda t: (t.idle,), lambda t: (0,)),
        ("cuCtxSynchronize", lambda t: ()),
        ("cuStreamCreate", lambda t: (out, 1)),
        ("cuStreamDestroy_v2", lambda t: (t.spare,)),
        ("cuStreamWaitEvent", lambda t: (t.captured, t.recorded, 0), lambda t: (t.idle, t.recorded, 0)),
        ("cuStreamWriteValue32_v2", lambda t: (t.captured, t.p, 1, 0), lambda t: (t.idle, t.p, 1, 0)),
        ("cuStreamBeginCapture_v2", lambda t: (t.captured, 0), lambda t: (0, 0)),
        ("cuStreamIsCapturing", lambda t: (t.idle, out), lambda t: (0, out)),
        ("cuStreamGetCaptureInfo_v2", lambda t: (t.captured, out, other, None, None, None)),
        ("cuEventCreate", lambda t: (out, 0)),
        ("cuEventDestroy_v2", lambda t: (t.event,)),
        ("cuEventRecord", lambda t: (t.event, t.captured), lambda t: (t.event, t.idle), lambda t: (t.event, 0)),
        ("cuEventQuery", lambda t: (t.recorded,)),
        ("cuEventSynchronize", lambda t: (t.recorded,)),
        ("cuMemCreate", lambda t: (out, unit, address(properties), 0)),
        ("cuMemMap", lambda t: (t.at + unit, unit, 0, t.handle, 0)),
        ("cuMemSetAccess", lambda t: (t.at, unit, address(access), 1)),
        ("cuMemUnmap", lambda t: (t.at, unit)),
        ("cuMemRelease", lambda t: (t.handle,)),
        ("cuMemAddressReserve", lambda t: (out, unit, 0, 0, 0)),
        ("cuMemAddressFree", lambda t: (t.at + unit, unit)),
        ("cuIpcGetMemHandle", lambda t: (out, t.p)),
        ("cuPointerGetAttribute", lambda t: (out, 2, t.p)),
        ("cuPointerSetAttribute", lambda t: (ctypes.byref(ctypes.c_uint(1)), 6, t.p)),
        ("cuMemGetAddressRange_v2", lambda t: (out, other, t.p)),
        ("cuModuleLoadData", lambda t: (out, ctypes.c_char_p(b"no module"))),
        ("cuModuleLoadData", lambda t: (out, ctypes.c_char_p(PTX))),
        ("cuModuleUnload", lambda t: (t.module,)),
        ("cuLibraryUnload", lambda t: (t.library,)),
        ("cuLaunchHostFunc", lambda t: (t.captured, HOST_FUNCTION, None), lambda t: (t.idle, HOST_FUNCTION, None)),
        ("cuEventElapsedTime_v2", lambda t: (out, t.recorded, t.recorded)),
        ("cuIpcCloseMemHandle", lambda t: (t.p,)),
        ("cuArrayCreate_v2", lambda t: (out, address(t.array_shape))),
        ("cuArrayDestroy", lambda t: (t.array,)),
        ("cuGraphInstantiateWithFlags", lambda t: (out, t.graph, 0)),
        ("cuGraphLaunch", lambda t: (t.executable, t.idle), lambda t: (t.executable, t.captured)),
        ("cuGraphExecDestroy", lambda t: (t.executable,)),
        ("cuGraphDestroy", lambda t: (t.graph,)),
        ("cuMemcpyPeer", lambda t: (t.p, int(context), t.p2, int(context), 16)),
        ("cuStreamEndCapture", lambda t: (t.idle, out)),
        ("cuStreamGetAttribute", lambda t: (t.captured, 3, out), lambda t: (t.idle, 3, out)),
        ("cuCtxSetFlags", lambda t: (0,), lambda t: (1,)),
        ("cuDevicePrimaryCtxSetFlags_v2", lambda t: (0, 0)),
        ("cuDeviceGetGraphMemAttribute", lambda t: (0, 0, out)),
        ("cuDeviceGraphMemTrim", lambda t: (0,)),
        ("cuCtxGetFlags", lambda t: (out,)),
        ("cuCtxGetLimit", lambda t: (out, 0)),
        ("cuCtxSetLimit", lambda t: (0, 4096)),
        ("cuCtxResetPersistingL2Cache", lambda t: ()),
        ("cuCtxDestroy_v2", lambda t: (t.own_context(),)),
        ("cuDevicePrimaryCtxRetain", lambda t: (out, 0)),
        ("cuDeviceGetAttribute", lambda t: (out, 16, 0)),
        ("cuGraphCreate", lambda t: (out, 0)),
        ("cuThreadExchangeStreamCaptureMode", lambda t: (ctypes.byref(ctypes.c_int(2)),)),
    )
    for arguments in all_arguments
]
ENDING = {"cuMemPoolDestroy", "cuStreamDestroy_v2", "cuMemRelease", "cuMemFree_v2", "cuMemFreeAsync"}
MADE_TO_STAY = {
    "cuMemCreate": "cuMemRelease",
    "cuMemAllocAsync": "cuMemFree_v2",
    "cuMemAllocFromPoolAsync": "cuMemFree_v2",
}
MODES = ("global", "thread-local", "relaxed")


def in_another_thread(call: Callable[[], int]) -> int:
    """Make a call there."""
    answers = []

    def work() -> None:
        ok(cu.cuCtxSetCurrent(context))
        answers.append(call())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return answers[0]


for mode, mode_name in enumerate(MODES):
    for by in ("itself", "another"):
        for name, arguments in CALLS:
            t = Things()
            passed = arguments(t)
            ok(cu.cuStreamBeginCapture(t.captured, cu.CUstreamCaptureMode(mode)))

            def call(name: str = name, passed: tuple[Any, ...] = passed) -> int:
                """The call in question."""
                return called(name, *passed)

            code = call() if by == "itself" else in_another_thread(call)
            made = written(8)
            again = code if code < 900 else call() if by == "itself" else in_another_thread(call)
            called("cuStreamIsCapturing", t.captured, out)
            state = written()
            graph = ctypes.c_void_p()
            ended = called("cuStreamEndCapture", t.captured, ctypes.byref(graph))
            nodes = ctypes.c_size_t()
            if not ended:
                called("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
            streams = {t.captured: "captured", t.idle: "idle", t.blocking: "blocking"}
            shown = [streams.get(a, a if a < 4096 else ".") if isinstance(a, int) else "." for a in passed]
            print(
                mode_name, by, name, *shown, "->", code, again, "capturing", state, "end", ended, "nodes", nodes.value
            )
            # Whatever it was, nothing of it may be left over in the mode of this thread.
            called("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(0)))
            called("cuCtxSynchronize")
            if name in MADE_TO_STAY and not code and not nodes.value:
                called(MADE_TO_STAY[name], made)
            t.release(set() if code or name not in ENDING else {a for a in passed if isinstance(a, int)})
