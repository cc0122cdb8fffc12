"""Buffers of 4 MiB, each full of its own number; nothing touches them before the file GO exists. Then one of these
things is done with them, and a result printed:

    sum      reads a word of each, the last buffer first
    last     reads a word of the last buffer
    free     frees every other one, allocates as many anew, fills those, and sums up all
    export   hands the last one to a child by an IPC handle, which reads it
    ballast  has much memory of the CPU as well; reads all of that, then as sum
    wait     waits for the file GO.end, then as sum
    first    reads a word of the last buffer, says so by ITERATION 2, then as wait
    ends     reads a word of the last buffer, says so by ITERATION 2, waits for the file GO.end, reads one of the first,
             waits for the file GO.over
    exit     ends without touching them

Usage: layers.py ACTION LAYERS GO
"""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

SIZE = 4 << 20
BALLAST = 1 << 30
"""Bytes: `criu lazy-pages` takes more than an instant for them."""

DETACHED = 0.1
"""Seconds: CRIU fails if a process ends while it detaches from its threads, one after another."""


def check(result: Any) -> Any:
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


def read(address: int) -> int:
    word = ctypes.c_uint32()
    check(cuda.cuMemcpyDtoH(ctypes.addressof(word), address, 4))
    return word.value


def total(layers: list[int]) -> int:
    return sum(read(layer + SIZE - 4) for layer in reversed(layers))


def fresh(value: int) -> int:
    address = int(check(cuda.cuMemAlloc(SIZE)))
    check(cuda.cuMemsetD32(address, value, SIZE // 4))
    return address


def wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.005)


def act(action: str, layers: list[int], go: Path) -> int:
    if action in ("first", "wait", "ends"):
        if action != "wait" and read(layers[-1] + SIZE - 4) == len(layers):
            print("ITERATION 2", flush=True)
        wait_for(f"{go}.end")
        if action == "ends":
            word = read(layers[0] + SIZE - 4)
            wait_for(f"{go}.over")
            return word
    elif action == "last":
        word = read(layers[-1] + SIZE - 4)
        time.sleep(DETACHED)
        return word
    elif action == "exit":
        time.sleep(DETACHED)
        os._exit(0)
    elif action == "free":
        for i in range(0, len(layers), 2):
            check(cuda.cuMemFree(layers[i]))
        for i in range(0, len(layers), 2):
            layers[i] = fresh(1000 + i)
    elif action == "export":
        handle = check(cuda.cuIpcGetMemHandle(layers[-1]))
        go.with_suffix(".handle").write_bytes(bytes(handle.reserved))
        child = [sys.executable, __file__, "child", "0", str(go)]
        return int(subprocess.run(child, capture_output=True, check=True).stdout)
    return total(layers)


def main() -> None:
    action, count, go = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    check(cuda.cuInit(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
    if action == "child":
        handle = cuda.CUipcMemHandle()
        handle.reserved = go.with_suffix(".handle").read_bytes()
        base = check(cuda.cuIpcOpenMemHandle(handle, cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))
        print(read(int(base) + SIZE - 4))
        return
    layers = [fresh(i + 1) for i in range(count)]
    ballast = b"\1" * BALLAST if action == "ballast" else b""
    check(cuda.cuCtxSynchronize())
    print("ITERATION 1", flush=True)
    wait_for(str(go))
    if ballast.count(b"\1") != len(ballast):
        raise SystemExit("the CPU's memory is not what it was")
    print(f"RESULT {act(action, layers, go)}", flush=True)


main()
