"""Two processes that share memory by the driver alone.

The owner makes memory and hands it over, by a socket BASE.socket; the guest opens it. Both read it at each ITERATION,
and say so when it READS another value: the owner writes the one in a file BASE.value. Once there is a file
BASE.freed-when the guest lets the memory go, the owner frees it, and both say FREED and go on with memory of their own,
until there is BASE.over, when they say how often they read what nobody had written.

How: `ipc`, `pool`, `pool-only` (the guest imports the pool and nothing in it), or `event` (both record an event and
wait for it, and each has memory of its own).
"""

import argparse
import array
import ctypes
import os
import socket
import time
from pathlib import Path

from cuda.bindings import driver as cuda

SIZE, VALUE = 2 << 20, 7
INTERPROCESS = 4 | 2  # CU_EVENT_INTERPROCESS, CU_EVENT_DISABLE_TIMING
HANDLE = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def read(address):
    word = ctypes.c_uint32()
    check(cuda.cuMemcpyDtoH(ctypes.addressof(word), address, 4))
    return word.value


def filled(address, value=VALUE):
    check(cuda.cuMemsetD32(address, value, SIZE // 4))
    check(cuda.cuCtxSynchronize())
    return address


def own():
    """Return memory of this process alone, and what frees it."""
    address = check(cuda.cuMemAlloc(SIZE))
    return filled(address), lambda: check(cuda.cuMemFree(address))


def use(event):
    check(cuda.cuEventRecord(event, 0))
    check(cuda.cuStreamWaitEvent(0, event, 0))
    check(cuda.cuEventSynchronize(event))


def owned(how, base):
    """Return memory that a guest has opened, what frees it, and the event."""
    event = None
    if how == "event":
        event = check(cuda.cuEventCreate(INTERPROCESS))
        use(event)
        address, free = own()
        descriptors, data = [], bytes(check(cuda.cuIpcGetEventHandle(event)).reserved)
    elif how == "ipc":
        address, free = own()
        descriptors, data = [], bytes(check(cuda.cuIpcGetMemHandle(address)).reserved)
    else:
        properties = cuda.CUmemPoolProps()
        properties.allocType = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.handleTypes = HANDLE
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        pool = check(cuda.cuMemPoolCreate(properties))
        address = filled(check(cuda.cuMemAllocFromPoolAsync(SIZE, pool, 0)))
        descriptors = [check(cuda.cuMemPoolExportToShareableHandle(pool, HANDLE, 0))]
        data = bytes(check(cuda.cuMemPoolExportPointer(address)).reserved)

        def free():
            check(cuda.cuMemFreeAsync(address, 0))
            check(cuda.cuStreamSynchronize(0))
            check(cuda.cuMemPoolDestroy(pool))

    path = f"{base}.socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        peer, _ = server.accept()
        with peer:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            peer.sendmsg([data], rights)
    for descriptor in descriptors:
        os.close(descriptor)
    Path(path).unlink()
    return address, free, event


def opened(how, base):
    """Return memory of the owner's, what lets it go, and the event."""
    with socket.socket(socket.AF_UNIX) as peer:
        while peer.connect_ex(f"{base}.socket"):
            time.sleep(0.01)
        data, descriptors, _, _ = socket.recv_fds(peer, 64, 1)
    if how == "event":
        handle = cuda.CUipcEventHandle()
        handle.reserved = data
        return *own(), check(cuda.cuIpcOpenEventHandle(handle))
    if how == "ipc":
        handle = cuda.CUipcMemHandle()
        handle.reserved = data
        address = check(cuda.cuIpcOpenMemHandle(handle, 1))
        return address, lambda: check(cuda.cuIpcCloseMemHandle(address)), None
    pool = check(cuda.cuMemPoolImportFromShareableHandle(descriptors[0], HANDLE, 0))
    os.close(descriptors[0])
    if how == "pool-only":
        address, free_own = own()
        return address, lambda: (free_own(), check(cuda.cuMemPoolDestroy(pool))), None
    pointer = cuda.CUmemPoolPtrExportData()
    pointer.reserved = data
    address = check(cuda.cuMemPoolImportPointer(pool, pointer))

    def free():
        check(cuda.cuMemFreeAsync(address, 0))
        check(cuda.cuStreamSynchronize(0))
        check(cuda.cuMemPoolDestroy(pool))

    return address, free, None


def share(how, role, base, report):
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    address, free, event = (owned if role == "owner" else opened)(how, base)
    number, wrong, value = 0, 0, None
    until, released, written, over = (Path(f"{base}.{end}") for end in ("freed-when", "released", "value", "over"))
    while not over.exists():
        if free and until.exists() and (role == "guest" or released.exists()):
            free()
            released.touch()
            print("FREED", file=report)
            address, free = own()[0], None
        if role == "owner" and written.exists():
            filled(address, int(written.read_text()))
        if event is not None:
            use(event)
        if value != (now := read(address)):
            value = now
            print(f"READS {value}", file=report)
        number += 1
        wrong += value != VALUE and not written.exists()
        print(f"ITERATION {number}", file=report)
        time.sleep(0.01)
    print(f"RESULT {wrong}", file=report)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=["ipc", "pool", "pool-only", "event"])
    parser.add_argument("role", choices=["owner", "guest"])
    parser.add_argument("base")
    parser.add_argument("--report", type=Path, default=Path("/dev/stdout"), help="where lines go (%(default)s)")
    chosen = parser.parse_args()
    with chosen.report.open("a", buffering=1) as report:
        share(chosen.how, chosen.role, chosen.base, report)


main()
