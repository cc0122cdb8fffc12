"""A program most of which never calls CUDA: a thread and a child count up words of a file, and the main thread uses the
GPU each time that the first word of the file is raised from outside. All counters are in a shared mapping, so the file
keeps its size.

Words: 0 asked for from outside, 1 answers of the main thread, 2 the thread, 3 the child. Usage: beside_the_gpu.py FILE
"""

import ctypes
import mmap
import os
import struct
import sys
import threading
import time

from cuda.bindings import driver as cuda


def check(result):
    if int(result[0]):
        raise SystemExit(f"CUDA error {result[0]}")
    return result[1] if len(result) == 2 else None


with open(sys.argv[1], "r+b") as file:
    words = mmap.mmap(file.fileno(), 4096)


def get(index):
    return struct.unpack_from("<Q", words, 8 * index)[0]


def put(index, value):
    struct.pack_into("<Q", words, 8 * index, value)


def count(index):
    while True:
        put(index, get(index) + 1)
        time.sleep(0.005)


if os.fork() == 0:
    count(3)
check(cuda.cuInit(0))
check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(check(cuda.cuDeviceGet(0))))))
address = int(check(cuda.cuMemAlloc(4 << 20)))
check(cuda.cuMemsetD32(address, 7, 1 << 20))
threading.Thread(target=count, args=(2,), daemon=True).start()
print("READY", flush=True)
while True:
    if get(0) > get(1):
        word = ctypes.c_uint32()
        check(cuda.cuMemcpyDtoH(ctypes.addressof(word), address + (3 << 20), 4))
        if word.value != 7:
            raise SystemExit(f"{word.value} instead of 7")
        put(1, get(0))
    time.sleep(0.005)
