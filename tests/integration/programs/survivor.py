"""A process that maps a GPU buffer of its child's by a CUDA IPC handle, and outlives it.

The child fills 3 MiB and exports them; it ends when there is a file HANDLE.leave. The parent counts up every word of
the buffer through its own mapping, looks at all of them at every step, and goes on whatever becomes of the child, until
there is a file UNTIL. When there is a file HANDLE.close it lets go of the child's buffer and goes on in one of its own.
Prints the child's pid, ITERATION lines and RESULT as the examples do, and CLOSED; with a wrong word it ends.
OWNER_TOGGLE_HOLD, if there is such a variable, is SOFTGPU_TOGGLE_HOLD for the child.
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from cuda.bindings import driver as cuda

SIZE = 3 << 20
FIRST = 12345


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def own(handle_file):
    base = int(check(cuda.cuMemAlloc(SIZE)))
    check(cuda.cuMemsetD32(base, FIRST, SIZE // 4))
    check(cuda.cuCtxSynchronize())
    unfinished = handle_file.with_suffix(".new")
    unfinished.write_bytes(bytes(check(cuda.cuIpcGetMemHandle(base)).reserved))
    unfinished.rename(handle_file)
    while not handle_file.with_suffix(".leave").exists():
        time.sleep(0.01)


def survive(handle_file, until):
    hold = os.environ.get("OWNER_TOGGLE_HOLD", os.environ.get("SOFTGPU_TOGGLE_HOLD", ""))
    environment = {**os.environ, "SOFTGPU_TOGGLE_HOLD": hold}
    child = subprocess.Popen([sys.executable, __file__, "own", str(handle_file)], env=environment)
    print(f"OWNER {child.pid}", flush=True)
    while not handle_file.exists():
        time.sleep(0.01)
    handle = cuda.CUipcMemHandle()
    handle.reserved = handle_file.read_bytes()
    base = int(check(cuda.cuIpcOpenMemHandle(handle, cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))
    words = (ctypes.c_uint32 * (SIZE // 4))()
    number = 0
    closed = False
    while not until.exists():
        if not closed and handle_file.with_suffix(".close").exists():
            mine = int(check(cuda.cuMemAlloc(SIZE)))
            check(cuda.cuMemcpyDtoD(mine, base, SIZE))
            check(cuda.cuIpcCloseMemHandle(base))
            base, closed = mine, True
            print("CLOSED", flush=True)
        check(cuda.cuMemcpyDtoH(ctypes.addressof(words), base, SIZE))
        if set(words) != {FIRST + number}:
            raise SystemExit(f"after {number} iterations the buffer has {sorted(set(words))[:5]}")
        number += 1
        check(cuda.cuMemsetD32(base, FIRST + number, SIZE // 4))
        print(f"ITERATION {number}", flush=True)
        time.sleep(0.03)
        child.poll()  # it is not to stay a zombie, which CRIU would dump
    print(f"RESULT {FIRST}", flush=True)


check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
if sys.argv[1] == "own":
    own(Path(sys.argv[2]))
else:
    survive(Path(sys.argv[2]), Path(sys.argv[3]))
