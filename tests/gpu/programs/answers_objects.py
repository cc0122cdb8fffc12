"""Calls about devices, entry points, contexts, streams, copies, and pools, answered the same with the frontend."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu
from driver_calls import called, ok, other, out, tell, written

ENTRY_POINTS = Path(__file__).resolve().parents[3] / "frontend" / "cuda_api.def"
VERSIONS = (2000, 3020, 5000, 7000, 9020, 11000, 11020, 12000, 12030, 13000)


def described() -> list[str]:
    """The names that programs ask cuGetProcAddress for."""
    rows = (line.split("|") for line in ENTRY_POINTS.read_text().splitlines() if line and line[0] not in "#@")
    return sorted({row[1].strip() for row in rows if len(row) > 2})


for name in (*described(), "cuNoSuchThing", "cudaMalloc", ""):
    for flags in range(4):
        found = []
        for version in VERSIONS:
            function, status = ctypes.c_void_p(), ctypes.c_int(-1)
            arguments = (ctypes.c_char_p(name.encode()), ctypes.byref(function), version, flags, ctypes.byref(status))
            code = called("cuGetProcAddress_v2", *arguments)
            found.append(f"{code}/{status.value}/{int(bool(function.value))}")
        print("cuGetProcAddress", name, flags, *found)

ok(cu.cuInit(0))
for attribute in range(1, 160):
    tell("cuDeviceGetAttribute", out, attribute, 0, value=True)
context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(0))))
tell("cuDeviceTotalMem_v2", out, 0, value=True)
for wanted in (-1, 99):
    tell("cuDeviceGet", out, wanted)
    tell("cuDeviceTotalMem_v2", out, wanted)
    tell("cuDevicePrimaryCtxRetain", out, wanted)
tell("cuDevicePrimaryCtxGetState", 0, out, other, value=True)
for name in ("cuCtxGetDevice", "cuCtxPopCurrent_v2", "cuCtxGetCurrent", "cuCtxGetFlags"):
    tell(name, out)
tell("cuCtxSynchronize")
ok(cu.cuCtxSetCurrent(context))

for limit in range(8):
    tell("cuCtxGetLimit", out, limit, value=True)
    tell("cuCtxSetLimit", limit, 1 << 20)
    tell("cuCtxGetLimit", out, limit, value=True)
tell("cuCtxSetLimit", 0, 1024)
for name in ("cuCtxGetFlags", "cuCtxGetCacheConfig", "cuCtxGetSharedMemConfig", "cuCtxGetDevice"):
    tell(name, out, value=True)
for flags in (1, 2, 4, 3, 8, 16, 0x80, 0):
    tell("cuCtxSetFlags", flags)
    tell("cuCtxGetFlags", out, value=True)
tell("cuCtxGetApiVersion", int(context), out, value=True)
tell("cuCtxGetStreamPriorityRange", out, other, value=True)
tell("cuCtxGetStreamPriorityRange", other, out, value=True)
second = int(ok(cu.cuCtxCreate(None, 0, 0)))
tell("cuCtxGetApiVersion", second, out, value=True)
tell("cuCtxPopCurrent_v2", out)
tell("cuCtxGetLimit", out, 0, value=True)
tell("cuCtxDestroy_v2", second)
tell("cuCtxEnablePeerAccess", int(context), 0)
tell("cuCtxDisablePeerAccess", int(context))
tell("cuDeviceCanAccessPeer", out, 0, 0, value=True)
tell("cuDeviceCanAccessPeer", out, 0, 1)

for flags in (0, 1, 2, 3):
    tell("cuStreamCreate", out, flags)
    tell("cuEventCreate", out, flags)
stream = int(ok(cu.cuStreamCreate(1)))
low = int(ok(cu.cuStreamCreateWithPriority(0, -2)))
for which in (stream, low, 0, 1, 2):
    tell("cuStreamGetFlags", which, out, value=True)
    tell("cuStreamGetPriority", which, out, value=True)
    tell("cuStreamIsCapturing", which, out, value=True)
    tell("cuStreamGetCaptureInfo_v2", which, out, None, None, None, None, value=True)
    tell("cuStreamEndCapture", which, out)
    tell("cuStreamQuery", which)
    tell("cuStreamGetDevice", which, out, value=True)
    for attribute in range(1, 8):
        tell("cuStreamGetAttribute", which, attribute, out, value=True)
timed, untimed = (int(ok(cu.cuEventCreate(flags))) for flags in (0, 2))
tell("cuEventQuery", timed)
tell("cuEventSynchronize", timed)
tell("cuEventElapsedTime_v2", out, timed, timed)
tell("cuEventRecord", timed, stream)
tell("cuEventRecord", untimed, stream)
tell("cuEventSynchronize", untimed)
for pair in ((timed, timed), (timed, untimed), (untimed, untimed)):
    tell("cuEventElapsedTime_v2", out, *pair)
tell("cuIpcGetEventHandle", out, timed)
tell("cuEventRecordWithFlags", timed, stream, 7)
tell("cuStreamWaitEvent", stream, timed, 7)

p, host = int(ok(cu.cuMemAlloc(1 << 20))), int(ok(cu.cuMemHostAlloc(1 << 16, 0)))
q = int(ok(cu.cuMemAllocAsync(5000, stream)))
ok(cu.cuStreamSynchronize(stream))
copies = [(0, p, 16), (p, 0, 16), (0, 0, 16), (p, p, 0), (0, 0, 0), (p, p + 8, 64), (p, host, 64), (host, p, 64)]
for to, source, size in copies:
    for name in ("cuMemcpy", "cuMemcpyDtoD_v2", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"):
        if (to and source) or "to" not in name:
            tell(name, to, source, size)
    tell("cuMemcpyAsync", to, source, size, stream)
    tell("cuMemcpyDtoDAsync_v2", to, source, size, stream)
for where, size in ((0, 16), (p, 0), (p + 1, 4), (p + 2, 4), (host, 16), (q, 16), (0, 0)):
    for width in (8, 16, 32):
        tell(f"cuMemsetD{width}_v2", where, 1, size)
        tell(f"cuMemsetD{width}Async", where, 1, size, stream)
for pitch, width, height in ((100, 50, 4), (50, 100, 4), (0, 1, 1), (100, 0, 4), (100, 50, 0)):
    tell("cuMemsetD2D8_v2", p, pitch, 1, width, height)
    tell("cuMemsetD2D32_v2", p, pitch, 1, width, height)


def copy_2d(**fields: Any) -> None:
    """A copy between rows of device memory, but for what is named."""
    copy = cu.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice, copy.srcPitch, copy.dstPitch = p, p + 4096, 256, 256
    copy.WidthInBytes, copy.Height = 128, 4
    for field, value in fields.items():
        setattr(copy, field, value)
    print(fields, end=" ")
    tell("cuMemcpy2DAsync_v2", ctypes.c_void_p(copy.getPtr()), stream)


# Of rows that end behind the pitch a driver tells only in cuMemAlloc memory, which ours is none of.
for wrong in ("WidthInBytes=512", "Height=0", "srcPitch=0", "srcPitch=64", "srcDevice=0"):
    field, value = wrong.split("=")
    copy_2d(**{field: int(value)})
copy_2d()

properties = cu.CUmemPoolProps()
properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
tell("cuMemPoolCreate", out, ctypes.c_void_p(properties.getPtr()))
pool = int(ok(cu.cuMemPoolCreate(properties)))
default = int(ok(cu.cuDeviceGetDefaultMemPool(0)))
USED, USED_HIGH = 7, 8  # what is reserved is an allocator's business
for which in (pool, default):
    for attribute in (1, 2, 3, 4, USED, USED_HIGH, 99):
        tell("cuMemPoolGetAttribute", which, attribute, out, value=True)
    for attribute in (1, 2, 3, 4, 5, 6, USED, USED_HIGH, 99):
        for new in (0, 1, 12345):
            tell("cuMemPoolSetAttribute", which, attribute, ctypes.byref(ctypes.c_uint64(new)))
            tell("cuMemPoolGetAttribute", which, attribute, out, value=attribute not in (5, 6))
    for size in (1, 511, 512, 513, 5000, 1 << 20, (1 << 20) + 1, 33 << 20):
        taken = int(ok(cu.cuMemAllocFromPoolAsync(size, which, stream)))
        for attribute in (USED, USED_HIGH):
            tell("cuMemPoolGetAttribute", which, attribute, out, value=True)
        ctypes.memset(host, 0, 4)
        ok(cu.cuStreamWaitValue32(stream, host, 1, 0))
        tell("cuMemFreeAsync", taken, stream)
        tell("cuMemPoolGetAttribute", which, USED, out, value=True)
        ctypes.memset(host, 1, 1)
        ok(cu.cuStreamSynchronize(stream))
        for attribute in (USED, USED_HIGH):
            tell("cuMemPoolGetAttribute", which, attribute, out, value=True)
    tell("cuMemPoolTrimTo", which, 0)
    tell("cuMemAllocFromPoolAsync", out, 0, which, stream)
    tell("cuMemAllocFromPoolAsync", out, 1 << 50, which, stream)
    tell("cuMemPoolExportToShareableHandle", out, which, 1, 0)
    tell("cuMemPoolGetAccess", out, which, ctypes.c_void_p(properties.getPtr() + 8), value=True)
tell("cuDeviceGetMemPool", out, 0)
tell("cuDeviceSetMemPool", 0, pool)
tell("cuDeviceSetMemPool", 99, pool)
tell("cuDeviceSetMemPool", 0, 0)
tell("cuMemPoolDestroy", default)
tell("cuMemPoolDestroy", pool)
ok(cu.cuStreamSynchronize(stream))

for memory in (p, p + 100, host, 0, 4096):
    tell("cuIpcGetMemHandle", out, memory)
tell("cuIpcGetMemHandle", out, q)
tell("cuIpcCloseMemHandle", p)
tell("cuIpcCloseMemHandle", 0)
for memory in (p, p + 1, host, 0):
    for kind in (1, 2):
        ctypes.memset(out._obj, 0xFF, 4)
        tell("cuMemGetHandleForAddressRange", out, memory, 1 << 20, kind, 0)
        if (descriptor := ctypes.c_int(written()).value) >= 0:
            os.close(descriptor)  # CRIU saves none of a dmabuf

unit = 2 << 20
memory_properties = cu.CUmemAllocationProp()
memory_properties.type = properties.allocType
memory_properties.location.type = properties.location.type
for option in (0, 1, 2):
    tell("cuMemGetAllocationGranularity", out, ctypes.c_void_p(memory_properties.getPtr()), option, value=True)
handle = int(ok(cu.cuMemCreate(unit, memory_properties, 0)))
tell("cuMemGetAllocationPropertiesFromHandle", out, handle, value=True)
tell("cuMemExportToShareableHandle", out, handle, 1, 0)
tell("cuMemExportToShareableHandle", out, handle, 8, 0)
tell("cuMemImportFromShareableHandle", out, -1, 1)
tell("cuModuleLoadData", out, ctypes.c_char_p(b"no module"))
tell("cuLibraryLoadData", out, ctypes.c_char_p(b"no module"), None, None, 0, None, None, 0)
graph = int(ok(cu.cuGraphCreate(0)))
tell("cuGraphInstantiateWithFlags", out, graph, 0)
tell("cuGraphGetNodes", graph, None, out, value=True)
tell("cuGraphCreate", out, 1)
for value in (1, 0):
    tell("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(value)))
tell("cuMemFreeAsync", q, stream)
tell("cuStreamSynchronize", stream)


def look_at(memory: int) -> None:
    """Whether there is memory, and how much of its pool is in use."""
    for attribute in (2, 9, 14, 17):
        tell("cuPointerGetAttribute", out, attribute, memory)
    tell("cuMemPoolGetAttribute", default, USED, out, value=True)


# What outlives its context, of the ways in which one ends.
for way in ("cuCtxDestroy_v2", "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxRelease_v2"):
    own = way == "cuCtxDestroy_v2"
    ending = int(ok(cu.cuCtxCreate(None, 0, 0))) if own else int(ok(cu.cuDevicePrimaryCtxRetain(0)))
    ok(cu.cuCtxSetCurrent(ending))
    plain, pooled, freed = (
        int(ok(cu.cuMemAlloc(5000))),
        int(ok(cu.cuMemAllocAsync(6000, 2))),
        int(ok(cu.cuMemAlloc(700))),
    )
    pinned = int(ok(cu.cuMemHostAlloc(4096, 0)))
    pooled_too = int(ok(cu.cuMemAllocAsync(8000, 2)))
    tell("cuMemFreeAsync", freed, 2)
    tell("cuMemFreeAsync", pooled_too, 2)
    ok(cu.cuCtxSynchronize())
    if way == "cuDevicePrimaryCtxRelease_v2":
        while called(way, 0) == 0:
            pass
    else:
        tell(way, ending if own else 0)
    tell("cuCtxGetCurrent", out, value=False)
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    for memory in (plain, pooled, pooled_too, pinned):
        look_at(memory)
    tell("cuMemHostGetFlags", out, pinned)
    tell("cuMemFree_v2", plain)
    tell("cuMemFreeAsync", pooled, 2)
    tell("cuCtxSynchronize")
    look_at(pooled)
