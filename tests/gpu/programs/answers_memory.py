"""Calls about memory whose answers must be the same with the frontend as without.

What differs in earnest is left out: what was freed twice, and what is behind a buffer's end (an allocator's slack).
With an argument streams that are none are left out, what no machine has, and mapping behind what is reserved: a driver
may crash, or try.
"""

from __future__ import annotations

import ctypes
import sys

from cuda.bindings import driver as cu
from driver_calls import ok, other, out, tell

DANGEROUS = len(sys.argv) == 1

tell("cuMemAlloc_v2", out, 16)
tell("cuMemFree_v2", 0)
ok(cu.cuInit(0))
tell("cuMemAlloc_v2", out, 16)
tell("cuMemAllocAsync", out, 16, 0)
tell("cuMemHostAlloc", out, 16, 0)
tell("cuMemFreeAsync", 4096, 0)
tell("cuCtxDestroy_v2", 0)
tell("cuDevicePrimaryCtxRelease_v2", 0)
context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(0))))
ok(cu.cuCtxSetCurrent(context))
tell("cuCtxDestroy_v2", int(context))

p = int(ok(cu.cuMemAlloc(10000)))
for size in (0, ok(cu.cuMemGetInfo())[1] + 1, 1 << 63, -1):
    tell("cuMemAlloc_v2", out, size)
    tell("cuMemAllocAsync", out, size, 0)
    if DANGEROUS or not 0 < size < 1 << 63:
        tell("cuMemHostAlloc", out, size, 0)
for width, height, element in ((0, 1, 4), (1, 0, 4), (4, 4, 3), (1 << 40, 4, 4)):
    tell("cuMemAllocPitch_v2", out, other, width, height, element)
for inside in (p + 1, p + 9999):
    tell("cuMemFree_v2", inside)
    tell("cuMemFreeAsync", inside, 0)
    tell("cuMemGetAddressRange_v2", None, out, inside, value=True)

stream, dead = (int(ok(cu.cuStreamCreate(1))) for _ in range(2))
ok(cu.cuStreamDestroy(dead))
q = int(ok(cu.cuMemAllocAsync(5000, stream)))
for wrong in (dead, 12345678) if DANGEROUS else ():
    tell("cuMemAllocAsync", out, 16, wrong)
    tell("cuMemFreeAsync", q, wrong)
    tell("cuMemsetD8Async", p, 1, 10, wrong)
tell("cuMemAllocFromPoolAsync", out, 16, 0, 0)

# CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, as who lets a network card read memory sets it.
SYNC_MEMOPS = 6
one, none = ctypes.byref(ctypes.c_uint(1)), ctypes.byref(ctypes.c_uint(0))


def synchronous(pointer: int) -> None:
    """Set it, and ask for it."""
    for setting in (one, one, none, None):
        tell("cuPointerSetAttribute", setting, SYNC_MEMOPS, pointer)
        tell("cuPointerGetAttribute", out, SYNC_MEMOPS, pointer, value=True)
    tell("cuPointerSetAttribute", one, SYNC_MEMOPS + 1, pointer)


host = int(ok(cu.cuMemHostAlloc(4096, 0)))
for pointer in (p, p + 9000, q, host, 4096):
    synchronous(pointer)

for flags in range(8):
    for made, known in ((cu.cuMemHostAlloc(8192, flags), True), (cu.cuMemAllocHost(8192), False)):
        allocated = int(ok(made))
        tell("cuMemHostGetFlags", out, allocated + 8191, value=known)
        tell("cuMemHostGetFlags", None, allocated)
        tell("cuMemHostUnregister", allocated)
        tell("cuMemHostRegister_v2", allocated, 4096, 0)
        tell("cuMemFreeHost", allocated + 1)
        tell("cuMemFreeHost", allocated)
        tell("cuMemFreeHost", allocated)
        tell("cuMemHostGetFlags", out, allocated)
memory = (ctypes.c_char * (1 << 20))()
own = (ctypes.addressof(memory) + 4095) & ~4095
for flags in (0, 1, 2, 255):
    tell("cuMemHostRegister_v2", own, 65536, flags)
    tell("cuMemHostRegister_v2", own, 65536, flags)
    tell("cuMemHostGetFlags", out, own)
    tell("cuMemFreeHost", own)
    tell("cuMemHostUnregister", own + 4096)
    tell("cuMemHostUnregister", own)

unit = 2 << 20
properties = cu.CUmemAllocationProp()
properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
for size in (0, 1, unit + 1, 1 << 63):
    tell("cuMemCreate", out, size, ctypes.c_void_p(properties.getPtr()), 0)
handles = [int(ok(cu.cuMemCreate(n * unit, properties, 0))) for n in (2, 1)]
at = int(ok(cu.cuMemAddressReserve(4 * unit, 0, 0, 0)))
wrong = [(at, 4 * unit, 0), (at, 0, 0), (at + 1, unit, 0), (at, unit, 1), (0, unit, 0)]
if DANGEROUS:
    wrong.append((at + 3 * unit, 2 * unit, 0))
for where, size, offset in wrong:
    tell("cuMemMap", where, size, offset, handles[0], 0)
ok(cu.cuMemMap(at, 2 * unit, 0, handles[0], 0))
ok(cu.cuMemMap(at + 2 * unit, unit, 0, handles[1], 0))
access = cu.CUmemAccessDesc()
access.location.type = properties.location.type
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
for where, size in ((at, unit), (at, 4 * unit), (at, 0), (at + 3 * unit, unit), (at, -at), (at, 3 * unit)):
    tell("cuMemSetAccess", where, size, ctypes.c_void_p(access.getPtr()), 1)
synchronous(at + unit)

# Of memory that is not managed: what the driver says of any, and refuses.
for where in (p, q, host, at + unit):
    for attribute in range(1, 24):
        # Addresses, numbers that count, and what is behind our memory differ from process to process.
        comparable = attribute in (2, 8, 9, 10, 13, 14, 16) or (attribute == 12 and where in (p, q))
        tell("cuPointerGetAttribute", out, attribute, where, value=comparable)
    for advice in (1, 3, 5):
        tell("cuMemAdvise", where, 4096, advice, 0)
    tell("cuMemPrefetchAsync", where, 4096, 0, 0)
    tell("cuMemRangeGetAttribute", out, 4, 1, where, 4096)
    tell("cuStreamAttachMemAsync", 0, where, 0, 4)
    tell("cuMemHostGetDevicePointer_v2", out, where, 0)
tell("cuMemDiscardBatchAsync", ctypes.byref(ctypes.c_uint64(p)), ctypes.byref(ctypes.c_size_t(4096)), 1, 0, 0)
for where in (at + 5, at + 3 * unit, p, 1, 0):
    tell("cuMemRetainAllocationHandle", out, where)
for where, size in ((at, unit), (at + unit, unit), (at, 0), (at, 4 * unit), (at + 1, unit)):
    tell("cuMemUnmap", where, size)
for _ in range(2):
    tell("cuMemUnmap", at, 3 * unit)
tell("cuMemAddressFree", at, unit)
for handle in (handles[0], handles[0], handles[1]):  # the first was retained above
    tell("cuMemRelease", handle)
tell("cuMemAddressFree", at, 4 * unit)
