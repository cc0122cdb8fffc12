"""Two processes that share one GPU buffer by a CUDA IPC handle, and each count it up in turn.

The parent allocates and exports, starts the child, and both add to the same word through their own mapping. Each checks
at every step that it sees what the other wrote. Prints ITERATION and RESULT lines as the examples do. With a file UNTIL
after HANDLE the parent pauses only until there is one, and does not begin its last iteration before. With "alone" for
"parent" somebody else starts the child. "keeps" opens the parent's memory and keeps it open; "leaves" frees 64 MiB as
soon as that one has it, says so by the file HANDLE.freed, and ends when there is a file HANDLE.over. "late" starts a
child that opens 64 MiB and overwrites them when there is a file HANDLE.go, and then says so by the file HANDLE.written;
when there is a file HANDLE.over, it says how many of 64 words, one a MiB, are as they were.
"""

import ctypes
import subprocess
import sys
import time
from pathlib import Path

from cuda.bindings import driver as cuda


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def read(address):
    word = ctypes.c_uint32()
    check(cuda.cuMemcpyDtoH(ctypes.addressof(word), address, 4))
    return word.value


def write(address, value):
    check(cuda.cuMemsetD32(address, value, 1))


def wait_for(address, value):
    while read(address) != value:
        time.sleep(0.002)


def outlive(owner, handle_file):
    opened, freed = handle_file.with_suffix(".opened"), handle_file.with_suffix(".freed")
    if owner:
        base = int(check(cuda.cuMemAlloc(64 << 20)))
        handle_file.write_bytes(bytes(check(cuda.cuIpcGetMemHandle(base)).reserved))
        while not opened.exists():
            time.sleep(0.01)
        check(cuda.cuMemFree(base))
        freed.touch()
        while not handle_file.with_suffix(".over").exists():
            time.sleep(0.01)
        print("RESULT 0", flush=True)
        return
    handle = cuda.CUipcMemHandle()
    handle.reserved = handle_file.read_bytes()
    check(cuda.cuIpcOpenMemHandle(handle, cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))
    opened.touch()
    time.sleep(60)


def open_late(owner, handle_file):
    go, written, over = (handle_file.with_suffix(suffix) for suffix in (".go", ".written", ".over"))
    check(cuda.cuMemAlloc(4 << 20))
    if owner:
        base = int(check(cuda.cuMemAlloc(64 << 20)))
        check(cuda.cuMemsetD32(base, 1, 16 << 20))
        check(cuda.cuCtxSynchronize())
        handle_file.write_bytes(bytes(check(cuda.cuIpcGetMemHandle(base)).reserved))
        child = subprocess.Popen([sys.executable, __file__, "opens", "0", str(handle_file)])
        while not over.exists():
            time.sleep(0.01)
        print(f"RESULT {sum(read(base + (n << 20)) == 1 for n in range(64))}", flush=True)
        child.kill()
        return
    handle_file.with_suffix(".ready").touch()
    while not go.exists():
        time.sleep(0.01)
    handle = cuda.CUipcMemHandle()
    handle.reserved = handle_file.read_bytes()
    base = check(cuda.cuIpcOpenMemHandle(handle, cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))
    check(cuda.cuMemsetD32(base, 2, 16 << 20))
    check(cuda.cuCtxSynchronize())
    written.touch()
    time.sleep(60)


def main():
    role, iterations, handle_file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    if role in ("leaves", "keeps"):
        outlive(role == "leaves", handle_file)
        return
    if role in ("late", "opens"):
        open_late(role == "late", handle_file)
        return
    parent = role != "child"
    if parent:
        base = int(check(cuda.cuMemAlloc(3 << 20)))
        check(cuda.cuMemsetD32(base, 0, (3 << 20) // 4))
        check(cuda.cuCtxSynchronize())
        handle = check(cuda.cuIpcGetMemHandle(base))
        handle_file.write_bytes(bytes(handle.reserved))
        if role == "parent":
            child = subprocess.Popen([sys.executable, __file__, "child", sys.argv[2], sys.argv[3]])
    else:
        handle = cuda.CUipcMemHandle()
        handle.reserved = handle_file.read_bytes()
        base = int(check(cuda.cuIpcOpenMemHandle(handle, cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))
    word = base + (1 << 20)
    until = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    for number in range(iterations):
        if parent:
            while until and number == iterations - 1 and not until.exists():
                time.sleep(0.01)
            wait_for(word, 2 * number)
            write(word, 2 * number + 1)
            print(f"ITERATION {number + 1}", flush=True)
            if not (until and until.exists()):
                time.sleep(0.03)
        else:
            wait_for(word, 2 * number + 1)
            write(word, 2 * number + 2)
    if parent:
        wait_for(word, 2 * iterations)
        if role == "parent":
            child.wait()
        print(f"RESULT {read(word)}", flush=True)
    else:
        check(cuda.cuIpcCloseMemHandle(base))


main()
