"""Two processes that share host memory of the driver's (cuMemCreate), as NCCL's do, and count a word of it up in turn.

The parent makes it, exports a descriptor, and starts the child, which imports that. After ITERATION 1 they go on until
there is a file argv[1].freed-when; then both let the memory go, the child says so by a file argv[1].released and the
parent, after that, by FREED; it counts by itself until it is told to end by a file argv[1].over.
"""

import ctypes
import subprocess
import sys
import time
from pathlib import Path

from cuda.bindings import driver as cuda

SIZE = 2 << 20
HANDLE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def mapped(handle):
    address = check(cuda.cuMemAddressReserve(SIZE, 0, 0, 0))
    check(cuda.cuMemMap(address, SIZE, 0, handle, 0))
    access = cuda.CUmemAccessDesc()
    access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(cuda.cuMemSetAccess(address, SIZE, [access], 1))
    return address


def read(address):
    word = ctypes.c_uint32()
    check(cuda.cuMemcpyDtoH(ctypes.addressof(word), address, 4))
    return word.value


def main():
    base, child = Path(sys.argv[1]), None
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    if len(sys.argv) == 2:
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        properties.requestedHandleTypes = HANDLE
        handle = check(cuda.cuMemCreate(SIZE, properties, 0))
        descriptor = check(cuda.cuMemExportToShareableHandle(handle, HANDLE, 0))
        word = mapped(handle)
        check(cuda.cuMemsetD32(word, 0, 1))
        check(cuda.cuCtxSynchronize())
        child = subprocess.Popen([sys.executable, __file__, sys.argv[1], str(descriptor)], pass_fds=[descriptor])
        ctypes.CDLL(None).close(descriptor)
    else:
        descriptor = int(sys.argv[2])
        handle = check(cuda.cuMemImportFromShareableHandle(descriptor, HANDLE))
        ctypes.CDLL(None).close(descriptor)
        word = mapped(handle)
    number, until = 0, Path(f"{base}.freed-when")
    while not until.exists():
        if read(word) % 2 == (child is None):
            check(cuda.cuMemsetD32(word, read(word) + 1, 1))
            number += 1
            if child:
                print(f"ITERATION {number}", flush=True)
        time.sleep(0.01)
    check(cuda.cuMemRelease(handle))
    check(cuda.cuMemUnmap(word, SIZE))
    released = Path(f"{base}.released")
    if not child:
        released.touch()
        while not Path(f"{base}.over").exists():
            time.sleep(0.01)
        return
    while not released.exists():
        time.sleep(0.01)
    print("FREED", flush=True)
    own = check(cuda.cuMemAlloc(4))
    while not Path(f"{base}.over").exists():
        number += 1
        check(cuda.cuMemsetD32(own, number, 1))
        assert read(own) == number
        print(f"ITERATION {number}", flush=True)
        time.sleep(0.01)
    print(f"RESULT {child.wait()}", flush=True)


main()
